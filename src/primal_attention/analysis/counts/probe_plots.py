"""A sentence in the eyes of counts and of a head: two matrices side by side."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import nn

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.heat_maps import plot_weights
from primal_attention.analysis.counts.projection import normalize_rows
from primal_attention.analysis.counts.vocabulary import split_words
from primal_attention.hosts import capture

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

__all__ = ["count_weights", "plot_head_beside_counts", "word_weights"]

Weights = Float[NDArray[np.float64], "n n"]


def count_weights(cooccurrence: Cooccurrence, words: list[str]) -> Weights:
    """Return count attention between words: rows of the counts, divided by their sums.

    A row without counts is uniform.

    Example:
        >>> counts = Cooccurrence.from_counts([[0, 3], [1, 1]], ["river", "bank"])
        >>> count_weights(counts, ["river", "bank"])
        array([[0. , 1. ],
               [0.5, 0.5]])
    """
    ids = cooccurrence.encode(words)
    known = ids >= 0
    found = np.zeros((len(ids), len(ids)))
    found[np.ix_(known, known)] = cooccurrence.counts[ids[known]][:, ids[known]].toarray()
    return normalize_rows(found)


def word_weights(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    *,
    layer: int | str = 0,
    head: int = 0,
) -> tuple[list[str], Weights]:
    """Return the words of a text and the attention of a head between them.

    Weights of the tokens of a word are summed over keys and averaged over queries. What goes to
    special tokens and punctuation is left out, and every row is divided by its sum.

    Args:
        model: A model of transformers.
        tokenizer: Its fast tokenizer.
        text: The text.
        layer: Number of the attention layer in the order of the forward, or its name.
        head: Number of the head.
    """
    words = split_words(text)
    if not words:
        raise ValueError(f"the text {text!r} has no words; give at least one.")
    batch = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    spans = batch.pop("offset_mapping")[0].tolist()
    found = capture(model, dict(batch), layers=layer)[0]
    if not 0 <= head < found.num_heads:
        raise ValueError(f"there is no head {head}; the layer has {found.num_heads}, from 0.")
    weights = found.weights(heads=head).cpu().numpy()
    member = np.zeros((len(words), len(spans)))  # which token belongs to which word
    start, lower = 0, text.lower()
    for i, word in enumerate(words):
        begin = lower.index(word, start)
        start = begin + len(word)
        member[i] = [first < start and last > begin for first, last in spans]
    tokens = np.maximum(member.sum(1, keepdims=True), 1)
    grouped = (member / tokens) @ weights @ member.T
    return words, normalize_rows(grouped)


def plot_head_beside_counts(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    cooccurrence: Cooccurrence,
    text: str,
    *,
    layer: int | str = 0,
    head: int = 0,
) -> "Figure":
    """Return a figure: count attention of a text beside that of a head of a model.

    Args:
        model: A model of transformers.
        tokenizer: Its fast tokenizer.
        cooccurrence: The counts; unknown words have uniform rows.
        text: A sentence.
        layer: Number of the attention layer in the order of the forward, or its name.
        head: Number of the head.
    """
    words, weights = word_weights(model, tokenizer, text, layer=layer, head=head)
    panels = {
        "counts": (words, count_weights(cooccurrence, words)),
        f"layer {layer}, head {head}": (words, weights),
    }
    return plot_weights(panels, largest=None)
