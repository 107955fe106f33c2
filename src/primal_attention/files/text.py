"""Text files: UTF-8, plain or compressed. Only a line feed ends a line."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from primal_attention.command import UserError, user_errors

__all__ = ["MAX_BYTES", "file_errors", "open_text", "read_bytes", "read_lines", "read_text"]

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


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: If it cannot be read, or is too large.
    """
    parts, size = list[bytes](), 0
    with file_errors(path), path.open("rb") as file:
        while size <= max_bytes and (part := file.read(max(path.stat().st_size, 1_000_000))):
            parts.append(part)
            size += len(part)
    if size > max_bytes:
        raise UserError(f"{path} has more than {max_bytes:,} bytes, the most that is read.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file for reading, plain, ``.gz`` or ``.xz``; its errors become sentences."""
    opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)
    with file_errors(path), opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        yield file


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file, plain, ``.gz`` or ``.xz``.

    Args:
        path: The file.
        max_bytes: Most characters that are read, after decompression.

    Raises:
        UserError: If the file cannot be read, is too large, or is not UTF-8.
    """
    with open_text(path) as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes:,} characters, the most that is read.")
    return text


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
