"""Nyströmformer (Xiong et al. 2021, arXiv 2102.03902): softmax through landmarks, a convolution."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from primal_attention.functional.linear import from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.schulz import iterate

__all__ = ["nystromformer_attention", "token_convolution"]

_BLOCK = 32
"""Tokens that one banded matrix convolves at least."""


def nystromformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    q_l: Float[Tensor, "b h s d"],
    k_l: Float[Tensor, "b h s d"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    steps: int = 6,
) -> Float[Tensor, "b h n v"]:
    """Return ``softmax(q k̃ᵀ/√d) softmax(q̃ k̃ᵀ/√d)⁺ softmax(q̃ kᵀ/√d) v`` (Xiong et al. 2021).

    Both tall factors go through the fused kernel, so no ``n × s`` matrix is kept.

    Args:
        q: Queries, not scaled.
        k: Keys.
        v: Values.
        q_l: Query landmarks.
        k_l: Key landmarks.
        key_mask: ``True`` where a key is real.
        steps: Iterations for the pseudo-inverse.
    """
    wide = accumulator(q)
    with full_precision(q):
        q, k, q_l, k_l = (t.to(wide) for t in (q, k, q_l, k_l))
        mask = None
        if key_mask is not None:
            mask = key_mask[:, None, None, :].expand(-1, q.shape[1], q_l.shape[2], -1)
        right = scaled_dot_product_attention(q_l, k, v.to(wide), attn_mask=mask)
        if key_mask is not None:
            right = torch.where(key_mask.any(1)[:, None, None, None], right, 0.0)
        a = (q_l @ k_l.mT * q.shape[-1] ** -0.5).softmax(-1)
        # each matrix by its own norms: batch mates must not meet here
        columns, rows = (a.sum(i, keepdim=True).amax((-2, -1), keepdim=True) for i in (-2, -1))
        inverse = iterate(a, a.mT / (columns * rows), steps)
        return scaled_dot_product_attention(q, k_l, inverse @ right).to(v.dtype)


def token_convolution(
    x: Float[Tensor, "b h n d"], weight: Float[Tensor, "h k"]
) -> Float[Tensor, "b h n d"]:
    """Return ``y_i = Σ_t w_t x_{i + t - k/2}`` per head, zero beyond the ends; ``k`` is odd.

    By products with banded matrices over blocks of tokens: on a CPU that costs half of what a
    grouped convolution does, whose layout is made for images, and a third in training.

    Example:
        >>> token_convolution(torch.ones(1, 1, 4, 1), torch.ones(1, 3)).flatten()
        tensor([2., 3., 3., 2.])
    """
    n, taps = x.shape[2], weight.shape[1]
    half, block = taps // 2, max(_BLOCK, taps - 1)
    if not torch.compiler.is_compiling():
        block = min(block, max(n + 2 * half, 1))
    at = torch.arange(block, device=x.device)
    tap = torch.arange(2 * block, device=x.device) - at[:, None]
    inside = (tap >= 0) & (tap < taps)
    band = torch.where(inside, weight[:, tap.clamp(0, taps - 1)], 0.0)  # [h i 2i]
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _convolve_in_place(x, band, half)
    blocks = to_chunks(pad(x, (0, 0, half, half)), block)  # [b h g i d]
    pairs = torch.cat([blocks, pad(blocks, (0, 0, 0, 0, 0, 1))[:, :, 1:]], dim=3)
    if torch.compiler.is_compiling():
        # the reshapes of einsum would tie an exported program to some lengths
        return from_chunks(band[:, None] @ pairs, n)
    return from_chunks(torch.einsum("hij,bhgjd->bhgid", band, pairs), n)


def _convolve_in_place(
    x: Float[Tensor, "b h n d"], band: Float[Tensor, "h i j"], half: int
) -> Float[Tensor, "b h n d"]:
    """Multiply two blocks after one another by a band, where they stand: nothing is copied."""
    (b, h, n, d), block = x.shape, band.shape[1]
    g = -(-(n + half) // block) + 1  # the last one stays empty
    tokens = x.new_zeros(h, b, g * block, d)
    tokens[:, :, half : half + n] = x.transpose(0, 1)
    y, count = torch.empty_like(tokens), max(b * g - 1, 0)
    for own, padded, out in zip(band, tokens, y, strict=True):
        pairs = padded.as_strided((count, 2 * block, d), (block * d, d, 1))
        # pairs of two sequences are worked out as well, and thrown away
        torch.bmm(own.expand(count, -1, -1), pairs, out=out.view(-1, block, d)[:count])
    return y[:, :, :n].transpose(0, 1)
