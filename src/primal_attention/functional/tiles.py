"""Tiles of tokens, features first: the layout in which a primal layer runs.

Tensors are ``[g h d t]`` here: ``g`` chunks of ``t`` tokens. Products of chunks are one batch that
the threads share, a factor per token multiplies whole rows, and a sum over tokens runs along
memory. A tile of chunks passes through the layer before the next one, while it is in cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = [
    "Buffers",
    "LinearMap",
    "Tile",
    "TileTotals",
    "add_up",
    "cut",
    "features_first",
    "inverse_norms",
    "norm_gradient",
    "tokens_first",
]

_NUMBERS = 2**18
"""Numbers in the heads of one chunk."""

_CHUNK = 1024
"""Smallest number of tokens in a chunk, also of wide layers."""

_CHUNKS = 4
"""Smallest number of chunks in a tile; more for more threads."""

_FINE = 512
"""Tokens of a chunk where a sequence is a multiple of this. Rows that lie a larger power of two
apart map to the same cache sets and evict each other."""


class Tile(NamedTuple):
    """Some sequences, or a part of one, cut into chunks of equal length."""

    rows: slice
    tokens: slice
    chunks: int
    """Chunks of one sequence."""
    shape: tuple[int, int]
    """Chunks in all, and tokens of each."""
    is_all: bool
    """Whether this is the only tile."""

    def of(self, x: Shaped[Tensor, "b n *rest"]) -> Shaped[Tensor, "g t *rest"]:
        """Return the tile's chunks of a tensor."""
        part = x if self.is_all else x[self.rows, self.tokens]
        return part if self.chunks == 1 else part.reshape(*self.shape, *x.shape[2:])

    def each(self, per_sequence: Shaped[Tensor, "#b h *rest"]) -> Shaped[Tensor, "gh *rest"]:
        """Repeat what is given per sequence and head for every chunk of the tile."""
        # the first axis is one where all sequences share the entry
        if not self.is_all and per_sequence.shape[0] > 1:
            per_sequence = per_sequence[self.rows]
        rest = per_sequence.shape[1:]
        if per_sequence.shape[0] == self.shape[0]:
            return per_sequence.flatten(0, 1)
        if per_sequence.shape[0] > 1:
            return per_sequence[:, None].expand(-1, self.chunks, *rest).flatten(0, 2)
        return per_sequence.expand(self.shape[0], *rest).flatten(0, 1)

    def sums(self, parts: Shaped[Tensor, "gh *rest"], h: int) -> Shaped[Tensor, "rows {h} *rest"]:
        """Return the sum over the chunks of each sequence, in float32 or better."""
        rest, wide = parts.shape[1:], accumulator(parts)
        if self.chunks == 1:
            return parts.view(-1, h, *rest).to(wide)
        return parts.view(-1, self.chunks, h, *rest).sum(1, dtype=wide)


