"""Linear attention with ``φ = elu + 1`` (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.attention.base import JOINED_TIME, Capabilities
from primal_attention.attention.features import FeatureCore
from primal_attention.attention.multihead import FixedCoreAttention
from primal_attention.attention.registry import register_attention

__all__ = ["LinearAttention", "LinearCore"]

_LOWEST = -40.0
"""Logarithm of the smallest feature of a key; far below rounding beside an ordinary feature."""


class LinearCore(FeatureCore):
    """``φ(q) (φ(k)ᵀ v) / φ(q) (φ(k)ᵀ 1)`` in ``O(n d v)`` time, state ``d × (v + 1)`` per head."""

    capabilities = Capabilities(time=JOINED_TIME | {"product", "rotary"})

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n d"]:
        """Return the positive features ``elu(x) + 1``, times a factor of each query.

        The factor cancels in the output. It makes the largest feature at least one, so that no
        query loses all features to underflow.
        """
        low = x.clamp_max(0)
        # a sum instead of elu: the compiled backward of elu assumes wrong strides
        return (low - low.detach().amax(-1, keepdim=True)).exp_() + x.relu()

    def key_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n d"]:
        """Return the positive features ``elu(x) + 1``, at least ``e^-40``."""
        # a smaller total of a query overflows in backward
        return x.clamp(_LOWEST, 0.0).exp_() + x.relu()


class LinearAttention(FixedCoreAttention):
    """Multi-head linear attention with the elu + 1 feature map.

    Arguments as in :class:`FixedCoreAttention`.

    Example:
        >>> LinearAttention(16, 4)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    core_class = LinearCore


register_attention(
    "linear",
    LinearAttention,
    capabilities=LinearCore.capabilities,
    cost="n",
    summary="kernel attention with features elu + 1",
)
