"""Landmarks of a sequence: some of its tokens, means of segments, or cluster means."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.gaussian import half_square, key_origin
from primal_attention.functional.primal import even_indices, first_reaching

__all__ = ["kmeans_landmarks", "segment_means", "strided_landmarks"]


def strided_landmarks(
    x: Float[Tensor, "b h n d"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h {num} d"]:
    """Return ``num`` evenly spaced real tokens.

    With fewer tokens some repeat; without tokens all landmarks are zero.
    """
    n = x.shape[2]
    x = pad(x, (0, 0, 0, 1))  # an empty sequence samples this zero row
    if key_mask is None:
        at = even_indices(n, num, x.device).clamp(0, n)
        return x.index_select(2, at)
    seen = key_mask.cumsum(1)
    rank = even_indices(key_mask.sum(1), num)  # [b num]
    # without a real token the search ends at n, the zero row
    at = first_reaching(seen, rank + 1)
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def segment_means(
    x: Float[Tensor, "b h n d"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h {num} d"]:
    """Return the means of ``num`` consecutive segments of real tokens of nearly equal length.

    Only real tokens are counted, so padding changes nothing. With fewer tokens than segments, an
    empty segment repeats the one before it. Without tokens all means are zero.

    Example:
        >>> segment_means(torch.arange(4.0).view(1, 1, 4, 1), 2).flatten()
        tensor([0.5000, 2.5000])
    """
    b, h, n, d = x.shape
    if key_mask is None and not torch.compiler.is_compiling() and n and n % num == 0:
        return x.unflatten(2, (num, n // num)).mean(3)
    if key_mask is None:
        segment = torch.arange(n, device=x.device) * num // max(n, 1)
        total = x.new_zeros(b, h, num, d).index_add(2, segment, x)
        count = x.new_zeros(1, num).index_add(1, segment, x.new_ones(1, n))
    else:
        rank = key_mask.cumsum(1) - 1
        segment = rank * num // key_mask.sum(1, keepdim=True).clamp_min(1)
        segment = segment.clamp(0, num - 1)
        share = key_mask.to(x.dtype)
        count = share.new_zeros(b, num).scatter_add(1, segment, share)
        at = segment[:, None, :, None].expand_as(x)
        total = x.new_zeros(b, h, num, d).scatter_add(2, at, x * share[:, None, :, None])
    mean = total / count.clamp_min(1)[:, None, :, None]
    order = torch.arange(num, device=x.device).expand_as(count)
    last = torch.where(count > 0, order, 0).cummax(1).values
    return mean.gather(2, last[:, None, :, None].expand_as(mean))


def kmeans_landmarks(
    x: Float[Tensor, "b h n d"],
    start: Float[Tensor, "b h s d"],
    key_mask: Bool[Tensor, "b n"] | None = None,
    *,
    steps: int = 5,
) -> Float[Tensor, "b h s d"]:
    """Return cluster means of the real tokens after a few Lloyd steps; ``O(steps n s d)``.

    Gradients pass through the means, not through the assignment. An empty cluster keeps its centre.
    """
    z, count = start.detach(), torch.zeros_like(start[..., :1])
    origin = key_origin(z, None)
    ones = torch.ones_like(x[..., :1])
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        x, ones = torch.where(keep, x, 0.0), torch.where(keep, ones, 0.0)
    for step in range(steps):
        near = z - origin
        nearest = ((x.detach() - origin) @ near.mT - half_square(near).mT).argmax(-1, keepdim=True)
        count = torch.zeros_like(count).scatter_add(2, nearest, ones)
        points = x if step == steps - 1 else x.detach()
        total = torch.zeros_like(start).scatter_add(2, nearest.expand_as(x), points)
        z = torch.where(count > 0, total / count.clamp_min(1), z)
    return z if steps else start
