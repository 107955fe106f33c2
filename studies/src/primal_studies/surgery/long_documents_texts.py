"""Long documents with known answers: reviews and articles in halves, and a planted sentence."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from primal_studies.kit.pretrained import imdb_sentences, wikitext
from primal_studies.kit.texts import imdb_reviews

__all__ = ["PIECE", "Pairs", "Vectors", "cut", "make_pairs", "score", "split"]

Vectors = Float[np.ndarray, "b p"]
PIECE = 512
"""Positions of MiniLM: most tokens of a piece, special ones included."""
_SPECIAL = 2
_SEED = 0


class Pairs(NamedTuple):
    """Queries, and the documents among which each has to find its own."""

    queries: list[str]
    documents: list[str]
    """The document of a query has its number."""


def make_pairs(name: str, count: int, tokens: int, tokenizer: Any, data: Path | None) -> Pairs:
    """Return so many queries and documents.

    ``"reviews"`` are the halves of long reviews of IMDb, ``"articles"`` those of articles of
    WikiText-2; a first half looks for its second. ``"planted"`` are parts of articles with a
    sentence of a review inside, and that sentence looks for its article.

    Args:
        name: One of the three.
        count: Number of pairs.
        tokens: Most tokens of a document.
        tokenizer: Counts the tokens.
        data: Folder of the data; by default that of ``PRIMAL_DATA``.
    """
    if name == "planted":
        rng = np.random.default_rng(_SEED)
        texts = _long(_articles(data), tokens, tokens, count, tokenizer)
        sentences = imdb_sentences("test", count, data)
        return Pairs(sentences, [_plant(t, s, rng) for t, s in zip(texts, sentences, strict=True)])
    source = _reviews(data) if name == "reviews" else _articles(data)
    # both halves are longer than a piece, so that no way sees a whole half in one
    texts = _long(source, 2 * PIECE + 200, 2 * tokens, count, tokenizer)
    halves = [_halve(text) for text in texts]
    return Pairs([first for first, _ in halves], [second for _, second in halves])


def _reviews(data: Path | None) -> Iterator[str]:
    for review in imdb_reviews("test", data):
        yield re.sub(r"<br ?/?>", " ", review.text)


def _articles(data: Path | None) -> Iterator[str]:
    """Yield articles without their titles."""
    for part in ("test", "valid"):
        yield from re.split(r"\n = [^=\n]+ = *\n", wikitext(part, data))[1:]


def _long(texts: Iterator[str], least: int, most: int, count: int, tokenizer: Any) -> list[str]:
    """Return the first texts that have so many tokens, cut where they have more."""
    found = []
    for text in texts:
        # a token has at least one character
        if len(text) >= least and len(_ends(text, tokenizer)) >= least:
            found.append(cut(text, most, tokenizer))
            if len(found) == count:
                break
    return found


def _ends(text: str, tokenizer: Any) -> list[int]:
    """Return where the tokens of a text end."""
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return [end for _, end in found["offset_mapping"]]


def cut(text: str, tokens: int, tokenizer: Any) -> str:
    """Return the start of a text with so many tokens."""
    ends = _ends(text, tokenizer)
    return text if len(ends) <= tokens else text[: ends[tokens - 1]]


def split(text: str, tokenizer: Any) -> list[str]:
    """Return a text in pieces that MiniLM can read, the special tokens included.

    Pieces begin with a word: the rest of a word can have more tokens than inside of it.
    """
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    words, offsets = found.word_ids(), found["offset_mapping"]
    places, start = [0], 0
    while len(words) - start > PIECE - _SPECIAL:
        stop = start + PIECE - _SPECIAL
        while words[stop] == words[stop - 1] and stop - start > 1:
            stop -= 1
        places.append(offsets[stop - 1][1])
        start = stop
    return [text[a:b] for a, b in pairwise([*places, len(text)])]


def _halve(text: str) -> tuple[str, str]:
    middle = text.index(" ", len(text) // 2)
    return text[:middle], text[middle + 1 :]


def _plant(text: str, sentence: str, rng: np.random.Generator) -> str:
    """Return a text with a sentence at the end of one of its own."""
    places = [match.end() for match in re.finditer(r"[.!?] ", text)]
    place = int(rng.choice(places))
    return f"{text[:place]}{sentence} {text[place:]}"


def score(queries: Sequence[Vectors], documents: Sequence[Vectors]) -> dict[str, float]:
    """Return how often a query finds its document first, and the mean reciprocal rank.

    Args:
        queries: The vectors of each query, of length one: one, or those of its pieces.
        documents: Those of each document. The best pair of vectors counts.

    Example:
        >>> one, other = np.eye(2)[:1], np.eye(2)[1:]
        >>> score([one, other], [one, other])
        {'first': 1.0, 'reciprocal rank': 1.0}
    """
    similarity = np.array([[float((q @ d.T).max()) for d in documents] for q in queries])
    own = np.diagonal(similarity)[:, None]
    # a document that is as similar counts as half a place
    ranks = 1 + (similarity > own).sum(1) + ((similarity == own).sum(1) - 1) / 2
    return {
        "first": round(float((ranks == 1).mean()), 4),
        "reciprocal rank": round(float((1 / ranks).mean()), 4),
    }
