"""Nyströmformer: softmax attention by landmarks (Xiong et al. 2021, arXiv 2102.03902).

    y = softmax(q k̃ᵀ/√d) softmax(q̃ k̃ᵀ/√d)⁺ softmax(q̃ kᵀ/√d) v + conv(v)

The landmarks ``q̃`` and ``k̃`` are means of segments of real tokens, so padding changes nothing. The
pseudo-inverse is computed for each matrix separately. Segment means contain later tokens, so there
is no causal form.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention.base import JOINED_TIME, Capabilities
from primal_attention.attention.multihead import Core, MultiHeadAttention
from primal_attention.attention.registry import register_attention
from primal_attention.functional.landmarks import segment_means
from primal_attention.functional.nystromformer import nystromformer_attention, token_convolution
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.kernels.base import Factory

__all__ = ["NystromformerAttention", "NystromformerCore"]


class NystromformerCore(Core):
    """Softmax by segment means in ``O(n s (d + v) + s³)`` time, plus a short convolution."""

    ordered = True
    takes_query_mask = True

    def __init__(
        self,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        kernel_size: int | None = 33,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_landmarks < 1:
            raise ValueError(f"num_landmarks must be at least 1, got {num_landmarks}.")
        if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
            raise ValueError(
                f"kernel_size is {kernel_size}; it must be odd and positive, or None for no "
                "convolution."
            )
        self.num_landmarks = num_landmarks
        # the convolution adds values to queries of the same position: not for cross-attention
        self.capabilities = Capabilities(
            causal=False,
            stateful=False,
            cross=kernel_size is None,
            time=JOINED_TIME | {"rotary"},
        )
        self.conv: nn.Parameter | None = None
        if kernel_size is not None:
            self.conv = nn.Parameter(
                torch.empty(num_heads, kernel_size, device=device, dtype=dtype)
            )
            nn.init.uniform_(self.conv, -(kernel_size**-0.5), kernel_size**-0.5)

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
        """Return the approximate softmax mean of the values; zero for a row without keys.

        Without a ``query_mask`` and with equal numbers of queries and keys, ``key_mask`` is used
        for both, so that landmarks contain no padding.
        """
        if query_mask is None and key_mask is not None and q.shape[2] == k.shape[2]:
            query_mask = key_mask
        wide, dtype = accumulator(q), v.dtype
        q, k, v = (t.to(wide) for t in (q, k, v))
        if key_mask is not None:
            v = torch.where(key_mask[:, None, :, None], v, 0.0)
        q_l = segment_means(q, self.num_landmarks, query_mask)
        k_l = segment_means(k, self.num_landmarks, key_mask)
        y = nystromformer_attention(q, k, v, q_l, k_l, key_mask=key_mask)
        if self.conv is not None and v.shape[2]:
            with full_precision(q):
                y = y + token_convolution(v, self.conv.to(wide))
        return y.to(dtype)


class NystromformerAttention(MultiHeadAttention):
    """Multi-head softmax attention approximated by segment means.

    Args:
        dim: Model width.
        num_heads: Number of heads; must divide ``dim``.
        num_landmarks: Number of segment means of queries and of keys; with fewer tokens some
            repeat.
        kernel_size: Length of the depthwise convolution of the values; ``None`` for no convolution,
            which allows cross-attention.
        bias: Whether the four projections have a bias.
        dropout: Probability of dropping an element of the output in training.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> attn = NystromformerAttention(16, 4, num_landmarks=8)
        >>> attn(torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_landmarks: int = 64,
        kernel_size: int | None = 33,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        core = NystromformerCore(
            max(num_heads, 1), num_landmarks=num_landmarks, kernel_size=kernel_size, **factory
        )
        super().__init__(dim, num_heads, core, bias=bias, dropout=dropout, **factory)


register_attention(
    "nystromformer",
    NystromformerAttention,
    capabilities=Capabilities(
        causal=False, stateful=False, cross=False, time=JOINED_TIME | {"rotary"}
    ),
    cost="n",
    summary="softmax by segment means, plus a short convolution",
)
