"""Linear attention with ``φ = elu + 1`` (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.attention.features import FeatureCore
from primal_attention.attention.multihead import MultiHeadAttention
from primal_attention.attention.registry import register_attention

__all__ = ["LinearAttention", "LinearCore"]


class LinearCore(FeatureCore):
    """``φ(q) (φ(k)ᵀ v) / φ(q) (φ(k)ᵀ 1)`` in ``O(n d v)`` time, state ``d × (v + 1)`` per head."""

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n d"]:
        """Return the positive features ``elu(x) + 1``."""
        # as a sum of two: the compiled backward of elu assumes other strides than it gets
        return x.clamp_max(0).exp() + x.relu()


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
