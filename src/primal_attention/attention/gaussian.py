"""Exact attention with the Gaussian kernel (Chen et al. 2021, arXiv 2111.00035).

    y_i = Σ_j κ(q̃_i, k̃_j) v_j  [/ Σ_j κ(q̃_i, k̃_j)],      κ(x, y) = exp(−‖x − y‖² / 2)

With ``q̃ = q d^(-1/4)``, ``κ(q̃, k̃)`` is ``exp(q·k / √d)`` times a factor per query and one per key.
The paper does not normalise the rows (``normalize=False``); a row sum is then between 0 and ``n``.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities
from primal_attention.attention.multihead import CachingCore, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.gaussian import gaussian_attention
from primal_attention.functional.precision import accumulator

__all__ = ["GaussianAttention", "GaussianCore"]

_UNIT_SCALE = 0.5
"""Initial root mean square of queries and keys with ``qk_norm``; with 1 most weights are tiny."""


class GaussianCore(CachingCore):
    """``κ(q̃, k̃) v`` at the cost of fused softmax; the decoding state grows with every token."""

    capabilities = Capabilities(time=JOINED_TIME | {"rotary"})

    def __init__(
        self,
        num_heads: int,
        *,
        normalize: bool = True,
        qk_norm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.scale: nn.Parameter | None = None
        if qk_norm:
            scale = torch.full((num_heads,), math.log(_UNIT_SCALE), device=device, dtype=dtype)
            self.scale = nn.Parameter(scale)

    def points(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return scaled queries or keys, in float32 or better."""
        wide = accumulator(x)
        x = x.to(wide)
        if self.scale is not None:
            size = (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
            x = x * size * self.scale.to(wide).exp()[:, None, None]
        return x * x.shape[-1] ** -0.25

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the weighted sum or mean of the values; zero for a row without keys."""
        return gaussian_attention(
            self.points(q),
            self.points(k),
            v,
            key_mask=key_mask,
            is_causal=is_causal,
            normalize=self.normalize,
        )

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        points = self.points(q), self.points(k)
        return gaussian_attention(*points, v, pair_mask=keep[:, 0], normalize=self.normalize)


class GaussianAttention(MultiHeadAttention):
    """Multi-head attention with exact Gaussian-kernel weights.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        normalize: Divide each row of weights by its sum. The paper does not; its outputs grow with
            the number of keys near a query.
        qk_norm: Give queries and keys a learned norm per head. Without it, the output and the
            gradient of a query far from all keys are zero.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> GaussianAttention(16, 4)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        normalize: bool = True,
        qk_norm: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = GaussianCore(
            max(num_heads, 1), normalize=normalize, qk_norm=qk_norm, device=device, dtype=dtype
        )
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "gaussian",
    GaussianAttention,
    capabilities=GaussianCore.capabilities,
    cost="n²",
    summary="exact Gaussian kernel at the speed of fused softmax",
)
