"""FAVOR+: softmax by positive random features (Choromanski et al. 2021, arXiv 2009.14794).

    exp(q·k / √d) = E φ(q)·φ(k),      φ(x) = exp(w·x̄ − ‖x̄‖²/2) / √p,   x̄ = x / d^(1/4)

Each feature is summed relative to its maximum over the keys, in causal order its running maximum,
which is part of the state. So the formula holds at any scale, and causal outputs do not depend on
later keys.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.types import Device

from primal_attention.attention.base import State
from primal_attention.attention.features import KernelCore
from primal_attention.attention.multihead import MultiHeadAttention, count_seen
from primal_attention.attention.registry import register_attention
from primal_attention.functional.exponential import exponential_attention
from primal_attention.functional.precision import full_precision
from primal_attention.kernels import PositiveFeatures

__all__ = ["FavorAttention", "FavorCore"]


class FavorCore(KernelCore):
    """Attention with positive features: ``O((n + m) p (d + v))`` time, state ``p × (v + 2)``."""

    features: PositiveFeatures

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted mean of the values; zero for a row without keys."""
        logs = self.features.log_features(q, up_to_rows=True), self.features.log_features(k)
        with full_precision(q):
            y = exponential_attention(*logs, v, key_mask=key_mask, is_causal=is_causal)
        return y.values.to(v.dtype)

    def init_state(self, k: Float[Tensor, "b h zero d"], v: Float[Tensor, "b h zero v"]) -> State:
        """Return zero sums and the smallest maxima."""
        logs = self.features.log_features(k)
        _, sums, maximum = exponential_attention(logs, logs, v)
        return State((sums, maximum), torch.zeros(k.shape[0], dtype=torch.long, device=k.device))

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
        sums, maximum = state.tensors
        logs = self.features.log_features(q, up_to_rows=True), self.features.log_features(k)
        with full_precision(q):
            y, sums, maximum = exponential_attention(
                *logs, v, key_mask=key_mask, is_causal=True, state=(sums, maximum)
            )
        return y.to(v.dtype), State((sums, maximum), count_seen(state, k, key_mask))


class FavorAttention(MultiHeadAttention):
    """Multi-head softmax attention approximated by orthogonal positive random features.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_features: Number of random features ``p``; the error falls as ``1/√p``.
        antithetic: Use directions in pairs ``±w``; this lowers the error for small queries and
            keys.
        generator: Random generator of the features.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> FavorAttention(16, 4, num_features=32)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_features: int = 128,
        antithetic: bool = False,
        generator: torch.Generator | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim = max(dim // max(num_heads, 1), 1)
        features = PositiveFeatures(
            head_dim,
            num_features,
            scale=head_dim**-0.5,
            antithetic=antithetic,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            dim,
            num_heads,
            FavorCore(features),
            bias=bias,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )


register_attention(
    "favor",
    FavorAttention,
    capabilities=FavorCore.capabilities,
    cost="n",
    summary="softmax by orthogonal positive random features (FAVOR+)",
)
