"""Prediction of the next word from counts: which refinement of the projection helps on real text.

Every method gives a word the scores ``Σ_s w_s V[x_s]``, the mean of the value rows ``V`` of the
context words ``x_s`` with weights ``w``. Methods differ in their weights and rows:

======================= =============================================== ==========================
method                  weights                                         rows
======================= =============================================== ==========================
``unigram``             none                                            frequency of the words
``projection``          ``mean_r M_rs``, raw counts                     rows of ``S``, raw counts
``normalized``          ``mean_r Norm(M)_rs``                           rows of ``S``, sum one
``symmetric``           uniform                                         rows of ``S``, sum one
``directional``         uniform                                         rows of ``F``, sum one
``association``         ``softmax_s PPMI(x_last, x_s)`` of ``F``        rows of ``F``, sum one
``inverse-distance``    one over the distance to the next word          rows of ``F``, sum one
``last-word``           all on the last word                            rows of ``F``, sum one
======================= =============================================== ==========================
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.analysis.counts.projection import normalize_rows

__all__ = [
    "NextWordCases",
    "PredictionMethod",
    "PredictionScore",
    "evaluate_prediction",
    "next_word_cases",
    "next_word_scores",
]

Floats = NDArray[np.float64]
PredictionMethod = Literal[
    "unigram",
    "projection",
    "normalized",
    "symmetric",
    "directional",
    "association",
    "inverse-distance",
    "last-word",
]
"""Name of a method; see the table above."""

# cases that are scored at once
_BLOCK = 512


class NextWordCases(NamedTuple):
    """Contexts and the words that followed them."""

    contexts: NDArray[np.int64]
    """Numbers of the context words, ``[cases length]``."""
    targets: NDArray[np.int64]
    """Number of the next word, ``[cases]``."""


class PredictionScore(NamedTuple):
    """How high the true next word ranks."""

    mrr: float
    """Mean of one over the rank."""
    top10: float
    """Share of cases with a rank of at most ten."""
    median_rank: float


def next_word_cases(
    documents: Iterable[NDArray[np.int64]], *, length: int = 8, count: int = 3000, seed: int = 0
) -> NextWordCases:
    """Return random stretches of text in which all words are known.

    Args:
        documents: Held-out documents as numbers; negative numbers are unknown words.
        length: Number of context words.
        count: Number of cases; fewer if the text has fewer.
        seed: Seed of the choice.

    Example:
        >>> next_word_cases([np.array([4, 2, -1, 3, 0, 1])], length=2).contexts
        array([[3, 0]])
    """
    window = np.lib.stride_tricks.sliding_window_view
    stretches = [
        window(ids, length + 1)[(window(ids, length + 1) >= 0).all(1)]
        for ids in map(np.asarray, documents)
        if len(ids) > length
    ]
    found = np.concatenate(stretches or [np.empty((0, length + 1), np.int64)])
    if len(found) == 0:
        raise ValueError(
            f"no document has {length + 1} known words in a row; give more text, or a shorter "
            "length."
        )
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    cases = found[np.sort(chosen)]
    return NextWordCases(cases[:, :-1].copy(), cases[:, -1].copy())


def next_word_scores(
    cooc: Cooccurrence, contexts: NDArray[np.int64], method: PredictionMethod
) -> Floats:
    """Return the scores of all words as the next word, ``[cases words]``.

    Args:
        cooc: The counts.
        contexts: Numbers of the context words, all known.
        method: Weights and rows.

    Example:
        >>> counts = Cooccurrence.from_corpus(["a b c", "a b c", "c a"])
        >>> scores = next_word_scores(counts, counts.encode("a b")[None], "last-word")
        >>> counts.words[scores[0].argmax()]
        'c'
    """
    return _Predictor(cooc, method).scores(np.asarray(contexts))


def evaluate_prediction(
    cooc: Cooccurrence,
    cases: NextWordCases,
    methods: Sequence[PredictionMethod] = get_args(PredictionMethod),
) -> dict[str, PredictionScore]:
    """Return the score of every method on the same cases.

    Words with equal scores share their mean rank.

    Args:
        cooc: Counts of other text than that of the cases.
        cases: Cases of :func:`next_word_cases`.
        methods: The methods to compare.

    Example:
        >>> counts = Cooccurrence.from_corpus(["a b c", "a b c", "c a"])
        >>> cases = next_word_cases([counts.encode("a b c")], length=2)
        >>> evaluate_prediction(counts, cases, ["last-word"])["last-word"].mrr
        1.0
    """
    found = {}
    for method in methods:
        predictor = _Predictor(cooc, method)
        ranks = [
            _ranks(
                predictor.scores(cases.contexts[at : at + _BLOCK]), cases.targets[at : at + _BLOCK]
            )
            for at in range(0, len(cases.targets), _BLOCK)
        ]
        rank = np.concatenate(ranks)
        found[str(method)] = PredictionScore(
            float((1 / rank).mean()), float((rank <= 10).mean()), float(np.median(rank))
        )
    return found


def _ranks(scores: Floats, targets: NDArray[np.int64]) -> Floats:
    own = scores[np.arange(len(targets)), targets][:, None]
    above, equal = (scores > own).sum(1), (scores == own).sum(1)
    return np.asarray(1 + above + (equal - 1) / 2)


class _Predictor:
    """Rows and weights of one method."""

    def __init__(self, cooc: Cooccurrence, method: PredictionMethod) -> None:
        if method not in get_args(PredictionMethod):
            raise ValueError(f"method must be one of {get_args(PredictionMethod)}, got {method!r}.")
        self.method = method
        self.unigram = cooc.unigram.astype(np.float64)
        is_symmetric = method in ("projection", "normalized", "symmetric")
        self.counts = cooc.symmetric if is_symmetric else cooc.forward
        self.rows = self.counts if method == "projection" else _stochastic(self.counts)
        if method == "association":
            self.association = cooc.transform("ppmi", directional=True, smoothing=0.0)

    def scores(self, contexts: NDArray[np.int64]) -> Floats:
        """Return the scores of all words for contexts."""
        from scipy.sparse import csr_array

        count, length = contexts.shape
        if self.method == "unigram":
            return np.repeat(self.unigram[None], count, 0)
        weights = self._weights(contexts)
        shape, starts = (count, len(self.unigram)), np.arange(count + 1) * length
        # a word that stands twice in a context adds up
        spread = csr_array((weights.ravel(), contexts.ravel(), starts), shape=shape)
        return np.asarray((spread @ self.rows).toarray())

    def _weights(self, contexts: NDArray[np.int64]) -> Floats:
        count, length = contexts.shape
        if self.method in ("symmetric", "directional"):
            return np.full((count, length), 1 / length)
        if self.method == "inverse-distance":
            return np.repeat(1.0 / np.arange(length, 0, -1)[None], count, 0)
        if self.method == "last-word":
            return np.repeat(np.eye(length)[-1:], count, 0)
        if self.method == "association":
            logits = _entries(self.association, contexts[:, -1:], contexts)
            shifted = np.exp(logits - logits.max(1, keepdims=True))
            return np.asarray(shifted / shifted.sum(1, keepdims=True))
        m = _entries(self.counts, contexts[:, :, None], contexts[:, None, :])
        if self.method == "normalized":
            m = normalize_rows(m)
        return np.asarray(m.mean(1))


def _stochastic(counts: Any) -> Any:
    """Return sparse counts with rows that sum to one, or to zero without counts."""
    total = np.asarray(counts.sum(1)).ravel()
    scaled = counts.copy()
    scaled.data = scaled.data / np.repeat(total, np.diff(scaled.indptr))
    return scaled


def _entries(matrix: Any, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Floats:
    """Return entries of a sparse matrix at broadcast rows and columns."""
    rows, columns = np.broadcast_arrays(rows, columns)
    flat = matrix[rows.ravel(), columns.ravel()]
    dense = flat.toarray() if hasattr(flat, "toarray") else flat
    return np.asarray(dense, np.float64).reshape(rows.shape)
