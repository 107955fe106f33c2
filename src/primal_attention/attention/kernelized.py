"""Kernel attention with relative positions (Luo et al. 2021, arXiv 2106.12566).

    y_i = Σ_j c_{j-i} φ(q̂_i)·φ(k̂_j) v_j / Σ_j c_{j-i} φ(q̂_i)·φ(k̂_j)

Queries and keys are normalised to length one, ``φ`` are positive random features of ``exp(s
q̂·k̂)``, and ``c`` is a learned weight per lag. Length one keeps the variance of the features
small, but then two content weights of a row differ by a factor of at most ``e²`` (``e^{2s}``). The
weights ``c`` make attention sharper.
"""

import functools
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.types import Device

from primal_attention.attention.base import SQUARES_FIT, Capabilities, State
from primal_attention.attention.features import divide_by_total, slots
from primal_attention.attention.multihead import (
    Core,
    MultiHeadAttention,
    close_gaps,
    count_seen,
    real_first,
)
from primal_attention.attention.positions import Position, RelativePosition
from primal_attention.attention.registry import register_attention
from primal_attention.functional.linear import append_ones
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.toeplitz import WindowState
from primal_attention.kernels import PositiveFeatures
from primal_attention.kernels.base import Factory
from primal_attention.kernels.exact import unit

__all__ = ["KernelizedAttention", "KernelizedCore"]

_MAX_TEMPERATURE = 3.0
"""Upper bound of a learned temperature; the variance of the features is exponential in it."""


