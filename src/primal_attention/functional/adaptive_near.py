"""What is near to a query in an adaptive sum: runs of neighbouring keys, and the first keys."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.adaptive_keys import (
    HeadKeys,
    KeyGradients,
    Rows,
    fused,
    fused_backward,
    join,
)

__all__ = ["Near", "join_sinks", "near_groups", "pull_sinks"]


class Near(NamedTuple):
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
        y, log = fused(self.rows(q), k, v, 0.0, causal, attn_mask=mask, scale=keys.scale)
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
        dq, *dkv = fused_backward(
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


def near_groups(n: int, keys: HeadKeys) -> list[Near]:
    """Return the groups in which ``n`` queries read what is near to them."""
    (size, window, _, sinks, *_), m, first = keys.plan, len(keys.k), keys.first
    if first is None:
        return [Near(0, n, 0, m, is_causal=keys.is_causal)] if n else []
    if keys.is_causal:
        full, rest = divmod(n - first, size)
        back, end = window * size, first + full * size
        found = [Near(0, first, 0, first, is_causal=True)]
        if full:
            found.append(Near(first, size, first - back, back + size, full, is_causal=True))
        if rest:
            found.append(Near(end, rest, end - back, back + rest, is_causal=True))
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
            found.append(Near(begin, end - begin, key, width))
    if stop > start:
        at = sinks + start * size
        width = (2 * window + 1) * size
        found.append(Near(at, size, at - window * size, width, stop - start))
    return found


def join_sinks(q: Tensor, keys: HeadKeys, y: Tensor, log_total: Tensor) -> None:
    """Add the first keys to a sum."""
    if keys.plan.sinks:
        k, v = (t[None, None, : keys.plan.sinks] for t in (keys.k, keys.v))
        part, log = fused(q[None, None], k, v, scale=keys.scale)
        join(y, log_total, part[0, 0], log[0, 0])


def pull_sinks(rows: Rows, keys: HeadKeys, pull: KeyGradients) -> None:
    """Add the gradients of the first keys."""
    if keys.plan.sinks:
        first = slice(keys.plan.sinks)
        q, grad, y, log = (t[None, None] for t in rows[:4])
        k, v = (t[None, None, first] for t in (keys.k, keys.v))
        dq, dk, dv = fused_backward(grad, q, k, v, y, log, 0.0, False, scale=keys.scale)
        rows.grad_q.add_(dq[0, 0])
        pull.k[first] += dk[0, 0]
        pull.v[first] += dv[0, 0]