def cut(b: int, n: int, width: int) -> list[Tile]:
    """Return the tiles of ``b`` sequences of ``n`` tokens whose heads are ``width`` wide."""
    chunk = max(_CHUNK, _NUMBERS // max(width, 1))
    size = max(_CHUNKS, torch.get_num_threads()) * chunk
    # short sequences of a batch stay whole, so that no sum over chunks is needed
    if b > 1 and n < 2 * chunk:
        chunk = max(n, 1)
        size = max(size, chunk)
    if n % _FINE == 0:
        chunk, size = _FINE, max(size // _FINE, 1) * _FINE
    rest = n % chunk
    # a batch that just exceeds a tile stays one tile, and tiles have equal size
    rows = 1 if rest else max(1, -(-b // max(1, round(b * n / size))))
    # start, stop, tokens of a chunk, tokens of a tile, sequences of a tile
    areas = [(0, n - rest, chunk, size, rows)]
    if rest:
        areas.append((n - rest, n, rest, rest, max(1, size // rest)))
    tiles = []
    for start, stop, length, step, height in areas:
        for i in range(0, b, height):
            for j in range(start, stop, step):
                last, end = min(i + height, b), min(j + step, stop)
                chunks = (end - j) // length
                shape = (last - i) * chunks, length
                tiles.append(Tile(slice(i, last), slice(j, end), chunks, shape, is_all=False))
    return [tiles[0]._replace(is_all=True)] if len(tiles) == 1 else tiles


def add_up(
    tiles: Sequence[Tile], sums: Sequence[Shaped[Tensor, "_ h *rest"]], b: int
) -> Shaped[Tensor, "{b} h *rest"]:
    """Return the sum over the tiles of each sequence."""
    if tiles[0].is_all:
        return sums[0]
    total = sums[0].new_zeros(b, *sums[0].shape[1:])
    for tile, part in zip(tiles, sums, strict=True):
        total[tile.rows] += part
    return total


@dataclass
class Buffers:
    """Uninitialised memory by name: new for each tile, or the same for all."""

    like: Tensor
    """Gives the device, and the type where none is asked for."""
    keeps: bool
    """Whether every tile gets memory of its own; otherwise the next tile overwrites it."""
    _last: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory of a shape."""
        last = self._last.get(name)
        if last is None or self.keeps or last.shape != shape:
            last = self._last[name] = self.like.new_empty(shape, dtype=dtype)
        return last


@dataclass
class TileTotals:
    """Sums by name."""

    dtype: torch.dtype
    """Type of the sums: float32 or better."""
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, parts: Tensor, dims: tuple[int, ...] = (0,)) -> None:
        """Add the sum over some axes."""
        # a sum over one part would only copy it
        is_single = dims == (0,) and parts.shape[0] == 1 and parts.dtype == self.dtype
        part = parts[0] if is_single else parts.sum(dims, dtype=self.dtype)
        self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def get(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return the sum so far; ``None`` if there is none."""
        return self._sums[name].to(dtype) if name in self._sums else None


class LinearMap(NamedTuple):
    """A linear map ``z ↦ weight z + bias``, or the gradient of one."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None


def features_first(
    x: Float[Tensor, "g t in"], linear: LinearMap | None, out: Float[Tensor, "g out t"]
) -> None:
    """Write ``weight x + bias`` of every token, or ``x`` itself, features first."""
    if linear is None:
        out.copy_(x.mT)
        return
    # an expanded weight is not copied: a batched product reads it once per chunk
    weight = linear.weight.expand(x.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(weight, x.mT, out=out)
    else:
        torch.baddbmm(linear.bias[:, None], weight, x.mT, out=out)


def tokens_first(
    z: Float[Tensor, "g in t"], linear: LinearMap | None, out: Float[Tensor, "g t out"]
) -> None:
    """Write ``weight z + bias`` of every token, or ``z`` itself, tokens first."""
    if linear is None:
        out.copy_(z.mT)
        return
    weight = linear.weight.T.expand(z.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(z.mT, weight, out=out)
    else:
        torch.baddbmm(linear.bias, z.mT, weight, out=out)


def inverse_norms(
    q: Float[Tensor, "gh d t"],
    key_mask: Bool[Tensor, "g t"] | None,
    eps: float,
    out: Float[Tensor, "gh 1 t"],
) -> None:
    """Write ``1 / max(‖q‖, eps)``, and zero for padding."""
    # clamp before the root: one over zero is infinite, and times zero it gives NaN
    torch.sum(q.to(out.dtype).square(), 1, keepdim=True, out=out)
    out.clamp_min_(eps**2).rsqrt_()
    if key_mask is not None:
        # zero here removes all that a padded token would add, and every gradient of it
        by_chunk = out.view(key_mask.shape[0], -1, key_mask.shape[1])
        by_chunk.masked_fill_(~key_mask[:, None, :], 0.0)


def norm_gradient(norm: Float[Tensor, "gh 1 t"], eps: float) -> Float[Tensor, "gh 1 t"]:
    """Return ``-1/‖q‖``, of ``d(1/‖q‖) = -q/‖q‖³``, and zero where the norm was clamped."""
    # with an allowance for rounding
    return torch.threshold_(norm.neg(), -(1 - 1e-6) / eps, 0.0)
