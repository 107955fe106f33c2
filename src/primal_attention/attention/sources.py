"""Where the projection weights of a primal layer come from: one record of tensors per answer.

A source holds the tensors that weights are made of, for one call. ``tie`` returns the weights that
tokens imply; they are all that tokens share, ``2 d s`` numbers per head. ``causal`` returns scores
of weights that change with every token. A source knows neither the layer nor its modules.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.attention.base import State
from primal_attention.functional import (
    Heads,
    LinearMap,
    attend,
    causal_sums,
    decayed_sum,
    prefix_sum,
    sampled_features,
    standardize_rows,
    tie_dual,
    tie_sampled,
)
from primal_attention.functional.plain import inverse_norm, swap_sides
from primal_attention.functional.precision import accumulator, full_precision

__all__ = [
    "CausalScores",
    "DualSource",
    "Prefix",
    "ProjectionWeights",
    "SampledSource",
    "StaticSource",
    "WeightSource",
    "cosines",
    "prefix_means",
]

_HORIZON = 2.0**16
"""Codes of the causal layer vary smoothly in ``log t`` and repeat beyond this many tokens."""


class ProjectionWeights(NamedTuple):
    """What ``tie`` returns."""

    joint: Float[Tensor, "#b both d s"]
    """The weights of all query heads and, after them, of all key heads."""
    tokens: Tensor | Heads
    """The tokens to attend from, or their heads where the weights were made of these."""


class Prefix(NamedTuple):
    """What causal weights need to know of the order of tokens."""

    position: Int[Tensor, "b n"]
    """How many real tokens there are up to each."""
    key_mask: Bool[Tensor, "b n"] | None
    """``True`` where a token is real."""
    start: State
    """The state before the first token."""


class CausalScores(NamedTuple):
    """What ``causal`` returns."""

    scores: Float[Tensor, "b n both_s"]
    """The scores of all query heads and, after them, of all key heads, in the type of the heads."""
    energy: Float[Tensor, "b both s"] | None
    """Sum of the squared scores over tokens, in float32 or better."""
    weights: Float[Tensor, "#b both d s"]
    """The weights after the last token, or those that never change."""
    state: tuple[Tensor, ...]
    """The sums after the last token."""
    heads: Float[Tensor, "b both n d"]
    """What was projected: heads, or their prefix means."""
    wide: Float[Tensor, "b both n s"] | None = None
    """The scores in float32 or better, where the weights differ from token to token."""


class SampledSource(NamedTuple):
    """``W_{e|X} = Fᵀ W_e``: evenly spaced tokens times learned codes of their relative position."""

    codes: tuple[Float[Tensor, "h k s"], Float[Tensor, "h k s"]]
    """The codes ``W_e`` and ``W_r``."""
    basis: Float[Tensor, "k m"] | None
    """Functions of position, for codes that are smooth in it."""
    num: int
    """How many tokens are sampled."""
    standardize: bool
    """Whether sampled tokens are standardised."""
    eps: float
    """Norms below this count as this."""

    def features(self, memory: Tensor, key_mask: Tensor | None) -> Float[Tensor, "b h m d"]:
        """Return the rows ``F`` of the kernel ``Φ_q FᵀF Φ_kᵀ``, combined by the basis."""
        return sampled_features(
            memory,
            self.num,
            self.codes[0].shape[0],
            key_mask=key_mask,
            basis=self.basis,
            standardize=self.standardize,
        )

    def tie(
        self, memory: Float[Tensor, "b m c"], key_mask: Bool[Tensor, "b m"] | None
    ) -> ProjectionWeights:
        """Return sampled rows times codes; see :data:`WeightSource`."""
        found = tie_sampled(
            memory,
            *self.codes,
            self.num,
            key_mask=key_mask,
            basis=self.basis,
            standardize=self.standardize,
        )
        return ProjectionWeights(*found)

    def causal(
        self, x: Float[Tensor, "b n c"], heads: Float[Tensor, "b both n d"], prefix: Prefix
    ) -> CausalScores:
        """Project on ``Σ_{u ≤ t} f_u w_uᵀ``; see :data:`WeightSource`."""
        position, wide, h = prefix.position, accumulator(x), self.codes[0].shape[0]
        rows = standardize_rows(x) if self.standardize else x
        f = rows.unflatten(-1, (h, -1)).transpose(1, 2)
        # a sum of so many random terms grows like √t; from the sampled size on, take the mean
        ratio = self.num / position.clamp_min(1).to(wide)[:, None, :, None]
        scale = torch.where(ratio > 1, ratio.sqrt(), ratio)
        scale = scale * inverse_norm(heads, prefix.key_mask, self.eps)
        both = torch.cat([f, f], dim=1)
        found = _causal_scores(heads, both, self.codes_at(position - 1), scale, prefix)
        # these weights change with every token, but the free ones are all that a loss asks for
        return found._replace(weights=torch.cat(self.codes)[None], wide=None)

    def codes_at(self, position: Int[Tensor, "b n"]) -> Float[Tensor, "b both n s"]:
        """Return the codes of absolute positions, counted from zero."""
        joint = torch.cat(self.codes)
        if self.basis is None:
            return joint[:, position.clamp(0, self.num - 1)].transpose(0, 1)
        # logarithmic: one basis then serves short and long sequences
        at = position.clamp_min(0).to(accumulator(joint)).log1p() / math.log1p(_HORIZON)
        return cosines(at, joint.shape[1], self.num).to(joint.dtype)[:, None] @ joint


class StaticSource(NamedTuple):
    """Parameters that see no token: information moves through the causal prefix mean alone."""

    codes: tuple[Float[Tensor, "h d s"], Float[Tensor, "h d s"]]
    """The weights ``W_e`` and ``W_r``."""
    decay: float | None
    """Decay of the prefix mean."""
    eps: float
    """Norms below this count as this."""

    def features(self, memory: Tensor, key_mask: Tensor | None) -> None:
        """Return ``None``: the kernel has the identity between its features."""

    def tie(
        self, memory: Float[Tensor, "b m c"], key_mask: Bool[Tensor, "b m"] | None
    ) -> ProjectionWeights:
        """Return the parameters; see :data:`WeightSource`."""
        return ProjectionWeights(torch.cat(self.codes)[None], memory)

    def causal(
        self, x: Float[Tensor, "b n c"], heads: Float[Tensor, "b both n d"], prefix: Prefix
    ) -> CausalScores:
        """Project the prefix means of queries and keys; see :data:`WeightSource`."""
        before = torch.cat(prefix.start.tensors, dim=-1)
        both = heads.transpose(1, 2).flatten(2)
        means, after = prefix_means(both, *prefix[:2], before, self.decay)
        joint = torch.cat(self.codes)[None]
        scores, energy = attend(means, joint, None, key_mask=prefix.key_mask, eps=self.eps)
        by_head = means.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
        return CausalScores(scores, energy, joint, after.chunk(2, dim=-1), by_head)


class DualSource(NamedTuple):
    """``W_{e|X} = Φ_kᵀ H_r / n`` with dual variables ``H`` that are linear in the tokens."""

    maps: tuple[LinearMap, LinearMap] | None
    """From tokens to the heads of both sides and to their dual variables; or, instead, these:"""
    heads: Float[Tensor, "b both m d"] | None
    duals: Float[Tensor, "b both m s"] | None
    num_heads: int
    """Heads of one side."""
    eps: float
    """Norms below this count as this."""

    @property
    def codes(self) -> None:
        """There are no free weights: dual variables take their place."""

    def features(self, memory: Tensor, key_mask: Tensor | None) -> None:
        """Return ``None``: the kernel has the identity between its features."""

    def tie(
        self, memory: Float[Tensor, "b m c"], key_mask: Bool[Tensor, "b m"] | None
    ) -> ProjectionWeights:
        """Return mean outer products of features and duals; see :data:`WeightSource`."""
        given: tuple[LinearMap, LinearMap] | Tensor | None = self.maps
        if self.heads is not None and self.duals is not None:
            # side by side
            memory, given = (t.transpose(1, 2).flatten(2) for t in (self.heads, self.duals))
        if given is None:
            raise ValueError("A dual source needs its maps, or heads and dual variables.")
        both = 2 * self.num_heads
        return ProjectionWeights(*tie_dual(memory, given, both, key_mask=key_mask, eps=self.eps))

    def causal(
        self, x: Float[Tensor, "b n c"], heads: Float[Tensor, "b both n d"], prefix: Prefix
    ) -> CausalScores:
        """Project on ``Σ_{u ≤ t} φ(k_u) h_uᵀ / t``; see :data:`WeightSource`."""
        if self.duals is None:
            raise ValueError("Causal dual weights need the dual variables of every token.")
        position = prefix.position
        norm = inverse_norm(heads, prefix.key_mask, self.eps)
        scale = norm / position.clamp_min(1)[:, None, :, None]
        # the weights of queries come from keys, and the other way round
        f, codes = swap_sides(heads), swap_sides(self.duals * norm)
        found = _causal_scores(heads, f, codes, scale, prefix)
        seen = torch.cat([prefix.start.seen[:, None], position], dim=1)
        last = seen[:, -1:].clamp_min(1)[:, None, :, None]  # also without tokens
        return found._replace(weights=found.weights / last)


WeightSource = SampledSource | StaticSource | DualSource
"""A source. All three have

