"""Tables of a user: CSV, TSV and Parquet, and the errors that files may cause."""

import csv
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from primal_attention.support.command import MissingPackageError, UserError, install_hint
from primal_attention.support.files import MAX_BYTES, check_regular, open_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FILE_ERRORS",
    "TABLE_SUFFIXES",
    "check_header",
    "csv_records",
    "ending",
    "list_some",
    "parquet_errors",
    "read_ratings",
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

_LONGEST = 2**31 - 1
"""Most characters of a field of a table."""


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


def read_table(path: Path, *, rows: int | None = None, words: Sequence[str] = ()) -> "pd.DataFrame":
    """Return a CSV, TSV or Parquet file as a pandas frame.

    A row of the frame is a row of the file: a blank line between rows is an error. So are two
    columns of the same name, and rows that are longer than the header.

    Args:
        path: The file; CSV and TSV may be compressed.
        rows: Read so many rows only.
        words: CSV and TSV: columns, if they are there, whose values stay words as they are written.
            In others ``NA`` and ``null`` are missing values and ``01`` is a number.

    Raises:
        ImportError: If pandas, or pyarrow for Parquet, is not installed.
        UserError: If the file is no such table, or is empty.
    """
    try:
        import pandas  # noqa: F401

        frame = (
            _read_parquet(path, rows) if ending(path) == ".parquet" else _read(path, rows, words)
        )
    except ImportError as error:
        # pandas raises a plain ImportError if pyarrow is missing
        raise MissingPackageError(
            f"Tables need pandas, and pyarrow for Parquet. {install_hint('tables')}"
        ) from error
    if not len(frame):
        raise UserError(f"{path} has no rows.")
    return frame


def _read(path: Path, rows: int | None, words: Sequence[str]) -> "pd.DataFrame":
    import pandas as pd

    separator = "\t" if ending(path) == ".tsv" else ","
    check_header(path, separator)
    with open_text(path) as file:
        try:
            # with low_memory the type of a column depends on the part of the file
            frame = pd.read_csv(
                file,
                sep=separator,
                nrows=rows,
                converters=dict.fromkeys(words, str),
                low_memory=False,
            )
        except (UserError, OSError, UnicodeDecodeError, EOFError, zlib.error, lzma.LZMAError):
            raise
        except Exception as error:  # pandas has many exceptions of its own
            raise UserError(f"{path} is not a readable table: {_explain(error)}.") from error
    _check_blank_lines(path, separator, rows)
    return frame


def check_header(path: Path, separator: str) -> None:
    """Raise if pandas would change names, or shift columns by one."""
    with open_text(path) as file:
        records = (row for row in csv_records(file, separator, path) if row)
        header, first = next(records, []), next(records, [])
    # pandas gives the second of two equal names a number
    _check_names(path, [word.strip() for word in header])
    if len(first) > len(header):
        # pandas would take the first column for an index
        raise UserError(
            f"{path} is not a readable table: its rows have more fields than the {len(header)} "
            "names of its header; name every column, or remove separators at the ends of rows."
        )


def _check_names(path: Path, names: Sequence[str]) -> None:
    # not names.count: a table may have 100,000 columns
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise UserError(
            f"{path}: two columns have the name {twice[0][:80]!r}; give every column its own."
        )


def csv_records(file: TextIO, separator: str, path: Path) -> Iterator[list[str]]:
    """Yield the fields of every row; blank lines have none."""
    csv.field_size_limit(_LONGEST)
    try:
        yield from csv.reader(file, delimiter=separator)
    except csv.Error as error:
        raise UserError(
            f"{path} is not a readable table: a line has a carriage return inside; save it with "
            "line feeds (\\n) at the ends of lines."
        ) from error


def _check_blank_lines(path: Path, separator: str, rows: int | None) -> None:
    """Raise if a line between rows is blank: rows behind it would be counted otherwise.

    Pandas ends a field at a NUL byte without a word, so that one is an error, too.
    """
    has_blank = False
    with open_text(path) as file:
        for number, text in enumerate(file, 1):
            has_blank = has_blank or text.isspace()
            if "\0" in text:
                raise UserError(f"{path}, line {number} has a NUL byte; save the table as text.")
    if not has_blank:
        return
    with open_text(path) as file:
        line, blank = 1, 0
        for number, row in enumerate(csv_records(file, separator, path)):
            if not row or (len(row) == 1 and row[0].isspace()):
                blank = blank or line
            elif blank:
                raise UserError(
                    f"{path}, line {blank} is blank; remove the line, or fill in its fields."
                )
            line += 1 + sum(field.count("\n") for field in row)
            if rows is not None and number > rows:
                return


