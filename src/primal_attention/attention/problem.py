"""The asymmetric kernel SVD that a primal layer poses on its tokens, and how well it is solved.

The layer's scores solve it if they are singular directions of ``K = Φ_q FᵀF Φ_kᵀ``. What the
regularisers ask for and what the diagnostics report are both read from one :class:`Problem`; none
of it needs more than the ``d × d`` Gram matrices of the features.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional import (
    Reduction,
    average_over_sequences,
    balance,
    dual_residual,
    effective_rank,
    feature_gram,
    kernel_singular_values,
    kkt_residual,
    ksvd_objective,
    off_diagonality,
    parameter_trace,
    project,
    reduce_objective,
    score_gram,
)

__all__ = ["Diagnostics", "Problem", "Regularizer", "Side", "Tied", "energy_term"]

Regularizer = Literal["ksvd", "kkt", "balance"]

_ORTHOGONALITY = 0.1
"""Weight of off-diagonality beside the KKT residual; without it directions collapse."""


class Diagnostics(NamedTuple):
    """What a layer has really learned, per sequence and head."""

    objective: Float[Tensor, "b h"]
    """The KSVD objective ``J``; zero at a stationary point, but not only there."""
    kkt: Float[Tensor, "b h"]
    """Relative, squared KKT residual; zero if and only if the directions are singular ones."""
    balance: Float[Tensor, "b h"]
    """Imbalance of query-side and key-side energy, 0 to 1; zero is necessary for stationarity."""
    off_diagonality: Float[Tensor, "b h"]
    """Mean squared cosine between query-side score columns, 0 to 1."""
    effective_rank: Float[Tensor, "b h"]
    """Effective rank of the induced kernel matrix."""
    singular_values: Float[Tensor, "b h d"]
    """Singular values of the induced kernel matrix, largest first."""


class Side(NamedTuple):
    """One side of the kernel: inputs of its feature map, and which of them are real."""

    inputs: Float[Tensor, "b h n d"]
    keep: Bool[Tensor, "b n"] | None

    def mean(self, total: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        """Divide a sum over tokens by the number of real ones."""
        if self.keep is None:
            return total / max(self.inputs.shape[2], 1)
        return total / self.keep.sum(1).clamp_min(1).view(-1, *[1] * (total.dim() - 1))

    def nonempty(self) -> Bool[Tensor, " b"] | None:
        """Return which sequences have a real token; ``None`` if all do."""
        if self.keep is not None:
            return self.keep.any(1)
        b, _, n, _ = self.inputs.shape
        return None if n else torch.zeros(b, dtype=torch.bool, device=self.inputs.device)


class Tied(NamedTuple):
    """Projection weights and what they were made of."""

    joint: Float[Tensor, "#b 2*h d s"]
    """The weights of all query heads and, after them, of all key heads."""
    rows: Float[Tensor, "b h m d"] | None = None
    """The rows ``F``; ``None`` for the identity."""
    duals: tuple[Float[Tensor, "b h m s"], Float[Tensor, "b h m s"]] | None = None
    """The dual variables of both sides, if the weights were made of them."""

    @property
    def w_e(self) -> Float[Tensor, "#b h d s"]:
        """The weights of the query heads."""
        return self.joint.chunk(2, dim=1)[0]

    @property
    def w_r(self) -> Float[Tensor, "#b h d s"]:
        """The weights of the key heads."""
        return self.joint.chunk(2, dim=1)[1]


@dataclass(frozen=True)
class Problem:
    """Everything that the objective, its conditions and the diagnostics depend on."""

    left: Side
    """Queries."""
    right: Side
    """Keys."""
    tied: Tied
    """The projection weights."""
    codes: tuple[Float[Tensor, "h m s"], Float[Tensor, "h m s"]] | None
    """The free weights ``W_e``, ``W_r``; ``None`` where dual variables take their place."""
    ell: Float[Tensor, "h s"]
    """``ℓ``, in float32 or better."""
    eps: float
    """Norms below this count as this."""

    def term(
        self,
        regularizer: Regularizer,
        reduction: Reduction,
        *,
        energy: Float[Tensor, "b 2*h s"] | None = None,
        scores: Float[Tensor, "b 2*h n s"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return a regulariser, unweighted, in float32 or better.

        Args:
            regularizer: Which one.
            reduction: How the published ``ksvd`` goes from objectives to one number.
            energy: Of the scores, if it is known already.
            scores: Of both sides, if they are known already.
        """
        if regularizer == "kkt":
            gram_q, gram_k = self._mean_grams()
            w_e = self.tied.w_e.to(gram_q.dtype)
            residual = self._kkt(gram_q, gram_k, scores)
            residual = residual + _ORTHOGONALITY * off_diagonality(score_gram(gram_q, w_e))
            return average_over_sequences(residual.mean(1), _nonempty(self.left, self.right))
        if energy is None:
            energy_e = _energy(self._gram(self.left), self.tied.w_e)
            energy_r = _energy(self._gram(self.right), self.tied.w_r)
            energy = torch.cat([energy_e, energy_r], dim=1)
        sides = self.left, self.right
        return energy_term(regularizer, reduction, energy, *sides, self.ell, self._trace())

    def diagnose(self) -> Diagnostics:
        """Measure how far the weights are from an asymmetric kernel SVD; ``O(n d²)`` per head."""
        gram_q, gram_k = self._mean_grams()
        wide = gram_q.dtype
        gram_e = score_gram(gram_q, self.tied.w_e.to(wide))
        moment_e, moment_r = _energy(gram_q, self.tied.w_e), _energy(gram_k, self.tied.w_r)
        rows = None if self.tied.rows is None else self.tied.rows.to(wide)
        sigma = kernel_singular_values(self._gram(self.left), self._gram(self.right), rows)
        rank = self.ell.shape[-1]
        return Diagnostics(
            ksvd_objective(moment_e, moment_r, self.ell, self._trace()),
            self._kkt(gram_q, gram_k, None),
            balance(moment_e, moment_r),
            off_diagonality(gram_e) / max(rank * (rank - 1) // 2, 1),
            effective_rank(sigma),
            sigma,
        )

    def _trace(self) -> Tensor:
        """Return the coupling ``Tr(W_eᵀ W_r)``: of the parameters, or of weights tied to duals."""
        return parameter_trace(*(self.codes or (self.tied.w_e, self.tied.w_r)))

    def _gram(self, side: Side) -> Float[Tensor, "b h d d"]:
        return feature_gram(side.inputs, key_mask=side.keep, eps=self.eps)

    def _mean_grams(self) -> tuple[Tensor, Tensor]:
        """Return the mean outer products of the features of both sides."""
        left, right = self.left, self.right
        return left.mean(self._gram(left)), right.mean(self._gram(right))

    def _kkt(self, gram_q: Tensor, gram_k: Tensor, scores: Tensor | None) -> Float[Tensor, "b h"]:
        """Return the relative residual of the optimality conditions."""
        wide, tied = gram_q.dtype, self.tied
        if self.codes is not None:
            rows = None if tied.rows is None else tied.rows.to(wide)
            w_e, w_r = (w[None].to(wide) for w in self.codes)
            return kkt_residual(gram_q, gram_k, w_e, w_r, self.ell, rows)
        if tied.duals is None:
            raise RuntimeError("A problem without free weights needs dual variables.")
        if scores is None:
            heads = torch.cat([self.left.inputs, self.right.inputs], dim=1)
            scores = project(heads, tied.joint, key_mask=self.left.keep, eps=self.eps).scores
        e, r = scores.to(wide).chunk(2, dim=1)
        dual_e, dual_r = (dual.to(wide) for dual in tied.duals)
        return dual_residual(e, r, dual_e, dual_r, self.ell, key_mask=self.left.keep)


def energy_term(
    regularizer: Regularizer,
    reduction: Reduction,
    energy: Float[Tensor, "b 2*h s"],
    left: Side,
    right: Side,
    ell: Float[Tensor, "h s"],
    trace: Float[Tensor, "#b h"] | Float[Tensor, " h"],
) -> Float[Tensor, ""]:
    """Return a regulariser other than ``kkt``, which needs more of the scores than their energy."""
    nonempty = _nonempty(left, right)
    energy_e, energy_r = energy.chunk(2, dim=1)
    moments = left.mean(energy_e), right.mean(energy_r)
    if regularizer == "balance":
        return average_over_sequences(balance(*moments).mean(1), nonempty)
    return reduce_objective(ksvd_objective(*moments, ell, trace), reduction, keep=nonempty)


def _nonempty(left: Side, right: Side) -> Bool[Tensor, " b"] | None:
    """Return which sequences have a real token on both sides; ``None`` if all do."""
    one, other = left.nonempty(), right.nonempty()
    return other if one is None else one if other is None else one & other


def _energy(gram: Float[Tensor, "b h d d"], w: Float[Tensor, "#b h d s"]) -> Float[Tensor, "b h s"]:
    """Return the energy of scores without forming them."""
    return score_gram(gram, w.to(gram.dtype)).diagonal(dim1=-2, dim2=-1)
