"""The adaptive sum with its ``n × m`` matrix, in operations that every tracer knows.

Compiled and exported programs, function transforms, second derivatives and devices other than a CPU
use it; :mod:`primal_attention.functional.adaptive` is the fast one.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.adaptive_blocks import CAP, REACH, BlockPlan, block_moments

__all__ = ["DenseAdaptive", "dense_adaptive"]


class DenseAdaptive(NamedTuple):
    """Outputs, and what of every query's mass was not read exactly."""

    y: Float[Tensor, "b h n v"]
    mass: Float[Tensor, "b h n"]
    """Share of the mass that comes from moments."""
    spread: Float[Tensor, "b h n"]
    """Estimated standard deviation of that share."""


def dense_adaptive(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    v: Float[Tensor, "b g m v"],
    plan: BlockPlan,
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> DenseAdaptive:
    """Return the adaptive sum; real keys come first.

    Args:
        q: Queries, in float32 or better.
        k: Keys; fewer heads than queries serve several of them each.
        v: Values.
        plan: What is read exactly.
        key_mask: ``True`` where a key is real.
        is_causal: Read keys ``j ≤ i`` only.
    """
    (b, h, n, d), (m, g) = q.shape, (k.shape[2], k.shape[1])
    q = (q * d**-0.5).unflatten(1, (g, h // g))
    keep = None if key_mask is None else key_mask[:, None]
    real = torch.ones(1, m, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    # a block more, without keys, so that there is always one
    short = plan.block + plan.sinks
    k, v, real = pad(k, (0, 0, 0, short)), pad(v, (0, 0, 0, short)), pad(real, (0, short))
    keep = real[:, None]
    mean, axes, value, slopes = (
        t[:, :, None] for t in block_moments(k, v, plan, keep.expand(b, g, -1))
    )
    sizes = _blocks(real.to(q.dtype), plan).sum(-1)  # [b j]
    is_near, is_far = _near(n, real, sizes, plan, is_causal)  # [b 1 1 n j]

    scores = q @ k[:, :, None].mT
    base = q @ mean.mT
    along = torch.einsum("bgrnd,bgxjsd->bgrnjs", q, axes)
    variance = along.square().sum(-1)
    # no root of the variance alone: its slope at zero is infinite
    along = along * (variance / (2 * CAP)).clamp_min(1).rsqrt()[..., None]
    square = along.square().sum(-1)
    log_mass = base + square / 2 + sizes.clamp_min(1).log()[:, None, None, None]
    low = torch.finfo(q.dtype).min / 2

    order = torch.arange(n, device=q.device)[:, None] >= torch.arange(m + short, device=q.device)
    allowed = real[:, None, None, None] & order if is_causal else real[:, None, None, None]
    near = _keys(is_near, plan, m + short, sinks=True) & allowed
    with torch.no_grad():
        bound = torch.where(is_far, base + REACH * variance.sqrt(), -torch.inf)
        if plan.top is None:
            chosen = _enough(bound, log_mass, scores.masked_fill(~near, -torch.inf), is_far, plan)
        else:
            # so many columns more that there are always enough of them
            best = pad(bound, (0, plan.top), value=-torch.inf).topk(plan.top).indices
            chosen = pad(torch.zeros_like(is_far).expand_as(bound), (0, plan.top))
            chosen = chosen.scatter(-1, best, True)[..., : bound.shape[-1]] & is_far
    read = (_keys(chosen, plan, m + short, sinks=False) | near) & allowed
    scores = torch.where(read, scores, low)
    log_mass = torch.where(is_far & ~chosen, log_mass, low)
    top = torch.maximum(scores.amax(-1, keepdim=True), log_mass.amax(-1, keepdim=True)).detach()
    exact = torch.where(read, (scores - top).exp(), 0.0)
    moments = torch.where(is_far & ~chosen, (log_mass - top).exp(), 0.0)
    total = exact.sum(-1) + moments.sum(-1)
    y = exact @ v[:, :, None] + moments @ value
    y = y + torch.einsum("bgrnj,bgrnjs,bgxjsv->bgrnv", moments, along, slopes)
    total = torch.where(total > 0, total, 1.0)
    mass = moments.sum(-1) / total
    noise = moments.square() * square.expm1() / sizes.clamp_min(1)[:, None, None, None]
    spread = noise.sum(-1).sqrt() / total
    y = y / total[..., None]
    return DenseAdaptive(*(t.flatten(1, 2) for t in (y, mass, spread)))


def _blocks(real: Tensor, plan: BlockPlan) -> Tensor:
    """Return what belongs to each block."""
    num = plan.num_blocks(real.shape[-1])
    gap = num * plan.block + plan.sinks - real.shape[-1]
    return pad(real[..., plan.sinks :], (0, gap)).unflatten(-1, (num, plan.block))


def _near(
    n: int, real: Tensor, sizes: Tensor, plan: BlockPlan, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return which blocks are near a query and which ones are far, ``[b 1 1 n j]``."""
    j, place = (torch.arange(x, device=sizes.device) for x in (sizes.shape[-1], n))
    own = ((place - plan.sinks) // plan.block).clamp_min(0)
    last = ((sizes > 0).sum(-1) - 1).clamp_min(0)
    lag = torch.minimum(own, last[:, None])[:, :, None] - j  # [b n j]
    exists = (sizes > 0)[:, None]
    # in a causal sum the first queries read everything before them, else all queries or none
    reads_all = place < plan.reach if is_causal else (real.sum(-1) <= plan.reach)[:, None]
    near = (lag.abs() <= plan.window) | reads_all[..., None]
    far = (lag > plan.window if is_causal else ~near) & ~reads_all[..., None]
    return (near & exists)[:, None, None], (far & exists)[:, None, None]


def _keys(blocks: Tensor, plan: BlockPlan, m: int, *, sinks: bool) -> Tensor:
    """Return the keys of some blocks as a mask, with the sinks or without."""
    # an index, because a slice makes a compiler ask whether the last block is full
    own = torch.arange(m - plan.sinks, device=blocks.device) // plan.block
    return pad(blocks[..., own], (plan.sinks, 0), value=sinks)


def _enough(
    bound: Tensor, log_mass: Tensor, near: Tensor, is_far: Tensor, plan: BlockPlan
) -> Tensor:
    """Return the fewest best blocks that leave no more than the allowed share to moments."""
    log_mass = torch.where(is_far, log_mass, -torch.inf)
    total = torch.logsumexp(torch.cat([near, log_mass], -1), -1, keepdim=True)
    order = bound.argsort(-1, descending=True)
    share = (log_mass.gather(-1, order) - total.clamp_min(torch.finfo(total.dtype).min)).exp()
    # what remains when this block and all worse ones are left to moments
    remains = share.flip(-1).cumsum(-1).flip(-1)
    chosen = torch.zeros_like(remains, dtype=torch.bool)
    return chosen.scatter(-1, order, remains > plan.error) & is_far
