"""Checks of the arrays of a log: nothing is converted to a sort that it is not."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["are_places", "as_array", "check_array", "join_marks"]


def as_array(values: object) -> np.ndarray:
    """Return values as an array; numbers beside words in a list stay numbers."""
    array = np.asarray(values)
    # numpy writes numbers beside words as words, so that 1 and "1" could not be told apart
    is_list = array.dtype.kind == "U" and not isinstance(values, np.ndarray)
    return np.asarray(values, dtype=object) if is_list else array


def check_array(name: str, array: Any, words: str, kinds: str) -> None:
    """Raise if a column of a log is no array of these kinds of numbers with one axis."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
        kind = f"{array.dtype} of the shape {array.shape}" if hasattr(array, "dtype") else None
        raise ValueError(
            f"{name} must hold {words} in an array with one axis, got "
            f"{kind or type(array).__name__}; EventSequences.from_arrays takes lists."
        )


def are_places(values: np.ndarray, levels: tuple[str, ...]) -> bool:
    """Return whether values are indices of levels, or -1."""
    is_whole = values.dtype.kind in "iu"
    return is_whole and (not len(values) or -1 <= values.min() <= values.max() < len(levels))


def join_marks(name: str, parts: Iterable[object], lengths: Sequence[int]) -> np.ndarray:
    """Return the values of a mark over all events."""
    arrays = [as_array(part) for part in parts] if hasattr(parts, "__len__") else []
    if [array.shape for array in arrays] != [(length,) for length in lengths]:
        raise ValueError(f"{name!r} must hold a list for every sequence, a value for every event.")
    return np.concatenate(arrays)
