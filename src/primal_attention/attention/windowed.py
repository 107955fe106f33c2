"""A memory of constant size: exact softmax near, a linear mechanism far, one normaliser.

    y_i = (Σ_{j ∈ N_i} e^{q_i·k_j/√d} v_j + Σ_{j ∉ N_i} Σ_p e^{a_ip + b_jp} v_j) / Z_i

``N_i`` holds the first keys and those of a window around the query; ``Z_i`` is the sum of all
weights. While that is everything, the
layer is softmax. Far keys enter through positive features with logarithms ``a`` and ``b``: either

    learned   a = q Wᵀ/√d + w,   b = log softmax(k Uᵀ + u)         (Zhang et al. 2024, 2402.04347)
    favor     a = w·q̄ − ‖q̄‖²/2,  b alike                           (Choromanski et al. 2021)

In the learned ones a softmax shares every key out to ``p`` slots, and a query reads the mean of a
slot with its own score. If ``W`` holds the centres of clusters of keys, that score is the one of
the centre. Exact near weights beside linear far ones are in LoLCATs (Zhang et al. 2024, arXiv
2410.10254), the exact first tokens in StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

Far sums add the keys that leave the window, in both directions if there is no order; nothing is
subtracted. ``primal-dual`` has no place here: its weights have both signs, and positive ones of
softmax cannot share a normaliser with them.
"""

from typing import Literal, NamedTuple, Protocol, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities, State
from primal_attention.attention.multihead import Core, MultiHeadAttention, close_gaps, count_seen
from primal_attention.attention.registry import register_attention
from primal_attention.functional.exponential import (
    LOG_ZERO,
    RelativeSums,
    exponential_sums,
)
from primal_attention.functional.linear import append_ones
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.windowed import (
    PartialSums,
    join_sums,
    softmax_sums,
    window_sums,
)
from primal_attention.kernels import PositiveFeatures
from primal_attention.kernels.random import draw_directions

__all__ = ["Far", "FavorFar", "LearnedFar", "WindowedAttention", "WindowedCore"]

Far = Literal["learned", "favor", "none"]
"""What far keys enter through; ``"none"`` leaves them out."""


