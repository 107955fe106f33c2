"""The adaptive sum of one head of queries over one head of keys, forward and backward.

Everything is two-dimensional here: queries ``[n d]``, keys ``[m d]``, values ``[m v]``.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.adaptive_blocks import (
    CAP,
    REACH,
    BlockPlan,
    Moments,
    block_moments,
)

__all__ = ["HeadKeys", "HeadSum", "KeyGradients", "attend_head", "pull_head"]

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_CHUNK = 64
"""Queries that share a gathered block."""
_CHUNKS = 64
"""Chunks of one pass through the kernel; they stay in cache."""
_TILE = 2**16
"""Scores of blocks that are computed together."""
_GROUP = 16
"""Scores of blocks whose maximum is compared first."""


class HeadKeys(NamedTuple):
    """One head of keys of one sequence, with its blocks."""

    k: Float[Tensor, "m d"]
    v: Float[Tensor, "m v"]
    plan: BlockPlan
    is_causal: bool
    at: tuple[int, int, slice]
    """Where the keys lie in the batch: sequence, head, tokens."""
    num_heads: int
    """Heads of keys in the batch."""
    moments: Moments
    """Of the blocks; ``axes`` and ``slopes`` are ``[r j _]``."""
    log_sizes: Float[Tensor, " j"]
    scale: float

    @classmethod
    def read(
        cls,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        is_causal: bool,
        at: tuple[int, int, slice],
        num_heads: int,
    ) -> "HeadKeys":
        """Return the keys with the moments of their blocks; those that fit need none."""
        scale = k.shape[-1] ** -0.5
        width = max(k.shape[-1], v.shape[-1])
        # the fused kernel needs values as wide as the keys
        k, v = widen(k, width), widen(v, width)
        part = slice(0, 0) if len(k) <= plan.reach else slice(None)
        moments = _moments(k[part], v[part], plan)
        sizes = k.new_full((moments.mean.shape[-2],), float(plan.block))
        if len(sizes):
            sizes[-1] = len(k) - plan.sinks - plan.block * (len(sizes) - 1)
        return cls(k, v, plan, is_causal, at, num_heads, moments, sizes.log(), scale)

    @property
    def first(self) -> int | None:
        """Queries before this one read every key that they may; ``None`` for all."""
        if len(self.k) <= self.plan.reach:
            return None
        return self.plan.reach if self.is_causal else 0

    def queries(self, q: Float[Tensor, "b h n d"]) -> Iterator[tuple[int, int, slice]]:
        """Yield where the heads of queries lie that read these keys."""
        row, head, tokens = self.at
        share = q.shape[1] // self.num_heads
        for i in range(head * share, (head + 1) * share):
            yield row, i, tokens if self.is_causal else slice(q.shape[2])

    def blocks(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the blocks of keys and values, flat, and what to add to scores of a short one."""
        size, num = self.plan.block, len(self.log_sizes)
        gap = num * size + self.plan.sinks - len(self.k)
        k, v = (pad(t[self.plan.sinks :], (0, 0, 0, gap)).view(num, -1) for t in (self.k, self.v))
        if not gap:
            return k, v, None
        bias = self.k.new_zeros(num, size)
        bias[-1, size - gap :] = -torch.inf
        return k, v, bias


def _moments(k: Tensor, v: Tensor, plan: BlockPlan) -> Moments:
    """Return the moments with the rank in front, as products of matrices need it."""
    mean, axes, value, slopes = block_moments(k, v, plan)
    return Moments(mean, axes.transpose(0, 1), value, slopes.transpose(0, 1))


def widen(x: Float[Tensor, "n d"], width: int) -> Float[Tensor, "n width"]:
    """Return rows with zeros behind."""
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


class HeadSum(NamedTuple):
    """What the forward of a head leaves for its backward."""

    y: Float[Tensor, "n v"]
    log_total: Float[Tensor, " n"]
    choices: Int[Tensor, "n t"]
    """Blocks that every query after the first ones chose; -1 where there is none."""


