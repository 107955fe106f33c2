"""Attention that knows the times of its tokens (Xu et al., NeurIPS 2019, arXiv 1911.12864).

``create_attention(name, dim, num_heads, time=...)`` makes any attention of the registry take
``times``. The values of ``time`` are ways in which times can enter:

- ``"concat"``: features of time are joined to each token before the projections.
- ``"concat-mlp"``: the same, then ``x + W₂ ReLU(W₁ x)``, so that times and contents mix.
- ``"add"``: features of time are mapped to the width of the tokens and added.
- ``"stationary-bias"``: a learned function of the gap is added to the logits.
- ``"rotary"``: queries and keys turn by angles that grow with time.
- ``"product"``: the kernel of the contents times a kernel of the gap.

The first three work for every attention. Weights see the times as they are given: give elapsed
times. The last three depend on differences of times alone. ``Capabilities.time`` lists the values
that an attention allows.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from primal_attention.attention.base import JOINED_TIME, Attention, Aux, Capabilities, State
from primal_attention.attention.documents import DocumentBatch, Ran
from primal_attention.attention.features import FeatureCore
from primal_attention.attention.multihead import MultiHeadAttention
from primal_attention.attention.primal import PrimalAttention
from primal_attention.attention.registry import Entry, list_attentions
from primal_attention.attention.rotary import Turn
from primal_attention.attention.time_fusions import (
    BiasedCore,
    ProductFusion,
    RotaryFusion,
    StationaryBias,
    TimeFusion,
    TurnedFeatureCore,
)
from primal_attention.kernels import BochnerTime, TimeFeatures, create_time

__all__ = [
    "FusedTimeAttention",
    "Fusion",
    "JoinedTimeAttention",
    "TimeAttention",
    "TimeOptions",
    "add_time",
]

Fusion = Literal["add", "concat", "concat-mlp", "product", "rotary", "stationary-bias"]

_WIDTH, _PRODUCT_WIDTH = 32, 16
_MOST_PRODUCTS = 1024
"""Largest width of ``φ ⊗ Φ``; beyond, a product costs more than it brings."""


@dataclass(frozen=True)
class TimeOptions:
    """How the times of tokens enter an attention.

    Example:
        >>> from primal_attention.attention import create_attention
        >>> time = TimeOptions("product", features="mercer", num_features=14)
        >>> layer = create_attention("linear", 32, 4, time=time)
        >>> layer(torch.randn(1, 5, 32), times=torch.rand(1, 5).cumsum(1)).shape
        torch.Size([1, 5, 32])
    """

    fusion: Fusion = "concat"
    """Where times enter."""
    features: str = "bochner"
    """Name of features of time; product, rotary and bias need a stationary kernel."""
    num_features: int | None = None
    """Width of the features; by default 32, for a product 16 or less, for rotary the head width."""

    def __post_init__(self) -> None:
        if self.fusion not in get_args(Fusion):
            raise ValueError(
                f"time must be one of {', '.join(get_args(Fusion))}, got {self.fusion!r}."
            )


class TimeAttention(Attention):
    """An attention that also takes the times of its tokens; build it with ``create_attention``.

    Attributes:
        inner: The attention.
        fusion: How times enter.
    """

    inner: Attention
    fusion: Fusion
    takes_times = True

    def __init__(self, dim: int, num_heads: int, inner: Attention, fusion: Fusion) -> None:
        super().__init__(dim, num_heads)
        self.inner, self.fusion = inner, fusion

    @property
    def features(self) -> TimeFeatures:
        """The features of time."""
        raise NotImplementedError  # abstract

    @overload
    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        times: Float[Tensor, "b n"] | None = None,
        context_times: Float[Tensor, "b m"] | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: Literal[False] = False,
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]: ...

    @overload
    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        times: Float[Tensor, "b n"] | None = None,
        context_times: Float[Tensor, "b m"] | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: Literal[True],
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n c"], Aux]: ...

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        context: Float[Tensor, "b m c"] | None = None,
        *more: object,
        times: Float[Tensor, "b n"] | None = None,
        context_times: Float[Tensor, "b m"] | None = None,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        return_aux: bool = False,
        rotary: Turn | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"] | tuple[Float[Tensor, "b n c"], Aux]:
        """Attend from ``x`` to ``context`` or to itself; see :class:`Attention`.

        Args:
            x: Tokens to attend from.
            context: Tokens to attend to; ``None`` for self-attention.
            more: Refused, with the call to write instead.
            times: Time of each token of ``x`` in scaled units, best in float64. Times of padded
                tokens are ignored, whatever they are.
            context_times: Time of each token of ``context``.
            key_mask: ``True`` where a token to attend to is real.
            is_causal: Let no output depend on a later token; tokens must be sorted by time.
            return_aux: Return ``(y, aux)`` instead of ``y``.
            rotary: Refused: times take the place of positions.
            document_ids: Document of each token, if rows hold several; see :class:`Attention`.
        """
        self._check(
            x,
            context,
            key_mask,
            is_causal,
            return_aux,
            rotary=rotary,
            document_ids=document_ids,
            more=more,
        )
        times = self._check_times("times", times, x)
        also: dict[str, Any] = {"is_causal": is_causal, "return_aux": return_aux}
        if document_ids is not None:
            return self._by_document(
                partial(self._run_documents, x, times, is_causal),
                document_ids,
                key_mask,
                return_aux,
            )
        if context is None:
            return self._self(x, times, key_mask, also)
        keys = context, self._check_times("context_times", context_times, context)
        return self._cross((x, times), keys, key_mask, also)

    def _run_documents(
        self,
        x: Tensor,
        times: Tensor,
        is_causal: bool,
        batch: DocumentBatch,
        keep: Tensor | None,
        has_term: bool,
    ) -> Ran:
        # features of time may look at the token before, so the times are unpacked, too
        also = {"is_causal": is_causal, "return_aux": has_term}
        found = self._self(batch.unpack(x), batch.unpack(times), keep, also)
        return (found[0], found[1].loss) if isinstance(found, tuple) else (found, None)

    @property
    def _publisher(self) -> nn.Module:
        return self.inner

    def _self(
        self, x: Tensor, times: Tensor, key_mask: Tensor | None, also: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Aux]:
        raise NotImplementedError  # abstract

    def _cross(
        self,
        queries: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        key_mask: Tensor | None,
        also: dict[str, Any],
    ) -> Tensor | tuple[Tensor, Aux]:
        raise NotImplementedError  # abstract

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token."""
        return self.inner.init_state(batch_size)

    def step(
        self,
        x: Float[Tensor, "b t c"],
        state: State,
        *,
        times: Float[Tensor, "b t"] | None = None,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], State]:
        """Decode the next tokens; see :meth:`Attention.step` and :meth:`forward`."""
        if not self.capabilities.stateful:
            return self.inner.step(x, state, key_mask=key_mask)
        self._check(x, key_mask=key_mask, state=state)
        return self._step(x, state, self._check_times("times", times, x), key_mask)

    def _step(
        self, x: Tensor, state: State, times: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        raise NotImplementedError  # abstract

    def advance(self, state: State, gap: Float[Tensor, " b"]) -> State:
        """Return the state for times that count from an origin moved forward by a gap.

        For Bochner and tied Mercer features this rotates the sums; no event of the history is read.
        After it, a time of ``t`` becomes ``t - gap``.

        Args:
            state: From ``init_state`` or ``step``; it is not changed.
            gap: How far the origin of each sequence moves.
        """
        raise ValueError(
            f"time={self.fusion!r} cannot move the origin of a state: it holds no sums of rotated "
            "features. Use time='product' or 'rotary' with an attention of constant state."
        )

    def _cannot(self, what: str, capability: str) -> str:
        if capability == "rotary":
            return (
                f"An attention with time={self.fusion!r} cannot {what}: times take the place of "
                "positions. Leave rotary out."
            )
        if capability == "cross" and self.inner.capabilities.cross:
            return f"An attention with time={self.fusion!r} cannot {what}; use time='concat'."
        return self.inner._cannot(what, capability)

    def _check_times(self, name: str, times: Tensor | None, x: Tensor) -> Tensor:
        if times is None:
            raise ValueError(
                f"{name} is missing; with time={self.fusion!r} every token needs a time: pass "
                f"{name}= of shape {tuple(x.shape[:2])}."
            )
        if times.shape != x.shape[:2] or not times.is_floating_point():
            raise ValueError(
                f"{name} must be floating point of shape {tuple(x.shape[:2])}, got {times.dtype} "
                f"{tuple(times.shape)}; give one time for each token, best in float64."
            )
        return times.double()

    def extra_repr(self) -> str:
        """Return how times enter."""
        return f"time={self.fusion!r}"


class JoinedTimeAttention(TimeAttention):
    """Attention on tokens with features of their time joined to them.

    Queries, keys and values are projections of both parts.

    Args:
        dim: Width of the tokens.
        num_heads: Number of heads.
        inner: Attention of the joined tokens; its output projection is replaced if they are wider.
        fusion: How times join.
        features: Features of time.
    """

    def __init__(
        self, dim: int, num_heads: int, inner: Attention, fusion: Fusion, features: TimeFeatures
    ) -> None:
        super().__init__(dim, num_heads, inner, fusion)
        self.time_features = features
        wide, last = inner.dim, cast(nn.Linear, inner.out_proj)
        factory: dict[str, Any] = {"device": last.weight.device, "dtype": last.weight.dtype}
        if fusion == "add":
            self.time_proj = nn.Linear(features.num_features, dim, bias=False, **factory)
        else:
            inner.out_proj = nn.Linear(wide, dim, last.bias is not None, **factory)
        if fusion == "concat-mlp":
            layers = (nn.Linear(wide, wide, **factory) for _ in range(2))
            self.mlp = nn.Sequential(next(layers), nn.ReLU(), next(layers))
        self.capabilities = _capabilities(inner, features)

    @property
    def features(self) -> TimeFeatures:
        """The features of time."""
        return self.time_features

    def _join(self, x: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        """Return tokens that know their times, in the width of the inner attention."""
        features = self.time_features(times, mask).to(x.dtype)
        if self.fusion == "add":
            return x + self.time_proj(features)
        missing = self.inner.dim - x.shape[-1] - features.shape[-1]
        x = torch.cat([x, pad(features, (0, missing))], dim=-1)
        if self.fusion == "concat":
            return x
        if mask is not None:
            # NaN in a padded slot would reach the gradients of the MLP
            x = torch.where(mask[..., None], x, 0.0)
        return x + self.mlp(x)

    def _self(
        self, x: Tensor, times: Tensor, key_mask: Tensor | None, also: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Aux]:
        return self.inner(self._join(x, times, key_mask), key_mask=key_mask, **also)

    def _cross(
        self,
        queries: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        key_mask: Tensor | None,
        also: dict[str, Any],
    ) -> Tensor | tuple[Tensor, Aux]:
        wide = self._join(*queries, None), self._join(*keys, key_mask)
        return self.inner(*wide, key_mask=key_mask, **also)

    def _step(
        self, x: Tensor, state: State, times: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        return self.inner.step(self._join(x, times, key_mask), state, key_mask=key_mask)


class FusedTimeAttention(TimeAttention):
    """Attention whose queries and keys, features or logits are changed by differences of times.

    Args:
        dim: Width of the tokens.
        num_heads: Number of heads.
        inner: The attention.
        fusion: How times enter.
        turn: From times to what they do.
    """

    def __init__(
        self, dim: int, num_heads: int, inner: Attention, fusion: Fusion, turn: TimeFusion
    ) -> None:
        super().__init__(dim, num_heads, inner, fusion)
        self.turn = turn
        self.capabilities = _capabilities(inner, turn.features, cross=False)

    @property
    def features(self) -> TimeFeatures:
        """The features of time."""
        return self.turn.features

    def _self(
        self, x: Tensor, times: Tensor, key_mask: Tensor | None, also: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Aux]:
        return self.inner(x, key_mask=key_mask, rotary=self.turn(times, key_mask), **also)

    def _step(
        self, x: Tensor, state: State, times: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        inner = cast(Any, self.inner)  # all that allow these fusions take rotary in step
        return inner.step(x, state, key_mask=key_mask, rotary=self.turn(times, key_mask))

    def advance(self, state: State, gap: Float[Tensor, " b"]) -> State:
        """Return the state for times that count from a later origin; see the base class."""
        core = getattr(self.inner, "core", None)
        if isinstance(core, TurnedFeatureCore):
            sums, total = state.tensors
            return state._replace(tensors=(self.turn.advance(sums, gap), total))
        if isinstance(self.inner, PrimalAttention):
            return state._replace(tensors=tuple(self.turn.advance(t, gap) for t in state.tensors))
        return super().advance(state, gap)


def add_time(
    entry: Entry, dim: int, num_heads: int, time: Fusion | TimeOptions, options: dict[str, Any]
) -> TimeAttention:
    """Build an attention that takes times; ``create_attention`` calls this.

    Args:
        entry: Row of the registry.
        dim: Width of the tokens.
        num_heads: Number of heads.
        time: How times enter.
        options: Options of the attention's constructor.
    """
    time = time if isinstance(time, TimeOptions) else TimeOptions(time)
    if time.fusion not in entry.capabilities.time:
        able = ", ".join(list_attentions(time=time.fusion))
        reason = _REASONS.get(time.fusion, "it takes no times.")
        raise ValueError(
            f"{entry.name} cannot use time={time.fusion!r}: {reason} It allows "
            f"{', '.join(sorted(entry.capabilities.time))}. Attentions with time={time.fusion!r}: "
            f"{able}."
        )
    factory = {name: options.get(name) for name in ("device", "dtype")}
    if time.fusion in JOINED_TIME:
        features = create_time(time.features, time.num_features or _WIDTH, **factory)
        wide = dim if time.fusion == "add" else dim + features.num_features
        inner = entry.factory(wide + -wide % max(num_heads, 1), num_heads, **options)
        return JoinedTimeAttention(dim, num_heads, inner, time.fusion, features)
    inner = entry.factory(dim, num_heads, **options)
    turn = _FUSIONS[time.fusion](inner, time, factory)
    return FusedTimeAttention(dim, num_heads, inner, time.fusion, turn)


def _rotary(inner: Attention, time: TimeOptions, factory: dict[str, Any]) -> TimeFusion:
    width = inner.head_dim // 2 * 2
    if width < 2 or time.num_features not in (None, width):
        raise ValueError(
            f"time='rotary' turns pairs of features of a head of width {inner.head_dim}, so "
            f"num_features must be {width}, got {time.num_features}; leave it out, and use heads "
            "of width two or more."
        )
    features = _stationary(time, width, factory)
    if not isinstance(features, BochnerTime):
        raise ValueError(
            f"time='rotary' needs one free frequency for each pair of features, got "
            f"{time.features!r}; use 'bochner', 'bochner-normal' or 'bochner-inverse-cdf'."
        )
    if isinstance(inner, MultiHeadAttention) and isinstance(inner.core, FeatureCore):
        inner.core = TurnedFeatureCore(inner.core, 1)
    return RotaryFusion(features)


def _product(inner: Attention, time: TimeOptions, factory: dict[str, Any]) -> TimeFusion:
    p = inner.head_dim
    core = inner.core if isinstance(inner, MultiHeadAttention) else None
    if isinstance(core, FeatureCore):
        empty = torch.zeros(0, inner.num_heads, 0, p)
        p = core.init_state(empty, empty).tensors[0].shape[2]
    width = time.num_features
    if width is None:
        width = min(_PRODUCT_WIDTH, max(_MOST_PRODUCTS // p // 2 * 2, 2))
    features = _stationary(time, width, factory)
    if p * features.num_features > _MOST_PRODUCTS:
        raise ValueError(
            f"time='product' makes {p} · {features.num_features} = {p * features.num_features} "
            f"features of each head, more than {_MOST_PRODUCTS}; use fewer features of time, more "
            "heads, or time='rotary', which adds none."
        )
    if isinstance(inner, PrimalAttention):
        inner.feature_dim = p * features.num_features
    elif isinstance(inner, MultiHeadAttention) and isinstance(core, FeatureCore):
        inner.core = TurnedFeatureCore(core, features.num_features)
    return ProductFusion(features)


def _bias(inner: Attention, time: TimeOptions, factory: dict[str, Any]) -> TimeFusion:
    features = _stationary(time, time.num_features or _WIDTH, factory)
    bias = StationaryBias(features, inner.num_heads, **factory)
    inner = cast(MultiHeadAttention, inner)
    inner.core = BiasedCore(inner.core, bias.width)
    return bias


def _stationary(time: TimeOptions, width: int, factory: dict[str, Any]) -> TimeFeatures:
    features = create_time(time.features, width, **factory)
    if not features.is_stationary:
        raise ValueError(
            f"time={time.fusion!r} needs features with a stationary kernel, got "
            f"{time.features!r}; use 'bochner' or 'mercer', or time='concat'."
        )
    return features


def _capabilities(inner: Attention, features: TimeFeatures, **also: bool) -> Capabilities:
    """Return the capabilities of an attention with times."""
    own = inner.capabilities
    return dataclasses.replace(
        own,
        rotary=False,
        deterministic=own.deterministic and features.is_deterministic,
        time=frozenset(),
        **also,
    )


_FUSIONS = {"rotary": _rotary, "product": _product, "stationary-bias": _bias}
_REASONS = {
    "stationary-bias": "it has no logits to which a function of the gap could be added.",
    "rotary": "not all it compares would turn with time, so outputs would depend on the date.",
    "product": "it does not sum plain features that could be multiplied with features of time.",
}
