"""Ways in which the times of tokens enter an attention after the projections.

    rotary            ⟨R(ω t_i) q_i, R(ω t_j) k_j⟩                     turns pairs of features
    stationary-bias   q_i·k_j / √d + Σ_l a_l cos ω_l Δ + b_l sin ω_l Δ,   Δ = t_i − t_j
    product           κ(q_i, k_j) ψ(Δ),  with features φ ⊗ Φ

All three depend on differences of times alone. ``b ≠ 0`` tells the past from the future. Rotary and
product weights may be negative; attentions with positive features then divide by the sum of the
weights without time, which cannot vanish.
"""

from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.types import Device

from primal_attention.attention.base import State
from primal_attention.attention.features import FeatureCore, slots
from primal_attention.attention.multihead import Core, count_seen
from primal_attention.attention.rotary import Rotary, Turn
from primal_attention.functional import causal_sums
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.kernels import TimeFeatures
from primal_attention.kernels.algebra import kronecker
from primal_attention.kernels.time_base import waves

__all__ = [
    "BiasedCore",
    "ProductFusion",
    "RotaryFusion",
    "StationaryBias",
    "TimeBias",
    "TimeFusion",
    "TimeProduct",
    "TurnedFeatureCore",
]

_NEEDS_TURN = "The state of this core holds keys that are turned by time; give step a turn."


