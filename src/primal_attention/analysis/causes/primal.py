"""Token graphs of primal layers in linear time, from scores or features.

Attention is an asymmetric kernel matrix ``K``, and the covariance of its tokens is ``K Kᵀ``.
With scores ``E = K H_r`` of all singular directions, ``K Kᵀ = E Eᵀ`` and ``Kᵀ K = R Rᵀ``. With the
leading ``s`` directions the error in spectral norm is ``σ²_{s+1}``. From features,
``K Kᵀ = Φ_q B Φ_qᵀ`` with ``B = FᵀF (Φ_kᵀΦ_k) FᵀF``. None of them needs an ``n × n`` matrix.

Give every token independent noise of variance ``λ``. The covariance is ``λI + E Eᵀ``, and the
partial correlation of two tokens given all others follows from the hat matrix of ``E``::

    G = (λI + EᵀE)⁻¹      h_ij = e_iᵀ G e_j      ρ_ij = h_ij / √((1 − h_ii)(1 − h_jj))

This costs ``O(n s²)`` once and ``O(s)`` a pair. The graph of the large ``ρ_ij`` is the moral
graph, also called Markov network: a token is independent of all others given its neighbours.
Causal discovery then needs the neighbourhood of a target only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from primal_attention.hosts import CapturedLayer, CapturedScores
from primal_attention.ksvd import unit_rows

__all__ = [
    "HatMatrix",
    "MoralGraph",
    "captured_scores",
    "kernel_factor",
    "moral_graph",
]

Matrix = Tensor | Shaped[np.ndarray, "..."]
"""A tensor or an array; it is read in float64."""


def promote(x: Matrix) -> Tensor:
    """Return a tensor or array as a float64 tensor without gradients, on the CPU."""
    found = x.detach() if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
    return found.to("cpu", torch.float64)


def kernel_factor(
    phi_q: Float[Tensor, "*h n p"],
    phi_k: Float[Tensor, "*h m p"],
    rows: Float[Tensor, "*h f p"] | None = None,
) -> Float[Tensor, "*h n k"]:
    """Return ``X`` with ``X Xᵀ = K Kᵀ`` for ``K = Φ_q FᵀF Φ_kᵀ``: time ``O(n p²)``.

    Swap ``phi_q`` and ``phi_k`` for ``Kᵀ K``. For softmax heads use random features of
    :mod:`primal_attention.kernels`: row scaling, and thus the denominator of softmax, does not
    change correlations.

    Args:
        phi_q: Features of the queries.
        phi_k: Features of the keys.
        rows: The rows ``F`` of data-dependent primal attention; by default the identity.

    Example:
        >>> q, k = torch.randn(2, 50, 4, dtype=torch.float64)
        >>> x = kernel_factor(q, k)
        >>> x.shape, bool(torch.allclose(x @ x.T, (q @ k.T) @ (q @ k.T).T))
        (torch.Size([50, 4]), True)
    """
    phi_q, phi_k = promote(phi_q), promote(phi_k)
    if rows is not None:
        rows = promote(rows)
        phi_q = (phi_q @ rows.mT) @ rows
    # Φ_kᵀΦ_k = TᵀT with the triangular factor; its square would lose half of the digits
    triangular = torch.linalg.qr(phi_k, mode="r").R
    return phi_q @ triangular.mT


def captured_scores(layer: CapturedLayer, sequence: int = 0) -> CapturedScores:
    """Return the scores of a captured primal layer, or refuse a layer whose weights are fixed.

    Args:
        layer: A primal layer that :func:`~primal_attention.hosts.capture` returns.
        sequence: Which sequence of the batch.

    Raises:
        ValueError: If the layer is not primal, or its weights do not depend on the data.

    Example:
        >>> from primal_attention.hosts import capture
        >>> from primal_attention.attention import PrimalAttention
        >>> (layer,) = capture(PrimalAttention(8, 2, rank=3), torch.randn(1, 20, 8))
        >>> captured_scores(layer).e.shape
        torch.Size([2, 20, 3])
    """
    if getattr(layer.layer, "weights", None) == "static":
        raise ValueError(
            f"{layer.name} has weights='static', which do not depend on the tokens: its scores "
            "show how similar single tokens are, not how tokens depend on one another. Use a layer "
            "with weights='data' or 'dual', or a softmax layer."
        )
    return layer.scores(sequence)


class MoralGraph(NamedTuple):
    """Strongest partial correlations of tokens, each pair given all other tokens."""

    nodes: Int[Tensor, " k"]
    """The tokens whose neighbours were asked for."""
    neighbors: Int[Tensor, "k count"]
    """Their neighbours, the strongest first."""
    partial: Float[Tensor, "k count"]
    """Partial correlations with these neighbours."""

    def edges(self, tau: float = 0.0) -> list[tuple[int, int, float]]:
        """Return ``(i, j, ρ)`` with ``i < j`` and ``|ρ| ≥ tau``, each pair once, sorted."""
        found: dict[tuple[int, int], float] = {}
        for i, others, values in zip(
            self.nodes.tolist(), self.neighbors.tolist(), self.partial.tolist(), strict=True
        ):
            for j, rho in zip(others, values, strict=True):
                if abs(rho) >= tau:
                    found[min(i, j), max(i, j)] = rho
        return [(i, j, rho) for (i, j), rho in sorted(found.items())]


class HatMatrix:
    """Partial correlations of tokens given all others, from scores: ``O(n s²)`` once.

    Args:
        scores: One row of scores for each token.
        ridge: Variance ``λ`` of independent noise per token, as a share of the mean variance.
            Scores have rank ``s``, so partial correlations given more tokens than that need it.

    Example:
        >>> e = torch.randn(1000, 8, dtype=torch.float64)
        >>> hat = HatMatrix(e)
        >>> hat.row(7).shape, float(hat.row(7)[7])
        (torch.Size([1000]), 1.0)
    """

    leverage: Float[Tensor, " n"]
    """``h_ii`` of each token, between 0 and 1: how far the scores alone determine it."""

    def __init__(self, scores: Matrix, *, ridge: float = 1e-3) -> None:
        e = promote(scores)
        if e.ndim != 2 or not e.numel():
            raise ValueError(
                f"scores must be a matrix with one row for each token, got the shape "
                f"{tuple(e.shape)}; give the scores of one head."
            )
        if not ridge > 0:
            raise ValueError(
                f"ridge must be positive, got {ridge}: scores of {e.shape[1]} directions do not "
                "determine partial correlations given all other tokens without it."
            )
        energy = float(e.square().sum()) / len(e)
        if not np.isfinite(energy) or energy == 0:
            raise ValueError(
                f"scores must be finite and not all zero, got a mean square of {energy}; check "
                "the layer and its inputs."
            )
        # λI + EᵀE = TᵀT from one QR of [E; √λ I]: no cancellation for small λ
        noise = (ridge * energy) ** 0.5 * torch.eye(e.shape[1], dtype=e.dtype)
        triangular = torch.linalg.qr(torch.cat([e, noise]), mode="r").R
        self._root = torch.linalg.solve_triangular(triangular, e, upper=True, left=False)
        self.leverage = self._root.square().sum(1)
        self._scale = (1 - self.leverage).clamp_min(torch.finfo(e.dtype).eps).rsqrt()

    def __len__(self) -> int:
        return len(self.leverage)

    def rows(self, index: Sequence[int] | Tensor) -> Float[Tensor, "k n"]:
        """Return rows of partial correlations, ``O(n s)`` each; a token has 1 with itself."""
        index = torch.as_tensor(index, dtype=torch.long)
        self._check(index)
        found = (self._root[index] @ self._root.T) * self._scale[index, None] * self._scale
        found.clamp_(-1, 1)
        found[torch.arange(len(index)), index] = 1.0
        return found

    def row(self, target: int) -> Float[Tensor, " n"]:
        """Return the partial correlations of one token with all tokens: ``O(n s)``."""
        return self.rows([target])[0]

    def neighbors(
        self, index: Sequence[int] | Tensor, count: int
    ) -> tuple[Int[Tensor, "k count"], Float[Tensor, "k count"]]:
        """Return the strongest neighbours of tokens, and their partial correlations."""
        index = torch.as_tensor(index, dtype=torch.long)
        rows = self.rows(index)
        size = rows.abs()
        size[torch.arange(len(index)), index] = -1.0
        found = size.topk(min(count, len(self) - 1), dim=1).indices
        return found, rows.gather(1, found)

    def _check(self, index: Tensor) -> None:
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(self)):
            raise ValueError(
                f"tokens must be between 0 and {len(self) - 1}, got {index.tolist()}; count "
                "tokens without padding."
            )


_BLOCK = 256


def moral_graph(
    scores: Matrix,
    *,
    target: int | None = None,
    count: int = 32,
    ridge: float = 1e-3,
) -> MoralGraph:
    """Return the strongest neighbours of one token or of all, given all other tokens.

    For a target the time is ``O(n s²)``. For all tokens it is ``O(n² s)``, in blocks of rows, and
    memory stays ``O(n (s + count))``. A fixed threshold means little here: the sum of ``h_ij²``
    over ``j`` is below 1, so correlations shrink as sequences grow. Hence a number of neighbours.

    Args:
        scores: One row of scores for each token: ``e`` of one head, or :func:`kernel_factor`.
            Rows are scaled to unit length, as correlations ignore the scale of a token.
        target: The token to explain; by default all.
        count: Number of neighbours of each token.
        ridge: Variance of independent noise per token, relative to its variance.

    Example:
        >>> e = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 2]]
        >>> moral_graph(e, target=0, count=1).neighbors.tolist()
        [[1]]
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    hat = HatMatrix(unit_rows(promote(scores)), ridge=ridge)
    wanted = torch.arange(len(hat)) if target is None else torch.tensor([target])
    parts = [hat.neighbors(block, count) for block in wanted.split(_BLOCK)]
    indices, values = (torch.cat(part) for part in zip(*parts, strict=True))
    return MoralGraph(wanted, indices, values)
