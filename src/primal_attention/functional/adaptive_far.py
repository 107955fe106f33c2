"""The far blocks of an adaptive sum: the choice of those that are read, and moments of the others.

Queries are taken in tiles whose scores of blocks stay in cache.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.adaptive_blocks import CAP, REACH, BlockPlan
from primal_attention.functional.adaptive_keys import HeadKeys, KeyGradients, Rows

__all__ = ["join_moments", "pull_moments"]

_TILE = 2**16
"""Scores of blocks that are computed together."""
_GROUPS = 32
"""Groups of blocks whose maxima are compared first."""
_LONGEST = math.sqrt(2 * CAP)
"""Standard deviations by which a query moves along the axes of a block, at most."""


def join_moments(
    q: Tensor, keys: HeadKeys, y: Tensor, log_total: Tensor, noted: Tensor | None = None
) -> Int[Tensor, "n t"]:
    """Add the moments of the blocks that are not chosen to a sum; return the chosen ones.

    Args:
        q: Queries after those that read everything.
        keys: Keys.
        y: Sum so far, divided by its mass.
        log_total: Logarithm of that mass.
        noted: For logarithms of the mass of the moments and of its standard deviation.
    """
    choices = []
    for tile in _tiles(len(q), keys):
        at = tile.rows
        found = _estimate(q[at] * keys.scale, keys, tile)
        choices.append(_choose(found, log_total[at], keys.plan))
        weights = _leave_out(found.log_mass, choices[-1])
        note = None if noted is None else noted[at]
        _join_tile(found, weights, keys, tile, y[at], log_total[at], note)
    return _stack(choices)


def _join_tile(
    found: "_Estimates",
    log_mass: Tensor,
    keys: HeadKeys,
    tile: "_Tile",
    y: Tensor,
    log_total: Tensor,
    noted: Tensor | None,
) -> None:
    """Add moments of one tile, given the logarithm of their mass."""
    j = tile.blocks
    top = torch.maximum(log_total, log_mass.amax(-1) if log_mass.shape[1] else log_total)
    weights = log_mass.sub_(top[:, None]).exp_()
    if noted is not None:
        # of the mean of exp(x) over n Gaussian keys
        noise = found.square.expm1().mul_(weights.square())
        noise = noise.div_(keys.log_sizes[j].exp()).sum(-1).sqrt_()
        noted.copy_(torch.stack([weights.sum(-1), noise], -1).log_().add_(top[:, None]))
    before = log_total.sub(top).exp_()
    mass = before + weights.sum(-1)
    y.mul_(before[:, None]).addmm_(weights, keys.moments.value[j])
    if len(found.along):
        weights.mul_(found.shorter)
    for along, slope in zip(found.along, keys.moments.slopes, strict=True):
        y.addmm_(along.mul_(weights), slope[j], alpha=_LONGEST)
    y.div_(mass[:, None])
    torch.add(top, mass.log_(), out=log_total)


def pull_moments(rows: Rows, keys: HeadKeys, choices: Tensor, pull: KeyGradients) -> None:
    """Add the gradients of the moments."""
    for tile in _tiles(len(rows.q), keys):
        _pull_tile(Rows(*(t[tile.rows] for t in rows)), keys, choices[tile.rows], tile, pull)


def _pull_tile(
    rows: Rows, keys: HeadKeys, choices: Tensor, tile: "_Tile", pull: KeyGradients
) -> None:
    q, grad, y, log_total, grad_q = rows
    q, j = q * keys.scale, tile.blocks
    found = _estimate(q, keys, tile)
    weights = _leave_out(found.log_mass, choices).sub_(log_total[:, None]).exp_()
    mean, axes, value, slopes = (t[..., j, :] for t in keys.moments)
    shorter = found.shorter * _LONGEST
    along = found.along * shorter
    slope_of = torch.stack([grad @ s.T for s in slopes]) if len(slopes) else along
    d_log = torch.addmm(-(grad * y).sum(-1, keepdim=True), grad, value.T)
    for step, each in zip(along, slope_of, strict=True):
        d_log.addcmul_(step, each)
    d_log.mul_(weights)
    sums = pull.moments
    sums.value[j].addmm_(weights.T, grad)
    sums.mean[j].addmm_(d_log.T, q)
    d_q = d_log @ mean
    if len(axes):
        d_along = slope_of.mul_(weights).addcmul_(along, d_log)
        for i, step in enumerate(along):
            sums.slopes[i, j].addmm_((weights * step).T, grad)
        # shortened steps change with a query in their direction no more
        radial = (d_along * along).sum(0).div_(2 * CAP)
        radial.masked_fill_(found.square < 2 * CAP, 0.0)
        d_along.addcmul_(along, radial, value=-1).mul_(shorter)
        for i, each in enumerate(d_along):
            sums.axes[i, j].addmm_(each.T, q)
            d_q.addmm_(each, axes[i])
    grad_q.add_(d_q, alpha=keys.scale)


class _Tile(NamedTuple):
    """Some queries, and the blocks that one of them may have far away."""

    rows: slice
    blocks: slice
    mixed: slice
    """Blocks that are far for some of the queries only."""
    is_far: Tensor
    """Whether a block of ``mixed`` is far for a query."""


def _tiles(n: int, keys: HeadKeys) -> Iterator[_Tile]:
    """Yield tiles of ``n`` queries after the first ones."""
    (size, window, _, sinks, *_), num = keys.plan, len(keys.log_sizes)
    first, start = keys.first or 0, 0
    while start < n:
        rows = _TILE / max(num, 1)
        if keys.is_causal:
            # the last query of a tile has the most blocks: rows · (before + rows) / size = _TILE
            before = first + start - sinks
            rows = (math.sqrt(before**2 + 4 * _TILE * size) - before) / 2
        stop = min(n, start + max(1, int(rows) // size) * size)
        place = torch.arange(first + start, first + stop)
        own = ((place - sinks) // size).clamp_(0, num - 1)[:, None]
        low, high = int(own[0]) - window, int(own[-1]) + window
        far = slice(0, max(int(own[-1]) - window, 0) if keys.is_causal else num)
        mixed = slice(max(low, 0), far.stop if keys.is_causal else min(high + 1, num))
        lag = own - torch.arange(mixed.start, mixed.stop)
        is_far = lag > window if keys.is_causal else lag.abs() > window
        yield _Tile(slice(start, stop), far, mixed, is_far)
        start = stop


class _Estimates(NamedTuple):
    """What the moments of the blocks say for some queries."""

    bound: Float[Tensor, "n j"]
    """What the best key of a block scores, probably, and the logarithm of a block's size."""
    log_mass: Float[Tensor, "n j"]
    along: Float[Tensor, "r n j"]
    """Standard deviations by which a query moves along every axis, before it is shortened."""
    square: Float[Tensor, "n j"]
    """Squared length of these steps after they are shortened."""
    shorter: Float[Tensor, "n j"]
    """Factor that shortens the steps, divided by their largest length."""


