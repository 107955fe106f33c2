"""Labelled token sequences of unequal length: storage and files."""

import io
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.support.command import user_errors
from primal_attention.support.files import take_arrays
from primal_attention.support.output import write_atomically

__all__ = ["PairSequences", "TokenSequences", "in_processes"]

T = TypeVar("T")


class TokenSequences(Dataset[dict[str, Tensor]]):
    """A data set of token ids with one label a sequence, stored end to end.

    Args:
        tokens: The ids of all sequences, one after the other.
        offsets: Where each sequence starts, and where the last one ends.
        labels: One class per sequence.

    Raises:
        ValueError: If one of them does not hold whole numbers, or the offsets decrease or do not
            fit the others.

    Example:
        >>> data = TokenSequences.pack([[3, 1], [2, 2, 5]], [0, 1])
        >>> data[1]["x"]
        tensor([2, 2, 5])
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray) -> None:
        named = {"tokens": tokens, "offsets": offsets, "labels": labels}
        for name, array in named.items():
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be whole numbers with one axis, got {array.dtype} of the shape "
                    f"{array.shape}."
                )
        if len(offsets) != len(labels) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(
                f"offsets must run from 0 to {len(tokens)} with one more entry than the "
                f"{len(labels)} labels, got {len(offsets)} entries; pass lists to "
                "TokenSequences.pack if in doubt."
            )
        falling = np.flatnonzero(offsets[1:] < offsets[:-1])
        if len(falling):
            at = int(falling[0])
            raise ValueError(
                f"offsets must not decrease, but {offsets[at]} is followed by {offsets[at + 1]} at "
                f"sequence {at}, counted from 0."
            )
        self.tokens, self.offsets, self.labels = tokens, offsets, labels

    @classmethod
    def pack(
        cls, sequences: Iterable[ArrayLike], labels: Iterable[int], dtype: DTypeLike = np.uint8
    ) -> Self:
        """Return a data set of sequences given one by one.

        Raises:
            ValueError: If a token or a label is no whole number, or a token does not fit ``dtype``.
        """
        rows = [_as_tokens(row, dtype, i) for i, row in enumerate(sequences)]
        offsets = np.cumsum([0, *map(len, rows)])
        tokens = np.concatenate(rows) if rows else np.zeros(0, dtype)
        return cls(tokens, offsets, np.asarray(list(labels) if rows else np.zeros(0, np.int64)))

    @classmethod
    def load(cls, path: Path, *, labelled: bool = True) -> Self:
        """Return a data set saved by :meth:`save`.

        Args:
            path: The file.
            labelled: Whether to read labels; otherwise all are zero.

        Raises:
            UserError: If the file is damaged, or holds no such data set.
        """
        kinds = ("tokens", "offsets", "labels") if labelled else ("tokens", "offsets")
        found = take_arrays(path, dict.fromkeys(kinds, ("whole numbers", 1)))
        labels = found.get("labels", np.zeros(max(len(found["offsets"]) - 1, 0), np.int64))
        with user_errors(str(path)):
            return cls(found["tokens"], found["offsets"], labels)

    def save(self, path: Path) -> None:
        """Write the data set to an ``.npz`` file, under a temporary name first."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, tokens=self.tokens, offsets=self.offsets, labels=self.labels)
        write_atomically(path, buffer.getvalue())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x``, the ids of one sequence, and ``labels``, its class."""
        x = torch.from_numpy(self.row(index).astype(np.int64))
        return {"x": x, "labels": torch.tensor(int(self.labels[index]))}

    def row(self, index: int) -> np.ndarray:
        """Return the ids of one sequence as they are stored."""
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} sequences, got index {index}.")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each sequence has."""
        return np.diff(self.offsets)

    def select(self, indices: Sequence[int] | np.ndarray) -> "TokenSequences":
        """Return the sequences at ``indices``, in that order."""
        return TokenSequences.pack(
            [self.row(int(i)) for i in indices], self.labels[indices], self.tokens.dtype
        )

    def truncate(self, length: int) -> "TokenSequences":
        """Return the first ``length`` tokens of every sequence."""
        rows = [self.row(i)[:length] for i in range(len(self))]
        return TokenSequences.pack(rows, self.labels, self.tokens.dtype)


def _as_tokens(row: ArrayLike, dtype: DTypeLike, index: int) -> np.ndarray:
    """Return ids as stored; those that the type cannot hold are an error."""
    array: np.ndarray = np.asarray(row)
    if not array.size:
        return np.zeros(0, dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    is_whole = array.dtype.kind in "iu" and array.ndim == 1
    if not is_whole or array.min() < low or array.max() > high:
        told = f"{array.min()} to {array.max()}" if is_whole else f"{array.dtype} {array.shape}"
        raise ValueError(
            f"sequence {index}, counted from 0: tokens must be whole numbers from {low} to {high} "
            f"in one row, got {told}."
        )
    return array.astype(dtype)


@dataclass(frozen=True)
class PairSequences(Dataset[dict[str, Tensor]]):
    """Two texts an item, with the label of the pair."""

    first: TokenSequences
    second: TokenSequences

    def __post_init__(self) -> None:
        if len(self.first) != len(self.second):
            raise ValueError(
                f"Both sides of the pairs must have one length, got {len(self.first)} and "
                f"{len(self.second)}."
            )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def labels(self) -> np.ndarray:
        """One class a pair."""
        return self.first.labels

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer text of every pair."""
        return np.maximum(self.first.lengths, self.second.lengths)

    def select(self, indices: Sequence[int] | np.ndarray) -> "PairSequences":
        """Return the pairs at ``indices``, in that order."""
        return PairSequences(self.first.select(indices), self.second.select(indices))

    def truncate(self, length: int) -> "PairSequences":
        """Return the first ``length`` tokens of every text."""
        return PairSequences(self.first.truncate(length), self.second.truncate(length))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` and ``other``, the ids of the two texts, and ``labels``."""
        item = self.first[index]
        return {"x": item["x"], "other": self.second[index]["x"], "labels": item["labels"]}


def in_processes(draw: Callable[[int], T], count: int, workers: int) -> list[T]:
    """Return ``draw(0) … draw(count - 1)``, computed by ``workers`` processes.

    Example:
        >>> in_processes(abs, 3, 1)
        [0, 1, 2]
    """
    if count < 0 or workers < 1:
        raise ValueError(
            f"count must not be negative and workers at least 1, got {count} and {workers}."
        )
    if workers == 1:
        return [draw(index) for index in range(count)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(draw, range(count), chunksize=max(1, count // (8 * workers))))
