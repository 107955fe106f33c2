"""Arrays of an ``.npz`` file that must have a certain name, sort and number of axes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError
from primal_attention.support.files.arrays import list_arrays, read_arrays
from primal_attention.support.files.text import MAX_BYTES

__all__ = ["take_arrays"]

_SORTS = {
    "numbers": "iuf",
    "finite numbers": "iuf",
    "whole numbers": "iu",
    "truth values": "b",
    "words": "U",
    "whole numbers or words": "iuU",
    "bytes": "u",
}
"""Kinds of numpy types by the words that describe them."""


def take_arrays(
    path: Path, expected: Mapping[str, tuple[str, int]], *, max_bytes: int = MAX_BYTES
) -> dict[str, NDArray[Any]]:
    """Return some arrays of an ``.npz`` file by name. Nothing is converted.

    Args:
        path: The file.
        expected: What each array holds, and its number of axes. It may hold ``"numbers"``,
            ``"finite numbers"``, ``"whole numbers"``, ``"truth values"``, ``"words"``,
            ``"whole numbers or words"`` or ``"bytes"``.
        max_bytes: Most bytes of all arrays together.

    Raises:
        UserError: If the file is not readable, or an array is missing or of another sort.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez(file, x=np.array([0.5, 1.0]))
        >>> take_arrays(file, {"x": ("finite numbers", 1)})
        {'x': array([0.5, 1. ])}
    """
    found = read_arrays(path, expected, max_bytes=max_bytes)
    lost = [name for name in expected if name not in found]
    if lost:
        there = ", ".join(name[:80] for name in list(list_arrays(path))[:12]) or "none"
        raise UserError(
            f"{path} has no array {lost[0]!r}; it needs {', '.join(expected)}, and has {there}."
        )
    for name, (sort, axes) in expected.items():
        _check(found[name], sort, axes, f"{path}: the array {name!r}")
    return found


def _check(array: NDArray[np.generic], sort: str, axes: int, where: str) -> None:
    is_right = array.dtype.kind in _SORTS[sort] and (sort != "bytes" or array.itemsize == 1)
    if not is_right or array.ndim != axes:
        raise UserError(
            f"{where} must hold {sort} and have {axes} {'axis' if axes == 1 else 'axes'}, got "
            f"{array.dtype} of the shape {array.shape}."
        )
    if sort == "finite numbers" and not np.isfinite(array).all():
        raise UserError(
            f"{where} holds a value that is not finite (NaN or infinite); remove or replace it."
        )
