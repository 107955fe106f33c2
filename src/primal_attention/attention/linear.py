"""Linear attention with ``φ = elu + 1`` (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import elu

from primal_attention.attention.base import Capabilities, State
from primal_attention.attention.multihead import Core, MultiHeadAttention, seen_after
from primal_attention.attention.registry import register_attention
from primal_attention.functional import linear_attention
from primal_attention.functional.precision import accumulator

__all__ = ["LinearAttention", "LinearCore"]


class LinearCore(Core):
    """``φ(q) (φ(k)ᵀ v) / φ(q) (φ(k)ᵀ 1)`` in ``O(n d v)`` time, state ``d × (v + 1)`` per head."""

    capabilities = Capabilities()

    def features(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return the positive features ``elu(x) + 1``."""
        return elu(x) + 1

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the kernel average of the values; zero for a row without keys."""
        return linear_attention(
            self.features(q), self.features(k), v, key_mask=key_mask, is_causal=is_causal
        ).values

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums."""
        b, h, _, d = k.shape
        sums = k.new_zeros(b, h, d, v.shape[-1] + 1, dtype=accumulator(k))
        return State((sums,), torch.zeros(b, dtype=torch.long, device=k.device))

    def step(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b h t d"],
        v: Float[Tensor, "b h t v"],
        state: State,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t v"], State]:
        """Add the new tokens to the sums and read them; the cost does not grow."""
        y, sums = linear_attention(
            self.features(q),
            self.features(k),
            v,
            key_mask=key_mask,
            is_causal=True,
            state=state.tensors[0],
        )
        return y, State((sums,), seen_after(state, k, key_mask))


class LinearAttention(MultiHeadAttention):
    """Multi-head linear attention with the elu + 1 feature map.

    Args:
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> LinearAttention(16, 4)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim, num_heads, LinearCore(), bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "linear",
    LinearAttention,
    capabilities=LinearCore.capabilities,
    cost="n",
    summary="kernel attention with features elu + 1",
)
