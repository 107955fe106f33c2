"""Files of a user: which errors they may cause, and tables as CSV or Parquet."""

import gzip
import lzma
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from primal_attention.command import MissingPackageError, install_hint

__all__ = [
    "FILE_ERRORS",
    "TABLE_SUFFIXES",
    "check_size",
    "ending",
    "list_some",
    "open_text",
    "read_table",
    "take_column",
    "take_labels",
]

FILE_ERRORS: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, OSError, EOFError, KeyError, IndexError),
    *(zlib.error, zipfile.BadZipFile, lzma.LZMAError),
)
"""What readers raise on a file that is missing, damaged or of another kind."""

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")

MAX_BYTES = 8_000_000_000
"""Largest file, or content of an archive, that is read into memory."""


def check_size(path: Path) -> None:
    """Raise if a file is, or unpacks to, more than is read into memory.

    Raises:
        ValueError: If it is too large.
    """
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > MAX_BYTES:
        raise ValueError(
            f"{path} holds {size:,} bytes, and at most {MAX_BYTES:,} are read; split the file."
        )


def ending(path: Path) -> str:
    """Return the ending of a file's name in lower case, without that of a compression.

    Example:
        >>> ending(Path("reviews.JSONL.xz"))
        '.jsonl'
    """
    parts = [suffix.lower() for suffix in path.suffixes]
    if len(parts) > 1 and parts[-1] in (".gz", ".xz"):
        del parts[-1]
    return parts[-1] if parts else ""


def open_text(path: Path) -> TextIO:
    """Return a text file for reading, plain or compressed; only line feeds end a line."""
    opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)
    file: TextIO = opened(path, "rt", encoding="utf-8-sig", newline="\n")
    return file


def read_table(path: Path, *, rows: int | None = None) -> Any:
    """Return a CSV, TSV or Parquet file as a pandas frame.

    Args:
        path: The file; CSV and TSV may be compressed.
        rows: Read so many rows only.

    Raises:
        ImportError: If pandas, or pyarrow for Parquet, is not installed.
        ValueError: If the file is no such table, or is empty.
    """
    try:
        import pandas as pd

        if ending(path) == ".parquet":
            frame = _read_parquet(path, rows)
        else:
            frame = pd.read_csv(path, sep="\t" if ending(path) == ".tsv" else ",", nrows=rows)
    except ImportError as error:
        # pandas raises a plain ImportError if pyarrow is missing
        raise MissingPackageError(
            f"Tables need pandas, and pyarrow for Parquet. {install_hint('tables')}"
        ) from error
    except OSError:
        raise
    except Exception as error:
        # parsers of pandas and pyarrow have many exceptions of their own
        words = " ".join(str(error).split())
        raise ValueError(f"{path} is not a readable {path.suffix} table: {words}") from error
    if not len(frame):
        raise ValueError(f"{path} has no rows.")
    return frame


def _read_parquet(path: Path, rows: int | None) -> Any:
    import pandas as pd

    if rows is None:
        return pd.read_parquet(path)
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=rows), None)
        return file.schema_arrow.empty_table().to_pandas() if batch is None else batch.to_pandas()


def take_column(frame: Any, name: str, path: Path, option: str) -> Any:
    """Return a column of a frame.

    Raises:
        ValueError: If the column is missing; the message says how to name another.
    """
    if name not in frame.columns:
        columns = list_some([str(c) for c in frame.columns])
        raise ValueError(
            f"{path} has no column {name!r}; its columns are {columns}. Name the right one with "
            f"--data.{option}."
        )
    return frame[name]


def take_labels(frame: Any, name: str, path: Path) -> list[str]:
    """Return the column of the classes as words.

    Raises:
        ValueError: If the column, or one of its values, is missing.
    """
    column = take_column(frame, name, path, "target")
    empty = column.isna().to_numpy().nonzero()[0]
    if len(empty):
        raise ValueError(
            f"{path}: {len(empty)} of {len(column)} rows have no {name!r}, the first is row "
            f"{empty[0] + 1}; every row needs a class."
        )
    return [str(value) for value in column]


def list_some(names: Sequence[str], most: int = 12) -> str:
    """Return names separated by commas, the first ones if there are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
