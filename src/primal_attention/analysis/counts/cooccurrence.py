"""Co-occurrence counts of a corpus: sparse, directional, streaming.

    F[i, j] = Σ_δ w(δ) · #(word j stands δ places after word i),   1 ≤ δ ≤ window
    S = F + Fᵀ

One sparse matrix per distance is summed from two shifted copies of the text, without a loop over
tokens. Sums are kept as whole multiples of ``1 / lcm(1 … window)``, so that the order of the
documents, and the parts in which they arrive, change no bit of the counts.

References: Pennington, Socher, Manning, *GloVe*, 2014; Levy, Goldberg, Dagan, *Improving
distributional similarity with lessons learned from word embeddings*, 2015.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_attention.analysis.counts.transforms import (
    Transform,
    TransformArguments,
    transform_counts,
)
from primal_attention.analysis.counts.vocabulary import (
    Document,
    Splitter,
    Vocabulary,
    as_numbers,
    chunks,
    learn_vocabulary,
    word_splitter,
)
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Boundary", "Cooccurrence", "Totals", "Weighting"]

Weighting = Literal["inverse", "flat", "harmonic-glove"]
"""Weight of a pair at distance ``δ``:

- ``"inverse"``: ``1/δ``; an unknown word keeps its place.
- ``"flat"``: 1; an unknown word keeps its place.
- ``"harmonic-glove"``: ``1/δ`` as the GloVe tool counts; unknown words are taken out first.
"""
Boundary = Literal["document", "stream"]
"""``"document"``: no window crosses from one document to the next. ``"stream"``: windows do."""

# tokens that are counted at once; more would not be faster
_CHUNK = 1 << 20
# above this window the least common multiple has too many digits for exact sums
_EXACT_WINDOW = 20


class CountingArguments(TypedDict, total=False):
    """Arguments of :class:`Cooccurrence`, without the vocabulary."""

    top_k: int | None
    window: int
    weighting: Weighting
    directional: bool
    boundary: Boundary
    min_count: int
    smoothing: float


class Totals(NamedTuple):
    """Sums of the counts, with smoothing."""

    rows: NDArray[np.float64]
    """Sum of each row: how often a word is the first of a pair."""
    columns: NDArray[np.float64]
    """Sum of each column: how often a word is the second of a pair."""
    all: float
    """Sum of all counts."""


class Cooccurrence:
    """Counts of word pairs in a corpus.

    Args:
        vocab: The words, or their number if documents are numbers. ``None``: learned by
            :meth:`fit`.
        top_k: Largest size of a learned vocabulary.
        window: Largest distance of a pair.
        weighting: Weight of a distance; see :data:`Weighting`.
        directional: Whether :attr:`counts` and the transforms use :attr:`forward`, otherwise
            :attr:`symmetric`.
        boundary: What ends a window; see :data:`Boundary`.
        min_count: Smallest number of occurrences of a word in a learned vocabulary.
        smoothing: Added to the count of every pair by the transforms. A positive value makes
            their results dense.

    Attributes:
        unigram: Number of occurrences of every word.
        num_tokens: Number of tokens read, with unknown ones.
        num_documents: Number of documents read.

    Example:
        >>> counts = Cooccurrence(window=2).fit(["the river bank", "the bank loan"])
        >>> counts.words
        ('bank', 'the', 'loan', 'river')
        >>> counts.forward.toarray()[1]  # what follows "the"
        array([1.5, 0. , 0.5, 1. ])
    """

    def __init__(
        self,
        vocab: Sequence[str] | int | None = None,
        *,
        top_k: int | None = None,
        window: int = 5,
        weighting: Weighting = "inverse",
        directional: bool = True,
        boundary: Boundary = "document",
        min_count: int = 1,
        smoothing: float = 0.0,
    ) -> None:
        _check_options(window, weighting, boundary, top_k, min_count, smoothing)
        if vocab is not None and (top_k is not None or min_count != 1):
            raise ValueError(
                "vocab is given together with top_k or min_count, which choose a learned "
                "vocabulary; give one or the other."
            )
        self.top_k, self.min_count = top_k, min_count
        self.window, self.weighting, self.boundary = window, weighting, boundary
        self.directional, self.smoothing = directional, float(smoothing)
        self._unit = math.lcm(*range(1, window + 1)) if window <= _EXACT_WINDOW else 1
        self._vocabulary: Vocabulary | None = None
        if vocab is not None:
            words = map(str, range(vocab)) if isinstance(vocab, int) else vocab
            self._set_vocabulary(Vocabulary(words))

    def _set_vocabulary(self, vocabulary: Vocabulary) -> None:
        if len(vocabulary) == 0:
            raise ValueError("the vocabulary is empty; it must have at least one word.")
        self._vocabulary = vocabulary
        self._reset()

    def _reset(self) -> None:
        n = len(self.vocabulary)
        self._sums = _sparse().csr_array((n, n), dtype=np.float64)
        self._tail = np.empty(0, np.int64)
        self.unigram = np.zeros(n, np.int64)
        self.num_tokens = self.num_documents = 0

    @classmethod
    def from_corpus(
        cls, texts: Iterable[str], tokenizer: Splitter = None, **options: Unpack[CountingArguments]
    ) -> Self:
        """Return the counts of texts.

        Args:
            texts: The documents.
            tokenizer: ``None`` for :func:`split_words`, a function from a text to its words, or an
                object with a method ``tokenize``, such as a tokenizer of Hugging Face.
            options: Arguments of the class.

        Example:
            >>> Cooccurrence.from_corpus(["a b", "b a c"], str.split, top_k=2).words
            ('a', 'b')
        """
        split = word_splitter(tokenizer)
        return cls(**options).fit(split(text) for text in texts)

    @classmethod
    def from_counts(
        cls,
        counts: "csr_array | ArrayLike",
        vocab: Sequence[str] | None = None,
        **options: Unpack[CountingArguments],
    ) -> Self:
        """Return an object with given counts, dense or sparse.

        Args:
            counts: ``F``, or with ``directional=False`` a symmetric ``S``; not negative.
            vocab: The words; by default their numbers.
            options: Other arguments of the class.

        Example:
            >>> Cooccurrence.from_counts([[0, 3], [1, 0]]).symmetric.toarray()
            array([[0., 4.],
                   [4., 0.]])
        """
        matrix = _sparse().csr_array(counts, dtype=np.float64)
        n, m = matrix.shape
        if n != m or (matrix.data < 0).any() or not np.isfinite(matrix.data).all():
            raise ValueError(
                f"counts have shape {n} × {m} and values from {matrix.min()} to {matrix.max()}; "
                "they must be square, finite and not negative."
            )
        found = cls(n if vocab is None else vocab, **options)
        if len(found) != n:
            raise ValueError(f"counts have {n} rows, but vocab has {len(found)} words.")
        if not found.directional:
            if abs(matrix - matrix.T).max() != 0:
                raise ValueError(
                    "counts are not symmetric; with directional=False they must be. Give "
                    "directional=True for directional counts."
                )
            matrix = matrix / 2
        found._sums, found._unit = matrix, 1
        found.unigram = np.rint(np.asarray(found.symmetric.sum(1))).astype(np.int64)
        return found

    def fit(self, documents: Iterable[Document] | NDArray[np.int64]) -> Self:
        """Count a corpus; earlier counts are forgotten. Returns ``self``.

        Args:
            documents: Texts, sequences of words, or arrays of numbers. Any number outside the
                vocabulary is an unknown word. One flat array is one document.
        """
        if self._vocabulary is None:
            vocabulary, coded = learn_vocabulary(_documents(documents), self.top_k, self.min_count)
            self._set_vocabulary(vocabulary)
            return self.update(coded)
        self._reset()
        return self.update(documents)

    def update(self, documents: Iterable[Document] | NDArray[np.int64]) -> Self:
        """Add more documents to the counts, for a corpus that arrives in parts. Returns ``self``.

        Example:
            >>> a, b = [0, 1, 2], [2, 1]
            >>> parts = Cooccurrence(3).update([a]).update([b])
            >>> bool((parts.forward != Cooccurrence(3).fit([a, b]).forward).nnz)
            False
        """
        encode = self.vocabulary.encode
        for batch in chunks((encode(d) for d in _documents(documents)), _CHUNK):
            self._add(batch)
        return self

    def _add(self, batch: list[NDArray[np.int64]]) -> None:
        n = len(self)
        self.num_documents += len(batch)
        self.num_tokens += sum(map(len, batch))
        known = np.concatenate(batch)
        self.unigram += np.bincount(known[known >= 0], minlength=n)
        if self.weighting == "harmonic-glove":
            batch = [ids[ids >= 0] for ids in batch]
        if self.boundary == "document":
            gap = np.full(self.window, -1, np.int64)
            ids = np.concatenate([part for document in batch for part in (document, gap)])
            start = 0
        else:
            ids, start = np.concatenate([self._tail, *batch]), len(self._tail)
            self._tail = ids[-self.window :]
        for distance in range(1, self.window + 1):
            pairs = _count_pairs(ids, start, distance, n)
            self._sums = self._sums + pairs * self._weight(distance)

    def _weight(self, distance: int) -> float:
        """Return the weight of a distance in units of the sums."""
        return float(self._unit if self.weighting == "flat" else self._unit / distance)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words and their numbers."""
        if self._vocabulary is None:
            raise RuntimeError("there is no vocabulary yet; call fit, or give vocab=.")
        return self._vocabulary

    @property
    def words(self) -> tuple[str, ...]:
        """The words, in the order of rows and columns."""
        return self.vocabulary.words

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __repr__(self) -> str:
        if self._vocabulary is None:
            return "Cooccurrence(not fitted)"
        return (
            f"Cooccurrence({len(self)} words, {self.num_tokens} tokens, window={self.window}, "
            f"weighting={self.weighting!r}, directional={self.directional})"
        )

    def encode(self, document: Document) -> NDArray[np.int64]:
        """Return the numbers of the words of a document; ``-1`` for an unknown word."""
        return self.vocabulary.encode(document)

    @property
    def forward(self) -> "csr_array":
        """``F`` as a sparse CSR array: ``F[i, j]`` counts ``j`` after ``i``."""
        return self._sums / self._unit

    @property
    def symmetric(self) -> "csr_array":
        """``S = F + Fᵀ`` as a sparse CSR array."""
        forward = self.forward
        return (forward + forward.T).tocsr()

    @property
    def counts(self) -> "csr_array":
        """:attr:`forward` if directional, otherwise :attr:`symmetric`."""
        return self.forward if self.directional else self.symmetric

    @property
    def totals(self) -> Totals:
        """Sums of the rows, the columns and all of :attr:`counts`, with smoothing."""
        counts, extra = self.counts, self.smoothing * len(self)
        rows, columns = (np.asarray(counts.sum(axis)).ravel() + extra for axis in (1, 0))
        return Totals(rows, columns, float(rows.sum()))

    def transform(
        self,
        kind: Transform = "ppmi",
        *,
        directional: bool | None = None,
        **options: Unpack[TransformArguments],
    ) -> "csr_array | NDArray[np.float64]":
        """Return an association measure of the counts; see :func:`transform_counts`.

        Args:
            kind: ``"counts"``, ``"probability"``, ``"log1p"``, ``"pmi"``, ``"ppmi"`` or ``"log"``.
            directional: Which counts to use; by default as the object.
            options: ``shift``, ``context_smoothing``, ``epsilon``, ``pmi_min``; ``smoothing`` is by
                default that of the object.

        Example:
            >>> counts = Cooccurrence(window=1).fit(["a b a b c"])
            >>> counts.transform("log1p", directional=False).toarray().round(2)
            array([[0.  , 1.39, 0.  ],
                   [1.39, 0.  , 0.69],
                   [0.  , 0.69, 0.  ]])
        """
        wanted = self.directional if directional is None else directional
        options.setdefault("smoothing", self.smoothing)
        return transform_counts(self.forward if wanted else self.symmetric, kind, **options)

    def restrict(self, words: Iterable[str]) -> "Cooccurrence":
        """Return the counts of some of the words only, for example of one sentence.

        Row-normalised counts of a text stay the same. Sums, and with them PMI, are those of the
        chosen words.

        Args:
            words: Words to keep; unknown and repeated ones are left out.

        Example:
            >>> counts = Cooccurrence.from_corpus(["the river bank", "the bank loan"])
            >>> counts.restrict(["bank", "loan"]).forward.toarray()
            array([[0., 1.],
                   [0., 0.]])
        """
        kept = [w for w in dict.fromkeys(words) if self.encode([w])[0] >= 0]
        if not kept:
            raise ValueError("no word is in the vocabulary; give at least one that is.")
        options = {name: getattr(self, name) for name in ("window", "weighting", "boundary")}
        found = Cooccurrence(
            kept, **options, directional=self.directional, smoothing=self.smoothing
        )
        at = self.encode(kept)
        found._sums, found._unit = self._sums[at][:, at].tocsr(), self._unit
        found.unigram = self.unigram[at]
        found.num_tokens, found.num_documents = self.num_tokens, self.num_documents
        return found

    def save(self, path: str | Path) -> None:
        """Write the counts and the vocabulary to an ``.npz`` file, without pickle."""
        from primal_attention.analysis.counts.storage import save_counts

        save_counts(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, max_bytes: int = 4 * 2**30) -> Self:
        """Return the counts of a file that :meth:`save` wrote.

        Args:
            path: The file.
            max_bytes: Largest size of the unpacked content.

        Raises:
            ValueError: If the file is not such a file, is damaged or too large.
        """
        from primal_attention.analysis.counts.storage import load_counts

        return load_counts(cls, Path(path), max_bytes)


