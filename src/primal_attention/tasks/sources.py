"""What can be seen of a user's file or folder before it is read, for tasks to recognise.

    source = look_at(Path("table.csv"))
    source.columns["price"].kind        # "number"

Looking reads the beginning of a file only, and does not import torch.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from primal_attention.support.command import UserError, did_you_mean
from primal_attention.support.files import MAX_BYTES, list_arrays, read_json_lines
from primal_attention.support.files.folders import walk_files
from primal_attention.support.files.tables import TABLE_SUFFIXES, ending, list_some, read_table

__all__ = [
    "Column",
    "Recognition",
    "Source",
    "check_column",
    "check_target",
    "existing",
    "is_date",
    "is_series_table",
    "look_at",
]

_ROWS = 2_000
"""Rows of a table that are looked at."""
_MANY = {True: 100, False: 20}
"""A column of whole or other numbers with more different values is a quantity, not a class."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d([.,]\d+)?)?\s?(Z|[+-]\d\d:?(\d\d)?)?)?")


class Column(NamedTuple):
    """A column of a table, as far as its first rows tell."""

    kind: Literal["number", "text"]
    """Whether all values are numbers, or missing."""
    distinct: int
    """Different values."""
    words: float
    """Mean number of words of a text."""
    is_whole: bool
    """Whether all values are whole numbers."""

    @property
    def is_quantity(self) -> bool:
        """Whether the values are numbers with too many different values for classes."""
        return self.kind == "number" and self.distinct > _MANY[self.is_whole]