class KeyGradients(NamedTuple):
    """Gradients of keys, values and moments, summed over the queries that read them."""

    k: Float[Tensor, "m d"]
    v: Float[Tensor, "m v"]
    moments: Moments

    @classmethod
    def zeros(cls, keys: HeadKeys) -> "KeyGradients":
        """Return the gradients before the first query."""
        own = (torch.zeros_like(t) for t in keys.moments)
        return cls(torch.zeros_like(keys.k), torch.zeros_like(keys.v), Moments(*own))

    def total(self, keys: HeadKeys) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values, those through the moments included."""
        if keys.first is None:
            return self.k, self.v
        with torch.enable_grad():
            # the moments are computed again: they keep several times the memory of the keys
            k, v = (t.detach().requires_grad_() for t in (keys.k, keys.v))
            found = torch.autograd.grad(tuple(_moments(k, v, keys.plan)), (k, v), self.moments)
        return self.k + found[0], self.v + found[1]


def attend_head(
    q: Float[Tensor, "n d"],
    keys: HeadKeys,
    y: Float[Tensor, "n v"],
    neglected: Float[Tensor, "n two"] | None = None,
) -> HeadSum:
    """Write the adaptive sum of one head of queries into ``y``.

    Args:
        q: Queries.
        keys: Keys.
        y: For the outputs.
        neglected: For the share of the mass that comes from moments, and its spread.
    """
    q = widen(q, keys.k.shape[-1])
    out = y if y.shape[-1] == q.shape[-1] else torch.empty_like(q)
    log_total = q.new_empty(len(q))
    for near in _near_groups(len(q), keys):
        near.attend(q, keys, out, log_total)
    choices = torch.empty(0, 0, dtype=torch.int32)
    if keys.first is not None and keys.first < len(q):
        q, rest, logs = (t[keys.first :] for t in (q, out, log_total))
        _join_sinks(q, keys, rest, logs)
        noted = None if neglected is None else neglected[keys.first :]
        tiles = _tiles(len(q), keys)
        choices = _stack([_join_moments(q, keys, rest, logs, tile, noted) for tile in tiles])
        _join_chosen(q, keys, rest, logs, choices)
        if noted is not None:
            noted.sub_(logs[:, None]).exp_()
    if out is not y:
        y.copy_(out[:, : y.shape[-1]])
    return HeadSum(y, log_total, choices)


def pull_head(
    q: Float[Tensor, "n d"],
    keys: HeadKeys,
    found: HeadSum,
    grad: Float[Tensor, "n v"],
    pull: KeyGradients,
) -> Float[Tensor, "n d"]:
    """Return the gradient of the queries, and add those of the keys to ``pull``."""
    given, width = q.shape[-1], keys.k.shape[-1]
    q, y, grad = (widen(t, width).contiguous() for t in (q, found.y, grad))
    grad_q, log_total = torch.zeros_like(q), found.log_total
    for near in _near_groups(len(q), keys):
        near.pull(q, keys, grad, y, log_total, grad_q, pull)
    if keys.first is not None and keys.first < len(q):
        given_rows = (t[keys.first :] for t in (q, grad, y, log_total, grad_q))
        rows = _Rows(*given_rows)
        _pull_sinks(rows, keys, pull)
        for tile in _tiles(len(rows.q), keys):
            _pull_moments(rows, keys, found.choices, tile, pull)
        _pull_chosen(rows, keys, found.choices, pull)
    return grad_q[:, :given]


class _Rows(NamedTuple):
    """Queries, and what backward knows of them."""

    q: Float[Tensor, "n d"]
    grad: Float[Tensor, "n v"]
    y: Float[Tensor, "n v"]
    log_total: Float[Tensor, " n"]
    grad_q: Float[Tensor, "n d"]


# near blocks -------------------------------------------------------------------------------------


class _Near(NamedTuple):
    """Groups of queries, each with one run of keys; both move on by a block from group to group."""

    query: int
    queries: int
    """Queries of a group."""
    key: int
    width: int
    """Keys of a group."""
    groups: int = 1
    is_causal: bool = False
    """Whether the last query of a group belongs to its last key."""

    def rows(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "1 groups count w"]:
        """Return the rows of the queries, as a view."""
        return _runs(x, self.query, self.queries, self.queries, self.groups)

    def keys(self, x: Float[Tensor, "m w"], step: int) -> Float[Tensor, "1 groups width w"]:
        """Return the rows of the keys; those of neighbouring groups share memory."""
        return _runs(x, self.key, self.width, step, self.groups)

    def options(self, keys: HeadKeys) -> tuple[bool, Tensor | None]:
        """Return whether the kernel's own causal order fits, and the mask otherwise."""
        if not self.is_causal or self.queries == self.width:
            return self.is_causal, None
        mask = keys.k.new_full((self.queries, self.width), -torch.inf)
        return False, mask.triu_(self.width - self.queries + 1)[None, None]

    def attend(self, q: Tensor, keys: HeadKeys, out: Tensor, log_total: Tensor) -> None:
        """Write the softmax of the groups, and the logarithm of its mass."""
        k, v = (self.keys(t, keys.plan.block) for t in (keys.k, keys.v))
        causal, mask = self.options(keys)
        y, log = _fused(self.rows(q), k, v, 0.0, causal, attn_mask=mask, scale=keys.scale)
        self.rows(out).copy_(y)
        log_total[self.query : self.query + log.numel()] = log.flatten()

    def pull(
        self,
        q: Tensor,
        keys: HeadKeys,
        grad: Tensor,
        y: Tensor,
        log_total: Tensor,
        grad_q: Tensor,
        pull: KeyGradients,
    ) -> None:
        """Add the gradients of the groups."""
        step = keys.plan.block
        k, v = (self.keys(t, step) for t in (keys.k, keys.v))
        causal, mask = self.options(keys)
        log = self.rows(log_total[:, None])[..., 0]
        rows = self.rows(q), k, v, self.rows(y), log
        dq, *dkv = _fused_backward(
            self.rows(grad), *rows, 0.0, causal, attn_mask=mask, scale=keys.scale
        )
        self.rows(grad_q).copy_(dq)
        for total, part in zip((pull.k, pull.v), dkv, strict=True):
            # runs of neighbouring groups overlap, so a block of every run at a time
            for at in range(0, self.width, step) if self.groups > 1 else [0]:
                size = step if self.groups > 1 else self.width
                runs = _runs(total, self.key + at, size, step, self.groups)
                runs += part[:, :, at : at + size]


