"""Turn the masks of other libraries into ``key_mask``, ``document_ids`` and ``is_causal``.

Linear attention supports three kinds of masks: padding, ``[b m]``, causal order, and documents
packed into a row. A mask over pairs of tokens is accepted if it expresses these, and refused
otherwise.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from primal_attention.attention.documents import document_ids_of
from primal_attention.hosts.errors import ConversionError

__all__ = [
    "PACKED",
    "TokenMask",
    "is_tracing",
    "packed_arguments",
    "packed_positions",
    "padding_mask",
    "read_mask",
]

PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""Arguments of the packed batches of transformers, which reach every attention of a model."""


class TokenMask(NamedTuple):
    """What a mask says of the new tokens."""

    key_mask: Bool[Tensor, "b n"] | None = None
    """``True`` where a token is real; ``None`` if all are."""
    document_ids: Int[Tensor, "b n"] | None = None
    """Document of every token, negative at padding; ``None`` if a row is one document."""


def read_mask(
    mask: Shaped[Tensor, "..."] | None,
    *,
    batch: int,
    is_causal: bool,
    tokens: int,
    seen: int = 0,
) -> TokenMask:
    """Return which of the new tokens are real, and to which documents they belong.

    Args:
        mask: ``[b m]`` with true for real tokens, or over pairs, ``[b h n m]``: boolean with true
            where a query attends to a key, or numbers that are added to the scores. ``m`` includes
            earlier tokens. Or the documents of the tokens, ``[b 1 m]``, from :func:`padding_mask`.
        batch: Number of sequences.
        is_causal: Whether the layer is causal; a mask over pairs must then be causal, too.
        tokens: Number ``n`` of new tokens.
        seen: Number of earlier tokens, padding included.

    Raises:
        ConversionError: If a mask over pairs is more than padding, order and packed documents.
    """
    if mask is None:
        return TokenMask()
    if mask.dim() == 2:
        return TokenMask(_last(mask.bool(), tokens, seen))
    if mask.dim() == 3 and not mask.is_floating_point():
        return TokenMask(document_ids=mask[:, 0].expand(batch, -1))
    if mask.dim() != 4:
        raise ConversionError(
            f"A mask must have shape [b m] or [b h n m], got {tuple(mask.shape)}; pass a padding "
            "mask."
        )
    pairs = mask if mask.dtype == torch.bool else mask == 0
    # the last query attends to every real key, causal or not, so its row is the padding mask
    keep = _last(pairs[:, 0, -1], tokens, seen)
    if is_tracing():
        return TokenMask(keep.expand(batch, -1))
    pairs = pairs[..., -tokens:, seen : seen + tokens]
    adds = mask.dtype != torch.bool
    if not (adds and bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())):
        expected = keep[:, None, None, :].expand(-1, -1, tokens, -1)
        # rows of queries that look like padding are compared, too: if sequences are packed into a
        # row, all but the last sequence look like padding
        if torch.equal(pairs, (expected.tril() if is_causal else expected).expand_as(pairs)):
            return TokenMask(keep.expand(batch, -1))
        documents = None if seen else _documents_of_pairs(pairs, is_causal)
        if documents is not None:
            return TokenMask(document_ids=documents.expand(batch, -1))
    raise ConversionError(
        "A converted layer got a mask over pairs of tokens that is more than padding"
        f"{' and causal order' if is_causal else ''}, such as a window or a bias. Attention "
        "without a score matrix does not support it; pass a padding mask [batch, tokens], or do "
        "not convert this layer."
    )


def _documents_of_pairs(
    pairs: Bool[Tensor, "b h n n"], is_causal: bool
) -> Int[Tensor, "b n"] | None:
    """Return the documents that a mask over pairs keeps apart; ``None`` if it does another thing.

    Tokens of a document follow each other. A token is real if it attends to itself.
    """
    real = pairs[:, 0].diagonal(dim1=1, dim2=2)
    begins = torch.zeros_like(real)
    begins[:, 1:] = ~pairs[:, 0].diagonal(offset=-1, dim1=1, dim2=2)
    ids = begins.cumsum(1).masked_fill(~real, -1)
    expected = (ids[:, :, None] == ids[:, None, :]) & real[:, None, :]
    expected = (expected.tril() if is_causal else expected)[:, None]
    # what a padded query attends to does not matter
    wrong = (pairs != expected) & real[:, None, :, None]
    return None if bool(wrong.any()) else ids


def _last(mask: Tensor, tokens: int, seen: int) -> Tensor:
    return mask[:, seen : seen + tokens]


def is_tracing() -> bool:
    """Return whether torch compiles, exports or traces, so that values cannot be read."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def packed_arguments(
    arguments: Mapping[str, object], batch: int, tokens: int
) -> Int[Tensor, "b n"] | None:
    """Return the documents that the arguments of a packed batch name; ``None`` without such.

    Args:
        arguments: May hold ``cu_seq_lens_q`` or ``seq_idx``, as ``DataCollatorWithFlattening`` of
            transformers returns them; see :data:`PACKED`.
        batch: Number of rows.
        tokens: Number of tokens of a row.
    """
    bounds, other = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if bounds is None:
        return cast("Tensor | None", arguments.get("seq_idx"))
    bounds = cast(Tensor, bounds)
    if batch != 1:
        raise ConversionError(
            f"cu_seq_lens_q names documents packed into one row, and the batch has {batch} rows; "
            "pack all documents into one row."
        )
    if isinstance(other, Tensor) and not is_tracing() and not torch.equal(bounds, other):
        raise ConversionError(
            "cu_seq_lens_q and cu_seq_lens_k differ, and a converted layer attends from a document "
            "to itself; pass the same bounds twice."
        )
    return document_ids_of(cu_seqlens=bounds, tokens=tokens)


def packed_positions(positions: object, batch: int) -> Int[Tensor, "b n"] | None:
    """Return the documents of positions that begin again; ``None`` if every row is one document.

    With a cache transformers does not look for them, and joins the documents.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2 or is_tracing():
        return None
    ids = torch.zeros_like(positions)
    ids[:, 1:] = (positions.diff(dim=1) < 1).cumsum(1)
    return ids.expand(batch, -1) if bool(ids.any()) else None


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
    converted layers do not need. For packed rows it returns the documents, ``[b 1 m]``.
    """
    if not is_tracing():
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function not in (None, bidirectional_mask_function, causal_mask_function):
            documents = _packed_documents(mask_function)
            if documents is not None and attention_mask is None:
                return documents[:, None]
            raise ConversionError(
                "The model asks for a mask over pairs of tokens, such as a sliding window, which "
                "its converted layers do not support; pass a padding mask [batch, tokens], or "
                "revert the conversion."
            )
        if attention_mask is not None and bool(attention_mask.all()):
            # without a mask the layers take their shorter path
            return None
    return attention_mask


def _packed_documents(mask_function: Callable[..., object]) -> Int[Tensor, "b n"] | None:
    """Return the documents of a causal mask over packed rows; ``None`` for every other mask.

    Transformers passes a function of pairs. Asking it for all pairs would cost what a linear
    attention saves, so the documents are read from the function itself.
    """
    from transformers.masking_utils import causal_mask_function

    parts = _inside(mask_function).get("mask_functions", ())
    if not (isinstance(parts, tuple) and len(parts) == 2 and parts[0] is causal_mask_function):
        return None
    return cast("Tensor | None", _inside(parts[1]).get("packed_sequence_mask"))


def _inside(function: Callable[..., object]) -> dict[str, object]:
    """Return the variables that an inner function takes from the function around it."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
