"""Two linear maps as one: the maps of a primal layer, folded, and the gradients of folding."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.tiles import LinearMap

__all__ = [
    "LayerMaps",
    "by_head",
    "by_side",
    "fold_bias",
    "fold_concat",
    "fold_concat_backward",
    "fold_weights",
    "fold_weights_backward",
    "join_maps",
]


class LayerMaps(NamedTuple):
    """The four linear maps of a layer."""

    q: LinearMap
    """From tokens to the query heads."""
    k: LinearMap
    """From tokens to the key heads."""
    concat: LinearMap
    """From both scores of a head to the width of the head."""
    out: LinearMap
    """From all heads to the output."""


def join_maps(first: LinearMap, second: LinearMap, h: int = 1) -> LinearMap:
    """Return two maps of the same input as one.

    Args:
        first: The map whose outputs come first.
        second: The map whose outputs come after them.
        h: Heads of each map; the outputs of both maps for one head stand next to each other.
    """
    weights = first.weight.unflatten(0, (h, -1)), second.weight.unflatten(0, (h, -1))
    weight = torch.cat(weights, dim=1).flatten(0, 1)
    a, b = first.bias, second.bias
    if a is None and b is None:
        return LinearMap(weight)
    a = first.weight.new_zeros(len(first.weight)) if a is None else a
    b = second.weight.new_zeros(len(second.weight)) if b is None else b
    biases = a.unflatten(0, (h, -1)), b.unflatten(0, (h, -1))
    return LinearMap(weight, torch.cat(biases, dim=1).flatten())


def fold_concat(concat: LinearMap, out: LinearMap) -> LinearMap:
    """Return ``O (C z + c) + o`` as one map of the scores of all query and all key heads."""
    (d, both), c = concat.weight.shape, out.weight.shape[0]
    by_head = (out.weight.reshape(-1, d) @ concat.weight).view(c, -1, 2, both // 2)
    return LinearMap(by_head.transpose(1, 2).reshape(c, -1), fold_bias(concat, out))


def fold_concat_backward(
    grad: Float[Tensor, "c all"], concat: LinearMap, out: LinearMap
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both weights."""
    (d, both), c = concat.weight.shape, out.weight.shape[0]
    # undo the order of fold_concat: scores by head instead of by side
    rows = grad.reshape(c, 2, -1, both // 2).transpose(1, 2).reshape(-1, both)
    return out.weight.reshape(-1, d).T @ rows, (rows @ concat.weight.T).view(c, -1)


def fold_weights(
    w: Float[Tensor, "#b both d s"], concat: LinearMap
) -> Float[Tensor, "#b h pair e"]:
    """Return ``W C``, which maps the unit query and key of a head to its output."""
    b, both, d, s = w.shape
    by_side = concat.weight.view(-1, 2, 1, s).permute(1, 2, 3, 0)  # [2 1 s e]
    folded = w.view(b, 2, both // 2, d, s) @ by_side
    # the width is said, because a batch may be empty
    return folded.transpose(1, 2).reshape(b, both // 2, 2 * d, folded.shape[-1])


def fold_weights_backward(
    grad: Float[Tensor, "#b h pair e"], w: Float[Tensor, "#b both d s"], concat: LinearMap
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projection weights and of the weight of ``concat``."""
    b, both, d, s = w.shape
    by_side = grad.view(b, both // 2, 2, d, -1).transpose(1, 2)  # [b 2 h d e]
    grad_w = by_side @ concat.weight.view(-1, 2, 1, s).permute(1, 2, 0, 3)
    sides = by_side, w.view(grad_w.shape)
    # a sum over sequences, heads and features is one product per side
    rows, columns = (t.transpose(0, 1).reshape(2, -1, t.shape[-1]) for t in sides)
    return grad_w.flatten(1, 2), torch.bmm(rows.mT, columns).transpose(0, 1).reshape(-1, 2 * s)


def fold_bias(concat: LinearMap, out: LinearMap) -> Float[Tensor, " c"] | None:
    """Return what the two biases add to the output."""
    if concat.bias is None:
        return out.bias
    # every head adds the same bias before the output map
    heads = out.weight.shape[1] // concat.bias.shape[0]
    return linear(concat.bias.expand(heads, -1).reshape(-1), out.weight, out.bias)


def by_head(rows: Tensor, h: int, dim: int = 0) -> Tensor:
    """Order an axis by heads, query before key, instead of all queries before all keys."""
    return rows.unflatten(dim, (2, h, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def by_side(rows: Tensor, h: int, dim: int = 0) -> Tensor:
    """Undo :func:`by_head`."""
    return rows.unflatten(dim, (h, 2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