- ``codes``: the free weights ``W_e`` and ``W_r``; ``None`` where duals take their place;
- ``features(memory, key_mask)``: the rows ``F`` of the kernel ``Φ_q FᵀF Φ_kᵀ``; ``None`` for the
  identity;
- ``tie(memory, key_mask)``: the projection weights that tokens imply; the tokens are zero where
  padded;
- ``causal(x, heads, prefix)``: scores of weights that see no later token, and the sums after the
  last one.
"""


def prefix_means(
    x: Float[Tensor, "b n c"],
    position: Int[Tensor, "b n"],
    key_mask: Bool[Tensor, "b n"] | None,
    start: Float[Tensor, "b c"],
    decay: float | None,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b c"]]:
    """Return the prefix means in the type of ``x``, and the sums after the last token."""
    count = position.clamp_min(1).to(start.dtype)[:, :, None]
    if decay is not None:
        sums = decayed_sum(x, decay, key_mask=key_mask, start=start)
        # the decayed sum of ones, so that the result is a mean
        count = (1 - decay**count) / (1 - decay)
    else:
        real = x if key_mask is None else torch.where(key_mask[:, :, None], x, 0.0)
        sums = prefix_sum(real, start)
    # divided before the cast: sums may exceed a narrow type
    return (sums / count).to(x.dtype), sums[:, -1] if x.shape[1] else start


def _causal_scores(
    heads: Float[Tensor, "b both n d"],
    f: Float[Tensor, "b both n d"],
    codes: Float[Tensor, "#b both n s"],
    scale: Float[Tensor, "b both n 1"],
    prefix: Prefix,
) -> CausalScores:
    """Return ``a_t Σ_{u ≤ t} ⟨q_t, f_u⟩ w_u``; the weights are the sums after the last token."""
    wide = accumulator(heads)
    with full_precision(heads):
        # sums of many tokens grow: in a narrow type small terms would vanish
        start = torch.cat(prefix.start.tensors, dim=1)
        sums, after = causal_sums(heads.to(wide), f.to(wide), codes.to(wide), state=start)
    # norms are part of the scale: it multiplies s numbers per token and head instead of d
    scores = sums * scale
    flat, energy = scores.to(heads.dtype).transpose(1, 2).flatten(2), scores.square().sum(2)
    return CausalScores(flat, energy, after, after.chunk(2, dim=1), heads, scores)


def cosines(
    at: Float[Tensor, "*batch n"], num: int, samples: int
) -> Float[Tensor, "*batch n {num}"]:
    """Return ``num`` functions at relative positions, orthonormal over the sampled rows."""
    order = torch.arange(num, dtype=at.dtype, device=at.device)
    scale = torch.where(order == 0, 0.5**0.5, torch.ones_like(order))
    scale = scale * (2 / samples) ** 0.5
    return scale * torch.cos(math.pi * order * at[..., None])
