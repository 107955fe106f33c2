"""The projection of corpus counts onto a sequence, written as its formulas; small and dense.

    M = Q S Qᵀ                  restriction of the counts to the tokens of a sequence
    Norm(M)                     rows divided by their sums
    E = M (Q S),  e = mean_r E_r            profile of the next word
    (Q + P) S (Q + P)ᵀ          the same with positions

``Q`` is a *selector*, not a query matrix: row ``r`` is the one-hot vector of token ``r``. ``P`` has
a mixture of word types for each position. Reference: Mehta, *Self-attention as distributional
projection*, 2025 (2511.13780).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PositionTerms",
    "Projection",
    "normalize_rows",
    "position_terms",
    "position_types",
    "project",
    "select",
]

Floats = NDArray[np.float64]


def select(ids: ArrayLike, num_words: int) -> Floats:
    """Return the selector of a sequence: one-hot rows, zero for an unknown word.

    Example:
        >>> select([1, -1, 0], 2)
        array([[0., 1.],
               [0., 0.],
               [1., 0.]])
    """
    numbers = np.asarray(ids)
    return (numbers[:, None] == np.arange(num_words)).astype(np.float64)


def normalize_rows(m: ArrayLike) -> Floats:
    """Return ``Norm(M)``, rows divided by their sums; a row of zeros becomes uniform.

    Raises:
        ValueError: If an entry is negative. Then only a softmax gives weights.

    Example:
        >>> normalize_rows([[1, 3], [0, 0]])
        array([[0.25, 0.75],
               [0.5 , 0.5 ]])
    """
    matrix = np.asarray(m, np.float64)
    if (matrix < 0).any():
        raise ValueError(
            f"the matrix has the negative entry {matrix.min():.3g}, so its rows cannot be divided "
            "by their sums; use a softmax of the entries, as transform='pmi' or 'log' does."
        )
    total = matrix.sum(-1, keepdims=True)
    uniform = np.full_like(matrix, 1 / matrix.shape[-1])
    return np.where(total > 0, matrix / np.where(total > 0, total, 1.0), uniform)


class Projection(NamedTuple):
    """Counts projected onto one sequence."""

    m: Floats
    """``M``, or ``Norm(M)``."""
    profiles: Floats
    """``E = M (Q S)``: scores of all words for each position."""
    scores: Floats
    """``e``, the mean over positions."""
    probability: Floats
    """``softmax(e / temperature)``."""


def project(
    counts: ArrayLike, selector: ArrayLike, *, normalize: bool = True, temperature: float = 1.0
) -> Projection:
    """Return the projection of counts onto a sequence, and its prediction of a word.

    With ``normalize=False`` the units of the counts decide how sharp the prediction is.

    Args:
        counts: ``S``.
        selector: ``Q``.
        normalize: Use ``Norm(M)`` instead of ``M``.
        temperature: Divides the scores.

    Example:
        >>> project([[0, 1], [1, 0]], select([0, 1], 2)).m
        array([[0., 1.],
               [1., 0.]])
    """
    s, q = np.asarray(counts, np.float64), np.asarray(selector, np.float64)
    m = q @ s @ q.T
    if normalize:
        m = normalize_rows(m)
    profiles = m @ (q @ s)
    scores = profiles.mean(0)
    shifted = np.exp((scores - scores.max()) / temperature)
    return Projection(m, profiles, scores, shifted / shifted.sum())


class PositionTerms(NamedTuple):
    """The four parts of ``(Q + P) S (Q + P)ᵀ``."""

    content_content: Floats
    content_position: Floats
    position_content: Floats
    position_position: Floats

    def combine(self, how: Literal["add", "stack"] = "add") -> Floats:
        """Return the sum ``[R R]``, or the blocks of ``[Q; P] S [Q; P]ᵀ`` as ``[2R 2R]``."""
        if how == "add":
            return sum(self[1:], self[0])
        if how == "stack":
            return np.block([[self[0], self[1]], [self[2], self[3]]])
        raise ValueError(f"how must be 'add' or 'stack', got {how!r}.")


def position_terms(counts: ArrayLike, selector: ArrayLike, positions: ArrayLike) -> PositionTerms:
    """Return the four terms of the projection with positions.

    Args:
        counts: ``S``.
        selector: ``Q``.
        positions: ``P``, for example of :func:`position_types`.

    Example:
        >>> q, p = np.eye(2), np.full((2, 2), 0.5)
        >>> position_terms([[0, 1], [1, 0]], q, p).combine()
        array([[1.5, 2.5],
               [2.5, 1.5]])
    """
    s, q, p = (np.asarray(a, np.float64) for a in (counts, selector, positions))
    return PositionTerms(q @ s @ q.T, q @ s @ p.T, p @ s @ q.T, p @ s @ p.T)


def position_types(documents: Iterable[NDArray[np.int64]], num_words: int, length: int) -> Floats:
    """Return ``P`` of a corpus: row ``r`` has the frequencies of the words at place ``r``.

    A place that no document reaches has a row of zeros.

    Args:
        documents: Documents as numbers; a number outside the vocabulary is skipped.
        num_words: Size of the vocabulary.
        length: Number of places.

    Example:
        >>> position_types([np.array([0, 1]), np.array([1])], 2, 2)
        array([[0.5, 0.5],
               [0. , 1. ]])
    """
    counts = np.zeros((length, num_words))
    for document in documents:
        ids = np.asarray(document)[:length]
        known = np.flatnonzero((ids >= 0) & (ids < num_words))
        counts[known, ids[known]] += 1
    total = counts.sum(1, keepdims=True)
    return counts / np.where(total > 0, total, 1.0)
