"""Where the projection weights of a primal layer come from: one small class for each answer.

A source has two stages. ``tie`` returns the weights that tokens imply, ``attend`` applies them to
tokens. The weights are all that tokens share, ``2 d s`` numbers per head. ``causal`` does both for
weights that change with every token.

A source holds no parameters: they belong to the layer, under names that saved models know.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from primal_attention.attention.base import JOINED_TIME, SQUARES_FIT, State, is_plain
from primal_attention.attention.rotary import Turn
from primal_attention.functional import (
    Heads,
    LayerMaps,
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
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.primal import inverse_norm, join
from primal_attention.functional.ties import swap_sides

if TYPE_CHECKING:
    from primal_attention.attention.primal_parameters import PrimalParameters

__all__ = ["SOURCES", "CausalOutput", "CausalTokens", "DualSource", "ProjectionWeights", "Source"]

_HORIZON = 2.0**16
"""Codes of the causal layer vary smoothly in ``log t`` and repeat beyond this many tokens."""


class ProjectionWeights(NamedTuple):
    """What ``tie`` returns."""

    joint: Float[Tensor, "#b both d s"]
    """The weights of all query heads and, after them, of all key heads."""
    tokens: Tensor | Heads
    """The tokens to attend from, or their heads where the weights were made of these."""
    duals: Float[Tensor, "b both m s"] | None = None
    """The dual variables of both sides, where they are at hand."""


class CausalTokens(NamedTuple):
    """What ``causal`` takes."""

    x: Float[Tensor, "b n c"]
    """The tokens; zero where padded."""
    position: Int[Tensor, "b n"]
    """How many real tokens there are up to each."""
    key_mask: Bool[Tensor, "b n"] | None
    """``True`` where a token is real."""
    start: State
    """The state before the first token."""
    rotary: Turn | None
    """Turns of queries and keys."""
    is_simple: bool
    """Whether output and energy are enough: nothing came before, and nobody needs the rest."""


class CausalOutput(NamedTuple):
    """What ``causal`` returns."""

    y: Float[Tensor, "b n c"]
    """The layer's output."""
    energy: Float[Tensor, "b both s"] | None
    """Sum of the squared scores over tokens, in float32 or better."""
    weights: Float[Tensor, "#b both d s"]
    """The weights after the last token, or those that never change."""
    state: tuple[Tensor, ...]
    """The state after the last token; may be empty for simple tokens, and so may the rest."""
    heads: Float[Tensor, "b both n d"] | None = None
    scores: Float[Tensor, "b both n s"] | None = None
    duals: Float[Tensor, "b both n s"] | None = None


