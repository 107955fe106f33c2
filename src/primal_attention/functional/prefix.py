"""Running sums over tokens: what the causal layer with static weights sees of the prefix."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.linear import from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision

__all__ = ["decayed_sum", "prefix_sum"]


def prefix_sum(
    x: Float[Tensor, "b n c"], start: Float[Tensor, "b c"] | None = None
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} x_u`` in float32 or better, continuing from ``start``."""
    total = x.to(accumulator(x)).cumsum(1)
    return total if start is None else total + start[:, None]


def decayed_sum(
    x: Float[Tensor, "b n c"],
    decay: float,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    start: Float[Tensor, "b c"] | None = None,
    chunk: int = 64,
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} γ^{t-u} x_u`` in float32 or better, continuing from ``start``.

    Time is counted in real tokens: padding neither adds nor decays. Inside a chunk one triangular
    product; across chunks a doubling scan that stops where ``γ`` has faded below rounding, so the
    cost is ``O(n (chunk + log(1/(1-γ)) / chunk) c)``.
    """
    n, c = x.shape[1:]
    wide = x.to(accumulator(x))
    if key_mask is not None:
        # pack the real tokens to the front; a position reads the sum of as many as it has seen
        wide = torch.where(key_mask[:, :, None], wide, 0.0)
        order = key_mask.logical_not().argsort(dim=1, stable=True)
        packed = wide.gather(1, order[:, :, None].expand(-1, -1, c))
        total = decayed_sum(packed, decay, start=start, chunk=chunk)
        start = wide.new_zeros(x.shape[0], c) if start is None else start
        total = torch.cat([start[:, None], total], dim=1)
        return total.gather(1, key_mask.cumsum(1)[:, :, None].expand(-1, -1, c))
    wide = to_chunks(wide, chunk)  # [b g i c]
    chunk = wide.shape[2]
    rate, steps = math.log(decay), torch.arange(chunk, dtype=wide.dtype, device=x.device)
    inside = (rate * (steps[:, None] - steps).tril()).exp().tril()  # [i j]
    with full_precision(x):
        local = inside @ wide
    # carry over chunks: after k rounds it holds the sum of the last 2^k chunks
    carry, step, groups = local[:, :, -1], 1, local.shape[1]
    memory = 1 + int(math.log(torch.finfo(wide.dtype).eps) / rate) // chunk
    while step <= memory:
        older = torch.nn.functional.pad(carry, (0, 0, step, 0))[:, :groups]
        carry = carry + decay ** (chunk * step) * older
        step *= 2
    before = torch.nn.functional.pad(carry, (0, 0, 1, 0))[:, :groups]
    total = local + (rate * (steps + 1)).exp()[:, None] * before[:, :, None]
    total = from_chunks(total, n)
    if start is None:
        return total
    age = torch.arange(1, n + 1, dtype=wide.dtype, device=x.device)
    return total + (rate * age).exp()[:, None] * start[:, None]
