"""Nyströmformer (Xiong et al. 2021, arXiv 2102.03902): softmax by landmarks, plus a convolution."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from primal_attention.functional.linear import from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.schulz import newton_schulz

__all__ = ["nystromformer_attention", "token_convolution"]

_BLOCK = 32
"""Smallest block of tokens that one banded matrix convolves."""


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

    Both large factors use the fused kernel, so no ``n × s`` matrix is kept for backward.

    Args:
        q: Queries, not scaled.
        k: Keys.
        v: Values.
        q_l: Query landmarks.
        k_l: Key landmarks.
        key_mask: ``True`` where a key is real.
        steps: Number of iterations for the pseudo-inverse.
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
        # norms per matrix: a sequence must not influence the others in the batch
        columns, rows = (a.sum(i, keepdim=True).amax((-2, -1), keepdim=True) for i in (-2, -1))
        inverse = newton_schulz(a, a.mT / (columns * rows), steps)
        return scaled_dot_product_attention(q, k_l, inverse @ right).to(v.dtype)


def token_convolution(
    x: Float[Tensor, "b h n d"], weight: Float[Tensor, "h k"]
) -> Float[Tensor, "b h n d"]:
    """Return ``y_i = Σ_t w_t x_{i + t - k/2}`` per head, zero beyond the ends; ``k`` is odd.

    It multiplies blocks of tokens by banded matrices. On a CPU this takes half the time of a
    grouped convolution, and a third in training.

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
        return _convolve_views(x, band, half)
    blocks = to_chunks(pad(x, (0, 0, half, half)), block)  # [b h g i d]
    pairs = torch.cat([blocks, pad(blocks, (0, 0, 0, 0, 0, 1))[:, :, 1:]], dim=3)
    if torch.compiler.is_compiling():
        # the reshapes of einsum would restrict an exported program to some lengths
        return from_chunks(band[:, None] @ pairs, n)
    return from_chunks(torch.einsum("hij,bhgjd->bhgid", band, pairs), n)


def _convolve_views(
    x: Float[Tensor, "b h n d"], band: Float[Tensor, "h i j"], half: int
) -> Float[Tensor, "b h n d"]:
    """Return the convolution from overlapping views of two blocks, without copying tokens."""
    (b, h, n, d), block = x.shape, band.shape[1]
    g = -(-(n + half) // block) + 1  # the last block stays zero
    tokens = x.new_zeros(h, b, g * block, d)
    tokens[:, :, half : half + n] = x.transpose(0, 1)
    y, count = torch.empty_like(tokens), max(b * g - 1, 0)
    for own, padded, out in zip(band, tokens, y, strict=True):
        pairs = padded.as_strided((count, 2 * block, d), (block * d, d, 1))
        # pairs that span two sequences are computed too, and ignored
        torch.bmm(own.expand(count, -1, -1), pairs, out=out.view(-1, block, d)[:count])
    return y[:, :, :n].transpose(0, 1)
