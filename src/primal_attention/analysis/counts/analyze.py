"""The analysis ``counts`` of ``primal analyze``: the probe with counts of texts at hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.probe import CountsResult, probe_heads
from primal_attention.analysis.counts.probe_plots import plot_head_beside_counts
from primal_attention.analysis.options import CountsOptions
from primal_attention.hosts import Batch, batch_arguments
from primal_attention.report.page import to_png

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["analyze_counts"]

_VOCABULARY = 4000
"""Largest vocabulary of counts that are made here."""


def analyze_counts(
    model: nn.Module,
    batches: Sequence[Batch],
    options: CountsOptions,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> CountsResult:
    """Return how much the heads of a model follow the word pairs of texts; see ``probe_heads``.

    Without a file of counts, the inputs are counted. With a tokenizer the help texts of Python are
    counted too: English text that is installed everywhere. Give a file of counts of the model's
    own kind of text for numbers that mean more.
    """
    if options.file is not None:
        counts, corpus = Cooccurrence.load(options.file), options.file.name
    elif tokenizer is None:
        counts, corpus = _count_ids(model, batches), "the inputs"
    else:
        texts = [*_texts(batches, tokenizer), *_help_texts()]
        counts = Cooccurrence.from_corpus(texts, top_k=_VOCABULARY)
        corpus = "the inputs and the help texts of Python"
    found = probe_heads(
        model,
        tokenizer,
        counts,
        words=options.words,
        layers=options.layers,
        offsets=options.offsets or None,
        min_count=options.min_count,
        corpus=corpus,
    )
    if options.text is None or options.head is None:
        return found
    if tokenizer is None:
        raise ValueError("The model has no tokenizer, so a text cannot be read; leave it out.")
    figure = plot_head_beside_counts(
        model, tokenizer, counts, options.text, layer=options.layers[0], head=options.head
    )
    return replace(found, beside=to_png(figure))


def _help_texts() -> list[str]:
    import pydoc_data.topics

    return [str(text) for text in pydoc_data.topics.topics.values()]


def _token_rows(batches: Sequence[Batch]) -> Iterator[Tensor]:
    """Yield the token ids of every sequence, without padding."""
    for batch in batches:
        args, kwargs = batch_arguments(batch)
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("x"))
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                "the inputs of the model are not token ids [batch, tokens]; the analysis counts "
                "needs a model of text."
            )
        keep = kwargs.get("attention_mask", kwargs.get("key_mask"))
        if not isinstance(keep, Tensor) or keep.shape != ids.shape:
            keep = torch.ones_like(ids)
        for row, kept in zip(ids.cpu(), keep.bool().cpu(), strict=True):
            yield row[kept]


def _texts(batches: Sequence[Batch], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    rows = _token_rows(batches)
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def _count_ids(model: nn.Module, batches: Sequence[Batch]) -> Cooccurrence:
    """Return counts of the tokens themselves, for a model without tokenizer."""
    rows = [np.asarray(row) for row in _token_rows(batches)]
    if not rows:
        raise ValueError("batches is empty; the analysis counts needs inputs to count.")
    return Cooccurrence(1 + max(int(row.max()) for row in rows if len(row))).fit(rows)
