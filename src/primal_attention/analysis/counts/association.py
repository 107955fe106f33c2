"""How much a matrix of logits follows the counts of a corpus.

    ρ(B, P) = Spearman correlation of B_ij and P_ij over pairs with count ≥ c_min

Row means over these pairs are subtracted from both matrices first: softmax does not see what all
keys of a query share. What is left still holds the *key effect*: keys that every query prefers.
Frequent words are such keys. The correlations named ``content`` subtract key effects too, so only
what depends on the pair is left.

Directions: ``F[i, j]`` counts ``j`` after ``i``, and ``B[i, j]`` is the logit of query ``i`` for
key ``j``. A head that looks at the words that follow has a high ``forward`` correlation ``ρ(B,
PMI(F))``, one that looks back a high ``backward`` correlation ``ρ(Bᵀ, PMI(F))``. The last one has
the rows of ``Bᵀ`` centred: it still holds what all keys of a query share, which softmax does not
see. ``content_backward`` does not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_attention.analysis.counts.cooccurrence import Cooccurrence
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Association", "Targets", "asymmetry", "spearman"]

Words = Sequence[str] | Sequence[int] | NDArray[np.int64]
"""Words, or their numbers in the counts."""
_FEWEST = 30
"""Pairs without which a correlation says nothing."""


class Association(NamedTuple):
    """Rank correlations of a matrix of logits with a corpus."""

    symmetric: float
    """``ρ(B, PMI(S))``, rows centred."""
    forward: float
    """``ρ(B, PMI(F))``, rows centred."""
    backward: float
    """``ρ(Bᵀ, PMI(F))``, rows of ``Bᵀ`` centred; holds effects of queries that softmax removes."""
    content_symmetric: float
    """As ``symmetric``, without key effects."""
    content_forward: float
    """As ``forward``, without key effects."""
    content_backward: float
    """As ``backward``, without key effects."""
    asymmetry: float
    """``‖B − Bᵀ‖ / ‖B + Bᵀ‖``: 0 for a symmetric matrix, 1 for an unrelated transpose."""
    null_mean: float
    """Mean of ``symmetric`` over random permutations of the words."""
    null_spread: float
    """Standard deviation over these permutations."""
    content_null_spread: float
    """The same for ``content_symmetric``."""

    @property
    def strongest(self) -> tuple[str, float]:
        """Name and value of the larger of ``symmetric`` and ``forward``, which softmax sees."""
        named = zip(self._fields[:2], self[:2], strict=True)
        return max(named, key=lambda pair: pair[1])


def asymmetry(b: ArrayLike) -> float:
    """Return ``‖B − Bᵀ‖ / ‖B + Bᵀ‖`` in the Frobenius norm.

    Example:
        >>> asymmetry([[0, 1], [1, 0]]), asymmetry([[0, 1], [0, 0]])
        (0.0, 1.0)
    """
    matrix = np.asarray(b, dtype=np.float64)
    odd, even = np.linalg.norm(matrix - matrix.T), np.linalg.norm(matrix + matrix.T)
    return float(odd / even) if even else (float("inf") if odd else 0.0)


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Return the rank correlation of two lists of numbers; ties share their mean rank.

    Example:
        >>> round(spearman([1, 2, 3, 4], [10, 30, 20, 40]), 3)
        0.8
    """
    return float(_standard_ranks(np.asarray(a, float)) @ _standard_ranks(np.asarray(b, float)))


