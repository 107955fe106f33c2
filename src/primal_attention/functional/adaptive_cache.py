"""Decoding with adaptive sums: a cache of keys and moments, and one token or a prompt at a time.

Real keys come first, so a slot is the number of real tokens before it. Old keys are stored as
blocks, the last ones as keys; a step copies the last ones only. Tensors are never changed in place.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from primal_attention.functional.adaptive import adaptive_attention
from primal_attention.functional.adaptive_blocks import (
    CAP,
    REACH,
    BlockPlan,
    Moments,
    block_moments,
)
from primal_attention.functional.precision import accumulator, full_precision

__all__ = ["AdaptiveCache", "attend_next", "crop_cache", "empty_cache"]

_FLUSH = 8
"""Blocks that are moved at once; moving copies all old keys."""
_QUERIES = 32
"""Queries that are decoded at once."""


class AdaptiveCache(NamedTuple):
    """Keys, values and moments of the tokens so far."""

    sink_k: Float[Tensor, "b g s d"]
    """The first keys, once there are blocks of old keys; before, they are among the new ones."""
    sink_v: Float[Tensor, "b g s v"]
    old_k: Float[Tensor, "b g o _"]
    """Blocks of keys, one a row, so that a block is copied as a whole."""
    old_v: Float[Tensor, "b g o _"]
    new_k: Float[Tensor, "b g t d"]
    new_v: Float[Tensor, "b g t v"]
    keep: Bool[Tensor, "b n"]
    """Which of the tokens so far are real, in the order in which they came."""
    mean: Float[Tensor, "b g j d"]
    axes: Float[Tensor, "b g j r d"]
    value: Float[Tensor, "b g j v"]
    slopes: Float[Tensor, "b g j r v"]

    @property
    def moments(self) -> Moments:
        """Moments of the blocks that are full in every sequence."""
        return Moments(*self[7:])

    def start(self, plan: BlockPlan) -> int:
        """Return the slot of the first of the new keys."""
        return self.sink_k.shape[2] + self.old_k.shape[2] * plan.block


def empty_cache(
    k: Float[Tensor, "b g zero d"], v: Float[Tensor, "b g zero v"], plan: BlockPlan
) -> AdaptiveCache:
    """Return the cache before the first token; ``k`` and ``v`` have no tokens."""
    keep = torch.zeros(k.shape[0], 0, dtype=torch.bool, device=k.device)
    wide = accumulator(k)
    moments = block_moments(k.to(wide), v.to(wide), plan)
    old = (x.new_zeros(*x.shape[:3], plan.block * x.shape[3]) for x in (k, v))
    return AdaptiveCache._make((k, v, *old, k, v, keep, *moments))


def attend_next(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t v"],
    cache: AdaptiveCache,
    plan: BlockPlan,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h t v"], AdaptiveCache]:
    """Return the outputs of the next tokens, and the cache after them.

    Args:
        q: Queries of the new tokens.
        k: Keys of the new tokens.
        v: Values of the new tokens.
        cache: The tokens before; it is not changed.
        plan: What is read exactly.
        key_mask: ``True`` where a new token is real.
    """
    (b, _, t, _), n = q.shape, cache.keep.shape[1]
    new = torch.ones(b, t, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    seen = cache.keep.sum(1)
    slots = (seen[:, None] + new.cumsum(1) - 1).clamp_min(0)
    after = _append(cache, k, v, torch.cat([cache.keep, new], 1), seen, new, plan)
    if not n:
        y = _attend_prompt(q, k, v, plan, key_mask)
    else:
        moments = _all_moments(after, plan)
        parts = zip(q.split(_QUERIES, 2), slots.split(_QUERIES, 1), strict=True)
        found = [_attend_some(x, at, after, moments, plan) for x, at in parts]
        y = torch.cat(found, 2).to(v.dtype) if found else v.new_zeros(*q.shape[:3], v.shape[3])
    return y, _settle(after, plan)


def crop_cache(cache: AdaptiveCache, length: int, plan: BlockPlan) -> AdaptiveCache:
    """Return the cache after the first ``length`` tokens, padding included."""
    keep = cache.keep[:, :length]
    low, high = _bounds(keep)
    full = max(0, (low - plan.sinks) // plan.block)
    moments = (x[:, :, :full].clone() for x in cache.moments)
    first, start = _first_new(low, plan), cache.start(plan)
    sink, old, new = _parts(cache)
    if first < start:
        # some of the old keys are near again
        blocks = max(0, first - plan.sinks) // plan.block
        count = (old[0].shape[2] - blocks) * plan.block
        back = (
            o[:, :, blocks:].reshape(*o.shape[:2], count, n.shape[3])
            for o, n in zip(old, new, strict=True)
        )
        front = sink if not blocks else tuple(x[:, :, :0] for x in sink)
        new = tuple(torch.cat(parts, 2) for parts in zip(front, back, new, strict=True))
        sink = sink if blocks else tuple(x[:, :, :0] for x in sink)
        old = tuple(x[:, :, :blocks].clone() for x in old)
    new = tuple(x[:, :, : high - min(first, start)].clone() for x in new)
    return AdaptiveCache._make((*sink, *old, *new, keep.clone(), *moments))


def _parts(cache: AdaptiveCache) -> tuple[tuple[Tensor, ...], ...]:
    """Return sinks, old blocks and new keys, each with its values."""
    return cache[:2], cache[2:4], cache[4:6]


def _bounds(keep: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest number of real tokens of a sequence."""
    seen = keep.sum(1)
    return (int(seen.min()), int(seen.max())) if len(seen) else (0, 0)


