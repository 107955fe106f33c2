"""Turn the masks of other libraries into ``key_mask`` and ``is_causal``.

Linear attention supports two kinds of masks: padding, ``[b m]``, and causal order. A mask over
pairs of tokens is accepted if it expresses one of these or both, and refused otherwise.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from primal_attention.hosts.errors import ConversionError

__all__ = ["is_tracing", "key_mask_of", "padding_mask"]


def key_mask_of(
    mask: Shaped[Tensor, "..."] | None,
    *,
    batch: int,
    is_causal: bool,
    tokens: int,
    seen: int = 0,
) -> Bool[Tensor, "b n"] | None:
    """Return which of the new tokens are real; ``None`` if all are.

    Args:
        mask: ``[b m]`` with true for real tokens, or over pairs, ``[b h n m]``: boolean with true
            where a query attends to a key, or numbers that are added to the scores. ``m`` includes
            earlier tokens.
        batch: Number of sequences.
        is_causal: Whether the layer is causal; a mask over pairs must then be causal, too.
        tokens: Number ``n`` of new tokens.
        seen: Number of earlier tokens, padding included.

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
    # the last query attends to every real key, causal or not, so its row is the padding mask
    keep = _last(pairs[:, 0, -1], tokens, seen)
    if not is_tracing():
        _check_pairs(mask, pairs, keep, is_causal, seen)
    return keep.expand(batch, -1)


def _last(mask: Tensor, tokens: int, seen: int) -> Tensor:
    return mask[:, seen : seen + tokens]


def is_tracing() -> bool:
    """Return whether torch compiles, exports or traces, so that values cannot be read."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _check_pairs(mask: Tensor, pairs: Tensor, keep: Tensor, is_causal: bool, seen: int) -> None:
    n = keep.shape[1]
    expected = keep[:, None, None, :].expand(-1, -1, n, -1)
    expected = expected.tril() if is_causal else expected
    # rows of queries that look like padding are compared, too: if sequences are packed into a row,
    # all but the last sequence look like padding
    wrong = pairs[..., -n:, seen : seen + n] != expected
    if mask.dtype != torch.bool:
        wrong = wrong | ((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any()
    if bool(wrong.any()):
        raise ConversionError(
            "A converted layer got a mask over pairs of tokens that is more than padding"
            f"{' and causal order' if is_causal else ''}, such as packed sequences, a window or a "
            "bias. Attention without a score matrix does not support it; pass a padding mask "
            "[batch, tokens], or do not convert this layer."
        )


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: Tensor | None = None,
    **_: object,
) -> Tensor | None:
    """Return the padding mask ``[b m]`` unchanged; ``None`` without padding.

    Transformers calls this function instead of building a mask over all pairs of tokens, which
    converted layers do not need.
    """
    if not is_tracing():
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function not in (None, bidirectional_mask_function, causal_mask_function):
            raise ConversionError(
                "The model asks for a mask over pairs of tokens, such as packed sequences or a "
                "sliding window, which its converted layers do not support; pass one sequence a "
                "row with a padding mask, or revert the conversion."
            )
        if attention_mask is not None and bool(attention_mask.all()):
            # without a mask the layers take their shorter path
            return None
    return attention_mask
