"""Softmax over a window, as sums that other sums of weights can join under one normaliser.

A set of keys adds ``Σ_j w_ij [v_j, 1]`` to a query. Each sum is kept relative to the largest of its
own weights, as online softmax does. :func:`join_sums` brings several sums to the largest weight of
all, adds them and divides once. So no exponential overflows, and nothing is ever subtracted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.exponential import LOG_ZERO, divide_sums
from primal_attention.functional.linear import from_chunks, to_chunks

__all__ = ["PartialSums", "join_sums", "softmax_sums", "window_sums"]

_LOWEST = LOG_ZERO / 10
"""Level of a row without keys: far above a masked score, far below any other."""
_CHUNKS = 32, 128
"""Least and most queries that read their windows in one product."""


class PartialSums(NamedTuple):
    """Weighted sums of values and of ones, divided by ``e^level``."""

    sums: Float[Tensor, "b h n w"]
    level: Float[Tensor, "b h n 1"]


def join_sums(parts: Sequence[PartialSums]) -> Float[Tensor, "b h n v"]:
    """Return the mean of the values of all parts; zero for a row without keys.

    Example:
        >>> one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
        >>> near = PartialSums(torch.tensor([[[[3.0, 1.0]]]]), zero)
        >>> far = PartialSums(torch.tensor([[[[9.0, 1.0]]]]), one.log())
        >>> join_sums([near, far]).item()
        6.0
    """
    top = torch.stack([part.level for part in parts]).amax(0)
    return divide_sums(sum((part.level - top).exp() * part.sums for part in parts))  # type: ignore[arg-type]


def softmax_sums(
    q: Float[Tensor, "*batch n d"],
    k: Float[Tensor, "*batch m d"],
    values: Float[Tensor, "*batch m w"],
    keep: Bool[Tensor, "*#batch #n m"],
) -> PartialSums:
    """Return the sums over the keys to keep, with weights ``e^{q·k}``; ``O(n m)`` memory.

    Args:
        q: Queries, with the scale inside.
        k: Keys.
        values: Values and a column of ones.
        keep: ``True`` where a query may read a key.
    """
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep, LOG_ZERO)
    if scores.shape[-1] == 0:
        return PartialSums(scores @ values, scores.new_full((*scores.shape[:-1], 1), _LOWEST))
    level = scores.detach().amax(-1, keepdim=True).clamp_min(_LOWEST)
    return PartialSums((scores - level).exp() @ values, level)


def window_sums(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    values: Float[Tensor, "b h m w"],
    keep: Bool[Tensor, "#b m"],
    reach: int,
) -> PartialSums:
    """Return the softmax sums over a window of every query; ``O(n reach)`` time and memory.

    Query ``i`` reads the keys ``i … i + reach``, so there are ``reach`` more keys than queries.

    Args:
        q: Queries, with the scale inside.
        k: Keys.
        values: Values and a column of ones.
        keep: ``True`` where a key is real.
        reach: Keys of a window but one.
    """
    n, chunk = q.shape[2], min(max(reach + 1, _CHUNKS[0]), _CHUNKS[1])
    if not torch.compiler.is_compiling() and n <= chunk:
        lag = torch.arange(n + reach, device=q.device) - torch.arange(n, device=q.device)[:, None]
        return softmax_sums(q, k, values, keep[:, None, None] & (lag >= 0) & (lag <= reach))
    queries = to_chunks(q, chunk)  # [b h g i d]
    more, groups = -(-reach // chunk), queries.shape[2]

    def spans(x: Tensor) -> Shaped[Tensor, "*batch g j w"]:
        """Return the keys that the queries of each chunk may read."""
        missing = (groups + more) * chunk - x.shape[-2]
        parts = pad(x, (0, 0, 0, missing)).unflatten(-2, (groups + more, chunk))
        return torch.cat([parts.narrow(-3, i, groups) for i in range(more + 1)], dim=-2)

    place = torch.arange((more + 1) * chunk, device=q.device)
    lag = place - place[:chunk, None]
    real = spans(keep[:, None, :, None]).transpose(-1, -2)
    found = softmax_sums(queries, spans(k), spans(values), real & (lag >= 0) & (lag <= reach))
    return PartialSums(from_chunks(found.sums, n), from_chunks(found.level, n))
