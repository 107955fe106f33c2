"""Exact separation ranks of small polynomial networks.

The separation rank of a function of two halves ``A`` and ``B`` of the tokens is the least ``R``
with ``y(x) = Σ_{r ≤ R} g_r(x_A) g'_r(x_B)``. It measures how much joint structure of the halves the
function can express. A function with rank 1 treats the halves as independent factors.

For a polynomial, the matrix ``M[α, β] = y(A_α, B_β)`` of ``T`` random templates for each half has
this rank as soon as ``T`` is large enough. Everything is computed modulo a prime, so there is no
rounding and no tolerance.
"""

from collections.abc import Callable, Sequence

import numpy as np

from primal_attention.analysis.depth.field import PRIME, Integers, PrimeField
from primal_attention.analysis.depth.layers import Layer, LayerFactory, LayerShape, find_layer

__all__ = ["one_layer_width", "separation_rank"]

_CHUNK = 16384
"""Inputs in one forward of the network."""


def separation_rank(
    attention: str | LayerFactory,
    layers: int,
    width: int,
    heads: int = 1,
    tokens: int = 4,
    rank: int | None = None,
    *,
    seeds: Sequence[int] = (0, 1),
    prime: int = PRIME,
    position: int = 0,
    max_templates: int = 640,
) -> int:
    """Return the exact separation rank of a network with random weights.

    The network is the softmax-free one of the theory: layers of attention, one after the other.

    Args:
        attention: ``"standard"`` (also ``"softmax-free"``), ``"residual"``, ``"linear"``,
            ``"primal"`` or ``"primal-static"``; or a function ``(field, shape)`` that draws weights
            and returns a layer ``[b n d] → [b n d]``.
        layers: Depth.
        width: Model width.
        heads: Heads; must divide the width.
        tokens: Number of tokens; the first half is ``A``, the rest ``B``.
        rank: Directions of each primal head; by default the head width.
        seeds: Seeds of weights and templates; the largest rank is returned.
        prime: The prime of the field.
        position: Token whose first coordinate is ``y``.
        max_templates: Work limit: largest number of templates ``T``. There are ``T²`` forwards and
            an elimination with ``T³ / 3`` steps.

    Raises:
        ValueError: If the rank is not below ``max_templates``; the message says what is known.

    Example:
        >>> separation_rank("standard", layers=2, width=3)
        49
        >>> separation_rank("primal", layers=2, width=3, tokens=6)
        37
        >>> separation_rank("primal-static", layers=3, width=3)
        1
    """
    make = find_layer(attention)
    shape = LayerShape(width, heads, tokens, rank)
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}.")
    if not -tokens <= position < tokens:
        raise ValueError(f"position must be below {tokens}, the number of tokens; got {position}.")

    def network(field: PrimeField) -> Callable[[Integers], Integers]:
        stack = [make(field, shape) for _ in range(layers)]
        return lambda x: _forward(stack, x)[:, position, 0]

    return _generic_rank(network, shape, seeds, prime, max_templates)


def one_layer_width(rank: int) -> int:
    """Return the width that one standard layer needs for a separation rank.

    One layer has rank ``d + 1``. The condition is necessary, not sufficient: a network of equal
    rank need not compute the same function.

    Example:
        >>> one_layer_width(separation_rank("standard", layers=2, width=3))
        48
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
    return rank - 1


def _forward(stack: Sequence[Layer], x: Integers) -> Integers:
    for layer in stack:
        x = layer(x)
    return x


def _generic_rank(
    make: Callable[[PrimeField], Callable[[Integers], Integers]],
    shape: LayerShape,
    seeds: Sequence[int],
    prime: int,
    limit: int,
) -> int:
    """Return the largest rank over the seeds; templates are doubled until the rank stops."""
    if shape.tokens < 2:
        raise ValueError(f"tokens must be at least 2, one for each half, got {shape.tokens}.")
    if not seeds:
        raise ValueError("seeds is empty; give at least one seed.")
    found, count = 0, min(32, limit)
    for seed in seeds:
        while True:
            rank = _grid_rank(make, shape, seed, prime, count)
            if rank < count:
                break
            if count >= limit:
                raise ValueError(
                    f"the separation rank is at least {rank}, and max_templates={limit} allows no "
                    "larger matrix. Take fewer layers or a smaller width, or raise max_templates: "
                    "twice the templates need four to eight times the time."
                )
            count = min(2 * count, limit)
        found = max(found, rank)
        # the next seed needs a few more templates than the rank to show a larger one
        count = min(found + 8, limit)
    return found


def _grid_rank(
    make: Callable[[PrimeField], Callable[[Integers], Integers]],
    shape: LayerShape,
    seed: int,
    prime: int,
    count: int,
) -> int:
    """Return the rank of ``M[α, β]`` with ``count`` templates for each half."""
    field = PrimeField(seed, prime)
    function = make(field)
    half = shape.tokens // 2
    first = field.random(count, half, shape.width)
    second = field.random(count, shape.tokens - half, shape.width)
    values = np.empty((count, count), dtype=np.int64)
    rows = max(1, _CHUNK // count)
    for start in range(0, count, rows):
        part = first[start : start + rows]
        left = np.repeat(part, count, axis=0)
        right = np.tile(second, (len(part), 1, 1))
        x = np.concatenate([left, right], axis=1)
        values[start : start + rows] = field.reduce(function(x)).reshape(len(part), count)
    return field.rank(values)
