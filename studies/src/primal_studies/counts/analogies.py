"""Analogies that word vectors answer: a small set that was written for this library."""

from collections.abc import Sequence
from typing import NamedTuple

from primal_attention.analysis.counts import WordVectors

__all__ = ["ANALOGIES", "AnalogyScore", "evaluate_analogies"]

ANALOGIES: tuple[tuple[str, str, str, str], ...] = tuple(
    (a, b, c, d)
    for a, b, c, d in (
        line.split()
        for line in (
            "man woman king queen",
            "man woman actor actress",
            "man woman boy girl",
            "man woman father mother",
            "man woman brother sister",
            "man woman son daughter",
            "man woman husband wife",
            "man woman he she",
            "he she his her",
            "boy girl son daughter",
            "good better bad worse",
            "good best bad worst",
            "big bigger small smaller",
            "is was are were",
            "is was has had",
            "go went see saw",
            "see seen do done",
            "movie movies film films",
            "actor actors character characters",
            "scene scenes story stories",
            "france french germany german",
            "england english japan japanese",
            "one two three four",
            "car cars house houses",
        )
    )
)
"""Questions "a is to b as c is to d", written by the authors."""


class AnalogyScore(NamedTuple):
    """Share of analogies that are answered with the right word first."""

    accuracy: float
    """NaN if no question is known."""
    used: int
    """Number of questions whose four words all have vectors."""
    total: int
    """Number of questions of the set."""


def evaluate_analogies(
    vectors: WordVectors, questions: Sequence[tuple[str, str, str, str]] = ANALOGIES
) -> AnalogyScore:
    """Return the share of analogies answered right, over questions of known words.

    Example:
        >>> import numpy as np
        >>> rows = np.array([[0, 1.0], [0, 2], [3, 1], [3, 2]])
        >>> vectors = WordVectors(("man", "woman", "king", "queen"), rows)
        >>> evaluate_analogies(vectors).accuracy
        1.0
    """
    known = [each for each in questions if all(word in vectors for word in each)]
    if not known:
        return AnalogyScore(float("nan"), 0, len(questions))
    right = [vectors.analogy(a, b, c)[0].word == d for a, b, c, d in known]
    return AnalogyScore(sum(right) / len(right), len(known), len(questions))