def _standard_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks, centred and of length one; zeros if all values are equal."""
    with needs("sklearn", "A rank correlation"):
        from scipy.stats import rankdata

    ranks = rankdata(values)
    ranks -= ranks.mean()
    length = float(np.linalg.norm(ranks))
    return ranks / length if length else ranks


class _Pairs:
    """Pairs of words with enough counts, and the ranks of their PMI."""

    def __init__(self, counts: "csr_array", chosen: NDArray[np.int64], min_count: float) -> None:
        rows, columns = (np.asarray(counts.sum(axis)).ravel() for axis in (1, 0))
        part = counts[chosen][:, chosen].tocoo()
        kept = part.data >= min_count
        self.i, self.j = part.row[kept], part.col[kept]
        if len(self.i) < _FEWEST:
            raise ValueError(
                f"only {len(self.i)} pairs of {len(chosen)} words occur {min_count:g} times or "
                f"more, at least {_FEWEST} are needed; lower min_count, choose more words, or "
                "count more text."
            )
        marginal = np.log(rows[chosen][self.i]) + np.log(columns[chosen][self.j])
        pmi = np.log(part.data[kept]) + np.log(rows.sum()) - marginal
        self._size = len(chosen)
        self._row_sizes, self._column_sizes = (
            np.maximum(np.bincount(of, minlength=self._size), 1) for of in (self.i, self.j)
        )
        self._plain = _standard_ranks(self._center_rows(pmi))
        self._content = _standard_ranks(self._center_both(pmi))

    def __len__(self) -> int:
        return len(self.i)

    def _center_rows(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        means = np.bincount(self.i, values, self._size) / self._row_sizes
        return np.asarray(values - means[self.i])

    def _center_both(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        # the pairs are no full grid: alternate until neither rows nor columns have a mean
        size = np.abs(values).max()
        for _ in range(100):
            values = self._center_rows(values)
            means = np.bincount(self.j, values, self._size) / self._column_sizes
            values = values - means[self.j]
            if np.abs(means).max() <= 1e-7 * size:
                break
        return values

    def plain(self, b: NDArray[np.float64], order: NDArray[np.int64] | None = None) -> float:
        """Return the correlation after centring of rows; ``order`` permutes the words."""
        return float(_standard_ranks(self._center_rows(self._take(b, order))) @ self._plain)

    def content(self, b: NDArray[np.float64], order: NDArray[np.int64] | None = None) -> float:
        """Return the correlation without key effects; ``order`` permutes the words."""
        return float(_standard_ranks(self._center_both(self._take(b, order))) @ self._content)

    def _take(self, b: NDArray[np.float64], order: NDArray[np.int64] | None) -> NDArray[np.float64]:
        if order is None:
            return np.asarray(b[self.i, self.j])
        return np.asarray(b[order[self.i], order[self.j]])


class Targets:
    """The PMI of chosen words, ready to be compared with many matrices.

    Args:
        cooccurrence: The counts; smoothing is not used.
        words: Words or their numbers in the counts, in the order of the rows of the matrices.
        min_count: Smallest weighted count of a pair.

    Example:
        >>> counts = Cooccurrence.from_counts(np.arange(36.0).reshape(6, 6) + 1)
        >>> Targets(counts, range(6), min_count=1).pairs
        (36, 36)
    """

    def __init__(
        self,
        cooccurrence: Cooccurrence,
        words: Words,
        min_count: float = 8.0,
    ) -> None:
        if not min_count > 0:
            raise ValueError(f"min_count must be positive, got {min_count}.")
        chosen = _numbers(cooccurrence, words)
        self.size = len(chosen)
        self._symmetric = _Pairs(cooccurrence.symmetric, chosen, min_count)
        self._forward = _Pairs(cooccurrence.forward, chosen, min_count)

    @property
    def pairs(self) -> tuple[int, int]:
        """Number of pairs in the symmetric and in the directional comparison."""
        return len(self._symmetric), len(self._forward)

    def compare(self, b: ArrayLike, *, permutations: int = 10, seed: int = 0) -> Association:
        """Return the correlations of a matrix ``[n n]`` of logits with the counts.

        Args:
            b: Rows are queries, columns keys.
            permutations: Random permutations of the words for the null.
            seed: Seed of the permutations.
        """
        matrix = np.asarray(b, dtype=np.float64)
        if matrix.shape != (self.size, self.size):
            raise ValueError(
                f"the matrix has shape {matrix.shape}, but {self.size} words were chosen; it must "
                f"be {self.size} × {self.size}."
            )
        if permutations < 2:
            raise ValueError(f"permutations must be at least 2, got {permutations}.")
        rng = np.random.default_rng(seed)
        plain, content = [], []
        for _ in range(permutations):
            order = rng.permutation(self.size)
            plain.append(self._symmetric.plain(matrix, order))
            content.append(self._symmetric.content(matrix, order))
        return Association(
            self._symmetric.plain(matrix),
            self._forward.plain(matrix),
            self._forward.plain(matrix.T),
            self._symmetric.content(matrix),
            self._forward.content(matrix),
            self._forward.content(matrix.T),
            asymmetry(matrix),
            float(np.mean(plain)),
            float(np.std(plain, ddof=1)),
            float(np.std(content, ddof=1)),
        )


def _numbers(cooccurrence: Cooccurrence, words: Words) -> NDArray[np.int64]:
    """Return the numbers of words in the counts, all known and different."""
    found = cooccurrence.encode(words)
    if (found < 0).any():
        unknown = [word for word, number in zip(words, found, strict=True) if number < 0]
        raise ValueError(
            f"{len(unknown)} words are not in the counts, such as {unknown[0]!r}; choose words "
            "from cooccurrence.words."
        )
    if len(np.unique(found)) < len(found):
        raise ValueError("a word is there twice; give different words.")
    return found
