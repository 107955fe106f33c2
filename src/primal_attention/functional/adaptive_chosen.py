"""The far blocks that queries chose; queries are gathered by block, which moves less memory."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from primal_attention.functional.adaptive_keys import (
    HeadKeys,
    KeyGradients,
    Rows,
    fused,
    fused_backward,
)

__all__ = ["join_chosen", "pull_chosen"]

_CHUNK = 64
"""Queries that share a gathered block."""
_CHUNKS = 16
"""Chunks of one pass through the kernel; they stay in cache."""
_PARTS = 2**17
"""Choices whose sums are held at once."""


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


def join_chosen(q: Tensor, keys: HeadKeys, y: Tensor, log_total: Tensor, choices: Tensor) -> None:
    """Add the chosen blocks to a sum."""
    if not choices.numel():
        return
    blocks, rows = keys.blocks(), max(_PARTS // choices.shape[1], 1)
    for i in range(0, len(q), rows):
        at = slice(i, i + rows)
        _join_rows(q[at], y[at], log_total[at], choices[at], keys, *blocks)


def _join_rows(
    q: Tensor,
    y: Tensor,
    log_total: Tensor,
    choices: Tensor,
    keys: HeadKeys,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> None:
    """Add what some queries chose to their sums."""
    chunks = _gather_queries(choices, len(keys.log_sizes))
    if not len(chunks.block):
        return
    width, size = q.shape[-1], keys.plan.block
    parts, logs = q.new_empty(chunks.query.numel(), width), q.new_empty(chunks.query.numel())
    for i in range(0, len(chunks.block), _CHUNKS):
        at = slice(i, i + _CHUNKS)
        own = chunks.block[at]
        rows = q.index_select(0, chunks.query[at].flatten()).view(-1, 1, _CHUNK, width)
        heads = (t.index_select(0, own).view(-1, 1, size, width) for t in (k, v))
        mask = None if bias is None else bias.index_select(0, own)[:, None, None]
        part, log = fused(rows, *heads, attn_mask=mask, scale=keys.scale)
        used = slice(i * _CHUNK, (i + len(own)) * _CHUNK)
        parts[used] = part.reshape(-1, width)
        logs[used] = log.flatten()
    logs = torch.where(choices < 0, -torch.inf, logs[chunks.slot])
    total = torch.logaddexp(log_total, logs.logsumexp(-1))
    y.mul_((log_total - total).exp_()[:, None])
    logs.sub_(total[:, None]).exp_()
    y.add_(_gather_sum(chunks.slot, parts, logs))
    log_total.copy_(total)


def pull_chosen(rows: Rows, keys: HeadKeys, choices: Tensor, pull: KeyGradients) -> None:
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
        dq, dk, dv = fused_backward(
            grad, q, *heads, y, log, 0.0, False, attn_mask=mask, scale=keys.scale
        )
        parts[i * _CHUNK : (i + len(own)) * _CHUNK] = dq.reshape(-1, width)
        d_k.index_add_(0, own, dk.reshape(len(own), -1))
        d_v.index_add_(0, own, dv.reshape(len(own), -1))
    rows.grad_q.add_(_gather_sum(chunks.slot, parts, (choices >= 0).to(parts.dtype)))
    sinks = keys.plan.sinks
    for total, part in ((pull.k, d_k), (pull.v, d_v)):
        total[sinks:] += part.view(-1, width)[: len(total) - sinks]


def _gather_sum(slot: Int[Tensor, "n t"], parts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the parts in some slots, without a copy of the parts."""
    return embedding_bag(slot, parts, mode="sum", per_sample_weights=weights)
