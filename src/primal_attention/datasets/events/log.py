"""Logs of events: who, when, what.

A log is stored ragged: sequence ``i`` owns the events ``offsets[i]:offsets[i + 1]`` of every
column. Times are float64 in one stated unit. Dates count from 1970 in UTC, to a microsecond.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primal_attention.datasets.events.checks import are_places, as_array, check_array, join_marks
from primal_attention.datasets.events.units import SECONDS, UNITS, moment, to_dates
from primal_attention.datasets.words import as_words
from primal_attention.support.files.tables import list_some

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EventSequences", "LogColumn"]

MAX_EVENTS = 100_000_000
"""Most events of a log."""
MAX_NAMES = 10_000
"""Most types of events, and most levels of a categorical column."""


class LogColumn(NamedTuple):
    """Values beside the events or beside the sequences."""

    values: np.ndarray
    """Numbers with NaN where missing, or indices of levels with −1 where missing."""
    levels: tuple[str, ...] | None = None
    """Names of the levels; ``None`` for numbers."""

    @classmethod
    def of(cls, values: object, name: str) -> "LogColumn":
        """Return a column: numbers stay numbers, anything else becomes categorical."""
        array = as_array(values)
        if array.dtype.kind == "c":
            raise ValueError(f"{name!r} holds complex numbers; give real ones or words.")
        if array.dtype.kind in "iuf":
            numbers = array.astype(np.float64)
            if np.isinf(numbers).any():
                raise ValueError(f"{name!r} holds infinite values; only NaN means missing.")
            return cls(numbers)
        cells = array.tolist()
        is_known = [not _is_missing(cell) for cell in cells]
        known = iter(as_words(compress(cells, is_known), f"levels of {name!r}"))
        words = [next(known) if there else None for there in is_known]
        levels = tuple(sorted({w for w in words if w is not None}))
        return cls(index_names(words, levels, f"levels of {name!r}"), levels)

    def take(self, index: slice | np.ndarray) -> "LogColumn":
        """Return some of the values."""
        return self._replace(values=self.values[index])

    def relevel(self, levels: tuple[str, ...] | None, name: str) -> "LogColumn":
        """Return the column with the levels of a training log; others count as missing."""
        if (levels is None) != (self.levels is None):
            kind = "numbers" if levels is None else "categories"
            raise ValueError(f"The column {name!r} must hold {kind}, as in the training log.")
        if levels is None or levels == self.levels:
            return self
        place = {level: i for i, level in enumerate(levels)}
        table = np.array([*(place.get(level, -1) for level in self.levels or ()), -1])
        return LogColumn(table[self.values], levels)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value)) or str(value) == "<NA>"


def index_names(
    words: Sequence[str | None], names: tuple[str, ...], what: str
) -> NDArray[np.int64]:
    """Return the place of every word among the names; −1 where it is missing."""
    if len(names) > MAX_NAMES:
        raise ValueError(
            f"There are {len(names):,} {what}, at most {MAX_NAMES:,} are possible; is it the right "
            "column? Merge rare ones, or use a number."
        )
    place = {name: i for i, name in enumerate(names)}
    return np.array([-1 if w is None else place[w] for w in words], dtype=np.int64)


@dataclass(frozen=True, repr=False, eq=False)
class EventSequences:
    """A log of typed events in continuous time, one sequence for each user, machine or patient.

    Make one with :meth:`from_frame`, :meth:`from_csv`, :meth:`from_parquet` or
    :meth:`from_arrays`. Events are sorted by time within their sequence. Events at the same time
    keep their order.

    Example:
        >>> log = EventSequences.from_arrays([[0.0, 1.5, 4.0], [2.0, 3.0]], [["a", "b", "a"], "ab"])
        >>> log
        EventSequences(2 sequences, 5 events, 2 types, times in 'units')
        >>> log.gaps[:3]
        array([nan, 1.5, 2.5])
    """

    offsets: NDArray[np.int64]
    """Start of every sequence among the events, and the number of events at the end."""
    times: NDArray[np.float64]
    """Times in ``unit``, sorted within a sequence; for dates counted from 1970 in UTC."""
    types: NDArray[np.int64]
    """Type of every event, an index into ``names``."""
    names: tuple[str, ...]
    """Names of the types."""
    keys: tuple[str, ...]
    """Names of the sequences."""
    unit: str = "units"
    """Unit of all times, gaps and waiting times."""
    is_dated: bool = False
    """Whether times are dates."""
    marks: Mapping[str, LogColumn] = field(default_factory=dict)
    """Values beside the type of every event."""
    covariates: Mapping[str, LogColumn] = field(default_factory=dict)
    """Values of every sequence."""

    def __post_init__(self) -> None:
        check_array("offsets", self.offsets, "whole numbers", "iu")
        check_array("times", self.times, "real numbers", "iuf")
        check_array("types", self.types, "whole numbers", "iu")
        count = len(self.times)
        if count > MAX_EVENTS:
            raise ValueError(f"A log has at most {MAX_EVENTS:,} events, got {count:,}; split it.")
        lengths = np.diff(self.offsets)
        if not len(lengths):
            raise ValueError("The log holds no sequence; give at least one event.")
        if (lengths < 0).any():
            raise ValueError(
                f"offsets must increase, but {int(self.offsets[lengths.argmin()])} is followed by "
                f"{int(self.offsets[lengths.argmin() + 1])}."
            )
        if self.offsets[0] or self.offsets[-1] != count or len(self.types) != count:
            raise ValueError(
                f"offsets must start at 0 and end at the number of events, got "
                f"{self.offsets[0]} and {self.offsets[-1]} for {count} times and "
                f"{len(self.types)} types."
            )
        if len(self.keys) != len(lengths):
            raise ValueError(f"keys must name {len(lengths)} sequences, got {len(self.keys)}.")
        empty = np.flatnonzero(lengths < 1)
        if len(empty):
            raise ValueError(
                f"Sequence {self.keys[empty[0]]!r} has no events; leave empty sequences out."
            )
        if not np.isfinite(self.times).all():
            bad = int(np.flatnonzero(~np.isfinite(self.times))[0])
            raise ValueError(
                f"Event {bad}, counted from 0, has no time (NaT, NaN or infinite); leave it out."
            )
        if count and not 0 <= self.types.min() <= self.types.max() < len(self.names):
            raise ValueError(
                f"types must index the {len(self.names)} names, got {self.types.min()} to "
                f"{self.types.max()}."
            )
        if len(set(self.names)) < len(self.names):
            twice = next(n for i, n in enumerate(self.names) if n in self.names[:i])
            raise ValueError(f"names must differ, but {twice!r} is there twice.")
        if np.isinf(self.gaps).any():
            raise ValueError("Times differ by more than float64 can hold; use a larger unit.")
        negative = np.flatnonzero(self.gaps < 0)
        if len(negative):
            raise ValueError(
                f"Event {negative[0]}, counted from 0, comes before the event ahead of it (gap "
                f"{self.gaps[negative[0]]:g}); EventSequences.from_arrays sorts by time."
            )
        if self.is_dated and self.unit not in SECONDS:
            raise ValueError(f"Dates need a unit of time: {', '.join(UNITS)}; got {self.unit!r}.")
        sizes = ((self.marks, count, "event"), (self.covariates, len(lengths), "sequence"))
        for columns, size, owner in sizes:
            for name, column in columns.items():
                if column.values.shape != (size,):
                    raise ValueError(
                        f"{name!r} must hold one value for every {owner} ({size}), got shape "
                        f"{column.values.shape}."
                    )
                if column.levels is not None and not are_places(column.values, column.levels):
                    raise ValueError(
                        f"{name!r} must index its {len(column.levels)} levels, with -1 where a "
                        "value is missing."
                    )

    @classmethod
    def from_frame(
        cls,
        frame: "pd.DataFrame",
        *,
        time: str | None = None,
        event: str | None = None,
        sequence: str | None = None,
        marks: Sequence[str] = (),
        covariates: Sequence[str] = (),
        unit: str | None = None,
    ) -> Self:
        """Return the log in a pandas frame with one row for every event.

        Args:
            frame: The table.
            time: Column of the times: numbers, ``datetime64`` with or without a time zone, or
                ISO 8601 text. Dates without a time zone are UTC. By default a column with a usual
                name, such as ``time`` or ``timestamp``.
            event: Column of the types. By default one named ``event``, ``type`` and so on.
            sequence: Column that tells sequences apart. By default one named ``sequence``,
                ``user``, ``id`` and so on; if there is none, all events are one sequence.
            marks: Columns with more about every event: numbers or categories.
            covariates: Columns that are constant in a sequence: numbers or categories.
            unit: Unit of the times. For dates one of milliseconds to weeks, by default days. For
                numbers the name of their unit; seconds, hours and so on allow ``"7D"``.

        Raises:
            ValueError: If a column is missing, or a time or a type is missing or unreadable.
        """
        from primal_attention.datasets.events.tables import log_from_frame

        columns = {"time": time, "event": event, "sequence": sequence}
        return log_from_frame(cls, frame, columns, marks, covariates, unit)

    @classmethod
    def from_csv(cls, path: str | Path, **columns: Any) -> Self:
        """Return the log in a ``.csv`` or ``.tsv`` file; options as in :meth:`from_frame`.

        A ``.dat`` file has lines ``user::item::rating::seconds``, as MovieLens-1M has. Items are
        the events; ``marks=["rating"]`` keeps the ratings.
        """
        from primal_attention.datasets.events.tables import read_log_table

        return cls.from_frame(read_log_table(Path(path)), **columns)

    @classmethod
    def from_parquet(cls, path: str | Path, **columns: Any) -> Self:
        """Return the log in a ``.parquet`` file; options as in :meth:`from_frame`."""
        from primal_attention.datasets.events.tables import read_log_table

        return cls.from_frame(read_log_table(Path(path)), **columns)

    @classmethod
    def from_arrays(
        cls,
        times: Sequence[Sequence[object] | np.ndarray],
        types: Sequence[Iterable[object]],
        *,
        keys: Sequence[object] | None = None,
        marks: Mapping[str, Sequence[object]] | None = None,
        covariates: Mapping[str, Sequence[object]] | None = None,
        unit: str | None = None,
    ) -> Self:
        """Return the log of arrays, one for every sequence.

        Args:
            times: Times of every sequence: numbers or ``datetime64``.
            types: Types of every sequence, of any kind; compared as text.
            keys: Names of the sequences; by default 0, 1, 2, …
            marks: By name, an array for every sequence with more about its events.
            covariates: By name, one value for every sequence.
            unit: Unit of the times, as in :meth:`from_frame`.

        Example:
            >>> when = np.array(["2024-01-01", "2024-01-03"], "datetime64[s]")
            >>> EventSequences.from_arrays([when], [["on", "off"]], unit="hours").gaps
            array([nan, 48.])
        """
        from primal_attention.datasets.events.tables import log_from_columns

        if not hasattr(times, "__len__") or not hasattr(types, "__len__"):
            raise ValueError("times and types must be lists with one list for every sequence.")
        rows = [np.atleast_1d(np.asarray(t)) for t in times]
        labels = [list(t) for t in types]
        kinds = {row.dtype.kind for row in rows}
        if any(row.ndim != 1 for row in rows):
            raise ValueError("A sequence has one list of times, not lists inside a list.")
        if "M" in kinds and len(kinds) > 1:
            raise ValueError("Times are dates in some sequences and numbers in others, not both.")
        lengths = [len(r) for r in rows]
        if lengths != [len(t) for t in labels]:
            raise ValueError(
                "times and types must have the same sequences with the same number of events, got "
                f"lengths {lengths[:5]} and {[len(t) for t in labels][:5]}."
            )
        if not rows:
            raise ValueError("The log holds no sequence; give at least one.")
        names = as_words(range(len(rows)) if keys is None else keys, "keys")
        if len(names) != len(rows):
            raise ValueError(f"keys must name {len(rows)} sequences, got {len(names)}.")
        if len(set(names)) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise ValueError(f"keys must differ, but {twice!r} is there twice; rename it.")
        if 0 in lengths:
            raise ValueError(
                f"Sequence {names[lengths.index(0)]!r} has no events; leave empty sequences out."
            )
        beside = {k: LogColumn.of(join_marks(k, v, lengths), k) for k, v in (marks or {}).items()}
        return log_from_columns(
            cls,
            np.repeat(np.arange(len(rows)), lengths),
            tuple(names),
            np.concatenate(rows),
            [label for row in labels for label in row],
            beside,
            {k: LogColumn.of(v, k) for k, v in (covariates or {}).items()},
            unit,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        words = f"{len(self):,} sequences, {len(self.times):,} events, {len(self.names):,} types"
        return f"{type(self).__name__}({words}, times in {self.unit!r})"

    def __iter__(self) -> Iterator[slice]:
        """Iterate over the sequences, as slices of the events."""
        return (slice(int(a), int(b)) for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of every sequence."""
        return np.diff(self.offsets)

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Time since the event before; NaN for the first event of a sequence."""
        with np.errstate(over="ignore"):
            gaps = np.diff(self.times, prepend=np.nan)
        gaps[self.offsets[:-1]] = np.nan
        return gaps

    @property
    def last_times(self) -> NDArray[np.float64]:
        """Time of the last event of every sequence."""
        return self.times[self.offsets[1:] - 1]

    @property
    def dates(self) -> NDArray[np.datetime64]:
        """Times as dates in UTC, for a log with dates."""
        if not self.is_dated:
            raise ValueError(f"The times of this log are numbers in {self.unit!r}, not dates.")
        return to_dates(self.times, self.unit)

    def moment(self, value: Any) -> float:
        """Return a moment, given as a number or a date, on the time axis of the log."""
        return moment(value, self.unit, self.is_dated)

    def take(self, index: np.ndarray | Sequence[int]) -> Self:
        """Return some of the sequences, by index or boolean mask."""
        rows = np.arange(len(self))[np.asarray(index)]
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in rows]
        events = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return self._choose(rows, events, [len(p) for p in parts])

    def cut(self, most: int | None) -> Self:
        """Return the most recent ``most`` events of every sequence; all of them if ``None``."""
        if most is None or self.lengths.max() <= most:
            return self
        starts = np.maximum(self.offsets[:-1], self.offsets[1:] - most)
        parts = [np.arange(a, b) for a, b in zip(starts, self.offsets[1:], strict=True)]
        return self._choose(np.arange(len(self)), np.concatenate(parts), [len(p) for p in parts])

    def before(self, time: object) -> Self:
        """Return the events up to a moment; sequences without any are left out."""
        return self._filter(self.times <= self.moment(time))

    def only_types(self, names: Sequence[str]) -> Self:
        """Return the events of some types; sequences without any are left out."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise ValueError(
                f"The log has no events of type {list_some(unknown)}; its types are "
                f"{list_some(self.names)}."
            )
        kept = [i for i, name in enumerate(self.names) if name in set(names)]
        return self._filter(np.isin(self.types, kept)).with_names(
            tuple(self.names[i] for i in kept)
        )

    def with_names(self, names: tuple[str, ...]) -> Self:
        """Return the log with the types numbered as in another log.

        Raises:
            ValueError: If there are events of other types; the message names them.
        """
        if names == self.names:
            return self
        place = {name: i for i, name in enumerate(names)}
        table = np.array([place.get(name, -1) for name in self.names])
        types = table[self.types]
        if (types < 0).any():
            unseen = sorted({self.names[i] for i in np.unique(self.types[types < 0])})
            raise ValueError(
                f"{int((types < 0).sum()):,} events have types that the training log does not "
                f"have: {list_some(unseen)}. Leave them out with only_types(...), or train with "
                "them."
            )
        return replace(self, types=types, names=names)

    def _filter(self, keep: NDArray[np.bool_]) -> Self:
        owner = np.repeat(np.arange(len(self)), self.lengths)[keep]
        rows, lengths = np.unique(owner, return_counts=True)
        return self._choose(rows, np.flatnonzero(keep), lengths)

    def _choose(self, rows: np.ndarray, events: np.ndarray, lengths: ArrayLike) -> Self:
        if not len(rows):
            raise ValueError("No event is left.")
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            times=self.times[events],
            types=self.types[events],
            keys=tuple(self.keys[i] for i in rows),
            marks={k: c.take(events) for k, c in self.marks.items()},
            covariates={k: c.take(rows) for k, c in self.covariates.items()},
        )


def warn_unsorted(count: int, total: int) -> None:
    """Warn that events had to be sorted."""
    warnings.warn(
        f"The events of {count:,} of {total:,} sequences were not in order of time; they have been "
        "sorted. Sort the log by time to avoid this warning.",
        stacklevel=5,
    )
