"""Tables of a user: from files or known sets to a task and its three parts.

A column of words is a category, a column of dates in ISO 8601 is a number. The target decides
between classes and numbers; :func:`is_class_target` has the rule.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import (
    FILE_ERRORS,
    list_some,
    read_table,
    take_column,
)
from primal_attention.tasks.sources import is_date
from primal_attention.tasks.splits import choose, hold_out
from primal_attention.tasks.tables.columns import (
    Cells,
    TableColumn,
    ValidTable,
    read_cells,
    take_items,
)
from primal_attention.tasks.tables.encoding import TableEncoder
from primal_attention.tasks.tables.settings import TableSettings
from primal_attention.tasks.task import Parts

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from primal_attention.tasks.tables.task import TableTask

__all__ = [
    "LabelledTable",
    "is_class_target",
    "known_rows",
    "load_table_parts",
    "parse_dates",
    "split_target",
]

TaskT = TypeVar("TaskT", bound="TableTask")

_CLASSES = 20
"""Most classes that are numbers."""
_STRATA = 10
"""Ranges of a target of numbers; every part gets the same share of each."""
_FEWEST = 10
"""Fewest rows of a table that is split into three parts."""


class LabelledTable(NamedTuple):
    """Features and target of a table."""

    X: ValidTable
    """Frame or array."""
    y: "pd.Series | np.ndarray"
    """Column or array."""
    places: NDArray[np.int64]
    """Where the rows stood in their file, counted from 0."""

    @property
    def cells(self) -> Cells:
        """The target."""
        return read_cells(self.y)

    def take(self, rows: np.ndarray) -> "LabelledTable":
        """Return some of the rows, by number or by a mask."""
        return LabelledTable(*(take_items(part, rows) for part in self))

    def strata(self, *, is_class: bool) -> NDArray[np.int64]:
        """Return the class of every row, or the range of its number."""
        if is_class:
            return self.cells.ranks()
        values = np.asarray(self.cells.values, np.float64)
        count = min(max(len(values) // 20, 1), _STRATA)  # a few rows of each for every part
        return np.digitize(values, np.quantile(values, np.linspace(0, 1, count + 1)[1:-1]))


def load_table_parts(cls: type[TaskT], settings: TableSettings) -> tuple[TaskT, Parts]:
    """Return the task and the three parts of a table.

    Args:
        cls: Class of the task.
        settings: Files, or the name of a known set; it has its own splits.

    Raises:
        UserError: If the table cannot be learned from.
    """
    notes: list[str] = []
    with user_errors(str(settings.train or ""), *FILE_ERRORS):
        table, test = _read_parts(settings, notes)
        is_class = _is_class(table, settings)
        strata = table.strata(is_class=is_class)
        pool, held = np.arange(len(strata)), np.zeros(0, np.int64)
        if test is None:
            pool, held = hold_out(strata, settings.test_share, settings.seed + 1)
            notes.append(_held_out(settings, is_class=is_class))
        chosen = pool[choose(strata[pool], settings.train_size)]
        split = hold_out(strata[chosen], settings.valid, settings.seed)
        train, valid = table.take(chosen[split.train]), table.take(chosen[split.valid])
        target = _describe_target(settings.target, table if is_class else train, is_class=is_class)
        encoder = TableEncoder(list(settings.categorical) or "auto").fit(train.X)
        task = cls.fit(encoder, target, min(len(train.places), settings.max_context))
        task = replace(task, max_context=settings.max_context)
        learned, chooses = (task.rows(part.X, part.y) for part in (train, valid))
    with user_errors(str(settings.test or "the test part"), *FILE_ERRORS):
        scored = table.take(held) if test is None else known_rows(task, test, notes)
        scored = scored.take(choose(scored.strata(is_class=is_class), settings.test_size))
        asked = task.rows(task._select(scored.X), scored.y)
    places = [*train.places.tolist(), *valid.places.tolist()]
    return task, Parts(learned, chooses, asked, places, " ".join(notes))


def _held_out(settings: TableSettings, *, is_class: bool) -> str:
    name = settings.train.name if settings.train is not None else "the set"
    return (
        f"There is no test file: {settings.test_share:.0%} of {name} were held out, the same share "
        f"of every {'class' if is_class else 'range of the target'}, and scored once."
    )


def _read_parts(
    settings: TableSettings, notes: list[str]
) -> tuple[LabelledTable, LabelledTable | None]:
    """Return the table to learn from and the one to score; ``None`` if a part is to be held out."""
    if settings.train is None:
        return _read_known(settings, notes)
    frame = _read_frame(settings.train)
    notes.extend(_mixed_columns(frame))
    table = split_target(frame, settings.target, settings.train)
    table = _drop_unlabelled(table, settings.target, notes)
    if len(table.places) < _FEWEST:
        raise UserError(
            f"{settings.train} has {len(table.places)} rows with a target, too few for a training, "
            f"a validation and a test part; give at least {_FEWEST}."
        )
    if settings.test is None:
        return table, None
    with user_errors(str(settings.test), *FILE_ERRORS):
        return table, split_target(_read_frame(settings.test), settings.target, settings.test)


def _read_known(settings: TableSettings, notes: list[str]) -> tuple[LabelledTable, LabelledTable]:
    """Return both parts of a known set; the seed chooses one of its splits."""
    from primal_attention.datasets import tables as sets

    if settings.name is None:
        raise UserError(
            f"data.train, a table, is missing; or give data.name, one of {', '.join(sets.TABLES)}."
        )
    table = sets.load_table(settings.name)
    number = settings.seed % len(table.splits)
    notes.append(f"Split {number + 1} of {len(table.splits)}: {table.note}.")
    whole = LabelledTable(table.X, table.y, np.arange(len(table.y)))
    fold = table.splits[number]
    return whole.take(fold.train), whole.take(fold.test)


def _read_frame(path: "Path") -> "pd.DataFrame":
    """Return a file as a frame with words as names and dates as dates."""
    frame = read_table(path)
    frame.columns = [str(name) for name in frame.columns]
    return parse_dates(frame)


def _mixed_columns(frame: "pd.DataFrame") -> list[str]:
    """Return a note for every column of numbers that some words make a column of categories."""
    import pandas as pd

    notes = []
    for name in frame.columns:
        known = frame[name].dropna()
        if pd.api.types.is_numeric_dtype(known) or not all(isinstance(v, str) for v in known):
            continue
        words = pd.to_numeric(known, errors="coerce").isna().to_numpy()
        if words.any() and 2 * words.sum() < len(known):
            row = int(np.flatnonzero(words)[0])
            notes.append(
                f"Column {name!r} holds words beside numbers, such as {known.iloc[row][:40]!r} in "
                f"row {known.index[row] + 1}, so its values are categories."
            )
    return notes


def parse_dates(frame: "pd.DataFrame", names: Sequence[str] | None = None) -> "pd.DataFrame":
    """Return a frame in which columns of dates as text are dates in UTC.

    Args:
        frame: A pandas frame.
        names: Columns that hold dates; by default those of which every value is one.

    Raises:
        ValueError: If a named column holds a text that is no date.
    """
    import pandas as pd

    found = {}
    for name in frame.columns if names is None else names:
        known = frame[name].dropna()
        if not len(known) or not all(isinstance(v, str) for v in known):
            continue
        if names is None and not all(map(is_date, known)):
            continue
        try:
            dates = pd.to_datetime(frame[name], format="ISO8601", utc=True)
        except ValueError:
            if names is None:
                continue  # such as the 31st of February
            raise ValueError(
                f"column {name!r} held dates in training; write them as 2024-05-31 or "
                f"2024-05-31T12:00, not as {known.iloc[0]!r}."
            ) from None
        found[name] = dates.dt.tz_localize(None)
    return frame.assign(**found) if found else frame


def split_target(frame: "pd.DataFrame", target: str, path: "Path") -> LabelledTable:
    """Return features and target of the frame in a file."""
    y = take_column(frame, target, path, "target")
    # an index that was written with the table has no name, nor has what a last comma makes
    unnamed = [n for n in frame.columns if n.startswith("Unnamed: ")]
    for name in unnamed:
        if name != frame.columns[0] and frame[name].notna().any():
            place = list(frame.columns).index(name) + 1
            raise ValueError(f"{path}: column {place} has no name; give every column its own.")
    X = frame.drop(columns=[target, *unnamed])
    if not X.shape[1]:
        raise ValueError(f"{path} has no column besides the target {target!r} to predict it from.")
    return LabelledTable(X, y, np.arange(len(frame)))


def _drop_unlabelled(
    table: LabelledTable, target: str, notes: list[str] | None = None
) -> LabelledTable:
    """Return the rows that have a target, and note how many have none."""
    known = table.cells.ranks() >= 0
    if not known.any():
        raise ValueError(f"no row has a value in the target {target!r}; choose another --target.")
    if not known.all() and notes is not None:
        count = int((~known).sum())
        words = (
            f"{count:,} rows without {target!r} were"
            if count > 1
            else f"A row without {target!r} was"
        )
        notes.append(f"{words} left out.")
    return table.take(known)


def _is_class(table: LabelledTable, settings: TableSettings) -> bool:
    if settings.kind == "auto":
        return is_class_target(table.y, settings.target)
    if settings.kind == "number" and not table.cells.is_numeric:
        raise ValueError(
            f"the target {settings.target!r} holds words, which are no numbers; correct the file, "
            "or leave out --kind number."
        )
    return settings.kind == "classes"


def is_class_target(y: "pd.Series | np.ndarray", target: str) -> bool:
    """Return whether a target is classes: words, booleans, or few whole numbers.

    Numbers are classes if there are two of them, or if they count from 0 or 1 without a gap to at
    most 20, with two rows of each on average. Other numbers are quantities.

    Args:
        y: The target, as a column or an array, without missing values.
        target: Its name.

    Raises:
        ValueError: If all values are equal, if they are dates, or if most words are different.

    Example:
        >>> is_class_target(np.array([0, 1, 2, 1, 0, 2]), "species")
        True
        >>> is_class_target(np.array([3, 8, 5, 5, 3, 8]), "quality")
        False
    """
    cells = read_cells(y)
    count, distinct = len(cells.values), len(np.unique(cells.ranks()))
    if distinct < 2:
        raise ValueError(
            f"the target {target!r} has the same value in all rows, so there is nothing to learn; "
            "choose another --target."
        )
    if cells.form in ("datetime", "duration"):
        raise ValueError(
            f"the target {target!r} holds dates or durations; predict a number or classes, such "
            "as the days since a fixed date."
        )
    if cells.is_numeric:
        values = np.unique(np.asarray(cells.values, np.float64))
        is_counting = values[0] in (0, 1) and bool((np.diff(values) == 1).all())
        is_few = distinct == 2 or (is_counting and distinct <= _CLASSES)
        return is_few and 2 * distinct <= count
    if 2 * distinct > count:
        raise ValueError(
            f"the target {target!r} has {distinct} different words in {count} rows; classes must "
            "repeat, and this looks like an identifier. Choose another --target."
        )
    return True


def _describe_target(name: str, table: LabelledTable, *, is_class: bool) -> TableColumn:
    """Return what the target is; classes are in the order of their names."""
    weights, most = np.ones(len(table.places)), len(table.places) + 2
    found = TableColumn.fit(
        name, table.cells, weights, is_categorical=is_class, max_categories=most
    )
    if not is_class:
        return found
    is_number = table.cells.form in ("integer", "float")
    ordered = sorted(found.categories, key=float if is_number else str)
    return TableColumn(
        name, "categorical", categories=tuple(ordered), form=found.form, dtype=found.dtype
    )


def known_rows(
    task: "TableTask", table: LabelledTable, notes: list[str] | None = None
) -> LabelledTable:
    """Return the rows of a table to score: those with a target.

    Raises:
        ValueError: If no row has a target, or one has a class that training did not have.
    """
    target = task._numeric_target
    table = _drop_unlabelled(table, target.name, notes)
    if task.is_class:
        unknown = np.isnan(target.encode(table.cells))
        words = sorted({str(v) for v in np.asarray(table.y)[unknown]})
        if words:
            raise ValueError(
                f"the classes {list_some(words)} of {target.name!r} are not among those of the "
                f"training: {list_some(task.classes)}."
            )
    return table
