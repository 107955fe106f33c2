"""Flow attention: weights from flow conservation between keys and queries.

Wu et al. 2022, arXiv 2202.06258. See :mod:`primal_attention.functional.flow` for the formulas.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.attention.base import SQUARES_FIT, Capabilities, State
from primal_attention.attention.multihead import Core, FixedCoreAttention, count_seen
from primal_attention.attention.registry import register_attention
from primal_attention.functional.flow import (
    FlowState,
    causal_flow_attention,
    empty_flow,
    flow_attention,
)
from primal_attention.functional.precision import full_precision

__all__ = ["FlowAttention", "FlowCore"]


class FlowCore(Core):
    """Flow attention in ``O((n + m) d v)`` time; the state is six sums, the largest ``d × v``."""

    capabilities = Capabilities(max_magnitude=SQUARES_FIT)
    takes_query_mask = True

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
        query_mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted sum of the values; zero for a row without keys.

        An output depends on the other queries, so padded queries must be masked. Without a
        ``query_mask`` and with equal numbers of queries and keys, ``key_mask`` is used for both.
        """
        if query_mask is None and key_mask is not None and q.shape[2] == k.shape[2]:
            query_mask = key_mask
        with full_precision(q):
            if is_causal:
                seen = torch.zeros(q.shape[0], dtype=torch.long, device=q.device)
                state = empty_flow(k, v)
                y, _ = causal_flow_attention(q, k, v, state=state, seen=seen, key_mask=key_mask)
            else:
                y = flow_attention(q, k, v, key_mask=key_mask, query_mask=query_mask)
        return y.to(v.dtype)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums."""
        seen = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
        return State(tuple(empty_flow(k, v)), seen)

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Continue a causal forward by ``t`` tokens, at constant cost per token."""
        with full_precision(q):
            y, after = causal_flow_attention(
                q, k, v, state=FlowState(*state.tensors), seen=state.seen, key_mask=key_mask
            )
        return y.to(v.dtype), State(tuple(after), count_seen(state, k, key_mask))


class FlowAttention(FixedCoreAttention):
    """Multi-head flow attention.

    Arguments as in :class:`FixedCoreAttention`.

    Example:
        >>> FlowAttention(16, 4)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    core_class = FlowCore


register_attention(
    "flow",
    FlowAttention,
    capabilities=FlowCore.capabilities,
    cost="n",
    summary="weights from flow conservation (Flowformer)",
)