def _sparse() -> ModuleType:
    with needs("sklearn", "Co-occurrence counting"):
        import scipy.sparse
    return scipy.sparse


def _documents(documents: Iterable[Document] | NDArray[np.int64]) -> Iterable[Document]:
    if isinstance(documents, str):
        raise TypeError("documents is one text; give a list of texts, even if it has one.")
    if isinstance(documents, np.ndarray) and documents.ndim == 1 and documents.dtype != object:
        return [as_numbers(documents)]
    return documents


def _count_pairs(ids: NDArray[np.int64], start: int, distance: int, n: int) -> "csr_array":
    """Return how often number ``j`` stands ``distance`` places after ``i``, as a CSR array.

    Pairs inside the first ``start`` places are left out: they were counted before.
    """
    first = max(start, distance)
    before, after = ids[first - distance : max(len(ids) - distance, 0)], ids[first:]
    known = (before >= 0) & (after >= 0)
    before, after = before[known], after[known]
    ones = np.ones(len(before))
    counted = _sparse().coo_array((ones, (before, after)), shape=(n, n)).tocsr()
    counted.sum_duplicates()
    return counted


def _check_options(
    window: int,
    weighting: str,
    boundary: str,
    top_k: int | None,
    min_count: int,
    smoothing: float,
) -> None:
    for name, value, choices in (
        ("weighting", weighting, get_args(Weighting)),
        ("boundary", boundary, get_args(Boundary)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    for name, number in (("window", window), ("top_k", top_k), ("min_count", min_count)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
    if not 0 <= smoothing < math.inf:
        raise ValueError(f"smoothing must be a finite number of at least 0, got {smoothing}.")
