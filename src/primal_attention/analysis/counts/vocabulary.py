"""Words, their numbers, and documents as arrays of numbers."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Document", "Vocabulary", "split_words"]

Document = str | Sequence[str] | Sequence[int] | NDArray[np.int64]
"""A text, its words, or the numbers of its words."""


class _Tokenizer(Protocol):
    """An object that splits texts, such as a tokenizer of Hugging Face."""

    def tokenize(self, text: str) -> Sequence[str]:
        """Return the words of a text."""
        ...


Splitter = Callable[[str], Sequence[str]] | _Tokenizer | None
"""What splits texts; ``None`` for :func:`split_words`."""
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation.

    Example:
        >>> split_words("The river's bank FLOODED, twice.")
        ['the', "river's", 'bank', 'flooded', 'twice']
    """
    return _WORD.findall(text.lower())


class Vocabulary:
    """Words and their numbers; ``-1`` is the number of every other word.

    Args:
        words: Different words, in the order of their numbers.

    Example:
        >>> vocabulary = Vocabulary(["river", "bank"])
        >>> vocabulary.encode("River bank flooded")
        array([ 0,  1, -1])
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self._index = {word: i for i, word in enumerate(self.words)}
        if len(self._index) < len(self.words):
            twice = next(w for i, w in enumerate(self.words) if self._index[w] != i)
            raise ValueError(
                f"the vocabulary has the word {twice!r} twice; every word must be there once."
            )

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, document: Document) -> NDArray[np.int64]:
        """Return the numbers of the words of a document; numbers come back checked."""
        if isinstance(document, str):
            document = split_words(document)
        if len(document) == 0:
            return np.empty(0, np.int64)
        if isinstance(document[0], str):
            found = (self._index.get(str(word), -1) for word in document)
            return np.fromiter(found, np.int64, len(document))
        ids = as_numbers(document)
        return np.where((ids >= 0) & (ids < len(self)), ids, -1)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of numbers; an unknown one is ``"?"``."""
        return [self.words[i] if 0 <= i < len(self) else "?" for i in ids]


def as_numbers(document: ArrayLike) -> NDArray[np.int64]:
    """Return one document of token numbers as an array, checked."""
    ids = np.asarray(document)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(
            f"a document has shape {ids.shape} and dtype {ids.dtype}; it must be a text, a "
            "sequence of words, or a one-dimensional sequence of whole numbers."
        )
    return ids.astype(np.int64)


def learn_vocabulary(
    documents: Iterable[Document], top_k: int | None, min_count: int
) -> tuple[Vocabulary, list[NDArray[np.int64]]]:
    """Return the most frequent words, and all documents as their numbers, in one pass.

    Args:
        documents: Texts or sequences of words.
        top_k: Largest number of words; ``None`` for no limit.
        min_count: Smallest number of occurrences of a word.
    """
    index: defaultdict[str, int] = defaultdict()
    index.default_factory = index.__len__
    coded = []
    for document in documents:
        words = split_words(document) if isinstance(document, str) else document
        if len(words) and not isinstance(words[0], str):
            raise ValueError(
                f"a document has {type(words[0]).__name__} tokens, but there is no vocabulary; "
                "give vocab=, the words or their number."
            )
        coded.append(np.fromiter(map(index.__getitem__, words), np.int64, len(words)))
    words = list(index)
    counts = np.bincount(np.concatenate(coded or [np.empty(0, np.int64)]), minlength=len(words))
    frequent = [i for i in range(len(words)) if counts[i] >= min_count]
    # the order must not depend on the order of the documents
    chosen = sorted(frequent, key=lambda i: (-counts[i], words[i]))[:top_k]
    if not chosen:
        raise ValueError(
            f"no word occurs {min_count} times in the documents; lower min_count or give more text."
        )
    number = np.full(len(words), -1, np.int64)
    number[chosen] = np.arange(len(chosen))
    return Vocabulary(words[i] for i in chosen), [number[ids] for ids in coded]


def word_splitter(tokenizer: Splitter) -> Callable[[str], Sequence[str]]:
    """Return a function from text to words: the default, a callable, or ``tokenizer.tokenize``."""
    if tokenizer is None:
        return split_words
    if hasattr(tokenizer, "tokenize"):
        return tokenizer.tokenize
    if callable(tokenizer):
        return tokenizer
    raise TypeError(
        f"tokenizer is {type(tokenizer).__name__}; it must be None, a function from a text to its "
        "words, or an object with a method tokenize."
    )


def chunks(documents: Iterable[NDArray[np.int64]], size: int) -> Iterator[list[NDArray[np.int64]]]:
    """Yield lists of documents with at least ``size`` tokens together, the last may have fewer."""
    batch: list[NDArray[np.int64]] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