class TimeProduct(NamedTuple):
    """Features of every token's time, to multiply with the features of its content."""

    features: Float[Tensor, "b n p"]

    def both(self, x: Float[Tensor, "b both n d"]) -> Float[Tensor, "b both n dp"]:
        """Return ``x ⊗ Φ(t)`` for every head; the same for queries and keys."""
        return kronecker(x, self.features[:, None].to(x.dtype))

    def queries(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n dp"]:
        """Return ``x ⊗ Φ(t)``."""
        return self.both(x)

    def keys(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n dp"]:
        """Return ``x ⊗ Φ(t)``."""
        return self.both(x)

    def take(self, slots: Int[Tensor, "b k"]) -> Self:
        """Return the features of the tokens in the given slots of each sequence."""
        at = slots[:, :, None].expand(-1, -1, self.features.shape[-1])
        return type(self)(self.features.gather(1, at))


class TimeBias(NamedTuple):
    """Cosines and sines of every token's time, and how a query weighs those of a key."""

    waves: Float[Tensor, "b n p"]
    """Cosines, then sines."""
    even: Float[Tensor, "h m"]
    odd: Float[Tensor, "h m"]

    def queries(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n dp"]:
        """Return queries with ``a cos + b sin`` and ``a sin − b cos`` appended."""
        cos, sin = self.waves[:, None].to(x.dtype).chunk(2, dim=-1)
        a, b = self.even[:, None].to(x.dtype), self.odd[:, None].to(x.dtype)
        return torch.cat([x, a * cos + b * sin, a * sin - b * cos], dim=-1)

    def keys(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n dp"]:
        """Return keys with the cosines and the sines appended."""
        extra = self.waves[:, None].to(x.dtype).expand(-1, x.shape[1], -1, -1)
        return torch.cat([x, extra], dim=-1)

    def both(self, x: Float[Tensor, "b both n d"]) -> Float[Tensor, "b both n dp"]:
        """Return changed heads of queries and, after them, of keys."""
        q, k = x.chunk(2, dim=1)
        return torch.cat([self.queries(q), self.keys(k)], dim=1)

    def take(self, slots: Int[Tensor, "b k"]) -> Self:
        """Return the waves of the tokens in the given slots of each sequence."""
        at = slots[:, :, None].expand(-1, -1, self.waves.shape[-1])
        return self._replace(waves=self.waves.gather(1, at))


class TimeFusion(nn.Module):
    """Base class: from times to what they do to queries and keys.

    Args:
        features: Features of time.
    """

    def __init__(self, features: TimeFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, times: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None) -> Turn:
        """Return the turn of every token; the times of masked tokens are ignored."""
        raise NotImplementedError  # abstract

    def advance(
        self, sums: Float[Tensor, "b h p v"], gap: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h p v"]:
        """Return sums of turned features after the origin of time moves forward by a gap."""
        raise NotImplementedError  # abstract


class RotaryFusion(TimeFusion):
    """Turns of queries and keys by angles ``ω t``: rotary positions in continuous time.

    Args:
        features: Bochner features; their frequencies are those of the turns.
    """

    def forward(
        self, times: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Rotary:
        """Return cosines and sines of every angle, both halves of a head written out."""
        times = times if mask is None else torch.where(mask, times, 0.0)
        dtype = next(self.features.parameters()).dtype
        cos, sin = waves(times, self.features.frequencies(), dtype)
        return Rotary(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))

    def advance(
        self, sums: Float[Tensor, "b h p v"], gap: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h p v"]:
        """Turn the sums back by the angle of the gap."""
        cos, sin = waves(-gap[:, None], self.features.frequencies(), sums.dtype)
        back = Rotary(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))
        return back.turn(sums.mT).mT


class ProductFusion(TimeFusion):
    """Products ``φ ⊗ Φ(t)`` with the features of time.

    Args:
        features: Features of time with a stationary kernel.
    """

    def forward(
        self, times: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> TimeProduct:
        """Return the features of every time."""
        return TimeProduct(self.features(times, mask))

    def advance(
        self, sums: Float[Tensor, "b h p v"], gap: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h p v"]:
        """Rotate the part of the sums that belongs to time."""
        apart = sums.mT.unflatten(-1, (-1, self.features.num_features))  # [b h v d p]
        moved = self.features.advance(apart, gap[:, None, None, None])
        return moved.flatten(-2).mT


class StationaryBias(TimeFusion):
    """A learned function of the gap for each head, added to the logits.

    It starts as the mean of the cosines: near events weigh more.

    Args:
        features: Features of time with frequencies; only these are used.
        num_heads: Number of heads.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> from primal_attention.kernels import BochnerTime
        >>> StationaryBias(BochnerTime(8), 2).logits(torch.zeros(3)).shape
        torch.Size([2, 3])
    """

    undecayed = ("even", "odd")

    def __init__(
        self,
        features: TimeFeatures,
        num_heads: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features)
        num = len(features.frequencies())
        shape = num_heads, num
        self.even = nn.Parameter(torch.full(shape, 1 / num, device=device, dtype=dtype))
        self.odd = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    @property
    def width(self) -> int:
        """How many features queries and keys get in addition."""
        return 2 * self.even.shape[1]

    def forward(
        self, times: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> TimeBias:
        """Return the waves of every time, and the coefficients."""
        times = times if mask is None else torch.where(mask, times, 0.0)
        cos, sin = waves(times, self.features.frequencies(), self.even.dtype)
        return TimeBias(torch.cat([cos, sin], dim=-1), self.even, self.odd)

    def logits(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "h *batch"]:
        """Return what each head adds to the logit of two tokens, query minus key, at a gap."""
        cos, sin = waves(gap, self.features.frequencies(), self.even.dtype)
        shape = (-1, *(1 for _ in gap.shape), cos.shape[-1])
        return (self.even.view(shape) * cos + self.odd.view(shape) * sin).sum(-1)


class BiasedCore(Core):
    """A softmax core whose logits get a function of the gap added; the fused kernel stays usable.

    Args:
        core: A core with logits ``q·k / √d``.
        width: How many features :class:`TimeBias` appends.
    """

    takes_turn = True

    def __init__(self, core: Core, width: int) -> None:
        super().__init__()
        self.core, self.width = core, width
        self.capabilities = core.capabilities

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        turn: Turn | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the output of the core; without a turn that of the core alone."""
        if turn is None:
            return self.core(q, k, v, key_mask=key_mask, is_causal=is_causal)
        wide = *self._pairs(q, k, turn), pad(v, (0, self.width))
        y = self.core(*wide, key_mask=key_mask, is_causal=is_causal)
        return y[..., : v.shape[-1]]

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return the state of the core for wider keys and values."""
        return self.core.init_state(pad(k, (0, self.width)), pad(v, (0, self.width)))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        turn: Turn | None = None,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens."""
        if turn is None:
            raise ValueError(_NEEDS_TURN)
        wide = *self._pairs(q, k, turn), pad(v, (0, self.width))
        y, state = self.core.step(*wide, state, key_mask=key_mask)
        return y[..., : v.shape[-1]], state

    def _pairs(self, q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return wider queries and keys, scaled so that the core's ``√width`` leaves ``√d``."""
        d = q.shape[-1]
        root = (d + self.width) ** 0.5
        # the bias gets no 1 / √d: it is a logit already
        return turn.queries(q * d**-0.5) * root, turn.keys(k)


class TurnedFeatureCore(FeatureCore):
    """A feature core whose features are turned by time; the divisor is the sum without time.

    Args:
        core: The core; its features must be positive.
        factor: How many times wider the turned features are.
    """

    takes_turn = True

    def __init__(self, core: FeatureCore, factor: int) -> None:
        super().__init__()
        self.core, self.factor = core, factor
        self.capabilities, self.ordered = core.capabilities, core.ordered

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the query features of the core."""
        return self.core.query_features(x, position)

    def key_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return the key features of the core."""
        return self.core.key_features(x, position)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        turn: Turn | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted sum of the values; without a turn the output of the core."""
        if turn is None:
            return self.core(q, k, v, key_mask=key_mask, is_causal=is_causal)
        with full_precision(q):
            key, value = self._keys(k, v, slots(k), key_mask)
            query = self.query_features(q.to(accumulator(q)), slots(q))
            value, one = value.split([v.shape[-1], 1], dim=-1)
            sums = []
            for a, b, c in ((turn.queries(query), turn.keys(key), value), (query, key, one)):
                sums.append(causal_sums(a, b, c).values if is_causal else a @ (b.mT @ c))
            return self.divide(torch.cat(sums, dim=-1)).to(v.dtype)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums of turned features, and of features for the divisor."""
        plain = self.core.init_state(k, v).tensors[0]
        sums, total = plain.split([v.shape[-1], 1], dim=-1)
        seen = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
        return State((sums.repeat(1, 1, self.factor, 1), total), seen)

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        turn: Turn | None = None,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens, at constant cost per token."""
        if turn is None:
            raise ValueError(_NEEDS_TURN)
        position = state.seen[:, None] + (slots(k) if key_mask is None else key_mask.cumsum(1) - 1)
        with full_precision(q):
            key, value = self._keys(k, v, position, key_mask)
            query = self.query_features(q.to(accumulator(q)), position)
            value, one = value.split([v.shape[-1], 1], dim=-1)
            before_sums, before_total = state.tensors
            turned = turn.queries(query), turn.keys(key)
            sums, after_sums = causal_sums(*turned, value, state=before_sums)
            total, after_total = causal_sums(query, key, one, state=before_total)
            y = self.divide(torch.cat([sums, total], dim=-1)).to(v.dtype)
        return y, State((after_sums, after_total), count_seen(state, k, key_mask))