_EXPLAINED = {
    r"No columns to parse from file": "it is empty",
    r"Expected (\d+) fields in line (\d+), saw (\d+)": r"line \2 has \3 fields, others have \1",
    r"EOF inside string starting at row (\d+)": r"a quotation mark in row \1 has no second one",
}
"""Words of pandas, and what they mean."""


def _explain(error: Exception) -> str:
    words = " ".join(str(error).split()).rstrip(".")
    for pattern, meaning in _EXPLAINED.items():
        match = re.search(pattern, words)
        if match:
            return match.expand(meaning)
    return words[:200] or type(error).__name__


def _read_parquet(path: Path, rows: int | None) -> "pd.DataFrame":
    import pyarrow.parquet as pq

    with parquet_errors(path), pq.ParquetFile(path) as file:
        about = file.metadata
        size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        if size > MAX_BYTES or about.num_rows > MAX_BYTES:
            raise UserError(
                f"{path} has {about.num_rows:,} rows of {size:,} bytes, and at most "
                f"{MAX_BYTES:,} bytes are read; split the file."
            )
        _check_names(path, file.schema_arrow.names)
        if rows is None:
            return file.read().to_pandas()
        batch = next(file.iter_batches(batch_size=rows), None)
        return file.schema_arrow.empty_table().to_pandas() if batch is None else batch.to_pandas()


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises about an ordinary file into a :class:`UserError`."""
    import pyarrow as pa

    check_regular(path)
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # such as a file that may not be read
        raise UserError(
            f"{path} is no Parquet file, or a damaged one; copy it again, or save it again."
        ) from error


def read_ratings(path: Path) -> "pd.DataFrame":
    """Return lines ``user::item::rating::seconds since 1970``, as MovieLens has, as a table.

    Raises:
        ValueError: If a line has another form.
    """
    import numpy as np
    import pandas as pd

    names = ["user", "event", "rating", "time"]
    kinds = {"user": str, "event": str, "rating": float, "time": float}
    form = f"{path} must have lines user::item::rating::seconds, as 1::1193::5::978300760"
    with open_text(path) as file:
        try:
            # single colons, with empty columns between: the fast parser takes one character only
            frame = pd.read_csv(file, sep=":", header=None, usecols=[0, 2, 4, 6])
            frame = frame.set_axis(names, axis=1).astype(kinds)
        except (ValueError, OverflowError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            words = " ".join(str(error).split())
            raise ValueError(f"{form} ({words[:120]}).") from None
    seconds = frame["time"].to_numpy()
    wrong = np.flatnonzero(~((seconds % 1 == 0) & (np.abs(seconds) < 2**40)))
    if len(wrong):
        raise ValueError(f"{form}; line {wrong[0] + 1} has the seconds {seconds[wrong[0]]:g}.")
    frame["time"] = seconds.astype(np.int64)
    return frame.assign(time=pd.to_datetime(frame["time"], unit="s"))


def take_column(frame: "pd.DataFrame", name: str, path: Path, option: str) -> "pd.Series":
    """Return a column of a frame.

    Raises:
        UserError: If the column is missing; the message says how to name another.
    """
    if name not in frame.columns:
        columns = list_some([str(c) for c in frame.columns])
        raise UserError(
            f"{path} has no column {name!r}; its columns are {columns}. Name the right one with "
            f"--data.{option}."
        )
    return frame[name]


def take_labels(frame: "pd.DataFrame", name: str, path: Path) -> list[str]:
    """Return the column of the classes as words.

    Raises:
        UserError: If the column, or one of its values, is missing.
    """
    column = take_column(frame, name, path, "target")
    if any(hasattr(value, "__len__") and not isinstance(value, str) for value in column):
        raise UserError(f"{path}: the column {name!r} holds lists; a class is a word or a number.")
    empty = (column.isna() | (column == "")).to_numpy().nonzero()[0]
    if len(empty):
        raise UserError(
            f"{path}: {len(empty)} of {len(column)} rows have no {name!r}, the first is row "
            f"{empty[0] + 1}; every row needs a class."
        )
    return [str(value) for value in column]


def list_some(names: Sequence[str], most: int = 12) -> str:
    """Return names separated by commas: the first ones if there are many, cut if they are long.

    Example:
        >>> list_some(["a", "b\\n", "c" * 5000], most=2)
        "a, 'b\\\\n' and 1 more"
    """
    shown = (n if n and n.isprintable() else repr(n[:80]) for n in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(n if len(n) <= 82 else f"{n[:80]}…" for n in shown) + more