class Source:
    """Base class; the methods take the layer whose parameters they use."""

    rotary = False
    mixes_without_order = True
    cross = True
    time: frozenset[str] = JOINED_TIME
    max_magnitude = SQUARES_FIT
    max_magnitude_float16 = 1e3

    def create(self, layer: "PrimalParameters", factory: dict[str, Any]) -> None:
        """Add the parameters of the weights to the layer."""
        raise NotImplementedError  # abstract

    def reset(self, layer: "PrimalParameters") -> None:
        """Draw new parameters."""
        for w in (layer.w_e, layer.w_r):
            # QR does not exist in half precision
            wide = torch.empty_like(w, dtype=accumulator(w))
            if layer.conventions.flat_init:
                nn.init.orthogonal_(wide)
            else:
                for head in wide:
                    nn.init.orthogonal_(head)
                wide.div_(layer.rank**0.5)
            w.copy_(wide)

    def codes(self, layer: "PrimalParameters") -> tuple[Tensor, Tensor] | None:
        """Return the free weights ``W_e`` and ``W_r``; ``None`` where duals take their place."""
        return layer.w_e, layer.w_r

    def features(
        self, layer: "PrimalParameters", memory: Tensor, key_mask: Tensor | None
    ) -> Float[Tensor, "b h m d"] | None:
        """Return the rows ``F`` of the kernel ``Φ_q FᵀF Φ_kᵀ``; ``None`` for the identity."""
        return None

    def tie(
        self,
        layer: "PrimalParameters",
        memory: Float[Tensor, "b m c"],
        heads: Float[Tensor, "b both m d"] | None,
        key_mask: Bool[Tensor, "b m"] | None,
    ) -> ProjectionWeights:
        """Return the projection weights that tokens imply.

        Args:
            layer: Whose parameters to use.
            memory: The tokens; zero where padded.
            heads: Their heads, where they were computed already.
            key_mask: ``True`` where a token is real.
        """
        raise NotImplementedError  # abstract

    def attend(
        self,
        layer: "PrimalParameters",
        tokens: Tensor | Heads,
        w: Float[Tensor, "#b both d s"],
        key_mask: Bool[Tensor, "b n"] | None,
        *,
        has_energy: bool,
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b both s"] | None]:
        """Return the layer's output and the energy of its scores; needs plain projections."""
        maps = LayerMaps(*(linear_map(m) for m in layer.projections))
        eps = layer.conventions.eps
        return attend(tokens, w, maps, key_mask=key_mask, eps=eps, has_energy=has_energy)

    def state_shape(self, layer: "PrimalParameters") -> tuple[int, ...]:
        """Return the shape of one side of the decoding state of one sequence."""
        return layer.num_heads, layer.feature_dim, layer.rank

    def causal(self, layer: "PrimalParameters", tokens: CausalTokens) -> CausalOutput:
        """Return scores of weights that see no later token, and the state after the last one.

        Args:
            layer: Whose parameters to use.
            tokens: What each of them sees is itself and those before it.
        """
        raise NotImplementedError  # abstract


class SampledSource(Source):
    """``W_{e|X} = Fᵀ W_e``: evenly spaced tokens times learned codes of their relative position."""

    def create(self, layer: "PrimalParameters", factory: dict[str, Any]) -> None:
        """Add the codes of both sides and, for smooth codes, the basis."""
        rows, num = _num_codes(layer), layer.num_samples
        shape = layer.num_heads, rows, layer.rank
        layer.w_e = nn.Parameter(torch.empty(shape, **factory))
        layer.w_r = nn.Parameter(torch.empty(shape, **factory))
        if layer.codes == "basis":
            # saved, so that a layer built on the meta device is whole once it is loaded
            layer.register_buffer("basis", torch.empty(rows, num, **factory))

    def reset(self, layer: "PrimalParameters") -> None:
        """Draw the codes and fill the basis."""
        if layer.codes == "basis":
            steps = torch.arange(layer.num_samples, device=layer.basis.device)
            at = (steps.to(accumulator(layer.basis)) + 0.5) / layer.num_samples
            layer.basis.copy_(_cosines(layer, at).T)
        super().reset(layer)

    def _options(self, layer: "PrimalParameters") -> dict[str, Any]:
        basis = layer.basis if layer.codes == "basis" else None
        return {"basis": basis, "standardize": layer.conventions.standardize}

    def features(
        self, layer: "PrimalParameters", memory: Tensor, key_mask: Tensor | None
    ) -> Float[Tensor, "b h m d"]:
        """Return the sampled rows, combined by the basis."""
        sizes = layer.num_samples, layer.num_heads
        return sampled_features(memory, *sizes, key_mask=key_mask, **self._options(layer))

    def tie(
        self,
        layer: "PrimalParameters",
        memory: Float[Tensor, "b m c"],
        heads: Float[Tensor, "b both m d"] | None,
        key_mask: Bool[Tensor, "b m"] | None,
    ) -> ProjectionWeights:
        """Return sampled rows times codes; see :meth:`Source.tie`."""
        codes = layer.w_e, layer.w_r, layer.num_samples
        return ProjectionWeights(
            *tie_sampled(memory, *codes, key_mask=key_mask, **self._options(layer))
        )

    def causal(self, layer: "PrimalParameters", tokens: CausalTokens) -> CausalOutput:
        """Project on ``Σ_{u ≤ t} f_u w_uᵀ``; see :meth:`Source.causal`."""
        x, position, key_mask, start = tokens[:4]
        heads, wide = layer.project_heads(x), accumulator(x)
        f = layer._split(standardize_rows(x) if layer.conventions.standardize else x)
        codes = self._codes_at(layer, position - 1)
        # a sum of so many random terms grows like √t; from the sampled size on, take the mean
        ratio = layer.num_samples / position.clamp_min(1).to(wide)[:, None, :, None]
        scale = torch.where(ratio > 1, ratio.sqrt(), ratio)
        scale = scale * inverse_norm(heads, key_mask, layer.conventions.eps)
        scores, after = _causal_scores(heads, torch.cat([f, f], dim=1), codes, scale, start)
        joint = torch.cat([layer.w_e, layer.w_r])[None]
        y = layer.project_out(layer._merge(scores.to(x.dtype)))
        return CausalOutput(y, scores.square().sum(2), joint, after)

    def _codes_at(
        self, layer: "PrimalParameters", position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b both n s"]:
        """Return the codes of absolute positions."""
        joint = torch.cat([layer.w_e, layer.w_r])
        if layer.codes == "table":
            return joint[:, position.clamp(0, layer.num_samples - 1)].transpose(0, 1)
        at = position.clamp_min(0).to(accumulator(joint)).log1p() / math.log1p(_HORIZON)
        return _cosines(layer, at)[:, None] @ joint


class StaticSource(Source):
    """Parameters that see no token: information moves through the causal prefix mean alone."""

    mixes_without_order = False
    cross = False

    def create(self, layer: "PrimalParameters", factory: dict[str, Any]) -> None:
        """Add the weights of both sides."""
        shape = layer.num_heads, layer.head_dim, layer.rank
        layer.w_e = nn.Parameter(torch.empty(shape, **factory))
        layer.w_r = nn.Parameter(torch.empty(shape, **factory))

    def tie(
        self,
        layer: "PrimalParameters",
        memory: Float[Tensor, "b m c"],
        heads: Float[Tensor, "b both m d"] | None,
        key_mask: Bool[Tensor, "b m"] | None,
    ) -> ProjectionWeights:
        """Return the parameters; see :meth:`Source.tie`."""
        return ProjectionWeights(torch.cat([layer.w_e, layer.w_r])[None], memory)

    def state_shape(self, layer: "PrimalParameters") -> tuple[int, ...]:
        """Return the width: the state is a sum of queries and one of keys."""
        return (layer.dim,)

    def causal(self, layer: "PrimalParameters", tokens: CausalTokens) -> CausalOutput:
        """Project the prefix means of queries and keys; see :meth:`Source.causal`."""
        x, position, key_mask, start = tokens[:4]
        joint, h = torch.cat([layer.w_e, layer.w_r])[None], 2 * layer.num_heads
        before = torch.cat(start.tensors, dim=-1)
        if tokens.is_simple and all(map(is_plain, layer.projections)):
            # queries and keys are linear in the tokens: so are their means in the means of tokens
            zero = before[:, : layer.dim]
            means, _ = prefix_means(x, position, key_mask, zero, layer.decay)
            y, energy = self.attend(layer, means, joint, key_mask, has_energy=True)
            return CausalOutput(y, energy, joint, ())
        both = layer._merge(layer.project_heads(x))
        means, after = prefix_means(both, position, key_mask, before, layer.decay)
        heads = means.unflatten(-1, (h, -1)).transpose(1, 2)
        scores, energy = layer.project_scores(heads, joint, key_mask)
        y = layer.project_out(scores)
        return CausalOutput(y, energy, joint, after.chunk(2, dim=-1), heads)


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
        count = (1 - decay**count) / (1 - decay)
    else:
        real = x if key_mask is None else torch.where(key_mask[:, :, None], x, 0.0)
        sums = prefix_sum(real, start)
    # divided before the cast: sums may exceed a narrow type
    return (sums / count).to(x.dtype), sums[:, -1] if x.shape[1] else start


class DualSource(Source):
    """``W_{e|X} = Φ_kᵀ H_r / n`` with dual variables ``H`` that are linear in the tokens."""

    rotary = True
    time = JOINED_TIME | {"product", "rotary"}
    # the published term is of degree four in the tokens
    max_magnitude = 1e6
    max_magnitude_float16 = 30.0

    def create(self, layer: "PrimalParameters", factory: dict[str, Any]) -> None:
        """Add the maps from tokens to dual variables."""
        width = layer.num_heads * layer.rank
        layer.dual_e = nn.Linear(layer.dim, width, False, **factory)
        layer.dual_r = nn.Linear(layer.dim, width, False, **factory)

    def reset(self, layer: "PrimalParameters") -> None:
        """Do nothing: the layer resets its linear maps."""

    def codes(self, layer: "PrimalParameters") -> None:
        """Return ``None``: dual variables take the place of free weights."""

    def tie(
        self,
        layer: "PrimalParameters",
        memory: Float[Tensor, "b m c"],
        heads: Float[Tensor, "b both m d"] | None,
        key_mask: Bool[Tensor, "b m"] | None,
    ) -> ProjectionWeights:
        """Return mean outer products of features and duals; see :meth:`Source.tie`."""
        options: Any = {"key_mask": key_mask, "eps": layer.conventions.eps}
        h, maps = 2 * layer.num_heads, (layer.q_proj, layer.k_proj, layer.dual_e, layer.dual_r)
        if heads is None and all(map(is_plain, maps)):
            q, k, e, r = map(linear_map, maps)
            return ProjectionWeights(*tie_dual(memory, (join(q, k), join(e, r)), h, **options))
        heads = layer.project_heads(memory) if heads is None else heads
        duals = layer.project_duals(memory)
        found = tie_dual(layer._merge(heads), layer._merge(duals), h, **options)
        return ProjectionWeights(*found, duals)

    def causal(self, layer: "PrimalParameters", tokens: CausalTokens) -> CausalOutput:
        """Project on ``Σ_{u ≤ t} φ(k_u) h_uᵀ / t``; see :meth:`Source.causal`."""
        x, position, key_mask, start, rotary = tokens[:5]
        heads, duals = layer.project_heads(x, rotary), layer.project_duals(x)
        norm = inverse_norm(heads, key_mask, layer.conventions.eps)
        scale = norm / position.clamp_min(1)[:, None, :, None]
        # the weights of queries come from keys, and the other way round
        scores, after = _causal_scores(
            heads, swap_sides(heads), swap_sides(duals * norm), scale, start
        )
        last = torch.cat([start.seen[:, None], position], dim=1)[:, -1:]  # also without tokens
        joint = torch.cat(after, dim=1) / last.clamp_min(1)[:, None, :, None]
        y = layer.project_out(layer._merge(scores.to(x.dtype)))
        return CausalOutput(y, scores.square().sum(2), joint, after, heads, scores, duals)


def _causal_scores(
    heads: Float[Tensor, "b both n d"],
    f: Float[Tensor, "b both n d"],
    codes: Float[Tensor, "#b both n s"],
    scale: Float[Tensor, "b both n 1"],
    start: State,
) -> tuple[Float[Tensor, "b both n s"], tuple[Tensor, ...]]:
    """Return ``a_t Σ_{u ≤ t} ⟨q_t, f_u⟩ w_u`` in float32 or better, and the state.

    Norms are part of the scale: it multiplies ``s`` numbers per token and head instead of ``d``.
    """
    q, f, codes = (t.to(accumulator(heads)) for t in (heads, f, codes))
    with full_precision(heads):
        sums, after = causal_sums(q, f, codes, state=torch.cat(start.tensors, dim=1))
    return sums * scale, after.chunk(2, dim=1)


SOURCES: dict[str, Source] = {
    "data": SampledSource(),
    "static": StaticSource(),
    "dual": DualSource(),
}


def linear_map(module: nn.Linear) -> LinearMap:
    """Return weight and bias of a module."""
    return LinearMap(module.weight, module.bias)


def _num_codes(layer: "PrimalParameters") -> int:
    smooth = layer.codes == "basis"
    return min(2 * layer.rank, layer.num_samples) if smooth else layer.num_samples


def _cosines(
    layer: "PrimalParameters", at: Float[Tensor, "*batch n"]
) -> Float[Tensor, "*batch n k"]:
    """Return the basis functions at relative positions, orthonormal over the sampled rows."""
    order = torch.arange(_num_codes(layer), dtype=at.dtype, device=at.device)
    scale = torch.where(order == 0, 0.5**0.5, torch.ones_like(order))
    scale = scale * (2 / layer.num_samples) ** 0.5
    return (scale * torch.cos(math.pi * order * at[..., None])).to(layer.w_e.dtype)
