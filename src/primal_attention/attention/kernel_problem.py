"""The asymmetric kernel SVD that a primal layer poses on its tokens.

The directions of a layer are right if they are singular directions of ``K = Φ_q FᵀF Φ_kᵀ``. The
regulariser ``kkt`` and the diagnostics both measure this from the ``d × d`` Gram matrices of the
features. No ``n × n`` matrix is formed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.attention.primal_parameters import PrimalParameters, count_tokens
from primal_attention.attention.regularizers import Regularizer, TokenCount, all_of, energy_term
from primal_attention.attention.sources import DualSource, WeightSource, prefix_means
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
    score_gram,
)
from primal_attention.functional.ksvd import FLOOR
from primal_attention.functional.precision import accumulator, representable

__all__ = ["Diagnostics", "Features", "KernelProblem", "pose_on_tokens", "pose_problem"]

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
        counts, floor = (self.queries.tokens, self.keys.tokens), representable(FLOOR, self.weights)
        gram_q, gram_k = self.queries.gram(self.eps), self.keys.gram(self.eps)
        if regularizer != "kkt":
            energy = torch.cat(self._energies(gram_q, gram_k), dim=1)
            given = energy, counts, self.ell, self._coupled(), floor
            return energy_term(regularizer, reduction, *given)
        gram_q, gram_k = counts[0].mean(gram_q), counts[1].mean(gram_k)
        residual = self._kkt(gram_q, gram_k, scores)
        others = off_diagonality(self._score_gram(gram_q), floor=floor)
        # each direction alone satisfies the conditions, also if all are the same
        residual = residual + _ORTHOGONALITY * others
        nonempty = all_of([count.nonempty(gram_q) for count in counts])
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
        # the residual is a difference of nearly equal numbers: narrow types would lose it
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
        # causal scores come from weights that change, so they cannot be computed from the last
        if scores is None:
            units = [_unit(side.inputs.to(wide), self.eps) for side in (self.queries, self.keys)]
            e, r = (unit @ w for unit, w in zip(units, self._sides(), strict=True))
        else:
            e, r = scores.to(wide).chunk(2, dim=1)
        dual_e, dual_r = self.duals.to(wide).chunk(2, dim=1)
        floor = representable(FLOOR, self.duals)
        return dual_residual(e, r, dual_e, dual_r, self.ell, key_mask=mask, floor=floor)


def pose_problem(
    layer: PrimalParameters,
    source: WeightSource,
    heads: Float[Tensor, "b both n d"],
    memory: Float[Tensor, "b m c"],
    memory_heads: Float[Tensor, "b both m d"],
    w: Float[Tensor, "#b both d s"],
    key_mask: Bool[Tensor, "b m"] | None,
) -> KernelProblem:
    """Return the problem of a layer from heads and weights that are known already.

    Args:
        layer: Whose conventions and ``ℓ`` to use.
        source: What the weights were made of.
        heads: Heads of the tokens to attend from.
        memory: The tokens to attend to; zero where padded.
        memory_heads: Their heads; the object ``heads`` itself for self-attention.
        w: The projection weights.
        key_mask: ``True`` where a token of the memory is real.
    """
    (q, _), (memory_q, k) = heads.chunk(2, dim=1), memory_heads.chunk(2, dim=1)
    duals = source.duals if isinstance(source, DualSource) else None
    # with a context, dual weights pose the whole problem on the context
    queries = Features(memory_q, key_mask)
    if heads is not memory_heads and duals is None:
        queries = Features(q, None)
    keys, rows = Features(k, key_mask), source.features(memory, key_mask)
    eps = layer.conventions.eps
    return KernelProblem(queries, keys, w, rows, source.codes, duals, layer.ell, eps)


def pose_on_tokens(
    layer: PrimalParameters,
    x: Float[Tensor, "b n c"],
    context: Float[Tensor, "b m c"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
    *,
    is_causal: bool,
) -> KernelProblem:
    """Return the problem of a layer on given tokens, which are zero where padded."""
    memory = x if context is None else context
    memory_heads = layer.project_heads(memory)
    if is_causal and layer.weights == "static":
        zero = x.new_zeros(len(x), 2 * layer.dim, dtype=accumulator(x))
        both, position = layer._merge(memory_heads), count_tokens(x, key_mask)
        means, _ = prefix_means(both, position, key_mask, zero, layer.decay)
        memory_heads = means.unflatten(-1, (2 * layer.num_heads, -1)).transpose(1, 2)
    heads = memory_heads if context is None else layer.project_heads(x)
    source = layer.source(memory, memory_heads)
    w = source.tie(memory, key_mask).joint
    return pose_problem(layer, source, heads, memory, memory_heads, w, key_mask)


def _unit(x: Float[Tensor, "b h n d"], eps: float) -> Float[Tensor, "b h n d"]:
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)
