"""Word-similarity checks of word vectors.

The built-in set is small and was written for this library: a quick check that vectors make sense,
not a benchmark. For numbers that others can compare, read a published set with
:func:`read_pairs`, for example WordSim-353 or SimLex-999, which gensim installs with its tests.

gensim computes the same correlation. It is not used because it skips damaged lines without a word,
reads pairs from files only, and would be one more package for a few lines.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from primal_attention.analysis.counts.association import spearman
from primal_attention.analysis.counts.word_vectors import WordVectors
from primal_attention.support.command import UserError
from primal_attention.support.files import read_lines

__all__ = [
    "SIMILAR_WORDS",
    "SimilarityScore",
    "WordPair",
    "evaluate_similarity",
    "read_pairs",
]


class WordPair(NamedTuple):
    """Two words and how similar people find them."""

    first: str
    second: str
    score: float


def _pairs(score: float, words: str) -> list[WordPair]:
    each = (pair.split("-") for pair in words.split())
    return [WordPair(first, second, score) for first, second in each]


SIMILAR_WORDS: tuple[WordPair, ...] = (
    *_pairs(9, "movie-film big-large begin-start car-automobile doctor-physician child-kid"),
    *_pairs(8, "good-great bad-terrible funny-hilarious scary-frightening woman-lady boy-girl"),
    *_pairs(7, "actor-actress king-queen mother-father dog-cat book-novel war-battle"),
    *_pairs(6, "music-song house-home police-crime money-bank school-teacher train-plane"),
    *_pairs(5, "doctor-hospital love-romance writer-book sea-ship camera-picture food-dinner"),
    *_pairs(4, "family-house night-dark death-war city-street game-team story-book"),
    *_pairs(2, "king-car money-song teacher-night water-paper dog-book city-love"),
    *_pairs(1, "cat-war film-sugar queen-train doctor-music hospital-joke boat-actress"),
)
"""Pairs graded by the authors in eight steps, from almost the same to unrelated."""


class SimilarityScore(NamedTuple):
    """Agreement of cosines with judged similarities."""

    spearman: float
    """Rank correlation; NaN if fewer than two pairs are known."""
    used: int
    """Number of pairs whose words both have vectors."""
    total: int
    """Number of pairs of the set."""


def read_pairs(path: str | Path) -> tuple[WordPair, ...]:
    """Return the word pairs of a file with three columns: word, word, score.

    Columns are separated by a tab, comma, semicolon or spaces; more columns are ignored. Empty
    lines and lines that start with ``#`` are skipped, and so is one line of headings.

    Raises:
        UserError: If the file cannot be read, a line has no two words and a finite number, or there
            is no pair.
    """
    found: list[WordPair] = []
    for number, line in enumerate(read_lines(Path(path)), 1):
        cells = [cell.strip() for cell in re.split(r"[\t,;]| +", line.strip()) if cell.strip()]
        if not cells or cells[0].startswith("#"):
            continue
        try:
            found.append(WordPair(cells[0].lower(), cells[1].lower(), _score(cells[2])))
        except (IndexError, ValueError):
            if not found and number <= 2:
                continue  # headings
            raise UserError(
                f"{path}, line {number}: {line.strip()!r} is not two words and a number."
            ) from None
    if not found:
        raise UserError(f"{path} has no word pairs; it must have two words and a number a line.")
    return tuple(found)


def _score(word: str) -> float:
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,2})?", word, re.ASCII | re.IGNORECASE):
        raise ValueError(f"{word!r} is no number.")
    return float(word)


def evaluate_similarity(
    vectors: WordVectors, pairs: Sequence[WordPair] = SIMILAR_WORDS
) -> SimilarityScore:
    """Return the rank correlation of cosines and judgements, over pairs of known words.

    Example:
        >>> vectors = WordVectors(("a", "b", "c"), np.array([[1, 0.0], [1, 0.1], [0.2, 1]]))
        >>> pairs = [WordPair("a", "b", 9), WordPair("a", "c", 1), WordPair("b", "x", 5)]
        >>> evaluate_similarity(vectors, pairs).used
        2
    """
    row = {word: i for i, word in enumerate(vectors.words)}
    known = [pair for pair in pairs if pair.first in row and pair.second in row]
    if len(known) < 2:
        return SimilarityScore(float("nan"), len(known), len(pairs))
    unit = vectors.unit_rows()
    first, second = [row[pair.first] for pair in known], [row[pair.second] for pair in known]
    cosines, judged = (unit[first] * unit[second]).sum(1), [pair.score for pair in known]
    # ranks that are all equal have no correlation
    is_constant = np.ptp(cosines) == 0 or np.ptp(judged) == 0
    value = float("nan") if is_constant else spearman(cosines, judged)
    return SimilarityScore(value, len(known), len(pairs))
