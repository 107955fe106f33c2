"""Cells of a table as vectors, and vectors as predictions of cells.

    H[i, j] = value(x_ij) + m_ij w_j + b_j + type_j        m_ij = 1 if the cell is hidden or missing

``value`` is zero for a hidden cell, so nothing of it can reach the model. A number enters linearly,
through the bins of its quantiles, or through learned waves; a category has a vector of its own.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

__all__ = ["CellEmbedding", "CellHeads", "bin_shares"]

BINS = 16
"""Most bins of a piecewise-linear embedding."""
_WAVES = 8
"""Frequencies of a periodic embedding."""


def bin_shares(
    x: Float[Tensor, "n d"], edges: Float[Tensor, "d edges"]
) -> Float[Tensor, "n d bins"]:
    """Return the share of every bin that lies below a number; beyond the ends it goes on linearly.

    Args:
        x: Numbers.
        edges: Increasing edges of the bins of each column; unused ones are NaN, at the end.

    Example:
        >>> bin_shares(torch.tensor([[1.5]]), torch.tensor([[0.0, 1.0, 2.0]]))
        tensor([[[1.0000, 0.5000]]])
    """
    low, high = edges[:, :-1], edges[:, 1:]
    share = (x[..., None] - low) / (high - low).clamp_min(1e-6)
    is_used = ~high.isnan()
    first = torch.zeros_like(is_used)
    first[:, 0] = True
    last = is_used & ~torch.cat([is_used[:, 1:], torch.zeros_like(first[:, :1])], dim=1)
    share = torch.where(first, share, share.clamp_min(0))
    share = torch.where(last, share, share.clamp_max(1))
    return torch.where(is_used, share, 0.0)


class CellEmbedding(nn.Module):
    """Vectors of cells.

    Args:
        categories: Categories of every column; zero for a column of numbers.
        dim: Width of a vector.
        numbers: How a number enters: ``"linear"``, ``"piecewise"`` or ``"periodic"``.

    Example:
        >>> embed = CellEmbedding((0, 3), 8, "linear")
        >>> embed(torch.tensor([[0.5, 2.0]]), torch.tensor([[False, True]])).shape
        torch.Size([1, 2, 8])
    """

    undecayed = ("bias", "mask", "kind", "frequencies")
    edges: Tensor
    is_category: Tensor
    offsets: Tensor
    last: Tensor

    def __init__(
        self,
        categories: Sequence[int],
        dim: int,
        numbers: Literal["linear", "piecewise", "periodic"] = "piecewise",
    ) -> None:
        super().__init__()
        d, total = len(categories), sum(categories)
        counts = torch.tensor(categories)
        self.numbers, self.has_categories = numbers, any(categories)
        self.register_buffer("is_category", counts > 0, persistent=False)
        offsets = (counts.cumsum(0) - counts).clamp_max(max(total - 1, 0))
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("last", (counts - 1).clamp_min(0), persistent=False)
        self.table = nn.Embedding(max(total, 1), dim)
        self.slope = nn.Parameter(torch.randn(d, dim))
        self.bias = nn.Parameter(0.5 * torch.randn(d, dim))
        self.mask = nn.Parameter(torch.randn(d, dim))
        mixed = 0 < sum(count > 0 for count in categories) < d
        self.kind = nn.Parameter(0.5 * torch.randn(2, dim)) if mixed else None
        if numbers == "piecewise":
            self.register_buffer("edges", torch.full((d, BINS + 1), torch.nan))
            self.bins = nn.Parameter(torch.randn(d, BINS, dim) / BINS**0.5)
        if numbers == "periodic":
            self.frequencies = nn.Parameter(torch.randn(d, _WAVES))
            self.waves = nn.Parameter(torch.randn(d, 2 * _WAVES, dim) / (2 * _WAVES) ** 0.5)

    def start_from(self, quantiles: Sequence[Sequence[float]]) -> None:
        """Set the edges of the bins: increasing quantiles of each column, perhaps none."""
        if self.numbers != "piecewise":
            return
        for j, edges in enumerate(quantiles):
            if len(edges) > BINS + 1:
                raise ValueError(f"Column {j} has {len(edges)} quantiles, at most {BINS + 1}.")
            self.edges[j] = torch.nan
            self.edges[j, : len(edges)] = torch.tensor(edges, dtype=self.edges.dtype)

    def forward(
        self, values: Float[Tensor, "n d"], hidden: Bool[Tensor, "n d"]
    ) -> Float[Tensor, "n d e"]:
        """Return the vectors of cells.

        Args:
            values: Standardised numbers and codes of categories; anything where hidden.
            hidden: ``True`` where a cell is hidden or missing.
        """
        values = torch.where(hidden, 0.0, values)  # where, not multiply: NaN must not survive
        h = self._numbers(torch.where(self.is_category, 0.0, values))
        if self.has_categories:
            codes = values.round().long().clamp_min(0).minimum(self.last) + self.offsets
            h = torch.where(self.is_category[:, None], self.table(codes), h)
        h = torch.where(hidden[..., None], self.mask, h) + self.bias
        return h if self.kind is None else h + self.kind[self.is_category.long()]

    def _numbers(self, x: Tensor) -> Tensor:
        h = x[..., None] * self.slope
        if self.numbers == "piecewise":
            shares = bin_shares(x, self.edges)
            return h + torch.einsum("ndt,dte->nde", shares, self.bins)
        if self.numbers == "periodic":
            phase = 2 * torch.pi * x[..., None] * self.frequencies
            return h + torch.einsum(
                "ndt,dte->nde", torch.cat([phase.cos(), phase.sin()], -1), self.waves
            )
        return h


class CellHeads(nn.Module):
    """Predictions of cells: one number, two for a target of numbers, or logits of categories.

    Args:
        categories: Categories of every column; zero for a column of numbers.
        dim: Width of a vector.
        num_targets: How many of the last columns are targets; a target of numbers also gets the
            logarithm of a deviation.

    Example:
        >>> heads = CellHeads((0, 3), 8, num_targets=1)
        >>> [heads.column(torch.randn(2, 2, 8), j).shape[-1] for j in range(2)]
        [1, 3]
    """

    undecayed = ("bias",)

    def __init__(self, categories: Sequence[int], dim: int, num_targets: int = 1) -> None:
        super().__init__()
        d = len(categories)
        self.widths = tuple(
            count or (2 if j >= d - num_targets else 1) for j, count in enumerate(categories)
        )
        self.starts = tuple(sum(self.widths[:j]) for j in range(d))
        self.weight = nn.Parameter(torch.randn(sum(self.widths), dim) / dim**0.5 / 4)
        self.bias = nn.Parameter(torch.zeros(sum(self.widths)))

    def column(self, h: Float[Tensor, "n d e"], j: int) -> Float[Tensor, "n width"]:
        """Return the predictions of one column."""
        part = slice(self.starts[j], self.starts[j] + self.widths[j])
        return h[:, j] @ self.weight[part].mT + self.bias[part]

    def numbers(self, h: Float[Tensor, "n d e"], columns: Sequence[int]) -> Float[Tensor, "n k"]:
        """Return the predicted numbers of some columns at once."""
        rows = [self.starts[j] for j in columns]
        return (h[:, columns] * self.weight[rows]).sum(-1) + self.bias[rows]
