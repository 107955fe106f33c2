"""Doubly stochastic attention in linear time: entropic transport through learned anchors.

Composing plans from queries to anchors and from anchors to keys is the idea of LOTFormer (Shahbazi
et al. 2025, arXiv 2509.23436). See :mod:`primal_attention.functional.anchors` for the formulas.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import SQUARES_FIT, Capabilities
from primal_attention.attention.multihead import Core, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.anchors import anchored_attention
from primal_attention.functional.precision import full_precision
from primal_attention.kernels.base import Factory

__all__ = ["TransportAttention", "TransportCore"]


class TransportCore(Core):
    """Two entropic plans through ``r`` learned anchors, ``O((n + m) r (d + v))`` time per head.

    Every query has total weight one, every key total weight ``n/m``. The plans depend on all
    queries, so there is no causal form.

    Args:
        head_dim: Width of a head.
        num_heads: Number of heads.
        num_anchors: Anchors ``r`` of each head.
        num_steps: Pairs of Sinkhorn steps of each plan.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    capabilities = Capabilities(causal=False, stateful=False, max_magnitude=SQUARES_FIT)
    takes_query_mask = True
    undecayed = ("z",)

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        num_anchors: int = 64,
        num_steps: int = 5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_anchors < 1 or num_steps < 0:
            raise ValueError(
                f"num_anchors is {num_anchors} and num_steps is {num_steps}; they must be at least "
                "1 and at least 0."
            )
        self.num_steps = num_steps
        factory: Factory = {"device": device, "dtype": dtype}
        self.z = nn.Parameter(torch.randn(num_heads, num_anchors, head_dim, **factory))
        self.log_mass = nn.Parameter(torch.zeros(num_heads, num_anchors, **factory))

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
        """Return the transported values; zero without keys.

        An output depends on the other queries, so padded queries must be masked. Without a
        ``query_mask`` and with equal numbers of queries and keys, ``key_mask`` is used for both.
        """
        if query_mask is None and key_mask is not None and q.shape[2] == k.shape[2]:
            query_mask = key_mask
        with full_precision(q):
            y = anchored_attention(
                q,
                k,
                v,
                self.z,
                self.log_mass.softmax(-1),
                num_steps=self.num_steps,
                key_mask=key_mask,
                query_mask=query_mask,
            )
        return y.to(v.dtype)


class TransportAttention(MultiHeadAttention):
    """Multi-head attention whose weights are a transport plan from queries to keys.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_anchors: Anchors of each head; the rank of the weights is at most this.
        num_steps: Pairs of Sinkhorn steps. Rows of weights sum to one after any number, columns in
            the limit.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> attn = TransportAttention(16, 4, num_anchors=8)
        >>> attn(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    core: TransportCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_anchors: int = 64,
        num_steps: int = 5,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        heads = max(num_heads, 1)
        core = TransportCore(
            max(dim // heads, 1), heads, num_anchors=num_anchors, num_steps=num_steps, **factory
        )
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)


register_attention(
    "transport",
    TransportAttention,
    capabilities=TransportCore.capabilities,
    cost="n",
    summary="doubly stochastic: transport through learned anchors",
)
