"""Files of a user: which errors they may cause, and tables as CSV or Parquet."""

import lzma
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["FILE_ERRORS", "TABLE_SUFFIXES", "list_some", "read_table", "take_column"]

FILE_ERRORS: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, OSError, EOFError, KeyError, IndexError),
    *(zlib.error, zipfile.BadZipFile, lzma.LZMAError),
)
"""What readers raise on a file that is missing, damaged or of another kind."""

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")


def read_table(path: Path) -> Any:
    """Return a CSV, TSV or Parquet file as a pandas frame.

    Raises:
        ImportError: If pandas, or pyarrow for Parquet, is not installed.
        ValueError: If the file is no such table, or is empty.
    """
    try:
        import pandas as pd

        if path.suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            frame = pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    except ImportError as error:
        raise ImportError(
            "Tables need pandas, and pyarrow for Parquet: pip install 'primal-attention[tables]'."
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


def list_some(names: Sequence[str], most: int = 12) -> str:
    """Return names separated by commas, the first ones if there are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
