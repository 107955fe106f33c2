"""Linformer-style attention for any length (after Wang et al. 2020, arXiv 2006.04768).

    y = softmax(q (E k)ᵀ/√d) (F v)

In the paper ``E`` and ``F`` have one learned column per position, which fixes the length. Here a
row of ``E`` is a function of the *relative* position, ``E_ji = Σ_l e_jl √2 cos(π l (i + ½)/m) / m``
with learned coefficients ``e`` (``l < m``), so any length works. Initially row ``j`` is a low-pass
filter around the position ``(j + ½)/s``, so each projected key is a local mean. The projection
mixes all positions, so there is no causal form.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities, is_plain
from primal_attention.attention.multihead import Core, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.attention.rotary import Turn
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.kernels.base import Factory

__all__ = ["LinformerAttention", "LinformerCore"]


class LinformerCore(Core):
    """Softmax over ``s`` projected keys in ``O((n + m) s (d + v))`` time."""

    capabilities = Capabilities(causal=False, stateful=False, time=JOINED_TIME | {"rotary"})
    ordered = True

    def __init__(
        self,
        num_heads: int,
        *,
        num_projections: int = 128,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_projections < 1:
            raise ValueError(f"num_projections must be at least 1, got {num_projections}.")
        self.num_projections = num_projections
        at = (torch.arange(num_projections, dtype=torch.float64) + 0.5) / num_projections
        dtype = torch.get_default_dtype() if dtype is None else dtype
        waves, scale = _cosines(at, num_projections)
        start = (waves.mT * scale).to(device=device, dtype=dtype)
        self.e_k = nn.Parameter(start.repeat(num_heads, 1, 1))
        self.e_v = nn.Parameter(start.repeat(num_heads, 1, 1))

    def project(
        self, x: Float[Tensor, "b m c"], key_mask: Bool[Tensor, "b m"] | None
    ) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b s 1"]]:
        """Return the cosine means of the tokens and of a constant token of ones.

        Positions are relative to the number of real keys.
        """
        with full_precision(x):
            x = x.to(accumulator(x))
            at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[None] + 0.5
            count = at.new_full((1, 1), x.shape[1])
            if key_mask is not None:
                count = key_mask.sum(1, keepdim=True).to(x.dtype)
            count = count.clamp_min(1)
            waves, scale = _cosines(at / count, self.num_projections)
            if key_mask is not None:
                waves = torch.where(key_mask[:, None], waves, 0.0)
            # with fewer tokens than cosines, higher frequencies repeat lower ones: drop them
            order = torch.arange(self.num_projections, device=x.device)
            scale = (scale * torch.where(order < count, 1 / count, 0.0))[..., None]
            return (waves @ x) * scale, waves.sum(-1, keepdim=True) * scale

    def attend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s v"],
    ) -> Float[Tensor, "b h n v"]:
        """Return softmax attention over the learned mixtures of cosine means."""
        wide = accumulator(q)
        with full_precision(q):
            keys, values = (e.to(wide) @ t.to(wide) for e, t in ((self.e_k, k), (self.e_v, v)))
            return scaled_dot_product_attention(q.to(wide), keys, values)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        v: Float[Tensor, "b h m v"],
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "b h n v"]:
        """Return the softmax mean of the projected values; zero without keys."""
        # one product with the cosines for all heads
        k_, v_ = (
            self.project(t.transpose(1, 2).flatten(2), key_mask)[0]
            .unflatten(-1, (t.shape[1], t.shape[3]))
            .transpose(1, 2)
            for t in (k, v)
        )
        return self.attend(q, k_, v_).to(v.dtype)


def _cosines(
    at: Float[Tensor, "*b n"], num: int
) -> tuple[Float[Tensor, "*b s n"], Float[Tensor, " s"]]:
    """Return cosines of increasing frequency, and factors that make their mean square one."""
    order = torch.arange(num, device=at.device, dtype=at.dtype)
    waves = (order[:, None] * (math.pi * at[..., None, :])).cos_()
    return waves, torch.where(order == 0, 1.0, 2.0).to(at.dtype).sqrt()


class LinformerAttention(MultiHeadAttention):
    """Multi-head softmax attention over learned projections of the sequence.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_projections: Number of projected keys and values per head, and of cosines in a
            projection.
        bias: Whether the four projections of tokens have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> attn = LinformerAttention(16, 4, num_projections=8)
        >>> attn(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    core: LinformerCore

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_projections: int = 128,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        core = LinformerCore(max(num_heads, 1), num_projections=num_projections, **factory)
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)

    def _attend(
        self, q: Tensor, memory: Tensor, rotary: Turn | None, also: dict[str, Any]
    ) -> Float[Tensor, "b h n v"]:
        if rotary is not None:
            return super()._attend(q, memory, rotary, also)
        # projecting is linear: project s sums instead of m tokens
        sums, ones = self.core.project(memory, also["key_mask"])
        sums, ones = sums.to(memory.dtype), ones.to(memory.dtype)
        k, v = (self._split(_project_sums(p, sums, ones)) for p in (self.k_proj, self.v_proj))
        return self.core.attend(q, k, v).to(v.dtype)


def _project_sums(
    projection: nn.Linear, sums: Float[Tensor, "b s c"], ones: Float[Tensor, "b s 1"]
) -> Float[Tensor, "b s c_out"]:
    """Return the sums of projected tokens; the bias is multiplied by the sum of ones."""
    if is_plain(projection):
        y = linear(sums, projection.weight)
        return y if projection.bias is None else y + ones.to(y.dtype) * projection.bias.to(y.dtype)
    zero = torch.zeros_like(sums[:, :1])
    projected: Tensor = projection(sums)
    return projected + (ones - 1) * projection(zero)


register_attention(
    "linformer",
    LinformerAttention,
    capabilities=LinformerCore.capabilities,
    cost="n",
    summary="softmax over learned smooth projections of the sequence",
)