@dataclass(frozen=True)
class Source:
    """A user's file or folder, as far as it is seen without reading all of it."""

    path: Path
    """The file or folder."""
    suffix: str
    """Ending of the file in lower case, without that of a compression; empty for a folder."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Tables and JSON lines: the columns by name."""
    rows: int = 0
    """Tables and JSON lines: rows that were looked at."""
    arrays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Files ``.npz``: the shape of every array."""
    endings: Mapping[str, int] = field(default_factory=dict)
    """Folders: how many files have each ending, in all folders inside."""
    folders: tuple[str, ...] = ()
    """Folders: the folders directly inside, sorted."""

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return not self.suffix and self.path.is_dir()


class Recognition(NamedTuple):
    """How a task reads a source."""

    words: str
    """What the task takes the source for, such as ``"one row a series"``."""
    settings: Mapping[str, Mapping[str, object]] = {}
    """Parts of a recipe, ``data``, ``model`` and ``training``, that suit the source; ``data.train``
    is the source itself unless it is given here. What is not given keeps its default."""
    is_general: bool = False
    """Whether almost any file of the kind can be read so; a task that recognises it by its content
    then goes first."""


def existing(path: Path) -> Path:
    """Return a path that exists.

    Raises:
        UserError: If it does not; the message offers a name like it.
    """
    if path.exists():
        return path
    if path.is_symlink():
        raise UserError(f"{path} is a link that leads to no file.")
    parent = path.parent
    if not parent.is_dir():
        raise UserError(f"there is no folder {parent}, so no file {path}.")
    hint = did_you_mean(path.name, sorted(p.name for p in parent.iterdir()))
    raise UserError(f"there is no file {path}.{hint}")


def check_column(source: Source, target: str) -> None:
    """Raise unless a table has the column to predict.

    Args:
        source: A table.
        target: Name of the column.
    """
    if target not in source.columns:
        # few values repeated often look like classes
        likely = [n for n, c in source.columns.items() if 2 * c.distinct <= source.rows]
        names = list(dict.fromkeys([*likely, *source.columns]))
        raise UserError(
            f"which column is to be predicted? There is no {target!r}; give --target with one of "
            f"{list_some(names)}."
        )


def check_target(source: Source, target: str) -> None:
    """Raise unless a column of a table can be the classes.

    Args:
        source: A table.
        target: Name of the column.
    """
    check_column(source, target)
    column = source.columns[target]
    if column.is_quantity:
        raise UserError(
            f"the column {target!r} holds {column.distinct} different numbers, which is a quantity "
            "and not a class; this task predicts classes. Put the numbers into a few ranges, or "
            "use a task for quantities."
        )


def is_series_table(source: Source, target: str, case: str) -> bool:
    """Return whether a table looks like time series, not like a table of named features.

    Its values are numbers and its target is no quantity. Either a column names the series, which
    have several rows, or the names of the columns are numbers or a word with a number: ``t0, t1``.

    Args:
        source: A table.
        target: Column of the classes.
        case: Column with the names of series.

    Example:
        >>> number, word = Column("number", 9, 0.0, False), Column("text", 2, 1.0, False)
        >>> waves = {"t0": number, "t1": number, "wave": word}
        >>> flowers = {"petal length": number, "petal width": number, "species": word}
        >>> is_series_table(Source(Path("a.csv"), ".csv", waves, 9), "wave", "case")
        True
        >>> is_series_table(Source(Path("b.csv"), ".csv", flowers, 9), "species", "case")
        False
    """
    values = {n: c for n, c in source.columns.items() if n not in (target, case)}
    asked = source.columns.get(target)
    if any(c.kind == "text" for c in values.values()) or (asked is not None and asked.is_quantity):
        return False
    if case in source.columns:
        return source.columns[case].distinct < source.rows
    found = [re.fullmatch(r"(.*?)\d+", name) for name in values]
    prefixes = {match[1] if match else None for match in found}
    return len(values) > 1 and len(prefixes) == 1 and None not in prefixes


def is_date(word: str) -> bool:
    """Return whether a word is a date in ISO 8601, with or without a time.

    Example:
        >>> is_date("2024-05-31"), is_date("2024-05-31 12:00"), is_date("31.5.2024")
        (True, True, False)
    """
    return _DATE.fullmatch(word.strip()) is not None


def look_at(path: Path) -> Source:
    """Return what can be seen of a file or folder.

    Raises:
        UserError: If it does not exist, or is a table or archive that cannot be read.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "table.csv"
        >>> _ = file.write_text("size,price\\n1.5,cheap\\n2.5,dear\\n")
        >>> {name: column.kind for name, column in look_at(file).columns.items()}
        {'size': 'number', 'price': 'text'}
    """
    if existing(path).is_dir():
        return _look_into(path)
    suffix = ending(path)
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes, the most that is read.")
    if suffix in TABLE_SUFFIXES:
        frame = read_table(path, rows=_ROWS)
        columns = {str(name): _column(frame[name].tolist()) for name in frame.columns}
        return Source(path, suffix, columns, len(frame))
    if suffix == ".jsonl":
        return _look_at_lines(path)
    if suffix == ".npz":
        return Source(path, suffix, arrays=list_arrays(path))
    return Source(path, suffix)


def _look_at_lines(path: Path) -> Source:
    values: dict[str, list[object]] = {}
    items = [line.value for line in islice(read_json_lines(path), _ROWS)]
    for item in items:
        for key, value in item.items():
            values.setdefault(key, []).append(value)
    return Source(path, ".jsonl", {k: _column(v) for k, v in values.items()}, len(items))


def _column(values: list[object]) -> Column:
    numbers = [v for v in values if isinstance(v, int | float)]
    # cells of a Parquet file may be arrays, which are not compared
    seen = {str(v) for v in values if hasattr(v, "__len__") or (v == v and v is not None)}
    if len(numbers) == len(values):
        whole = all(v == v and float(v).is_integer() for v in numbers)
        return Column("number", len(seen), 0.0, whole)
    words = sum(1 if is_date(str(v)) else len(str(v).split()) for v in values) / len(values)
    return Column("text", len(seen), words, False)


def _look_into(path: Path) -> Source:
    endings = Counter(file.suffix.lower() for file in walk_files(path))
    folders = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return Source(path, "", endings=dict(endings), folders=tuple(folders))
