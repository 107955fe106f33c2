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
    "Tile",
    "enter",
    "invert_norms",
    "leave",
    "room_for",
    "score",
    "score_backward",
    "spans_of",
    "tiles_of",
]

_NUMBERS = 2**18
"""Numbers that the heads of a chunk hold."""

_CHUNK = 1024
"""Tokens of a chunk at least, also of wide layers."""

_CHUNKS = 4
"""Chunks of a tile at least; more for more threads."""


class Tile(NamedTuple):
    """Sequences, or a part of one, and into how many chunks each of them is cut."""

    rows: slice
    tokens: slice
    chunks: int

    @property
    def size(self) -> int:
        """How many tokens it has."""
        return (self.rows.stop - self.rows.start) * (self.tokens.stop - self.tokens.start)

    def of(self, x: Shaped[Tensor, "b n *rest"]) -> Shaped[Tensor, "g t *rest"]:
        """Return the tile's chunks of a tensor."""
        part = x[self.rows, self.tokens]
        if self.chunks == 1:
            return part
        return part.reshape(part.shape[0] * self.chunks, -1, *x.shape[2:])

    def each(self, own: Float[Tensor, "#b ..."]) -> Float[Tensor, "#g ..."]:
        """Return for each chunk what its sequence has; one thing for all stays as it is."""
        if own.shape[0] > 1:
            own = own[self.rows]
        if own.shape[0] == 1 or self.chunks == 1:
            return own
        return own.repeat_interleave(self.chunks, 0)

    def spread(self, w: Float[Tensor, "#b h d s"], g: int) -> Float[Tensor, "{g}*h d s"]:
        """Return the matrices of all chunks and heads as one batch."""
        return self.each(w).expand(g, -1, -1, -1).flatten(0, 1)

    def add(self, parts: Float[Tensor, "g ..."], total: Float[Tensor, "b ..."]) -> None:
        """Add what every chunk has to the sum of its sequence."""
        rows = total[self.rows]
        rows.add_(parts if self.chunks == 1 else parts.unflatten(0, (-1, self.chunks)).sum(1))


def tiles_of(b: int, n: int, width: int) -> list[Tile]:
    """Cut ``b`` sequences of ``n`` tokens whose heads are ``width`` wide."""
    chunk = max(_CHUNK, _NUMBERS // max(width, 1))
    size = max(_CHUNKS, torch.get_num_threads()) * chunk
    if b > 1 and n < 2 * chunk:
        chunk = max(n, 1)
        size = max(size, chunk)
    rest = n % chunk
    rows = 1 if rest else max(1, size // max(n, 1))
    tiles = [
        Tile(slice(i, min(i + rows, b)), slice(j, end), (end - j) // chunk)
        for i in range(0, b, rows)
        for j in range(0, n - rest, size)
        for end in (min(j + size, n - rest),)
    ]
    if rest:
        rows = max(1, size // rest)
        ends = slice(n - rest, n)
        tiles += [Tile(slice(i, min(i + rows, b)), ends, 1) for i in range(0, b, rows)]
    return tiles


def spans_of(tiles: Sequence[Tile], keeps: bool) -> list[slice]:
    """Return where the tokens of each tile stand in memory; one after another, if all are kept."""
    spans, start = [], 0
    for tile in tiles:
        count = tile.size
        spans.append(slice(start, start + count))
        start += count if keeps else 0
    return spans


def room_for(spans: Sequence[slice]) -> int:
    """Return for how many tokens that memory is."""
    return max((span.stop for span in spans), default=0)


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
    q: Float[Tensor, "g h d t"],
    keep: Bool[Tensor, "g t"] | None,
    eps: float,
    inverse: Float[Tensor, "g h 1 t"],
) -> None:
    """Write the inverse norms."""
    wide = accumulator(q)
    # chunk by chunk: what lies in between stays small
    for chunk, row in zip(q, inverse, strict=True):
        torch.sum(chunk.to(wide).square(), 1, keepdim=True, out=row)
    inverse.sqrt_().clamp_min_(eps).reciprocal_()
    if keep is not None:
        # zero here makes whatever a padded token would add vanish, and every gradient of it
        inverse.masked_fill_(~keep[:, None, None, :], 0.0)


def score(
    tile: Tile,
    q: Float[Tensor, "gh d t"],
    norm: Float[Tensor, "g h 1 t"],
    w: Float[Tensor, "#b h d s"],
    scores: Float[Tensor, "g h s t"],
    energy: Float[Tensor, "b h s"],
) -> None:
    """Write ``Wᵀ q / ‖q‖`` of one tile, and add to the energy."""
    g, h, s, t = scores.shape
    torch.bmm(tile.spread(w, g).mT, q, out=scores.view(g * h, s, t))
    scores.mul_(norm)
    tile.add(torch.linalg.vector_norm(scores, dim=-1, dtype=energy.dtype).square_(), energy)


def score_backward(
    grad: Float[Tensor, "g h s t"],
    scores: Float[Tensor, "g h s t"],
    norm: Float[Tensor, "g h 1 t"],
    eps: float,
    work: Float[Tensor, " size"],
) -> Float[Tensor, "g h 1 t"]:
    """Divide the gradient of the scores by the norms; return the factor of ``q`` in its own."""
    # d(1/‖q‖) = -q/‖q‖³, and zero where the norm was clamped
    product = torch.mul(grad, scores, out=work[: grad.numel()].view_as(grad))
    radial = product.sum(2, keepdim=True).mul_(norm)
    grad.mul_(norm)
    return radial.mul_(torch.threshold_(norm.neg(), -1 / eps, 0.0))
