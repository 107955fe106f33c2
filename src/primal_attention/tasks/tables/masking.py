"""What is hidden in training, and the loss of what was hidden (Kossen et al. 2021, section 2).

    L = (1 - λ) L_targets + λ L_features        λ(t) = λ₀ (1 + cos π t) / 2,  t from 0 to 1

Each of the two is a sum over hidden cells, divided by their number: cross-entropy of categories,
squared error of standardised numbers.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from primal_attention.tasks.tables.cells import CellHeads

__all__ = ["HiddenCells", "feature_share", "hidden_feature_loss", "hide_cells", "target_losses"]

RANDOM_SHARE = 0.1
"""Share of the selected cells that get a random value instead of being hidden."""


class HiddenCells(NamedTuple):
    """A table with hidden cells."""

    values: Float[Tensor, "n d"]
    """Values, some of them random."""
    hidden: Bool[Tensor, "n d"]
    """``True`` where the model must not see a value: missing or hidden cells."""
    selected: Bool[Tensor, "n d"]
    """``True`` where a value is to be predicted: hidden cells, and those with a random value."""


def hide_cells(
    values: Float[Tensor, "n d"],
    missing: Bool[Tensor, "n d"],
    categories: Sequence[int],
    probability: float,
    *,
    generator: torch.Generator | None = None,
) -> HiddenCells:
    """Select known cells at random: nine of ten are hidden, the tenth gets a random value.

    A random value is a uniform category or a standard normal number; its mask bit stays off.

    Args:
        values: Standardised numbers and codes of categories.
        missing: ``True`` where there is no value; such a cell is never selected.
        categories: Categories of every column; zero for a column of numbers.
        probability: Of selecting a known cell.
        generator: Source of the draws; by default torch's own.

    Example:
        >>> found = hide_cells(torch.zeros(9, 2), torch.zeros(9, 2).bool(), (0, 3), 0.0)
        >>> bool(found.hidden.any())
        False
    """
    shape = values.shape
    where: Any = {"device": values.device, "generator": generator}
    selected = (torch.rand(shape, **where) < probability) & ~missing
    is_random = selected & (torch.rand(shape, **where) < RANDOM_SHARE)
    counts = torch.tensor(categories, device=values.device)
    codes = (torch.rand(shape, **where) * counts).floor()
    drawn = torch.where(counts > 0, codes, torch.randn(shape, **where)).to(values.dtype)
    values = torch.where(is_random, drawn, values)
    return HiddenCells(values, missing | (selected & ~is_random), selected)


def feature_share(start: float, progress: float) -> float:
    """Return the weight ``λ`` of the features when a share ``progress`` of the training is done.

    Example:
        >>> [feature_share(1.0, t) for t in (0.0, 0.5, 1.0)]
        [1.0, 0.5, 0.0]
    """
    return start * (1 + math.cos(math.pi * progress)) / 2


def hidden_feature_loss(
    heads: CellHeads,
    h: Float[Tensor, "n d e"],
    values: Float[Tensor, "n d"],
    selected: Bool[Tensor, "n d"],
    categories: Sequence[int],
) -> Float[Tensor, ""]:
    """Return the mean loss of the selected features; zero if there is none.

    Args:
        heads: Predictions of cells.
        h: Vectors of the cells after the last layer.
        values: The true values.
        selected: The cells to predict; only the first columns, the features, are read.
        categories: Categories of every feature; zero for numbers.
    """
    d = len(categories)
    values = torch.where(selected[:, :d], values[:, :d], 0.0)  # the others may be anything
    numbers = [j for j in range(d) if not categories[j]]
    total = h.new_zeros(())
    if numbers:
        error = (heads.numbers(h, numbers) - values[:, numbers]).square()
        total = total + torch.where(selected[:, numbers], error, 0.0).sum()
    for j in range(d):
        if categories[j]:
            losses = cross_entropy(heads.column(h, j), values[:, j].long(), reduction="none")
            total = total + torch.where(selected[:, j], losses, 0.0).sum()
    return total / selected[:, :d].sum().clamp_min(1)


def target_losses(
    prediction: Float[Tensor, "n width"], target: Float[Tensor, " n"], *, is_class: bool
) -> Float[Tensor, " n"]:
    """Return the loss of every target: cross-entropy, or squared error and a fitted deviation.

    The deviation learns from the normal likelihood with the mean held fixed. So the mean has the
    published loss, and intervals come for free.
    """
    if is_class:
        return cross_entropy(prediction, target.long(), reduction="none")
    mean, log_std = prediction.unbind(1)
    error = (mean - target).square()
    return error + 0.5 * error.detach() * (-2 * log_std).exp() + log_std
