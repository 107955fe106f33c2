"""Text files: UTF-8, plain or compressed. Only a line feed ends a line."""

import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from primal_attention.support.command import UserError, user_errors

__all__ = [
    "MAX_BYTES",
    "check_regular",
    "file_errors",
    "open_bytes",
    "open_text",
    "read_bytes",
    "read_lines",
    "read_start",
    "read_text",
]

MAX_BYTES = 8_000_000_000
"""Largest content of a file that is read into memory."""


@contextmanager
def file_errors(path: Path | str) -> Iterator[None]:
    """Turn what the system and decompressors raise about a file into a :class:`UserError`."""
    try:
        with user_errors(str(path), OSError, EOFError, zlib.error, lzma.LZMAError):
            yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text in UTF-8: it has the byte {error.object[error.start]:#04x}, where "
            "no such byte can be; save it as UTF-8."
        ) from error


def check_regular(path: Path) -> None:
    """Raise if a path is no ordinary file: a device never ends, and a pipe may never begin.

    Raises:
        UserError: Also if there is no file.
    """
    with file_errors(path):
        mode = path.stat().st_mode
    # the system itself names a folder
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(
            f"{path} is a device, pipe or socket; only ordinary files are read. Write the data "
            "into a file first."
        )


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file for reading; its errors become sentences."""
    check_regular(path)
    with file_errors(path), path.open("rb") as file:
        yield file


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: If it cannot be read, or is too large.
    """
    parts, size = list[bytes](), 0
    with open_bytes(path) as file:
        _check_size(path, max_bytes)
        # in parts: a file may grow meanwhile
        while size <= max_bytes and (part := file.read(max(path.stat().st_size, 1_000_000))):
            parts.append(part)
            size += len(part)
    if size > max_bytes:
        raise UserError(_too_large(path, max_bytes))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_start(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, of any size; fewer if it is shorter.

    Raises:
        UserError: If it cannot be read.
    """
    with open_bytes(path) as file:
        return file.read(count)


class _Limited(io.RawIOBase):
    """Reads a binary file up to a number of bytes, and raises beyond it."""

    def __init__(self, file: BinaryIO, path: Path, most: int) -> None:
        self._file, self._path, self._most, self._left = file, path, most, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(_too_large(self._path, self._most))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_text(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[TextIO]:
    """Open a text file for reading, plain, ``.gz`` or ``.xz``; its errors become sentences.

    Args:
        path: The file. Only a line feed ends a line.
        max_bytes: Most bytes that are read, after decompression.
    """
    check_regular(path)
    opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)
    with file_errors(path), opened(path, "rb") as file:
        _check_size(path, max_bytes)
        raw = io.BufferedReader(_Limited(file, path, max_bytes), 1 << 20)
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file, plain, ``.gz`` or ``.xz``.

    Args:
        path: The file.
        max_bytes: Most bytes that are read, after decompression.

    Raises:
        UserError: If the file cannot be read, is too large, or is not UTF-8.
    """
    with open_text(path, max_bytes) as file:
        return file.read()


def _check_size(path: Path, most: int) -> None:
    """Raise if a file is too large, before it is read."""
    if path.stat().st_size > most:
        raise UserError(_too_large(path, most))


def _too_large(path: Path, most: int) -> str:
    return f"{path} has more than {most:,} bytes, the most that is read; split the file."


def read_lines(path: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    r"""Return the lines of a text file without their ends; empty lines count too.

    Lines end with ``\n`` or ``\r\n``, and nowhere else: form feeds, U+0085 and U+2028 are
    characters of a line.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.txt"
        >>> _ = file.write_bytes("a\fb\r\n\nc\u2028d\n".encode())
        >>> read_lines(file)
        ['a\x0cb', '', 'c\u2028d']
    """
    lines = read_text(path, max_bytes).split("\n")
    if not lines[-1]:
        del lines[-1]
    return [line.removesuffix("\r") for line in lines]
