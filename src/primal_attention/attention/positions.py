"""Learned weights of relative positions for any length, with a fixed number of parameters.

The weight of a lag ``t = key position − query position`` is ``c_t = exp(b_t − max b)``, with one
table ``b`` per head. There are three kinds of tables:

- ``window``: one entry per lag for ``|t| < w``, constant beyond on each side; constant decoding
  state;
- ``log``: linear between knots. Knots are one lag apart up to lag 16; then their distance grows in
  proportion to the lag. Constant from lag 65,536 on;
- ``grid``: tokens lie on a grid, row after row; one entry per row and column lag below ``w``.
"""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device

from primal_attention.functional.precision import accumulator
from primal_attention.functional.toeplitz import (
    WindowState,
    grid_lags,
    grid_positions,
    toeplitz_sums,
    windowed_step,
    windowed_sums,
)

__all__ = ["Position", "RelativePosition"]

Position = Literal["window", "log", "grid"]

_WINDOW = 64
"""Default number of lags with their own weight on each side."""
_NEAR = 16
"""Lag up to which the log table has one knot per lag."""
_FAR = 2**16
"""Lag from which the log table is constant."""


class RelativePosition(nn.Module):
    """Weights ``c_t`` of each lag per head, and sums with these weights.

    Args:
        num_heads: Number of heads; each has its own table.
        kind: ``"window"``, ``"log"`` or ``"grid"``.
        window: Number of lags with their own weight on each side, for ``"window"`` and ``"grid"``;
            by default 64.
        width: Number of columns of the grid, for ``"grid"``.
        device: Device of the table.
        dtype: Dtype of the table.

    Example:
        >>> position = RelativePosition(2, window=4)
        >>> position.weight(torch.arange(-9, 10)).shape
        torch.Size([2, 19])
    """

    undecayed = ("table",)

    def __init__(
        self,
        num_heads: int,
        kind: Position = "window",
        *,
        window: int | None = None,
        width: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(Position):
            raise ValueError(f"position must be one of {get_args(Position)}, got {kind!r}.")
        if kind == "log" and window is not None:
            raise ValueError(
                f"window is {window}, but position='log' has no window; leave window out."
            )
        window = _WINDOW if window is None else window
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        if (kind == "grid") != (width is not None) or (width is not None and width < 1):
            raise ValueError(
                f"position is {kind!r} and width is {width}; position='grid' needs a width of at "
                "least 1, other positions need width=None."
            )
        self.kind: Position = kind
        self.width = 1 if width is None else width
        reach = round(_knot(_FAR)) if kind == "log" else window
        self.reach = reach
        shape = (num_heads, *[2 * reach + 1] * (2 if kind == "grid" else 1))
        # zero: initially all lags have the same weight
        self.table = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        """Return the options of the module."""
        return f"{self.kind!r}, reach={self.reach}"

    def levels(self) -> Tensor:
        """Return the table minus its maximum per head, in float32 or better."""
        b = self.table.to(accumulator(self.table))
        return b - b.detach().flatten(1).amax(1).reshape(-1, *[1] * (b.dim() - 1))

    def places(self, index: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Return the positions of the tokens on the line on which lags are measured."""
        return grid_positions(index, self.width) if self.kind == "grid" else index

    def weight(self, lag: Int[Tensor, "*n"]) -> Float[Tensor, "h *n"]:
        """Return the weights ``c`` of the given lags."""
        b, reach = self.levels(), self.reach
        if self.kind == "grid":
            rows, columns = (t.clamp(-reach, reach) + reach for t in grid_lags(lag, self.width))
            return b[:, rows, columns].exp()
        if self.kind == "window":
            return b[:, lag.clamp(-reach, reach) + reach].exp()
        size = lag.abs().clamp(max=_FAR).to(b.dtype)
        # far lags matter less, so their knots may lie further apart
        stretched = _NEAR * (1 + (size.clamp_min(_NEAR) / _NEAR).log())
        at = torch.where(size <= _NEAR, size, stretched) * lag.sign() + reach
        at = at.clamp(0, 2 * reach)
        low = at.floor().clamp_max(2 * reach - 1)
        # linear between knots: the weights are continuous in the lag
        share, index = at - low, low.long()
        return ((1 - share) * b[:, index] + share * b[:, index + 1]).exp()

    def sums(
        self,
        q: Float[Tensor, "b h n p"],
        k: Float[Tensor, "b h m p"],
        v: Float[Tensor, "b h m v"],
        *,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return ``Σ_j c_{j-i} ⟨q_i, k_j⟩ v_j`` over all keys, or over ``j ≤ i``."""
        if self.kind == "window":
            return windowed_sums(q, k, v, self.levels().exp(), is_causal=is_causal)
        if self.kind == "log":
            c = self.weight(_lags(q.shape[2], k.shape[2], q.device))
            return toeplitz_sums(q, k, v, c, is_causal=is_causal)
        at_q, at_k = (self.places(torch.arange(t.shape[2], device=t.device)) for t in (q, k))
        n, m = (
            s + torch.sym_max(s - 1, 0) // self.width * (self.width - 1)
            for s in (q.shape[2], k.shape[2])
        )
        q, k, v = _spread(q, at_q, n), _spread(k, at_k, m), _spread(v, at_k, m)
        c = self.weight(_lags(n, m, q.device))
        return toeplitz_sums(q, k, v, c, is_causal=is_causal).index_select(2, at_q)

    def totals(
        self, at: Int[Tensor, "b n"], count: int | Int[Tensor, "b 1"] | None
    ) -> Float[Tensor, "b h n 1"]:
        """Return ``Σ_j c_{j-i}`` for queries at positions ``at``; only for ``window``.

        The result is positive, also if all weights underflow.

        Args:
            at: Positions ``i`` of the queries.
            count: Number of keys, at positions from zero on; ``None`` for the causal ``j ≤ i``.
        """
        c, w = self.levels().exp(), self.reach

        def run(weights: Tensor, last: Tensor) -> Tensor:
            """Return the sum of ``last + 1`` weights; beyond the table the last one repeats."""
            prefix = torch.nn.functional.pad(weights.cumsum(1), (1, 0))  # [h w+2]
            head = prefix[:, (last + 1).clamp(0, weights.shape[1])]
            return head + weights[:, -1:, None] * (last + 1 - weights.shape[1]).clamp_min(0)

        past, future = c[:, : w + 1].flip(1), c[:, w + 1 :]  # lags 0 … −w and 1 … w
        total = run(past, at)
        if count is not None:
            total = total - run(past, at - count) + run(future, count - 2 - at)
        # if all weights are zero, so are the sums: any positive denominator will do
        return total.transpose(0, 1)[..., None].clamp_min(torch.finfo(total.dtype).tiny)

    def step(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h t p"],
        v: Float[Tensor, "b h t v"],
        state: WindowState,
    ) -> tuple[Float[Tensor, "b h t v"], WindowState]:
        """Continue causal sums by ``t`` tokens; for ``window`` only."""
        return windowed_step(q, k, v, self.levels().exp(), state)


def _knot(lag: float) -> float:
    return lag if lag <= _NEAR else _NEAR * (1 + math.log(lag / _NEAR))


def _lags(n: int, m: int, device: torch.device) -> Int[Tensor, " l"]:
    return torch.arange(torch.sym_max(n + m - 1, 0), device=device) - (n - 1)


def _spread(x: Tensor, places: Tensor, length: int) -> Tensor:
    empty = x.new_zeros(*x.shape[:2], length, x.shape[-1])
    return empty.index_copy(2, places, x)