class KernelizedCore(Core):
    """Normalised positive random features times a weight per lag."""

    def __init__(
        self,
        features: PositiveFeatures,
        position: RelativePosition,
        *,
        num_heads: int,
        temperature: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(temperature, bool):
            raise TypeError(
                f"temperature must be True (learn one per head) or False, got {temperature!r}."
            )
        self.features, self.position = features, position
        # on a line padding is removed; on a grid a masked token must not move the others
        self.ordered = position.kind != "grid"
        self.capabilities = Capabilities(relative_position=True, max_magnitude=SQUARES_FIT)
        self.temperature: nn.Parameter | None = None
        if temperature:
            # softplus of this is one
            start = torch.full((num_heads,), math.log(math.expm1(1)), device=device, dtype=dtype)
            self.temperature = nn.Parameter(start)

    def normalize(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return rows of length one, or ``√temperature``, in float32 or better."""
        x = unit(x)
        if self.temperature is None:
            return x
        heat = softplus(self.temperature.to(x.dtype)).clamp_max(_MAX_TEMPERATURE)
        return x * heat.sqrt()[:, None, None]

    def map_features(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n p"]:
        """Return the features of the normalised rows."""
        return self.features.query_features(self.normalize(x))

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in place; call it between training steps."""
        self.features.redraw_(generator)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted mean of the values; zero for a row without keys."""
        with full_precision(q):
            value = append_ones(v, key_mask)
            sums = self.position.sums(
                self.map_features(q), self.map_features(k), value, is_causal=is_causal
            )
            return divide_by_total(sums).to(v.dtype)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums and an empty window; for other positions an empty cache."""
        (b, h, _, _), p, u, wide = (
            k.shape,
            self.features.num_features,
            v.shape[-1] + 1,
            accumulator(k),
        )
        seen = torch.zeros(b, dtype=torch.long, device=k.device)
        if self.position.kind != "window":
            empty = (k.new_zeros(b, h, 0, w, dtype=wide) for w in (p, u))
            return State((*empty, torch.zeros(b, 0, dtype=torch.bool, device=k.device)), seen)
        w = self.position.reach
        shapes = ((b, h, p, u), (b, h, w, p), (b, h, w, u))
        return State(tuple(k.new_zeros(s, dtype=wide) for s in shapes), seen)

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens; constant cost for ``position="window"``."""
        seen = count_seen(state, k, key_mask)
        with full_precision(q):
            query, key, value = self.map_features(q), self.map_features(k), append_ones(v, key_mask)
            if self.position.kind != "window":
                sums, after = self._extend(query, key, value, state, key_mask)
            elif key_mask is None:
                sums, after = self.position.step(query, key, value, WindowState(*state.tensors))
            else:
                old, *window = state.tensors
                moved = close_gaps(window, query, [key, value], state.seen, key_mask)
                sums, after = self.position.step(
                    moved.queries, *moved.tokens, WindowState(old, *moved.window)
                )
                sums = moved.read(sums)
            return divide_by_total(sums).to(v.dtype), State(tuple(after), seen)

    def _extend(
        self, query: Tensor, key: Tensor, value: Tensor, state: State, key_mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the sums over a cache of all keys, and the extended cache."""
        b, _, t, _ = key.shape
        keep = torch.ones(b, t, dtype=torch.bool, device=key.device)
        keep = torch.cat([state.tensors[2], keep if key_mask is None else key_mask], dim=1)
        keys = torch.cat([state.tensors[0], key], dim=2)
        values = torch.cat([state.tensors[1], value], dim=2)
        after = keys, values, keep
        if state.tensors[2].shape[1] == 0:
            # a prompt: use the fast sums, with real tokens first
            order = (real_first(keep) if self.ordered else slots(key))[:, None, :, None]
            tokens = [x.gather(2, order.expand_as(x)) for x in (query, key, value)]
            sums = self.position.sums(tokens[0], tokens[1], tokens[2], is_causal=True)
            return sums.gather(2, order.argsort(2).expand_as(sums)), after
        at = keep.cumsum(1) - 1 if self.ordered else slots(keys)
        at = self.position.places(at).clamp_min(0)
        lag = at[:, None, :] - at[:, at.shape[1] - t :, None]
        weights = torch.where(lag <= 0, self.position.weight(lag), 0.0).transpose(0, 1)
        return (query @ keys.mT * weights) @ values, after


class KernelizedAttention(MultiHeadAttention):
    """Multi-head kernel attention with learned relative positions.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_features: Number of random features, even; 16 to 64 are enough.
        position: ``"window"`` (one weight per lag in a window, constant beyond), ``"log"`` (coarser
            with the lag, by FFT) or ``"grid"`` (rows and columns of an image, by FFT).
        window: Number of lags with their own weight on each side; by default 64; not for ``"log"``.
        width: Number of columns of the grid.
        temperature: Learn a temperature per head; by default content weights are ``exp(q̂·k̂)``.
        generator: Random generator of the features.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> attn = KernelizedAttention(16, 4, window=8)
        >>> attn(torch.randn(2, 50, 16), is_causal=True).shape
        torch.Size([2, 50, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_features: int = 32,
        position: Position = "window",
        window: int | None = None,
        width: int | None = None,
        temperature: bool = False,
        generator: torch.Generator | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        heads = max(num_heads, 1)  # the base class raises if num_heads is below 1
        features = PositiveFeatures(
            max(dim // heads, 1),
            num_features,
            antithetic=True,
            spread=2.0,  # for two rows of length one
            num_heads=heads,
            generator=generator,
            **factory,
        )
        core = KernelizedCore(
            features,
            RelativePosition(heads, position, window=window, width=width, **factory),
            num_heads=heads,
            temperature=temperature,
            **factory,
        )
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)


register_attention(
    "kernelized",
    KernelizedAttention,
    capabilities=Capabilities(relative_position=True, max_magnitude=SQUARES_FIT),
    cost="n",
    summary="normalised positive features, learned weights of near lags",
)
register_attention(
    "kernelized-log",
    functools.partial(KernelizedAttention, position="log"),
    capabilities=Capabilities(relative_position=True, max_magnitude=SQUARES_FIT),
    cost="n log n",
    summary="normalised positive features, learned weights of all lags by FFT",
)
