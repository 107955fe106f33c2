"""Word vectors: neighbours, analogies and files."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import did_you_mean
from primal_attention.support.output import write_atomically

__all__ = ["Neighbor", "WordVectors"]


class Neighbor(NamedTuple):
    """A word and its cosine."""

    word: str
    similarity: float


@dataclass(frozen=True)
class WordVectors:
    """Vectors of words, and of the same words as contexts.

    Example:
        >>> found = WordVectors(("a", "b", "c"), np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]]))
        >>> [each.word for each in found.neighbors("a")]
        ['b', 'c']
    """

    words: tuple[str, ...]
    """The words, in the order of the rows."""
    vectors: NDArray[np.float64]
    """Vectors of the words, ``[n s]``."""
    contexts: NDArray[np.float64] | None = None
    """Vectors of the words as contexts, ``[n s]``; their products with ``vectors`` model the
    association."""
    singular_values: NDArray[np.float64] | None = None
    """Singular values of the association, if the vectors come from them."""
    word_bias: NDArray[np.float64] | None = None
    """Bias of every word, of GloVe."""
    context_bias: NDArray[np.float64] | None = None
    """Bias of every context, of GloVe: the key bias of count attention."""

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.words):
            raise ValueError(
                f"vectors have shape {self.vectors.shape} for {len(self.words)} words; they must "
                "be one row for each word."
            )

    def __len__(self) -> int:
        return len(self.words)

    def index(self, word: str) -> int:
        """Return the row of a word.

        Raises:
            KeyError: If there is no such word.
        """
        try:
            return self.words.index(word)
        except ValueError:
            hint = did_you_mean(word, self.words)
            raise KeyError(f"the word {word!r} has no vector.{hint}") from None

    def __contains__(self, word: object) -> bool:
        return word in self.words

    def joined(self) -> "WordVectors":
        """Return vectors ``[word; context]``, the output of a primal layer for each word."""
        return WordVectors(self.words, np.hstack([self.vectors, self._context_rows()]))

    def summed(self) -> "WordVectors":
        """Return vectors ``word + context``, as GloVe publishes them."""
        return WordVectors(self.words, self.vectors + self._context_rows())

    def _context_rows(self) -> NDArray[np.float64]:
        if self.contexts is None:
            raise ValueError("these word vectors have no context vectors.")
        return self.contexts

    def similarity(self, first: str, second: str) -> float:
        """Return the cosine of two words."""
        unit = self.unit_rows()
        return float(unit[self.index(first)] @ unit[self.index(second)])

    def neighbors(self, word: str, count: int = 10) -> list[Neighbor]:
        """Return the words with the largest cosine to a word, in descending order."""
        at = self.index(word)
        unit = self.unit_rows()
        return self._best(unit @ unit[at], count, {at})

    def analogy(self, a: str, b: str, c: str, count: int = 1) -> list[Neighbor]:
        """Return the words closest to ``b − a + c``: "``a`` is to ``b`` as ``c`` is to" these."""
        at = [self.index(word) for word in (a, b, c)]
        unit = self.unit_rows()
        target = unit[at[1]] - unit[at[0]] + unit[at[2]]
        length = max(float(np.linalg.norm(target)), np.finfo(np.float64).tiny)
        return self._best(unit @ (target / length), count, set(at))

    def _best(self, cosines: NDArray[np.float64], count: int, without: set[int]) -> list[Neighbor]:
        order = np.argsort(-cosines, kind="stable")[: count + len(without)]
        found = [Neighbor(self.words[i], float(cosines[i])) for i in order if i not in without]
        return found[:count]

    def unit_rows(self) -> NDArray[np.float64]:
        """Return the vectors with length one; a zero vector stays zero."""
        length = np.linalg.norm(self.vectors, axis=1, keepdims=True)
        return self.vectors / np.where(length > 0, length, 1.0)

    def to_word2vec(self, path: str | Path) -> None:
        """Write the vectors in the text format of word2vec, which gensim and others read.

        The file has one word a line, so a word with a space cannot be written.
        """
        for word in self.words:
            if not word or word.split() != [word]:
                raise ValueError(
                    f"the word {word!r} is empty or has a space, which the text format of word2vec "
                    "cannot hold; rename or remove it."
                )
        lines = [f"{len(self)} {self.vectors.shape[1]}"]
        for word, row in zip(self.words, self.vectors.tolist(), strict=True):
            lines.append(" ".join([word, *(f"{value:.9g}" for value in row)]))
        write_atomically(Path(path), "\n".join(lines) + "\n")