def _first_new(low: int, plan: BlockPlan) -> int:
    """Return where new keys may begin: before everything that a later query has near."""
    blocks = (low - plan.sinks) // plan.block - plan.window - 1
    # a query before the reach reads all keys
    return plan.sinks + blocks * plan.block if blocks > 0 and low >= plan.reach else 0


def _append(
    cache: AdaptiveCache,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    seen: Tensor,
    new: Tensor,
    plan: BlockPlan,
) -> AdaptiveCache:
    """Return the cache with more new keys, and the moments of the blocks that are full now."""
    low, high = _bounds(keep)
    keys, values = torch.cat([cache.new_k, k], 2), torch.cat([cache.new_v, v], 2)
    start = cache.start(plan)
    if high - start != keys.shape[2] or low != high:
        was = torch.arange(cache.new_k.shape[2], device=k.device) < seen[:, None] - start
        order = (
            torch.cat([was, new], 1).to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        )
        order = order[:, None, : high - start, None]
        keys, values = (
            x.gather(2, order.expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values)
        )
    after = cache._replace(new_k=keys, new_v=values, keep=keep)
    full = max(0, (low - plan.sinks) // plan.block)
    if full == cache.mean.shape[2]:
        return after
    more = _moments_of(after, cache.mean.shape[2], full, plan)
    joined = (torch.cat(pair, 2) for pair in zip(cache.moments, more, strict=True))
    return AdaptiveCache(*after[:7], *joined)


def _moments_of(cache: AdaptiveCache, first: int, stop: int, plan: BlockPlan) -> Moments:
    """Return the moments of some blocks among the new keys."""
    part = slice(*(plan.sinks + j * plan.block - cache.start(plan) for j in (first, stop)))
    wide = accumulator(cache.new_k)
    with full_precision(cache.new_k):
        k, v = (x[:, :, part].to(wide) for x in (cache.new_k, cache.new_v))
        return block_moments(k, v, plan._replace(sinks=0))


def _all_moments(cache: AdaptiveCache, plan: BlockPlan) -> Moments:
    """Return the moments of all blocks that are far for a query; some sequences may be ahead."""
    _, high = _bounds(cache.keep)
    have, need = cache.mean.shape[2], (high - 1 - plan.sinks) // plan.block - plan.window
    if need <= have:
        return cache.moments
    more = _moments_of(cache, have, need, plan)
    return Moments(*(torch.cat(pair, 2) for pair in zip(cache.moments, more, strict=True)))


def _settle(cache: AdaptiveCache, plan: BlockPlan) -> AdaptiveCache:
    """Move new keys that no later query has near to the old ones, many at once."""
    first, start = _first_new(_bounds(cache.keep)[0], plan), cache.start(plan)
    if first - start < _FLUSH * plan.block:
        return cache
    sink, old, new = _parts(cache)
    if not start:
        sink = tuple(x[:, :, : plan.sinks].clone() for x in new)
        start, new = plan.sinks, tuple(x[:, :, plan.sinks :] for x in new)
    more = first - start
    moved = (x[:, :, :more].unflatten(2, (-1, plan.block)).flatten(3) for x in new)
    old = tuple(torch.cat(pair, 2) for pair in zip(old, moved, strict=True))
    return AdaptiveCache._make((*sink, *old, *(x[:, :, more:].clone() for x in new), *cache[6:]))


def _attend_prompt(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, key_mask: Tensor | None
) -> Tensor:
    """Return the outputs of the first tokens."""
    if key_mask is None:
        return adaptive_attention(q, k, v, plan, is_causal=True)
    order = (~key_mask).to(torch.uint8).argsort(dim=1, stable=True)
    q, k, v = (_take(x, order) for x in (q, k, v))
    y = adaptive_attention(q, k, v, plan, key_mask=key_mask.gather(1, order), is_causal=True)
    return _take(y, order.argsort(1))


def _take(x: Float[Tensor, "b h n w"], at: Int[Tensor, "b k"]) -> Float[Tensor, "b h k w"]:
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _attend_some(
    q: Tensor, slots: Tensor, cache: AdaptiveCache, moments: Moments, plan: BlockPlan
) -> Tensor:
    """Return the outputs of a few queries; those before the reach read all keys."""
    is_first = slots < plan.reach
    if not is_first.any():
        return _attend(q, slots, cache, moments, plan)
    y = _attend_all(q, slots, cache, plan)
    if is_first.all():
        return y
    return torch.where(is_first[:, None, :, None], y, _attend(q, slots, cache, moments, plan))


def _attend_all(q: Tensor, slots: Tensor, cache: AdaptiveCache, plan: BlockPlan) -> Tensor:
    """Return softmax over all keys before the reach, none of which is among the old ones yet."""
    wide = accumulator(q)
    k, v = (x[:, :, : plan.reach].to(wide) for x in (cache.new_k, cache.new_v))
    keep = torch.arange(k.shape[2], device=q.device) <= slots[..., None]
    with full_precision(q):
        return scaled_dot_product_attention(
            q.to(wide), k, v, attn_mask=keep[:, None], enable_gqa=q.shape[1] != k.shape[1]
        )


def _attend(
    q: Float[Tensor, "b h t d"],
    slots: Int[Tensor, "b t"],
    cache: AdaptiveCache,
    moments: Moments,
    plan: BlockPlan,
) -> Float[Tensor, "b h t v"]:
    """Return the outputs of a few queries in the given slots."""
    wide = accumulator(q)
    with full_precision(q):
        g, size, sinks = cache.new_k.shape[1], plan.block, plan.sinks
        q = (q.to(wide) * q.shape[-1] ** -0.5).unflatten(1, (g, q.shape[1] // g))  # [b g r t d]
        own = ((slots - sinks) // size).clamp_min(0)[:, None, None]  # [b 1 1 t]
        log_mass, bound, along = _estimate(q, moments, own, plan)
        exact = [_read_near(q, slots, cache, plan)]
        log_near = exact[0][0].logsumexp(-1, keepdim=True)
        choices = _choose(bound.detach(), log_mass.detach(), log_near.detach(), plan)
        if choices.shape[-1]:
            exact.append(_read_chosen(q, choices, cache, plan))
            gone = torch.zeros(*bound.shape[:-1], bound.shape[-1] + 1, dtype=torch.bool)
            gone = gone.to(q.device).scatter(-1, choices.where(choices >= 0, bound.shape[-1]), True)
            log_mass = log_mass.masked_fill(gone[..., :-1], -torch.inf)
        scores = torch.cat([s for s, _ in exact] + [log_mass], -1)
        weights = scores.softmax(-1)
        # a padded token before the first real one has no keys; its output is never read
        *parts, far = weights.split([*(s.shape[-1] for s, _ in exact), log_mass.shape[-1]], -1)
        y = far @ moments.value.to(wide)[:, :, None]
        for part, (_, values) in zip(parts, exact, strict=True):
            y = y + (part.unsqueeze(-2) @ values).squeeze(-2)
        slopes = moments.slopes[:, :, None]
        y = y + sum((far * along[s]) @ slopes[..., s, :] for s in range(plan.rank))
        return y.flatten(1, 2)


def _estimate(
    q: Tensor, moments: Moments, own: Tensor, plan: BlockPlan
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return mass and bound of all blocks, and the steps along their axes."""
    mean, axes = moments.mean[:, :, None], moments.axes[:, :, None]
    base = q @ mean.mT
    along = [q @ axes[..., s, :].mT for s in range(plan.rank)]
    square = sum((a.square() for a in along), torch.zeros_like(base))
    bound = base + REACH * square.detach().sqrt()
    shorter = (square / (2 * CAP)).clamp_min(1).rsqrt()
    log_mass = base + square.clamp_max(2 * CAP) / 2 + torch.tensor(float(plan.block)).log()
    blocks = torch.arange(base.shape[-1], device=q.device)
    is_far = blocks < (own - plan.window)[..., None]  # [b 1 1 t j]
    log_mass, bound = (torch.where(is_far, x, -torch.inf) for x in (log_mass, bound))
    return log_mass, bound, [a * shorter for a in along]


def _choose(bound: Tensor, log_mass: Tensor, log_near: Tensor, plan: BlockPlan) -> Tensor:
    """Return the blocks to read exactly, -1 where there are fewer."""
    if plan.top is not None:
        best = bound.topk(min(plan.top, bound.shape[-1]))
        return best.indices.where(best.values != -torch.inf, -1)
    order = bound.argsort(-1, descending=True)
    every = torch.cat([log_mass, log_near], -1).logsumexp(-1, keepdim=True)
    share = (log_mass - every).exp().gather(-1, order)
    needed = share.flip(-1).cumsum(-1).flip(-1) > plan.error
    most = int(needed.sum(-1).max()) if needed.numel() else 0
    return order[..., :most].where(needed[..., :most], -1)


def _read_near(
    q: Tensor, slots: Tensor, cache: AdaptiveCache, plan: BlockPlan
) -> tuple[Tensor, Tensor]:
    """Return scores and values of the sinks and the near blocks, ``[b g r t x]`` and ``… x v]``."""
    sinks, size = plan.sinks, plan.block
    own = ((slots - sinks) // size).clamp_min(0)
    first = sinks + (own - plan.window).clamp_min(0) * size  # [b t]
    at = first[..., None] + torch.arange((plan.window + 1) * size, device=q.device)
    exists = at <= slots[..., None]
    t, width = at.shape[1:]
    index = (at - cache.start(plan)).clamp(0, cache.new_k.shape[2] - 1).flatten(1)
    near_k, near_v = (
        _take(x, index).unflatten(2, (t, width)).to(q.dtype)[:, :, None]
        for x in (cache.new_k, cache.new_v)
    )
    scores = (near_k @ q.unsqueeze(-1)).squeeze(-1)
    scores = torch.where(exists[:, None, None], scores, -torch.inf)
    if not sinks:
        return scores, near_v
    held = cache[:2] if cache.old_k.shape[2] else (cache.new_k, cache.new_v)
    sink_k, sink_v = (x[:, :, None, :sinks].to(q.dtype) for x in held)
    count = sink_k.shape[3]
    exists = torch.arange(count, device=q.device) <= slots[..., None]
    first_scores = torch.where(exists[:, None, None], q @ sink_k.mT, -torch.inf)
    values = torch.cat([sink_v.unsqueeze(3).expand(-1, -1, -1, t, -1, -1), near_v], -2)
    return torch.cat([first_scores, scores], -1), values


def _read_chosen(
    q: Tensor, choices: Tensor, cache: AdaptiveCache, plan: BlockPlan
) -> tuple[Tensor, Tensor]:
    """Return scores and values of the chosen blocks."""
    b, g, r, t, count = choices.shape
    flat = choices.clamp_min(0).flatten(2)  # [b g r·t·count]
    k, v = (_blocks(flat, *x, plan).to(q.dtype) for x in zip(cache[2:4], cache[4:6], strict=True))
    k, v = (x.view(b, g, r, t, count * plan.block, x.shape[-1]) for x in (k, v))
    scores = (k @ q.unsqueeze(-1)).squeeze(-1)
    exists = (choices >= 0).repeat_interleave(plan.block, -1)
    return torch.where(exists, scores, -torch.inf), v


def _blocks(index: Int[Tensor, "b g x"], old: Tensor, new: Tensor, plan: BlockPlan) -> Tensor:
    """Return blocks of old and new keys by number."""
    before, size = old.shape[2], plan.block
    own = new if before else new[:, :, plan.sinks :]
    gap = -own.shape[2] % size
    own = pad(own, (0, 0, 0, gap)).unflatten(2, ((own.shape[2] + gap) // size, size)).flatten(3)
    found = _gather_blocks(own, index - before)
    if before:
        found = torch.where((index < before)[..., None], _gather_blocks(old, index), found)
    return found.unflatten(-1, (size, new.shape[-1]))


def _gather_blocks(blocks: Tensor, index: Tensor) -> Tensor:
    """Return blocks by number, another one where there is none with this number."""
    b, g, num, width = blocks.shape
    rows = index.clamp(0, num - 1) + num * torch.arange(b * g, device=index.device).view(b, g, 1)
    # copies whole rows, many times faster than gather
    flat = blocks.reshape(b * g * num, width)
    return flat.index_select(0, rows.flatten()).view(*index.shape, width)
