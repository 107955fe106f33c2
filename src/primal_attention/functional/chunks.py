"""Tokens in chunks, features first, and what happens to them between two linear maps.

Tensors are ``[g h d t]`` here: ``g`` chunks of ``t`` tokens. Products of such chunks are one batch
that the threads share, a factor per token multiplies whole rows, and a sum over tokens runs along
memory. A tile of chunks passes through a layer before the next one, while it is in cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = [
    "Map",
    "Room",
    "Tile",
    "enter",
    "gather",
    "invert_norms",
    "leave",
    "needs_grad",
    "radial_factor",
    "score",
    "score_backward",
    "tiles_of",
]

_NUMBERS = 2**18
"""Numbers that the heads of a chunk hold."""

_CHUNK = 1024
"""Tokens of a chunk at least, also of wide layers."""

_CHUNKS = 4
"""Chunks of a tile at least; more for more threads."""

_FINE = 512
"""Tokens of a chunk of a sequence that can be cut into such: rows that lie a larger power of two
apart share cache sets, and push each other out."""


class Tile(NamedTuple):
    """Sequences, or a part of one, and into how many chunks each of them is cut."""

    rows: slice
    tokens: slice
    chunks: int
    shape: tuple[int, int]
    """How many chunks it has in all, and how many tokens each of them has."""
    is_all: bool
    """Whether there is no other one."""

    def of(self, x: Shaped[Tensor, "b n *rest"]) -> Shaped[Tensor, "g t *rest"]:
        """Return the tile's chunks of a tensor."""
        part = x if self.is_all else x[self.rows, self.tokens]
        return part if self.chunks == 1 else part.reshape(*self.shape, *x.shape[2:])

    def each(self, own: Shaped[Tensor, "#b h *rest"]) -> Shaped[Tensor, "gh *rest"]:
        """Return for each chunk what its sequence has, heads and all, as one batch."""
        if not self.is_all and own.shape[0] > 1:
            own = own[self.rows]
        if own.shape[0] > 1:
            return own[:, None].expand(-1, self.chunks, *own.shape[1:]).flatten(0, 2)
        return own.expand(self.shape[0], *own.shape[1:]).flatten(0, 1)

    def sums(self, parts: Shaped[Tensor, "gh *rest"], h: int) -> Shaped[Tensor, "rows {h} *rest"]:
        """Sum what the chunks of a sequence have, in float32 or better."""
        rest, wide = parts.shape[1:], accumulator(parts)
        if self.chunks == 1:
            return parts.view(-1, h, *rest).to(wide)
        return parts.view(-1, self.chunks, h, *rest).sum(1, dtype=wide)


def gather(
    tiles: Sequence[Tile], sums: Sequence[Shaped[Tensor, "_ h *rest"]], b: int
) -> Shaped[Tensor, "{b} h *rest"]:
    """Return for every sequence the sum of what the tiles have of it."""
    if tiles[0].is_all:
        return sums[0]
    total = sums[0].new_zeros(b, *sums[0].shape[1:])
    for tile, part in zip(tiles, sums, strict=True):
        total[tile.rows] += part
    return total


