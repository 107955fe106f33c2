"""Flow attention in linear time (Wu et al. 2022, arXiv 2202.06258).

Attention as a flow network: keys are sources, queries are sinks, and the flow through each is
conserved. With ``Q = σ(q)``, ``K = σ(k)``:

    I_i = Q_i·Σ_j K_j             O_j = K_j·Σ_i Q_i              inflow of sinks, outflow of sources
    Î_i = Q_i·Σ_j K_j/O_j         Ô_j = K_j·Σ_i Q_i/I_i          conserved on the other side
    y_i = σ(Î_i n/m) (Q_i/I_i) Σ_j K_jᵀ (m softmax_j(Ô)) v_j

In causal order every sum is a prefix sum, ``I`` and ``O`` are divided by the number of tokens so
far, and the softmax of a key runs over this and earlier keys.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.functional.linear import causal_sums
from primal_attention.functional.precision import accumulator

__all__ = ["FlowState", "causal_flow_attention", "empty_flow", "flow_attention"]


class FlowState(NamedTuple):
    """Running sums of causal flow attention; the first axis is the batch."""

    keys: Float[Tensor, "b h d"]
    queries: Float[Tensor, "b h d"]
    sources: Float[Tensor, "b h d"]
    """``Σ K / O``."""
    sinks: Float[Tensor, "b h d"]
    """``Σ Q / I``."""
    competition: Float[Tensor, "b h"]
    """``Σ exp Ô``."""
    values: Float[Tensor, "b h d v"]
    """``Σ Kᵀ v̂``."""


def empty_flow(k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> FlowState:
    """Return the sums over no tokens."""
    b, h, _, d = k.shape
    zero = k.new_zeros(b, h, d, dtype=accumulator(k))
    pairs = zero.new_zeros(b, h, d, v.shape[-1])
    return FlowState(zero, zero, zero, zero, zero.new_zeros(b, h), pairs)


def _dot(x: Tensor, y: Tensor, eps: float) -> Tensor:
    return ((x + eps) * (y + eps)).sum(-1, keepdim=True)


def _sigmoid(x: Tensor, mask: Tensor | None) -> Tensor:
    x = x.to(accumulator(x)).sigmoid()
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)


def _count(mask: Tensor | None, x: Tensor) -> Tensor:
    """Return the number of real tokens of each sequence, at least one, as ``[b 1 1 1]``."""
    if mask is None:
        return x.new_full((x.shape[0], 1, 1, 1), max(x.shape[2], 1))
    return mask.sum(1).clamp_min(1).to(x.dtype)[:, None, None, None]


def flow_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b h n v"]:
    """Return flow attention over all keys; zero for a row without keys. ``O((n + m) d v)`` time.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        key_mask: ``True`` where a key is real.
        query_mask: ``True`` where a query is real. Other queries are left out of all sums.
        eps: Added to both sides of every inner product.

    Example:
        >>> flow_attention(*torch.randn(3, 1, 1, 5, 4)).shape
        torch.Size([1, 1, 5, 4])
    """
    query, key = _sigmoid(q, query_mask), _sigmoid(k, key_mask)
    v = v.to(key.dtype)
    n, m = _count(query_mask, query), _count(key_mask, key)
    # a capacity needs the sum over the other side alone: linear, and no matrix of pairs
    incoming = _dot(query, key.sum(2, keepdim=True), eps)
    outgoing = _dot(key, query.sum(2, keepdim=True), eps)
    conserved_sink = _dot(query, (key / outgoing).sum(2, keepdim=True), eps)
    # clamped, because it goes into an exponential
    conserved_source = _dot(key, (query / incoming).sum(2, keepdim=True), eps).clamp(-1, 1)
    share = conserved_source.exp()
    if key_mask is not None:
        share = torch.where(key_mask[:, None, :, None], share, 0.0)
    # a sequence without keys has total zero: its outputs are zero, not NaN
    total = share.sum(2, keepdim=True)
    competition = m * share / torch.where(total > 0, total, 1.0)
    collected = (query / incoming) @ (key.transpose(-1, -2) @ (competition * v))
    return (conserved_sink * n / m).sigmoid() * collected


def causal_flow_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    *,
    state: FlowState,
    seen: Int[Tensor, " b"],
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h n v"], FlowState]:
    """Return flow attention over the tokens so far, and the updated sums.

    Args:
        q: Queries.
        k: Keys, one per query.
        v: Values.
        state: Sums over earlier tokens, or :func:`empty_flow`.
        seen: Number of earlier real tokens of each sequence.
        key_mask: ``True`` where a token is real.
        eps: Added to both sides of every inner product.
    """
    query, key = _sigmoid(q, key_mask), _sigmoid(k, key_mask)
    v = v.to(key.dtype)
    step = torch.ones_like(query[:, 0, :, 0]) if key_mask is None else key_mask.to(query.dtype)
    count = (seen[:, None].to(query.dtype) + step.cumsum(1)).clamp_min(1)[:, None, :, None]

    def running(x: Tensor, before: Tensor) -> Tensor:
        return before[:, :, None] + x.cumsum(2)

    keys, queries = running(key, state.keys), running(query, state.queries)
    # running sums grow with the prefix: means keep the sigmoid and the exponential in range
    incoming, outgoing = _dot(query, keys, eps) / count, _dot(key, queries, eps) / count
    sources = running(key / outgoing, state.sources)
    sinks = running(query / incoming, state.sinks)
    conserved_sink = _dot(query, sources, eps) / count
    conserved_source = (_dot(key, sinks, eps) / count).clamp(-1, 1)
    share = conserved_source.exp() * step[:, None, :, None]
    total = running(share, state.competition[..., None])
    competition = share * count / torch.where(total > 0, total, 1.0)
    collected, values = causal_sums(
        query / (incoming * count), key, competition * v, state=state.values
    )
    y = conserved_sink.sigmoid() * collected

    def last(x: Tensor, before: Tensor) -> Tensor:
        return torch.cat([before[:, :, None], x], dim=2)[:, :, -1]

    after = FlowState(
        last(keys, state.keys),
        last(queries, state.queries),
        last(sources, state.sources),
        last(sinks, state.sinks),
        last(total[..., 0], state.competition),
        values,
    )
    return y, after