class FarFeatures(Protocol):
    """Logarithms of positive features of far keys, and of the queries that read them."""

    num_features: int

    def log_queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return ``a``."""

    def log_keys(self, k: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h m p"]:
        """Return ``b``."""


class LearnedFar(nn.Module):
    """Learned features: keys are shared out to slots, queries score the slots.

    Args:
        num_heads: Number of heads.
        dim: Head width.
        num_features: Number of slots ``p``.
        generator: Random generator of the first slots.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        num_features: int,
        *,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        dtype = torch.get_default_dtype() if dtype is None else dtype
        drawn = draw_directions(num_features, dim, num_sets=num_heads, generator=generator)
        shape = num_heads, num_features, dim
        self.centers = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.shares = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.center_levels = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        self.share_levels = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        self.place_centers(drawn, torch.full((num_heads,), dim**0.5))

    @torch.no_grad()
    def place_centers(
        self,
        centers: Float[Tensor, "h p d"],
        spread: Float[Tensor, " h"],
        metric: Float[Tensor, "h d d"] | None = None,
    ) -> None:
        """Make every slot a cluster of keys, with shares as of a mixture of Gaussians.

        Args:
            centers: The mean key of every cluster.
            spread: Variance of the keys of a cluster, in each direction of the metric.
            metric: Inner product in which distances are measured; by default the identity.
        """
        shares = (centers if metric is None else centers @ metric) / spread[:, None, None]
        levels = -0.5 * (shares * centers).sum(-1)
        for parameter, start in (
            (self.centers, centers),
            (self.shares, shares),
            (self.center_levels, torch.zeros_like(levels)),
            (self.share_levels, levels),
        ):
            parameter.copy_(start.to(parameter))

    def log_queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return the scores of the slots."""
        centers, levels = (t.to(q.dtype) for t in (self.centers, self.center_levels))
        return q @ (centers * q.shape[-1] ** -0.5).mT + levels[:, None]

    def log_keys(self, k: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h m p"]:
        """Return the logarithms of the shares of every key, which add up to one."""
        shares, levels = (t.to(k.dtype) for t in (self.shares, self.share_levels))
        return (k @ shares.mT + levels[:, None]).log_softmax(-1)

    def extra_repr(self) -> str:
        """Return the options for ``print``."""
        return f"num_features={self.num_features}"


class FavorFar(PositiveFeatures):
    """Positive random features of softmax, the same for all heads."""

    def log_queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return the logarithms with the factor of each query: it sets the share of far keys."""
        return self.log_features(q)

    def log_keys(self, k: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h m p"]:
        """Return the logarithms of the features."""
        return self.log_features(k)


class _Memory(NamedTuple):
    """The tensors of the state."""

    first_k: Float[Tensor, "b h s d"]
    first_v: Float[Tensor, "b h s v"]
    last_k: Float[Tensor, "b h w d"]
    last_v: Float[Tensor, "b h w v"]
    sums: Float[Tensor, "b h p u"]
    maximum: Float[Tensor, "b h p"]


class WindowedCore(Core):
    """Exact softmax near, features far; the decoding state has constant size.

    Args:
        num_heads: Number of heads.
        dim: Head width.
        window: Places, the own one included, whose weights are exact.
        sinks: First keys, whose weights are always exact.
        far: What far keys enter through.
        num_features: Number of features of far keys.
        generator: Random generator of the features.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    capabilities = Capabilities(cross=False, time=JOINED_TIME | {"rotary"})
    ordered = True
    reads_far: bool = True
    """Whether far keys count. ``False`` shows what the layer owes to its window alone."""

    def __init__(
        self,
        num_heads: int,
        dim: int,
        window: int = 64,
        sinks: int = 4,
        far: Far = "learned",
        num_features: int = 64,
        *,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("window", window, 1),
            ("sinks", sinks, 0),
            ("num_features", num_features, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}; raise it.")
        if far not in get_args(Far):
            raise ValueError(f"far must be one of {', '.join(get_args(Far))}, got {far!r}.")
        self.window, self.sinks, self.far = window, sinks, far
        factory = {"generator": generator, "device": device, "dtype": dtype}
        self.features: LearnedFar | FavorFar | None = None
        if far == "learned":
            self.features = LearnedFar(num_heads, dim, num_features, **factory)  # type: ignore[arg-type]
        elif far == "favor":
            self.features = FavorFar(dim, num_features, scale=dim**-0.5, **factory)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return the options for ``print``."""
        return f"window={self.window}, sinks={self.sinks}, far={self.far!r}"

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n v"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted mean of the values; zero for a row without keys."""
        b, _, n, _ = k.shape
        w, s, d = self.window, self.sinks, k.shape[-1]
        place = torch.arange(n, device=k.device).expand(b, -1)
        real = place >= 0 if key_mask is None else key_mask
        after = 0 if is_causal else w - 1
        with full_precision(q):
            q, k, v, kind = (*(t.to(accumulator(t)) for t in (q, k, v)), v.dtype)
            values, scaled = append_ones(v, real), q * d**-0.5
            near_k, near_v = (pad(t, (0, 0, w - 1, after)) for t in (k, values))
            first_k, first_v = (pad(t, (0, 0, 0, s)).narrow(2, 0, s) for t in (k, values))
            among_first = pad(real, (0, s)).narrow(1, 0, s)
            around = pad(real, (w - 1, after))
            parts = [
                window_sums(scaled, near_k, near_v, around, w - 1 + after),
                self._first_sums(scaled, first_k, first_v, among_first, place, is_causal),
            ]
            if self._counts_far:
                far = real & (place >= s)
                parts.append(PartialSums(*self._past_sums(q, *_delayed(k, v, far, w))[:2]))
                if not is_causal:
                    # what lies behind a query is the past of the reversed sequence
                    turned = _delayed(k.flip(2), v.flip(2), far.flip(1), w)
                    later = self._past_sums(q.flip(2), *turned)
                    parts.append(PartialSums(later.sums.flip(2), later.level.flip(2)))
            return join_sums(parts).to(kind)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums, no first keys and an empty window."""
        (b, h, _, d), u = k.shape, v.shape[-1]
        p = 0 if self.features is None else self.features.num_features
        wide = accumulator(k)
        memory = _Memory(
            k.new_zeros(b, h, self.sinks, d),
            v.new_zeros(b, h, self.sinks, u),
            k.new_zeros(b, h, self.window, d),
            v.new_zeros(b, h, self.window, u),
            k.new_zeros(b, h, p, u + 1, dtype=wide),
            k.new_full((b, h, p), LOG_ZERO, dtype=wide),
        )
        return State(tuple(memory), torch.zeros(b, dtype=torch.long, device=k.device))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens, at constant cost per token."""
        memory, seen = _Memory(*state.tensors), count_seen(state, k, key_mask)
        old, moved = (memory.last_k, memory.last_v), None
        if key_mask is not None:
            moved = close_gaps(old, q, [k, v], state.seen, key_mask)
            old, q, (k, v) = moved.window, moved.queries, moved.tokens
        t, w = k.shape[2], self.window
        keys, values = (torch.cat(both, dim=2) for both in zip(old, (k, v), strict=True))
        slots = torch.arange(w + t, device=k.device) - (w + t)
        place = seen[:, None] + slots  # of every key in its sequence; negative where empty
        first = self._fill_first(memory, keys, values, state.seen, seen)
        kept = (*first, keys[:, :, t:], values[:, :, t:])
        with full_precision(q):
            q, k, v, kind = (*(x.to(accumulator(x)) for x in (q, keys, values)), v.dtype)
            ones, scaled = append_ones(v, place >= 0), q * q.shape[-1] ** -0.5
            among_first = torch.arange(self.sinks, device=k.device) < seen[:, None]
            wide = first[0].to(q.dtype), append_ones(first[1], among_first)
            parts = [
                window_sums(scaled, k[:, :, 1:], ones[:, :, 1:], place[:, 1:] >= 0, w - 1),
                self._first_sums(scaled, *wide, among_first, place[:, w:], True),
            ]
            sums, maximum = memory.sums, memory.maximum
            if self._counts_far:
                # the key that leaves the window when a token comes is w places before it
                leaving = k[:, :, :t], v[:, :, :t], place[:, :t] >= self.sinks
                *far, sums, maximum = self._past_sums(q, *leaving, (sums, maximum))
                parts.append(PartialSums(*far))
            y = join_sums(parts).to(kind)
        return y if moved is None else moved.read(y), State((*kept, sums, maximum), seen)

    @property
    def _counts_far(self) -> bool:
        return self.features is not None and self.reads_far

    def _past_sums(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n v"],
        keep: Bool[Tensor, "b n"],
        state: tuple[Tensor, Tensor] | None = None,
    ) -> RelativeSums:
        """Return the sums over the keys that have left the window, one more with every query."""
        if self.features is None:
            raise ValueError("far='none' has no sums of far keys; choose another value of far.")
        logs = self.features.log_queries(q), self.features.log_keys(k)
        return exponential_sums(*logs, v, key_mask=keep, is_causal=True, state=state)

    def _first_sums(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        values: Float[Tensor, "b h s u"],
        real: Bool[Tensor, "b s"],
        place: Int[Tensor, "b n"],
        is_causal: bool,
    ) -> PartialSums:
        """Return the sums over the first keys, for queries whose window does not hold them."""
        lag = place[:, :, None] - torch.arange(self.sinks, device=q.device)
        outside = lag >= self.window
        if not is_causal:
            outside = outside | (lag <= -self.window)
        return softmax_sums(q, k, values, (outside & real[:, None])[:, None])

    def _fill_first(
        self,
        memory: _Memory,
        keys: Float[Tensor, "b h m d"],
        values: Float[Tensor, "b h m v"],
        before: Int[Tensor, " b"],
        after: Int[Tensor, " b"],
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s v"]]:
        """Return the first keys and values; ``keys`` are the last ones, the newest at the end."""
        m, place = keys.shape[2], torch.arange(self.sinks, device=keys.device)
        at = (place - after[:, None] + m).clamp(0, m - 1)[:, None, :, None]
        is_new = ((place >= before[:, None]) & (place < after[:, None]))[:, None, :, None]
        pairs = ((memory.first_k, keys), (memory.first_v, values))
        k, v = (
            torch.where(
                is_new, new.gather(2, at.expand(-1, *new.shape[1:2], -1, new.shape[3])), old
            )
            for old, new in pairs
        )
        return k, v


def _delayed(
    k: Float[Tensor, "b h n d"], v: Float[Tensor, "b h n v"], keep: Bool[Tensor, "b n"], by: int
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n v"], Bool[Tensor, "b n"]]:
    """Return keys, values and mask so many places later; nothing comes first."""
    n = k.shape[2]
    k, v = (pad(t, (0, 0, by, 0)).narrow(2, 0, n) for t in (k, v))
    return k, v, pad(keep, (by, 0)).narrow(1, 0, n)


class WindowedAttention(MultiHeadAttention):
    """Multi-head softmax over a window and the first keys, with linear attention for all others.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        window: Places, the own one included, whose weights are exact; without order on both sides.
        sinks: First keys, whose weights are always exact.
        far: What far keys enter through: ``"learned"`` features, the random ones of ``"favor"``,
            or ``"none"``.
        num_features: Number of features of far keys.
        generator: Random generator of the features.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> layer = WindowedAttention(16, 4, window=8, num_features=8)
        >>> layer(torch.randn(2, 100, 16), is_causal=True).shape
        torch.Size([2, 100, 16])
    """

    core: WindowedCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        window: int = 64,
        sinks: int = 4,
        far: Far = "learned",
        num_features: int = 64,
        generator: torch.Generator | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        heads = max(num_heads, 1)  # the base class raises if num_heads is below 1
        core = WindowedCore(
            heads,
            max(dim // heads, 1),
            window,
            sinks,
            far,
            num_features,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "window-linear",
    WindowedAttention,
    capabilities=WindowedCore.capabilities,
    cost="n",
    summary="exact softmax in a window, linear attention beyond; constant state",
)
