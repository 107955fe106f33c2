"""Softmax attention: with the fused kernel, and with an explicit matrix of weights."""

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities
from primal_attention.attention.multihead import CachingCore, FixedCoreAttention, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.precision import accumulator, full_precision

__all__ = [
    "ExplicitSoftmaxAttention",
    "ExplicitSoftmaxCore",
    "SoftmaxAttention",
    "SoftmaxCore",
]


class SoftmaxCore(CachingCore):
    """``softmax(q kᵀ / √d) v`` in ``O(n m d)`` time; the decoding state grows with every token."""

    capabilities = Capabilities(time=JOINED_TIME | {"rotary", "stationary-bias"})
    takes_groups = True

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b g m d"],
        v: Float[Tensor, "b g m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the softmax mean of the values; zero for a row without keys."""
        if key_mask is None:
            shared = k.shape[1] != q.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shared)
        # one mask row for all queries: if expanded, the fused kernel copies it to n × m floats
        keep = key_mask[:, None, None, :]
        if is_causal:
            keep = keep.expand(-1, -1, q.shape[2], -1).tril()
        return self._attend_masked(q, k, v, keep)

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        shared = k.shape[1] != q.shape[1]
        y = scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=shared)
        return torch.where(keep.any(-1, keepdim=True), y, 0.0)


class ExplicitSoftmaxCore(SoftmaxCore):
    """Softmax that forms the ``n × m`` weights, for dropout on weights, inspection and hooks.

    Args:
        weight_dropout: Probability of dropping a weight in training, as in Vaswani et al. 2017.
    """

    takes_groups = False

    def __init__(self, weight_dropout: float = 0.0) -> None:
        super().__init__()
        if not 0 <= weight_dropout < 1:
            raise ValueError(
                f"weight_dropout must be at least 0 and less than 1, got {weight_dropout}."
            )
        self.weight_dropout = nn.Dropout(weight_dropout)
        if weight_dropout:
            self.capabilities = dataclasses.replace(self.capabilities, deterministic=False)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the softmax mean of the values; zero for a row without keys."""
        weights = self.weights(q, k, key_mask=key_mask, is_causal=is_causal)
        return self.weight_dropout(weights) @ v

    def weights(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n m"]:
        """Return the dense matrix of weights."""
        keep = None
        if key_mask is not None:
            keep = key_mask[:, None, None, :].expand(-1, -1, q.shape[2], -1)
        if is_causal:
            every = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            keep = (every if keep is None else keep).tril()
        return self._weights(q, k, keep)

    def _weights(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        if q.dtype == torch.float16:  # its range is too small for scores
            with full_precision(q):
                scores = q.float() @ k.float().transpose(-1, -2)
        else:
            scores = q @ k.transpose(-1, -2)
        if keep is None:
            return scores.softmax(-1, dtype=accumulator(q)).to(q.dtype)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=accumulator(q)).to(q.dtype)
        # a row without keys must be zero, not uniform
        return torch.where(keep, weights, 0.0)

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return self.weight_dropout(self._weights(q, k, keep)) @ v


class SoftmaxAttention(FixedCoreAttention):
    """Multi-head softmax attention with the fused kernel.

    Arguments as in :class:`FixedCoreAttention`.

    Example:
        >>> SoftmaxAttention(16, 4)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    core_class = SoftmaxCore


class ExplicitSoftmaxAttention(MultiHeadAttention):
    """Multi-head softmax attention that forms its matrix; the baseline in many papers.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        weight_dropout: Probability of dropping a weight in training.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> layer = ExplicitSoftmaxAttention(16, 4)
        >>> q = torch.randn(2, 4, 5, 4)
        >>> layer.core.weights(q, q, is_causal=True)[0, 0, 0]
        tensor([1., 0., 0., 0., 0.])
    """

    core: ExplicitSoftmaxCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        weight_dropout: float = 0.0,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = ExplicitSoftmaxCore(weight_dropout)
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "softmax-explicit",
    ExplicitSoftmaxAttention,
    capabilities=ExplicitSoftmaxCore.capabilities,
    cost="n²",
    summary="softmax that forms its matrix, as in many papers",
)
