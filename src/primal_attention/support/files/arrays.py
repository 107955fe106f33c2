"""Arrays in ``.npy`` and ``.npz`` files. Their headers are checked before memory is taken."""

import math
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError
from primal_attention.support.files.text import MAX_BYTES, open_bytes

__all__ = ["list_arrays", "read_array", "read_arrays"]

_MAX_MEMBERS = 10_000
_KINDS = "biufcUSMm"
"""Kinds of numpy types that hold no Python objects."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, UnicodeError, OverflowError),
    OSError,  # without its beginning a file has offsets that lie before it
)
"""What zipfile raises about an archive that is damaged; its words name fields of the format."""


def read_array(path: Path, *, mmap: bool = False, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """Return the array of a ``.npy`` file.

    Args:
        path: The file.
        mmap: Leave the numbers on the disk; they cannot be changed then, and may be of any size.
        max_bytes: Largest array that is read into memory.

    Raises:
        UserError: If the file is no array, is damaged, too large, or holds Python objects.
    """
    with open_bytes(path) as file:
        size = path.stat().st_size
        limit = size if mmap else max_bytes
        try:
            if mmap:
                _check_header(file, size, limit)
                return np.load(path, mmap_mode="r", allow_pickle=False)
            return _read(file, size, limit)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


def read_arrays(
    path: Path, names: Collection[str] | None = None, *, max_bytes: int = MAX_BYTES
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file by name.

    Args:
        path: The file.
        names: Read only these, as far as they are there; by default all.
        max_bytes: Most bytes of all arrays together.

    Raises:
        UserError: If the file is no archive of arrays, is damaged, encrypted, too large, or holds
            Python objects.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.npz"
        >>> np.savez_compressed(file, x=np.arange(3))
        >>> read_arrays(file)
        {'x': array([0, 1, 2])}
    """
    found = {}
    with _opened(path, max_bytes) as archive:
        for name, member in _members(archive):
            if names is None or name in names:
                with archive.open(member) as file, _named(name):
                    found[name] = _read(file, member.file_size, max_bytes)  # type: ignore[arg-type]
    return found


def list_arrays(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of an ``.npz`` file by name, from their headers alone.

    Raises:
        UserError: If the file is no archive of arrays, is damaged, encrypted or too large.
    """
    shapes = {}
    with _opened(path, MAX_BYTES) as archive:
        for name, member in _members(archive):
            with archive.open(member) as file, _named(name):
                shapes[name] = _read_header(file)[0]  # type: ignore[arg-type]
    return shapes


@contextmanager
def _opened(path: Path, max_bytes: int) -> Iterator[zipfile.ZipFile]:
    """Open an archive, and turn what is wrong with it into a :class:`UserError`."""
    with open_bytes(path) as file:
        start = file.read(6)
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                _check_members(archive, max_bytes)
                yield archive
        except _DAMAGES as error:
            if start[:2] == b"PK":
                raise UserError(
                    f"{path} is a damaged .npz archive; copy it again, or save it again with "
                    "numpy.savez."
                ) from error
            raise UserError(f"{path} is not an .npz archive: {_guess(start)}.") from error
        except ValueError as error:
            raise UserError(f"{path} is not a readable .npz archive: {error}") from error


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Begin messages with the name of an array."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"array {name[:80]!r}: {error}") from error


def _guess(start: bytes) -> str:
    if start == b"\x93NUMPY":
        return "it holds a single array; save it with numpy.savez under a name"
    if start[:1] == b"\x80":
        return "it is a pickle, and pickles are never read; save arrays with numpy.savez"
    return "save arrays with numpy.savez" if start else "it is empty"


def _check_members(archive: zipfile.ZipFile, max_bytes: int) -> None:
    members = archive.infolist()
    total = sum(member.file_size for member in members)
    if len(members) > _MAX_MEMBERS or total > max_bytes:
        raise ValueError(
            f"it has {len(members):,} members of {total:,} bytes in all; at most "
            f"{_MAX_MEMBERS:,} of {max_bytes:,} bytes are read."
        )


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield name and place of every array, checked as far as the list of contents tells."""
    seen = set()
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename:
            raise ValueError(f"its member {name[:80]!r} is no array; save arrays with numpy.savez.")
        if name in seen:
            raise ValueError(f"it has two arrays {name[:80]!r}.")
        if member.flag_bits & 1:
            raise ValueError(f"its array {name[:80]!r} is encrypted; save it without a password.")
        if member.compress_type not in _METHODS:
            raise ValueError(
                f"its array {name[:80]!r} has the compression {member.compress_type}, which numpy "
                "does not write; save it with numpy.savez_compressed."
            )
        seen.add(name)
        yield name, member


def _read(file: BinaryIO, size: int, max_bytes: int) -> NDArray[Any]:
    shape, in_columns, dtype = _check_header(file, size, max_bytes)
    count = math.prod(shape)
    data = file.read(count * dtype.itemsize)
    # one byte more: an archive compares the checksum of a member only at its end
    if len(data) < count * dtype.itemsize or file.read(1):
        raise ValueError(f"it does not hold the {count:,} numbers that its header promises.")
    # a copy, because an array on top of bytes cannot be changed
    array = np.frombuffer(data, dtype, count).copy()
    return array.reshape(shape, order="F" if in_columns else "C")


def _check_header(
    file: BinaryIO, size: int, max_bytes: int
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array; raise if it is damaged or promises what the file lacks."""
    shape, in_columns, dtype = _read_header(file)
    if dtype.hasobject or dtype.kind not in _KINDS:
        raise ValueError(
            f"it has the type {dtype}; Python objects and records are never read, save numbers or "
            "words."
        )
    promised = math.prod(shape) * dtype.itemsize
    if promised > size:
        raise ValueError(f"its header promises {promised:,} bytes, the file has {size:,}.")
    if promised > max_bytes:
        raise ValueError(f"it has {promised:,} bytes, and at most {max_bytes:,} are read.")
    return shape, in_columns, dtype


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    npy: Any = np.lib.format
    try:
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, in_columns, dtype = readers[version](file, max_header_size=10_000)
    except (zipfile.BadZipFile, zlib.error):
        raise  # the archive is damaged, not the header
    except Exception as error:
        # numpy parses the header as Python; a damaged one raises errors of many types
        raise ValueError("it has no header of a .npy array that can be read.") from error
    if any(n < 0 for n in shape) or len(shape) > 32:
        raise ValueError(f"its shape {shape[:8]} is impossible.")
    return shape, in_columns, dtype
