"""Rows of a file of texts, one after another: files may be larger than the memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from primal_attention.support.command import UserError, did_you_mean, needs
from primal_attention.support.files.tables import (
    check_header,
    csv_records,
    ending,
    list_some,
    parquet_errors,
)
from primal_attention.support.files.text import open_text
from primal_attention.support.files.values import read_json_lines

__all__ = ["TEXT_SUFFIXES", "TextRow", "read_text_rows"]

TEXT_SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
_AT_ONCE = 256
"""Rows of a Parquet file that are read together."""


class TextRow(NamedTuple):
    """A row of a file of texts."""

    text: str
    kept: tuple[object, ...]
    """Values of the other columns that were asked for."""


def read_text_rows(path: Path, column: str = "text", keep: Sequence[str] = ()) -> Iterator[TextRow]:
    """Yield the texts of a file, row by row.

    A line of a ``.txt`` file is a text, also a blank one. Values of CSV and TSV are words as they
    are written. Text files may be compressed (``.gz``, ``.xz``).

    Args:
        path: The file.
        column: Column of the texts; a ``.txt`` file has only the column ``text``.
        keep: Other columns to read.

    Raises:
        UserError: If the file is of another kind or damaged, lacks a column, or a row has no text.
    """
    names = (column, *keep)
    for number, values in enumerate(_values(path, names), 1):
        text, *kept = values
        if not isinstance(text, str):
            raise UserError(
                f"{path}, row {number} has {_describe(text)} in the column {column!r}, and every "
                "row needs a text; fill it in, remove the row, or name another column with "
                "--column."
            )
        yield TextRow(text, tuple(kept))


def _describe(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _values(path: Path, names: Sequence[str]) -> Iterator[Sequence[object]]:
    """Yield the values of some columns."""
    kind = ending(path)
    if kind == ".txt":
        _check_columns(path, names, ["text"])
        with open_text(path) as file:
            yield from ([line.removesuffix("\n").removesuffix("\r")] * len(names) for line in file)
    elif kind == ".jsonl":
        for number, row in read_json_lines(path):
            _check_columns(f"{path}, line {number}", names, list(row))
            yield [row[name] for name in names]
    elif kind in (".csv", ".tsv"):
        yield from _table_values(path, "\t" if kind == ".tsv" else ",", names)
    elif kind == ".parquet":
        yield from _parquet_values(path, names)
    else:
        raise UserError(
            f"{path} has the ending {kind or 'of no format'!r}; texts are read from "
            f"{', '.join(TEXT_SUFFIXES)}. Save it as one of them."
        )


def _table_values(path: Path, separator: str, names: Sequence[str]) -> Iterator[list[object]]:
    check_header(path, separator)
    with open_text(path) as file:
        records = (record for record in csv_records(file, separator, path) if record)
        header = [name.strip() for name in next(records, [])]
        _check_columns(path, names, header)
        places = [header.index(name) for name in names]
        for number, record in enumerate(records, 1):
            if len(record) != len(header):
                raise UserError(
                    f"{path}, row {number} has {len(record)} fields, and the header has "
                    f"{len(header)}; write every field, and quote texts with separators."
                )
            yield [record[place] for place in places]


def _parquet_values(path: Path, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    with needs("tables", "A Parquet file"):
        import pyarrow.parquet as pq
    with parquet_errors(path), pq.ParquetFile(path) as file:
        _check_columns(path, names, file.schema_arrow.names)
        # not a set: a column may be asked for as text and kept as well
        columns = list(dict.fromkeys(names))
        for batch in file.iter_batches(_AT_ONCE, columns=columns):
            values = {name: batch.column(name).to_pylist() for name in columns}
            yield from zip(*(values[name] for name in names), strict=True)


def _check_columns(where: Path | str, names: Sequence[str], have: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name not in have:
            option = "--keep" if number else "--column"
            raise UserError(
                f"{where} has no column {name!r}; its columns are {list_some(list(have))}."
                f"{did_you_mean(name, have)} Name one of them with {option}."
            )
