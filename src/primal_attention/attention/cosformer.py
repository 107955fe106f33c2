"""cosFormer: weights that decrease with distance (Qin et al. 2022, arXiv 2202.08791).

    A_ij = ReLU(q_i)·ReLU(k_j) cos(π (i − j) / 2M)

The cosine of a difference is an inner product of cosines and sines, so the weights are inner
products of features. In the paper ``M`` is the current length; then the function changes with the
length, and causal outputs depend on later tokens. Here the horizon ``M`` is fixed. Beyond it the
published weight is negative, so by default the cosine is squared, and the weight never vanishes:

    ε + (1 − ε) cos²(π (i − j) / 2M) = (1 + ε)/2 + (1 − ε)/2 cos(π (i − j) / M),   ε = 1/1024

The weight falls from one to ``ε`` at the horizon, and has the period ``2M``. With ``ε = 0`` a
query that overlaps only a key at the horizon would divide rounding errors by each other.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities, State
from primal_attention.attention.features import FeatureCore
from primal_attention.attention.multihead import MultiHeadAttention
from primal_attention.attention.registry import register_attention

__all__ = ["CosformerAttention", "CosformerCore"]

_FLOOR = 1 / 1024
"""Weight at the horizon. Relative rounding errors of a row are below ``1 / _FLOOR`` units."""


class CosformerCore(FeatureCore):
    """``ReLU`` features times cosines of the position: ``O((n + m) d v)`` time, constant state.

    Args:
        horizon: Distance ``M`` at which the weight is smallest; beyond it the weight rises again.
        power: 2, or 1 for the published weight, which allows at most ``horizon`` tokens.
    """

    capabilities = Capabilities(relative_position=True, time=JOINED_TIME | {"product", "rotary"})
    ordered = True

    def __init__(self, horizon: int = 1024, power: Literal[1, 2] = 2) -> None:
        super().__init__()
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {horizon}.")
        if power not in (1, 2):
            raise ValueError(f"power must be 1 or 2, got {power}.")
        self.horizon, self.power = horizon, power

    def query_features(
        self, x: Float[Tensor, "b h n d"], position: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b h n p"]:
        """Return ``ReLU(x)`` times cosine and sine of the position; if squared, also times one."""
        # reduce the position by whole periods as an integer: angles stay exact at any length
        turn = position % (4 * self.horizon)
        angle = turn.to(x.dtype) * (math.pi * self.power / (2 * self.horizon))
        angle = angle[:, None, :, None]
        x = x.relu()
        if self.power == 1:
            return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)
        plain, wave = x * ((1 + _FLOOR) / 2) ** 0.5, x * ((1 - _FLOOR) / 2) ** 0.5
        return torch.cat([plain, wave * angle.cos(), wave * angle.sin()], dim=-1)

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
        if self.power == 1:
            self._check_length(max(q.shape[2], k.shape[2]))
        return super().forward(q, k, v, key_mask=key_mask, is_causal=is_causal)

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
        y, state = super().step(q, k, v, state, key_mask=key_mask)
        # a compiled step cannot read the number of tokens
        if self.power == 1 and state.seen.numel() and not torch.compiler.is_compiling():
            self._check_length(int(state.seen.max()))
        return y, state

    def _check_length(self, length: int) -> None:
        if length > self.horizon:
            raise ValueError(
                f"The sequence has {length} tokens, but cosformer with power=1 allows at most "
                f"horizon={self.horizon}; raise horizon or use power=2."
            )


class CosformerAttention(MultiHeadAttention):
    """Multi-head linear attention with weights that decrease with the distance of two tokens.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        horizon: Distance in tokens at which the weight is smallest, 1/1024; in the paper the
            length. Beyond it the weight rises again, with the period ``2 * horizon``.
        power: 2, or 1 for the published weight, which allows at most ``horizon`` tokens.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> CosformerAttention(16, 4, horizon=64)(torch.randn(2, 5, 16), is_causal=True).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        horizon: int = 1024,
        power: Literal[1, 2] = 2,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        core = CosformerCore(horizon, power)
        super().__init__(
            dim, num_heads, core, bias=bias, dropout=dropout, device=device, dtype=dtype
        )


register_attention(
    "cosformer",
    CosformerAttention,
    capabilities=CosformerCore.capabilities,
    cost="n",
    summary="ReLU features, weights decrease with distance",
)
