"""Film reviews for the study of counts: words, counts, held-out cases, and rank-k attention."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.projection import normalize_rows
from primal_attention.analysis.counts.vocabulary import learn_vocabulary, split_words
from primal_studies.counts.prediction import NextWordCases, next_word_cases
from primal_studies.kit.texts import Labelled, imdb_reviews, wikitext_lines

__all__ = [
    "imdb_cases",
    "imdb_counts",
    "imdb_labels",
    "imdb_words",
    "low_rank_distances",
    "wikitext_ids",
]


@functools.cache
def imdb_words(split: str, reviews: int | None = None, data: Path | None = None) -> list[list[str]]:
    """Return the words of the reviews of a split, evenly spaced if only some are wanted."""
    texts = (re.sub(r"<br ?/?>", " ", review.text) for review in _reviews(split, reviews, data))
    return [split_words(text) for text in texts]


def imdb_labels(split: str, reviews: int | None = None, data: Path | None = None) -> list[int]:
    """Return the labels of the reviews that :func:`imdb_words` returns."""
    return [int(review.label) for review in _reviews(split, reviews, data)]


def _reviews(split: str, count: int | None, data: Path | None) -> list[Labelled]:
    found = list(imdb_reviews(split, data))
    if count is None or count >= len(found):
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, count).astype(int)]


def wikitext_ids(split: str, words: int, data: Path | None = None) -> NDArray[np.int64]:
    """Return WikiText-2 as numbers of its most frequent training words; ``words`` is any other."""
    vocabulary, coded = learn_vocabulary([_wikitext_words("train", data)], words, 1)
    found = coded[0] if split == "train" else vocabulary.encode(_wikitext_words(split, data))
    return np.where(found < 0, words, found)


def _wikitext_words(split: str, data: Path | None) -> list[str]:
    lines = wikitext_lines(split, data)
    # the last line has an end, too: what stands behind it is no line
    lines = lines if lines[-1] else lines[:-1]
    return [word for line in lines for word in (*line.split(), "<eos>")]


@functools.cache
def imdb_counts(
    top_k: int, reviews: int | None = None, window: int = 5, data: Path | None = None
) -> Cooccurrence:
    """Return the counts of the training reviews, weighted by the inverse distance."""
    return Cooccurrence(top_k=top_k, window=window).fit(imdb_words("train", reviews, data))


@functools.cache
def imdb_cases(
    counts: Cooccurrence, count: int, length: int = 8, data: Path | None = None
) -> NextWordCases:
    """Return stretches of the test reviews in which all words are known."""
    documents = (counts.encode(words) for words in imdb_words("test", None, data))
    return next_word_cases(documents, length=length, count=count)


def low_rank_distances(
    counts: Cooccurrence,
    contexts: NDArray[np.int64],
    ranks: Sequence[int],
    *,
    words: int = 1000,
    smoothing: float = 0.5,
) -> dict[str, float]:
    """Return the mean total variation between approximations and exact count attention.

    Exact weights are ``Norm(M)`` of ``F + smoothing``. Rank ``k`` stands for a softmax of the PMI
    cut off after ``k`` singular directions, plus the log probability of the key.

    Args:
        counts: The counts; the first ``words`` words are used.
        contexts: Sequences of word numbers below ``words``.
        ranks: Numbers of singular directions.
        words: Number of words.
        smoothing: Added to every count.
    """
    full = counts.forward[:words][:, :words].toarray()
    forward = full + smoothing
    keys = forward.sum(0) / forward.sum()
    pmi = np.log(forward / forward.sum(1, keepdims=True) / keys)
    at = contexts[:, :, None], contexts[:, None, :]
    exact, bias = normalize_rows(forward[at]), np.log(keys)[contexts][:, None, :]
    u, sigma, v = np.linalg.svd(pmi)

    def distance(weights: NDArray[np.float64]) -> float:
        return float(np.abs(weights - exact).sum(-1).mean() / 2)

    both = full + full.T + 2 * smoothing
    found = {
        "uniform": distance(np.full(exact.shape, 1 / exact.shape[-1])),
        "key bias only": distance(normalize_rows(np.exp(np.broadcast_to(bias, exact.shape)))),
        "symmetric counts": distance(normalize_rows(both[at])),
    }
    for rank in ranks:
        low = (u[:, :rank] * sigma[:rank]) @ v[:rank]
        logits = low[at] + bias
        weights = normalize_rows(np.exp(logits - logits.max(-1, keepdims=True)))
        found[str(rank)] = distance(weights)
    return found
