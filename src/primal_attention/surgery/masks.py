"""From the masks of other libraries to ``key_mask`` and ``is_causal``.

Attention in linear time knows two kinds of masks: padding, ``[b m]``, and order. A mask over pairs
of tokens is read as one of these if that is what it says, and refused otherwise.
"""

from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from primal_attention.surgery.config import ConversionError

__all__ = ["is_tracing", "key_mask_of", "padding_mask"]


def key_mask_of(
    mask: Shaped[Tensor, "..."] | None,
    *,
    batch: int,
    is_causal: bool,
    tokens: int,
    seen: int = 0,
) -> Bool[Tensor, "b n"] | None:
    """Return which of the new tokens are real, ``None`` if all are.

    Args:
        mask: ``[b m]`` with true for real tokens, or over pairs, ``[b h n m]``: boolean with true
            where a query may look at a key, or a number to add to the score. ``m`` counts the
            tokens seen before, too.
        batch: Number of sequences.
        is_causal: Whether the layer is causal, so that a mask over pairs may say so.
        tokens: Number ``n`` of new tokens.
        seen: Slots decoded before them.

    Raises:
        ConversionError: If a mask over pairs is neither padding nor padding with order.
    """
    if mask is None:
        return None
    if mask.dim() == 2:
        return _last(mask.bool(), tokens, seen)
    if mask.dim() != 4:
        raise ConversionError(
            f"A mask must have shape [b m] or [b h n m], got {tuple(mask.shape)}; pass a padding "
            "mask."
        )
    pairs = mask if mask.dtype == torch.bool else mask == 0
    # the last query may look at every real key, whether or not there is an order
    keep = _last(pairs[:, 0, -1], tokens, seen)
    if not is_tracing():
        _check_pairs(mask, pairs, keep, is_causal, seen)
    return keep.expand(batch, -1)


def _last(mask: Tensor, tokens: int, seen: int) -> Tensor:
    return mask[:, seen : seen + tokens]


def is_tracing() -> bool:
    """Return whether a program is being captured, so that values cannot be looked at."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _check_pairs(mask: Tensor, pairs: Tensor, keep: Tensor, is_causal: bool, seen: int) -> None:
    n = keep.shape[1]
    expected = keep[:, None, None, :].expand(-1, -1, n, -1)
    expected = expected.tril() if is_causal else expected
    # rows of padded queries count too: in packed sequences they are what gives them away
    wrong = pairs[..., -n:, seen : seen + n] != expected
    if mask.dtype != torch.bool:
        wrong = wrong | ((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any()
    if bool(wrong.any()):
        raise ConversionError(
            "A converted layer was given a mask over pairs of tokens that is more than padding"
            f"{' and causal order' if is_causal else ''}: packed sequences, a window, a bias. "
            "Attention without a score matrix cannot honour it; pass a padding mask [batch, "
            "tokens], or leave this layer unconverted."
        )


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the padding mask ``[b m]`` as it came, ``None`` without padding; for transformers.

    Registered as the mask function of converted models, it keeps them from building a mask over all
    pairs of tokens that nobody reads.
    """
    if not is_tracing():
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function not in (None, bidirectional_mask_function, causal_mask_function):
            raise ConversionError(
                "The model asks for a mask over pairs of tokens (packed sequences, a sliding "
                "window or the like), which its converted layers cannot honour; pass one sequence "
                "a row with a padding mask, or revert the conversion."
            )
        if attention_mask is not None and bool(attention_mask.all()):
            return None
    return attention_mask
