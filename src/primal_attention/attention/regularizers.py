"""The regularisers of a primal layer, and how far its weights are from an asymmetric kernel SVD.

The directions of a layer are right if they are singular directions of ``K = Φ_q FᵀF Φ_kᵀ``.
Regularisers and diagnostics both follow from the ``d × d`` Gram matrices of the features; ``ksvd``
and ``balance`` need no more than the energy of the scores.
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
    reduce_objective,
    sample_loss,
    score_gram,
)
from primal_attention.functional.precision import is_traced

__all__ = ["Diagnostics", "Features", "KernelProblem", "Regularizer", "TokenCount", "energy_term"]

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


class TokenCount(NamedTuple):
    """Tokens of a batch of sequences, some of them padding."""

    tokens: int
    """Tokens of each sequence, padding included."""
    key_mask: Bool[Tensor, "b n"] | None
    """``True`` where a token is real."""

    def mean(self, total: Float[Tensor, "b *rest"]) -> Float[Tensor, "b *rest"]:
        """Return a sum over tokens divided by the number of real ones."""
        if self.key_mask is None:
            return total / max(self.tokens, 1)
        return total / self.key_mask.sum(1).clamp_min(1).view(-1, *[1] * (total.dim() - 1))

    def nonempty(self, like: Tensor) -> Bool[Tensor, " b"] | None:
        """Return which sequences have a real token; ``None`` if all have."""
        if self.key_mask is not None:
            return self.key_mask.any(1)
        if self.tokens:
            return None
        return torch.zeros(len(like), dtype=torch.bool, device=like.device)


def energy_term(
    regularizer: Literal["ksvd", "balance"],
    reduction: Reduction,
    energy: Float[Tensor, "b both s"],
    counts: tuple[TokenCount, TokenCount],
    ell: Float[Tensor, "h s"],
    coupled: tuple[Float[Tensor, "*b h k s"], Float[Tensor, "*b h k s"]],
) -> Float[Tensor, ""]:
    """Return a regulariser from the energy of the scores, unweighted, in float32 or better.

    Args:
        regularizer: Which one.
        reduction: How the published ``ksvd`` goes from objectives to one number.
        energy: Of the query side and, after it, of the key side.
        counts: Tokens of the query side and of the key side.
        ell: ``ℓ``, in float32 or better.
        coupled: The two factors of the trace ``Tr(W_eᵀ W_r)``.
    """
    count, mask = counts[0].tokens, counts[0].key_mask
    usual = (regularizer, reduction) == ("ksvd", "sample") and counts[0] is counts[1]
    eager = not is_traced() and count * energy.numel() and energy.dtype == coupled[0].dtype
    if usual and eager and coupled[0].dim() == 3:
        return sample_loss(energy, ell, *coupled, count if mask is None else mask.sum(1))
    energy_e, energy_r = energy.chunk(2, dim=1)
    moments = counts[0].mean(energy_e), counts[1].mean(energy_r)
    nonempty = _all_of([c.nonempty(energy) for c in counts])
    if regularizer == "balance":
        return average_over_sequences(balance(*moments).mean(1), nonempty)
    objective = ksvd_objective(*moments, ell, parameter_trace(*coupled))
    return reduce_objective(objective, reduction, keep=nonempty)


def _all_of(masks: list[Tensor | None]) -> Tensor | None:
    given = [mask for mask in masks if mask is not None]
    return torch.stack(given).all(0) if given else None


class Features(NamedTuple):
    """One side of the kernel: inputs of its feature map, and which tokens are real."""

    inputs: Float[Tensor, "b h n d"]
    key_mask: Bool[Tensor, "b n"] | None

    @property
    def tokens(self) -> TokenCount:
        """The number of tokens."""
        return TokenCount(self.inputs.shape[2], self.key_mask)

    def gram(self, eps: float) -> Float[Tensor, "b h d d"]:
        """Return the sum of the outer products of the features."""
        return feature_gram(self.inputs, key_mask=self.key_mask, eps=eps)


@dataclass(frozen=True)
class KernelProblem:
    """The asymmetric kernel SVD that a layer poses on its tokens, and the weights it has for it."""

    queries: Features
    keys: Features
    weights: Float[Tensor, "#b both d s"]
    """The projection weights of all query heads and, after them, of all key heads."""
    rows: Float[Tensor, "b h m d"] | None
    """The rows ``F``; ``None`` for the identity."""
    codes: tuple[Float[Tensor, "h m s"], Float[Tensor, "h m s"]] | None
    """The free weights ``W_e``, ``W_r``; ``None`` where dual variables take their place."""
    duals: Float[Tensor, "b both m s"] | None
    """The dual variables of both sides."""
    ell: Float[Tensor, "h s"]
    """``ℓ``, in float32 or better."""
    eps: float
    """Norms below this count as this."""

    def term(
        self,
        regularizer: Regularizer,
        reduction: Reduction,
        scores: Float[Tensor, "b both n s"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return a regulariser, unweighted, in float32 or better.

        Args:
            regularizer: Which one.
            reduction: How the published ``ksvd`` goes from objectives to one number.
            scores: Of both sides, where they are not those of ``weights``.
        """
        counts = self.queries.tokens, self.keys.tokens
        gram_q, gram_k = self.queries.gram(self.eps), self.keys.gram(self.eps)
        if regularizer != "kkt":
            energy = torch.cat(self._energies(gram_q, gram_k), dim=1)
            return energy_term(regularizer, reduction, energy, counts, self.ell, self._coupled())
        gram_q, gram_k = counts[0].mean(gram_q), counts[1].mean(gram_k)
        residual = self._kkt(gram_q, gram_k, scores)
        residual = residual + _ORTHOGONALITY * off_diagonality(self._score_gram(gram_q))
        nonempty = _all_of([count.nonempty(gram_q) for count in counts])
        return average_over_sequences(residual.mean(1), nonempty)

    def diagnose(self) -> Diagnostics:
        """Measure how far the weights are from an asymmetric kernel SVD; ``O(n d²)`` per head."""
        sums = self.queries.gram(self.eps), self.keys.gram(self.eps)
        gram_q, gram_k = self.queries.tokens.mean(sums[0]), self.keys.tokens.mean(sums[1])
        moments = self._energies(gram_q, gram_k)
        sigma = kernel_singular_values(*sums, self._wide(self.rows))
        rank = self.ell.shape[-1]
        return Diagnostics(
            ksvd_objective(*moments, self.ell, parameter_trace(*self._coupled())),
            self._kkt(gram_q, gram_k, None),
            balance(*moments),
            off_diagonality(self._score_gram(gram_q)) / max(rank * (rank - 1) // 2, 1),
            effective_rank(sigma),
            sigma,
        )

    def _wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.ell.dtype)

    def _sides(self) -> tuple[Tensor, Tensor]:
        w_e, w_r = self.weights.to(self.ell.dtype).chunk(2, dim=1)
        return w_e, w_r

    def _coupled(self) -> tuple[Tensor, Tensor]:
        """Return the factors of ``Tr(W_eᵀ W_r)``: parameters, or weights made of duals."""
        return self.codes or self._sides()

    def _score_gram(self, gram: Float[Tensor, "b h d d"]) -> Float[Tensor, "b h s s"]:
        return score_gram(gram, self._sides()[0])

    def _energies(self, gram_q: Tensor, gram_k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energy of the scores of both sides without forming them."""
        e, r = (
            score_gram(gram, w).diagonal(dim1=-2, dim2=-1)
            for gram, w in zip((gram_q, gram_k), self._sides(), strict=True)
        )
        return e, r

    def _kkt(self, gram_q: Tensor, gram_k: Tensor, scores: Tensor | None) -> Float[Tensor, "b h"]:
        """Return the relative residual of the optimality conditions."""
        wide = self.ell.dtype
        if self.codes is not None:
            w_e, w_r = (w[None].to(wide) for w in self.codes)
            return kkt_residual(gram_q, gram_k, w_e, w_r, self.ell, self._wide(self.rows))
        if self.duals is None:
            raise RuntimeError("A problem without free weights needs dual variables.")
        mask = self.queries.key_mask
        if scores is None:
            units = [_unit(side.inputs.to(wide), self.eps) for side in (self.queries, self.keys)]
            e, r = (unit @ w for unit, w in zip(units, self._sides(), strict=True))
        else:
            e, r = scores.to(wide).chunk(2, dim=1)
        dual_e, dual_r = self.duals.to(wide).chunk(2, dim=1)
        return dual_residual(e, r, dual_e, dual_r, self.ell, key_mask=mask)


def _unit(x: Float[Tensor, "b h n d"], eps: float) -> Float[Tensor, "b h n d"]:
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)