def _runs(x: Tensor, start: int, count: int, step: int, groups: int) -> Tensor:
    """Return ``groups`` runs of ``count`` rows as a view ``[1 groups count w]``."""
    return x[start : start + (groups - 1) * step + count].unfold(0, count, step).mT[None]


def _near_groups(n: int, keys: HeadKeys) -> list[_Near]:
    """Return the groups in which ``n`` queries read what is near to them."""
    (size, window, _, sinks, *_), m, first = keys.plan, len(keys.k), keys.first
    if first is None:
        return [_Near(0, n, 0, m, is_causal=keys.is_causal)] if n else []
    if keys.is_causal:
        full, rest = divmod(n - first, size)
        back, end = window * size, first + full * size
        found = [_Near(0, first, 0, first, is_causal=True)]
        if full:
            found.append(_Near(first, size, first - back, back + size, full, is_causal=True))
        if rest:
            found.append(_Near(end, rest, end - back, back + rest, is_causal=True))
        return found
    num = len(keys.log_sizes)
    # the first and the last groups have fewer keys, or more queries
    start = max(window, 1)
    stop = min(num - 1, (m - sinks) // size - window, (n - sinks) // size)
    alone = [*range(start), *range(stop, num)] if stop > start else [*range(num)]
    found = []
    for own in alone:
        begin = sinks + own * size if own else 0
        end = n if own == num - 1 else min(n, sinks + (own + 1) * size)
        key = sinks + max(own - window, 0) * size
        width = min(m, sinks + (own + window + 1) * size) - key
        if begin < end:
            found.append(_Near(begin, end - begin, key, width))
    if stop > start:
        at = sinks + start * size
        width = (2 * window + 1) * size
        found.append(_Near(at, size, at - window * size, width, stop - start))
    return found


# sinks -------------------------------------------------------------------------------------------


def _join_sinks(q: Tensor, keys: HeadKeys, y: Tensor, log_total: Tensor) -> None:
    """Add the first keys to a sum."""
    if keys.plan.sinks:
        k, v = (t[None, None, : keys.plan.sinks] for t in (keys.k, keys.v))
        part, log = _fused(q[None, None], k, v, scale=keys.scale)
        _join(y, log_total, part[0, 0], log[0, 0])


def _pull_sinks(rows: _Rows, keys: HeadKeys, pull: KeyGradients) -> None:
    """Add the gradients of the first keys."""
    if keys.plan.sinks:
        first = slice(keys.plan.sinks)
        q, grad, y, log = (t[None, None] for t in rows[:4])
        k, v = (t[None, None, first] for t in (keys.k, keys.v))
        dq, dk, dv = _fused_backward(grad, q, k, v, y, log, 0.0, False, scale=keys.scale)
        rows.grad_q.add_(dq[0, 0])
        pull.k[first] += dk[0, 0]
        pull.v[first] += dv[0, 0]


def _join(y: Tensor, log_total: Tensor, part: Tensor, log_part: Tensor) -> None:
    """Add a part to a sum; both are divided by their own mass."""
    total = torch.logaddexp(log_total, log_part)
    y.mul_(log_total.sub_(total).exp_()[:, None])
    y.addcmul_(part, (log_part - total).exp_()[:, None])
    log_total.copy_(total)


# moments of far blocks ---------------------------------------------------------------------------


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
    """What the best key of a block scores, probably."""
    log_mass: Float[Tensor, "n j"]
    along: Float[Tensor, "r n j"]
    """Standard deviations by which a query moves along every axis."""
    shorter: Float[Tensor, "n j"] | None
    """Factor by which ``along`` was shortened."""


def _estimate(q: Float[Tensor, "n d"], keys: HeadKeys, tile: _Tile) -> _Estimates:
    """Return estimates for scaled queries; far blocks only have finite ones."""
    mean, axes, _, _ = keys.moments
    j = tile.blocks
    log_mass = torch.addmm(keys.log_sizes[j], q, mean[j].T)
    if not len(axes):
        along = log_mass.new_empty(0, *log_mass.shape)
        bound = log_mass - keys.log_sizes[j]
        _only_far(tile, bound, log_mass)
        return _Estimates(bound, log_mass, along, None)
    along = torch.stack([q @ axis[j].T for axis in axes])
    square = along[0].square()
    for each in along[1:]:
        square.addcmul_(each, each)
    bound = torch.add(log_mass, square.sqrt(), alpha=REACH).sub_(keys.log_sizes[j])
    shorter = (square / (2 * CAP)).clamp_min_(1).rsqrt_()
    along *= shorter
    log_mass.add_(square.clamp_max_(2 * CAP), alpha=0.5)
    _only_far(tile, bound, log_mass)
    return _Estimates(bound, log_mass, along, shorter)


def _only_far(tile: _Tile, *estimates: Tensor) -> None:
    """Remove blocks that are not far."""
    for x in estimates:
        part = x[:, tile.mixed]
        part.masked_fill_(~tile.is_far, -torch.inf)


def _join_moments(
    q: Tensor,
    keys: HeadKeys,
    y: Tensor,
    log_total: Tensor,
    tile: _Tile,
    noted: Float[Tensor, "n two"] | None,
) -> Int[Tensor, "n t"]:
    """Add the moments of the blocks that are not chosen; return the chosen ones.

    ``noted`` gets logarithms of the mass of the moments and of its standard deviation.
    """
    y, log_total = y[tile.rows], log_total[tile.rows]
    found = _estimate(q[tile.rows] * keys.scale, keys, tile)
    choices = _choose(found, log_total, keys.plan)
    weights, j = _leave_out(found.log_mass, choices), tile.blocks
    top = torch.maximum(log_total, weights.amax(-1) if weights.shape[1] else log_total)
    weights.sub_(top[:, None]).exp_()
    if noted is not None:
        # of the mean of exp(x) over n Gaussian keys
        noise = found.along.square().sum(0).expm1_().mul_(weights.square())
        noise = noise.div_(keys.log_sizes[j].exp()).sum(-1).sqrt_()
        found_log = torch.stack([weights.sum(-1), noise], -1).log_()
        noted[tile.rows] = found_log.add_(top[:, None])
    before = log_total.sub(top).exp_()
    mass = before + weights.sum(-1)
    y.mul_(before[:, None]).addmm_(weights, keys.moments.value[j])
    for along, slope in zip(found.along, keys.moments.slopes, strict=True):
        y.addmm_(along.mul_(weights), slope[j])
    y.div_(mass[:, None])
    torch.add(top, mass.log_(), out=log_total)
    return choices


def _choose(found: _Estimates, log_near: Tensor, plan: BlockPlan) -> Int[Tensor, "n t"]:
    """Return the blocks to read exactly, -1 where there are fewer."""
    bound = found.bound
    if plan.top is not None:
        best = _largest(bound, min(plan.top, bound.shape[1]))
        return best.int().masked_fill_(bound.gather(-1, best) == -torch.inf, -1)
    order = bound.argsort(-1, descending=True)
    every = torch.cat([found.log_mass, log_near[:, None]], -1).logsumexp(-1, keepdim=True)
    share = (found.log_mass - every).exp().gather(-1, order)
    # what remains when this block and all worse ones are left to moments
    needed = share.flip(-1).cumsum(-1).flip(-1) > plan.error
    most = int(needed.sum(-1).max()) if needed.numel() else 0
    return order[:, :most].int().masked_fill_(~needed[:, :most], -1)


def _largest(x: Float[Tensor, "n j"], count: int) -> Int[Tensor, "n t"]:
    """Return the places of the largest elements of every row."""
    num = x.shape[1] // _GROUP
    if num < max(count, _GROUP):
        return x.topk(count, sorted=False).indices
    # they lie in the groups with the largest maxima, and maxima are faster to find
    whole, rest = x[:, : num * _GROUP].unflatten(1, (num, _GROUP)), x[:, num * _GROUP :]
    groups = whole.amax(-1).topk(count, sorted=False).indices
    inside = whole.gather(1, groups[..., None].expand(-1, -1, _GROUP)).flatten(1)
    place = torch.cat([inside, rest], 1).topk(count, sorted=False).indices
    group = groups.gather(-1, (place // _GROUP).clamp_max(count - 1))
    behind = place + (num - count) * _GROUP
    return torch.where(place < count * _GROUP, group * _GROUP + place % _GROUP, behind)


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


def _pull_moments(
    rows: _Rows, keys: HeadKeys, choices: Tensor, tile: _Tile, pull: KeyGradients
) -> None:
    """Add the gradients of the moments."""
    q, grad, y, log_total, grad_q = (t[tile.rows] for t in rows)
    q, j = q * keys.scale, tile.blocks
    found = _estimate(q, keys, tile)
    weights = _leave_out(found.log_mass, choices[tile.rows]).sub_(log_total[:, None]).exp_()
    mean, axes, value, slopes = (t[..., j, :] for t in keys.moments)
    slope_of = torch.stack([grad @ s.T for s in slopes]) if len(slopes) else found.along
    pulled = torch.addmm(-(grad * y).sum(-1, keepdim=True), grad, value.T)
    for along, each in zip(found.along, slope_of, strict=True):
        pulled.addcmul_(along, each)
    d_log = pulled.mul_(weights)
    sums = pull.moments
    sums.value[j].addmm_(weights.T, grad)
    sums.mean[j].addmm_(d_log.T, q)
    d_q = d_log @ mean
    if found.shorter is not None:
        d_along = slope_of.mul_(weights).addcmul_(found.along, d_log)
        for i, along in enumerate(found.along):
            sums.slopes[i, j].addmm_((weights * along).T, grad)
        # shortened steps change with a query in their direction no more
        radial = (d_along * found.along).sum(0).div_(2 * CAP)
        radial = torch.where(found.shorter < 1, radial, 0.0)
        d_along.addcmul_(found.along, radial, value=-1).mul_(found.shorter)
        for i, each in enumerate(d_along):
            sums.axes[i, j].addmm_(each.T, q)
            d_q.addmm_(each, axes[i])
    grad_q.add_(d_q, alpha=keys.scale)


# chosen blocks -----------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """Queries gathered by the block that they chose."""

    query: Int[Tensor, "chunks c"]
    """Row of the query in every slot; 0 in slots that are not used."""
    is_used: Tensor
    block: Int[Tensor, " chunks"]
    slot: Int[Tensor, "n t"]
    """Slot of every choice; 0 where there is none."""


def _gather_queries(choices: Int[Tensor, "n t"], num: int) -> _Chunks:
    """Return chunks of queries with the same choice."""
    t, flat = choices.shape[1], choices.flatten()
    # choices that do not exist sort behind all blocks
    block, order = torch.where(flat < 0, num, flat).sort(stable=True)
    counts = torch.bincount(block, minlength=num + 1)
    chunks = (counts + _CHUNK - 1) // _CHUNK
    chunks[num] = 0
    # a block's first slot in the chunks, less its first place in the order
    shift = (chunks.cumsum(0) - chunks) * _CHUNK - (counts.cumsum(0) - counts)
    exist = len(flat) - int(counts[num])
    place = torch.arange(exist) + shift[block[:exist]]
    order = order[:exist]
    total = int(chunks.sum())
    query = torch.zeros(total * _CHUNK, dtype=torch.long)
    query[place] = order // t
    is_used = torch.zeros(total * _CHUNK, dtype=torch.bool)
    is_used[place] = True
    slot = torch.zeros(len(flat), dtype=torch.long)
    slot[order] = place
    return _Chunks(
        query.view(total, _CHUNK),
        is_used.view(total, _CHUNK),
        torch.repeat_interleave(torch.arange(num + 1), chunks),
        slot.view(choices.shape),
    )


def _join_chosen(q: Tensor, keys: HeadKeys, y: Tensor, log_total: Tensor, choices: Tensor) -> None:
    """Add the chosen blocks to a sum."""
    if not choices.numel():
        return
    chunks, (k, v, bias) = _gather_queries(choices, len(keys.log_sizes)), keys.blocks()
    width, size = q.shape[-1], keys.plan.block
    parts, logs = q.new_empty(chunks.query.numel(), width), q.new_empty(chunks.query.numel())
    for i in range(0, len(chunks.block), _CHUNKS):
        at = slice(i, i + _CHUNKS)
        own = chunks.block[at]
        rows = q.index_select(0, chunks.query[at].flatten()).view(-1, 1, _CHUNK, width)
        heads = (t.index_select(0, own).view(-1, 1, size, width) for t in (k, v))
        mask = None if bias is None else bias.index_select(0, own)[:, None, None]
        part, log = _fused(rows, *heads, attn_mask=mask, scale=keys.scale)
        used = slice(i * _CHUNK, (i + len(own)) * _CHUNK)
        parts[used] = part.reshape(-1, width)
        logs[used] = log.flatten()
    logs = torch.where(choices < 0, -torch.inf, logs[chunks.slot])
    total = torch.logaddexp(log_total, logs.logsumexp(-1))
    y.mul_((log_total - total).exp_()[:, None])
    logs.sub_(total[:, None]).exp_()
    for slot, weight in zip(chunks.slot.T, logs.T, strict=True):
        y.addcmul_(parts.index_select(0, slot), weight[:, None])
    log_total.copy_(total)


def _pull_chosen(rows: _Rows, keys: HeadKeys, choices: Tensor, pull: KeyGradients) -> None:
    """Add the gradients of the chosen blocks."""
    if not choices.numel():
        return
    chunks, (k, v, bias) = _gather_queries(choices, len(keys.log_sizes)), keys.blocks()
    width, size = rows.q.shape[-1], keys.plan.block
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    parts = rows.q.new_empty(chunks.query.numel(), width)
    for i in range(0, len(chunks.block), _CHUNKS):
        at = slice(i, i + _CHUNKS)
        own, index, used = chunks.block[at], chunks.query[at].flatten(), chunks.is_used[at]
        q, grad, y = (t.index_select(0, index).view(-1, 1, _CHUNK, width) for t in rows[:3])
        # slots that are not used have no weight
        log = torch.where(used, rows.log_total[chunks.query[at]], torch.inf)[:, None]
        heads = (t.index_select(0, own).view(-1, 1, size, width) for t in (k, v))
        mask = None if bias is None else bias.index_select(0, own)[:, None, None]
        dq, dk, dv = _fused_backward(
            grad, q, *heads, y, log, 0.0, False, attn_mask=mask, scale=keys.scale
        )
        parts[i * _CHUNK : (i + len(own)) * _CHUNK] = dq.reshape(-1, width)
        d_k.index_add_(0, own, dk.reshape(len(own), -1))
        d_v.index_add_(0, own, dv.reshape(len(own), -1))
    for slot, exists in zip(chunks.slot.T, (choices >= 0).to(parts.dtype).T, strict=True):
        rows.grad_q.addcmul_(parts.index_select(0, slot), exists[:, None])
    sinks = keys.plan.sinks
    for total, part in ((pull.k, d_k), (pull.v, d_v)):
        total[sinks:] += part.view(-1, width)[: len(total) - sinks]