class Room:
    """Memory for the tiles: of its own for each, or the same for one after another."""

    def __init__(self, like: Tensor, keeps: bool) -> None:
        self._like, self._keeps = like, keeps
        self._last: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory of a shape, with anything in it."""
        last = self._last.get(name)
        if last is None or self._keeps or last.shape != shape:
            last = self._last[name] = self._like.new_empty(shape, dtype=dtype)
        return last


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass may follow, for which a function must keep something."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def tiles_of(b: int, n: int, width: int) -> list[Tile]:
    """Cut ``b`` sequences of ``n`` tokens whose heads are ``width`` wide."""
    chunk = max(_CHUNK, _NUMBERS // max(width, 1))
    size = max(_CHUNKS, torch.get_num_threads()) * chunk
    if b > 1 and n < 2 * chunk:
        chunk = max(n, 1)
        size = max(size, chunk)
    if n % _FINE == 0:
        chunk, size = _FINE, max(size // _FINE, 1) * _FINE
    rest = n % chunk
    # sequences that just exceed a tile are not worth a second one, and tiles are alike
    rows = 1 if rest else max(1, -(-b // max(1, round(b * n / size))))
    tiles = _cut(b, 0, n - rest, chunk, size, rows)
    if rest:
        tiles += _cut(b, n - rest, n, rest, rest, max(1, size // rest))
    nothing = [Tile(slice(0, 0), slice(0, 0), 1, (0, 0), is_all=False)]
    return [tiles[0]._replace(is_all=True)] if len(tiles) == 1 else tiles or nothing


def _cut(b: int, start: int, stop: int, chunk: int, size: int, rows: int) -> list[Tile]:
    """Cut some tokens of all sequences: ``rows`` sequences to a tile, ``size`` tokens of each."""
    tiles = []
    for i in range(0, b, rows):
        for j in range(start, stop, size):
            last, end = min(i + rows, b), min(j + size, stop)
            chunks = (end - j) // chunk
            shape = (last - i) * chunks, chunk
            tiles.append(Tile(slice(i, last), slice(j, end), chunks, shape, is_all=False))
    return tiles


class Map(NamedTuple):
    """A linear map, or the gradient of one."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None


def enter(x: Float[Tensor, "g t in"], linear: Map, out: Float[Tensor, "g out t"]) -> None:
    """Write ``weight x + bias`` of every token, features first."""
    weight = linear.weight.expand(x.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(weight, x.mT, out=out)
    else:
        torch.baddbmm(linear.bias[:, None], weight, x.mT, out=out)


def leave(z: Float[Tensor, "g in t"], linear: Map, out: Float[Tensor, "g t out"]) -> None:
    """Write ``weight z + bias`` of every token, tokens first."""
    weight = linear.weight.T.expand(z.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(z.mT, weight, out=out)
    else:
        torch.baddbmm(linear.bias, z.mT, weight, out=out)


def invert_norms(
    q: Float[Tensor, "gh d t"],
    keep: Bool[Tensor, "g t"] | None,
    eps: float,
    inverse: Float[Tensor, "gh 1 t"],
) -> None:
    """Write the inverse norms."""
    torch.sum(q.to(inverse.dtype).square(), 1, keepdim=True, out=inverse)
    inverse.clamp_min_(eps**2).rsqrt_()
    if keep is not None and keep.numel():
        # zero here makes whatever a padded token would add vanish, and every gradient of it
        by_chunk = inverse.view(keep.shape[0], -1, keep.shape[1])
        by_chunk.masked_fill_(~keep[:, None, :], 0.0)


def score(
    q: Float[Tensor, "gh d t"],
    norm: Float[Tensor, "gh 1 t"],
    w: Float[Tensor, "gh d s"],
    scores: Float[Tensor, "gh s t"],
) -> Float[Tensor, "gh s"]:
    """Write ``Wᵀ q / ‖q‖``; return the energy."""
    torch.bmm(w.mT, q, out=scores)
    scores.mul_(norm)
    return torch.linalg.vector_norm(scores, dim=-1, dtype=accumulator(q)).square_()


def score_backward(
    grad: Float[Tensor, "gh s t"],
    scores: Float[Tensor, "gh s t"],
    norm: Float[Tensor, "gh 1 t"],
    eps: float,
    work: Float[Tensor, "gh s t"],
) -> Float[Tensor, "gh 1 t"]:
    """Divide the gradient of the scores by the norms; return the factor of ``q`` in its own."""
    grad.mul_(norm)
    radial = torch.mul(grad, scores, out=work).sum(1, keepdim=True)
    return radial.mul_(radial_factor(norm, eps))


def radial_factor(norm: Float[Tensor, "gh 1 t"], eps: float) -> Float[Tensor, "gh 1 t"]:
    """Return ``-1/‖q‖``, of ``d(1/‖q‖) = -q/‖q‖³``, and zero where the norm was clamped."""
    # rounding allowed for
    return torch.threshold_(norm.neg(), -(1 - 1e-6) / eps, 0.0)
