"""Linformer-style attention for any length (after Wang et al. 2020, arXiv 2006.04768).

    y = softmax(q (E k)ᵀ/√d) (F v)

The paper learns ``E`` and ``F`` with one column per position, which fixes the length. Here a row of
``E`` is a function of *relative* position, ``E_ji = Σ_l e_jl √2 cos(π l (i + ½)/m) / m``, and the
coefficients ``e`` are learned (``l < m``), so that any number of tokens works. At first row ``j``
is a low-pass filter around the position ``(j + ½)/s``: each projected key is a local average.
The projection mixes all positions: there is no causal form.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from primal_attention.attention.base import Capabilities
from primal_attention.attention.multihead import Core, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.precision import accumulator, full_precision

__all__ = ["LinformerAttention", "LinformerCore"]


class LinformerCore(Core):
    """Softmax over ``s`` projected keys in ``O((n + m) s (d + v))`` time."""

    capabilities = Capabilities(causal=False, stateful=False)
    ordered = True

    def __init__(
        self, num_heads: int, *, num_projections: int = 128, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        if num_projections < 1:
            raise ValueError(f"num_projections must be at least 1, got {num_projections}.")
        self.num_projections = num_projections
        at = (torch.arange(num_projections, dtype=torch.float64) + 0.5) / num_projections
        dtype = torch.get_default_dtype() if dtype is None else dtype
        start = _cosines(at, num_projections).to(device=device, dtype=dtype)
        self.e_k = nn.Parameter(start.repeat(num_heads, 1, 1))
        self.e_v = nn.Parameter(start.repeat(num_heads, 1, 1))

    def basis(
        self, m: int, key_mask: Bool[Tensor, "b m"] | None, like: Tensor
    ) -> Float[Tensor, "b m s"]:
        """Return the cosines of relative positions over the number of keys; zero for padding."""
        at = torch.arange(m, device=like.device, dtype=like.dtype)[None] + 0.5
        real = torch.ones_like(at, dtype=torch.bool) if key_mask is None else key_mask
        count = real.sum(1, keepdim=True).clamp_min(1)
        waves = _cosines(at / count, self.num_projections) / count[..., None]
        # what fewer tokens than cosines cannot resolve would only repeat, and add up
        order = torch.arange(self.num_projections, device=like.device)
        resolved = order < count[..., None]  # [b 1 s]
        return torch.where(real[..., None] & resolved, waves, 0.0)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return softmax averages of the projected values; zero without keys."""
        wide, dtype = accumulator(q), v.dtype
        with full_precision(q):
            q, k, v = (t.to(wide) for t in (q, k, v))
            waves = self.basis(k.shape[2], key_mask, k).mT[:, None]  # [b 1 s m]
            keys, values = self.e_k.to(wide) @ (waves @ k), self.e_v.to(wide) @ (waves @ v)
            return scaled_dot_product_attention(q, keys, values).to(dtype)


def _cosines(at: Float[Tensor, "*n"], num: int) -> Float[Tensor, "*n s"]:
    order = torch.arange(num, device=at.device, dtype=at.dtype)
    scale = torch.where(order == 0, 1.0, 2.0).to(at.dtype).sqrt()
    return scale * torch.cos(math.pi * order * at[..., None])


class LinformerAttention(MultiHeadAttention):
    """Multi-head softmax attention over learned projections of the sequence.

    Args:
        dim: Model width.
        num_heads: Heads; must divide ``dim``.
        num_projections: Projected keys and values per head; also the smoothest-to-roughest
            cosines that a projection may use.
        bias: Whether the four projections of tokens have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> attn = LinformerAttention(16, 4, num_projections=8)
        >>> attn(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_projections: int = 128,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        core = LinformerCore(max(num_heads, 1), num_projections=num_projections, **factory)
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)


register_attention(
    "linformer",
    LinformerAttention,
    capabilities=LinformerCore.capabilities,
    cost="n",
    summary="softmax over learned smooth projections of the sequence",
)