def _estimate(q: Float[Tensor, "n d"], keys: HeadKeys, tile: _Tile) -> _Estimates:
    """Return estimates for scaled queries; far blocks only have finite ones."""
    mean, axes, _, _ = keys.moments
    j = tile.blocks
    log_mass = torch.addmm(keys.log_sizes[j], q, mean[j].T)
    along = log_mass.new_empty(len(axes), *log_mass.shape)
    square = torch.zeros_like(log_mass)
    for axis, steps in zip(axes, along, strict=True):
        torch.mm(q, axis[j].T, out=steps)
        square.addcmul_(steps, steps)
    bound = torch.add(log_mass, square.sqrt(), alpha=REACH)
    if j.stop == len(keys.log_sizes):
        # a short block is compared as if it were whole
        bound[:, -1] += math.log(keys.plan.block) - keys.log_sizes[-1]
    shorter = square.clamp_min(2 * CAP).rsqrt_()
    log_mass.add_(square.clamp_max_(2 * CAP), alpha=0.5)
    for estimate in (bound, log_mass):
        estimate[:, tile.mixed].masked_fill_(~tile.is_far, -torch.inf)
    return _Estimates(bound, log_mass, along, square, shorter)


def _choose(found: _Estimates, log_near: Tensor, plan: BlockPlan) -> Int[Tensor, "n t"]:
    """Return the blocks to read exactly, -1 where there are fewer."""
    bound = found.bound
    if plan.top is not None:
        count = min(plan.top, bound.shape[1])
        if not count:
            return torch.empty(len(bound), 0, dtype=torch.int32)
        values, places = _largest(bound, count)
        return places.int().masked_fill_(values == -torch.inf, -1)
    order = bound.argsort(-1, descending=True)
    every = torch.cat([found.log_mass, log_near[:, None]], -1).logsumexp(-1, keepdim=True)
    share = (found.log_mass - every).exp().gather(-1, order)
    # what remains when this block and all worse ones are left to moments
    needed = share.flip(-1).cumsum(-1).flip(-1) > plan.error
    most = int(needed.sum(-1).max()) if needed.numel() else 0
    return order[:, :most].int().masked_fill_(~needed[:, :most], -1)


def _largest(x: Float[Tensor, "n j"], count: int) -> tuple[Tensor, Tensor]:
    """Return the largest elements of every row, and their places; ``x`` is used up."""
    size = x.shape[1] // _GROUPS
    if size < 4 or count > _GROUPS:
        return _one_by_one(x, count)
    # they lie in the groups with the largest maxima; members of a group are far apart, because
    # rows of neighbours are compared fast
    whole, rest = x[:, : size * _GROUPS].unflatten(1, (size, _GROUPS)), x[:, size * _GROUPS :]
    best, group = _one_by_one(whole.amax(1), count)
    inside = whole.gather(2, group[:, None].expand(-1, size, -1))
    inside.masked_fill_((best == -torch.inf)[:, None], -torch.inf)
    values, place = _one_by_one(torch.cat([inside.flatten(1), rest], 1), count)
    member = place // count * _GROUPS + group.gather(-1, place % count)
    behind = place + (_GROUPS - count) * size
    return values, torch.where(place < count * size, member, behind)


def _one_by_one(x: Float[Tensor, "n j"], count: int) -> tuple[Tensor, Tensor]:
    """Return the largest elements of every row; faster than topk, which sorts."""
    values, places = [], []
    for _ in range(count):
        value, place = x.max(-1, keepdim=True)
        x.scatter_(-1, place, -torch.inf)
        values.append(value)
        places.append(place)
    return torch.cat(values, -1), torch.cat(places, -1)


def _leave_out(log_mass: Tensor, choices: Tensor) -> Tensor:
    """Remove the chosen blocks from the masses."""
    if not choices.numel():
        return log_mass
    if int(choices.min()) >= 0:
        return log_mass.scatter_(-1, choices.long(), -torch.inf)
    # a column more for the choices that do not exist
    num = log_mass.shape[1]
    gone = torch.zeros(len(log_mass), num + 1, dtype=torch.bool)
    gone.scatter_(-1, torch.where(choices < 0, num, choices).long(), True)
    return log_mass.masked_fill_(gone[:, :num], -torch.inf)


def _stack(choices: list[Tensor]) -> Tensor:
    most = max(t.shape[1] for t in choices)
    return torch.cat([pad(t, (0, most - t.shape[1]), value=-1) for t in choices])
