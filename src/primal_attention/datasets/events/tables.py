"""Logs from tables: which column is which, dates, time zones, order."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.events.log import (
    EventSequences,
    LogColumn,
    index_names,
    warn_unsorted,
)
from primal_attention.datasets.events.units import SECONDS, UNITS, seconds_since_1970
from primal_attention.datasets.words import as_words
from primal_attention.support.command import did_you_mean
from primal_attention.support.files.tables import (
    TABLE_SUFFIXES,
    ending,
    list_some,
    read_ratings,
    read_table,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["USUAL", "find_columns", "log_from_columns", "log_from_frame", "read_log_table"]

USUAL = {
    "time": ("time", "timestamp", "when", "datetime", "date", "t", "time_stamp", "event_time"),
    "event": (
        *("event", "type", "event_type", "what", "action", "activity", "kind", "badge", "name"),
        *("event_name", "concept:name"),
    ),
    "sequence": (
        *("sequence", "user", "user_id", "sequence_id", "case", "case_id", "session", "session_id"),
        *("customer", "customer_id", "patient", "patient_id", "device", "machine", "id", "who"),
        "case:concept:name",
    ),
}
"""Names by which columns are recognised, the first match counts; case does not matter."""

LogT = TypeVar("LogT", bound=EventSequences)


def read_log_table(path: Path) -> "pd.DataFrame":
    """Return the table in a file of events.

    Raises:
        ValueError: If the file is of another kind, too large or damaged.
    """
    endings = *TABLE_SUFFIXES, ".dat"
    if ending(path) not in endings:
        raise ValueError(f"a log of events ends in {', '.join(endings)}, got {path.name!r}.")
    return read_ratings(path) if ending(path) == ".dat" else read_table(path)


def find_columns(names: Sequence[str]) -> dict[str, str]:
    """Return the columns of time, event and sequence that have usual names.

    Example:
        >>> find_columns(["User", "Timestamp", "price"])
        {'time': 'Timestamp', 'sequence': 'User'}
    """
    lower = {str(name).lower(): str(name) for name in reversed(names)}
    found = {}
    for role, usual in USUAL.items():
        match = next((lower[name] for name in usual if name in lower), None)
        if match is not None:
            found[role] = match
    return found


def log_from_frame(
    kind: type[LogT],
    frame: "pd.DataFrame",
    columns: Mapping[str, str | None],
    marks: Sequence[str],
    covariates: Sequence[str],
    unit: str | None,
) -> LogT:
    """Return the log in a frame; see :meth:`EventSequences.from_frame`."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"from_frame takes a pandas DataFrame, got {type(frame).__name__}; from_arrays takes "
            "lists of arrays."
        )
    if not len(frame):
        raise ValueError("The table has no rows; a log needs at least one event.")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"The table has two columns {str(twice[0])!r}; give each its own name.")
    given = {role: name for role, name in columns.items() if name is not None}
    for name in (*given.values(), *marks, *covariates):
        if name not in frame.columns:
            there = [str(c) for c in frame.columns]
            raise ValueError(
                f"The table has no column {name!r}.{did_you_mean(name, there)} Its columns are "
                f"{list_some(there)}."
            )
    taken = {*given.values(), *marks, *covariates}
    usual = find_columns([str(c) for c in frame.columns if c not in taken])
    roles = usual | given
    for role in ("time", "event"):
        if role not in roles:
            raise ValueError(
                f"The column of the {role}s is not recognised among "
                f"{list_some([str(c) for c in frame.columns])}; name it: {role}='...'."
            )
    if "sequence" in roles:
        owner = frame[roles["sequence"]]
        if owner.isna().any():
            row = int(np.flatnonzero(owner.isna())[0])
            raise ValueError(f"Row {row}, counted from 0, has no {roles['sequence']!r}.")
        try:
            codes, keys = pd.factorize(owner)
        except TypeError:
            raise ValueError(
                f"The column {roles['sequence']!r} cannot tell sequences apart: it holds "
                f"{type(owner.iloc[0]).__name__} objects; give numbers or words."
            ) from None
    else:
        codes, keys = np.zeros(len(frame), np.int64), ["all"]
    labels = frame[roles["event"]]
    if labels.isna().any():
        row = int(np.flatnonzero(labels.isna())[0])
        raise ValueError(
            f"Row {row}, counted from 0, has no event type in {roles['event']!r}; leave it out, or "
            "give missing types a name."
        )
    return log_from_columns(
        kind,
        codes.astype(np.int64),
        tuple(as_words(keys, "names of sequences")),
        _times_of(frame[roles["time"]]),
        labels.tolist(),
        {name: _column(frame[name], name) for name in marks},
        {name: _constant(frame[name], name, codes) for name in covariates},
        unit,
    )


def _times_of(column: "pd.Series") -> np.ndarray:
    """Return a column of times as numbers or as dates in UTC."""
    import pandas as pd

    kind = column.dtype
    if isinstance(kind, pd.DatetimeTZDtype):
        return np.asarray(column.dt.tz_convert("UTC").dt.tz_localize(None))
    if kind.kind in "iufMm":
        return np.asarray(column)
    if kind.kind in "bc":
        words = "truth values" if kind.kind == "b" else "complex numbers"
        raise ValueError(f"The column {column.name!r} holds {words}, not times.")
    try:
        # numbers first: read as a date, 2024 would be a year
        return np.asarray(pd.to_numeric(column), dtype=np.float64)
    except (ValueError, TypeError):
        pass
    dates = pd.to_datetime(column, utc=True, format="ISO8601", errors="coerce")
    wrong = np.flatnonzero(dates.isna() & column.notna())
    if len(wrong):
        raise ValueError(
            f"The column {column.name!r} holds times that are neither numbers nor ISO 8601 dates "
            f"such as 2024-05-31T12:00: row {wrong[0]}, counted from 0, holds "
            f"{str(column.iloc[wrong[0]])[:40]!r}. Correct it, or convert the column with "
            "pandas.to_datetime."
        )
    return np.asarray(dates.dt.tz_localize(None))


def _column(values: "pd.Series", name: str) -> LogColumn:
    kind = values.dtype.kind
    return LogColumn.of(
        values.to_numpy(np.float64, na_value=np.nan) if kind in "iuf" else values, name
    )


def _constant(values: "pd.Series", name: str, codes: NDArray[np.int64]) -> LogColumn:
    """Return the value of every sequence of a column that is constant in each."""
    groups = values.groupby(codes)
    mixed = np.flatnonzero(groups.nunique(dropna=False).to_numpy() > 1)
    if len(mixed):
        raise ValueError(
            f"The covariate {name!r} changes within a sequence (the one numbered {mixed[0]}); a "
            "covariate is one value for each sequence. Use marks for what changes."
        )
    return _column(groups.first(), name)


def log_from_columns(
    kind: type[LogT],
    codes: NDArray[np.int64],
    keys: tuple[str, ...],
    times: np.ndarray,
    labels: Sequence[object],
    marks: Mapping[str, LogColumn],
    covariates: Mapping[str, LogColumn],
    unit: str | None,
) -> LogT:
    """Return a log from columns over all events: find the unit, check, sort.

    Args:
        kind: Class to make.
        codes: Number of every event's sequence.
        keys: Names of the sequences.
        times: Numbers, dates or durations.
        labels: Type of every event.
        marks: Values beside the events.
        covariates: Values of the sequences.
        unit: Unit of the times.
    """
    seconds, is_dated, unit = _measure(times, unit)
    missing = np.flatnonzero(~np.isfinite(seconds))
    if len(missing):
        raise ValueError(
            f"{len(missing):,} events have no time (NaT, NaN or infinite), the first is row "
            f"{missing[0]}, counted from 0; leave them out, or find out why they are missing."
        )
    # the last key counts first; equal times keep their order
    order = np.lexsort((seconds, codes))
    by_owner = np.argsort(codes, kind="stable")
    if not np.array_equal(order, by_owner):
        back = (np.diff(seconds[by_owner]) < 0) & (np.diff(codes[by_owner]) == 0)
        warn_unsorted(len(np.unique(codes[by_owner][1:][back])), len(keys))
    words = _type_words(labels)
    names = tuple(_sorted_names(set(words)))
    counts = np.bincount(codes, minlength=len(keys))
    return kind(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        times=seconds[order],
        types=index_names(words, names, "types of events")[order],
        names=names,
        keys=keys,
        unit=unit,
        is_dated=is_dated,
        marks={name: column.take(order) for name, column in marks.items()},
        covariates=dict(covariates),
    )


def _measure(times: np.ndarray, unit: str | None) -> tuple[NDArray[np.float64], bool, str]:
    """Return times as numbers in the unit, whether they are dates, and the unit."""
    if times.dtype.kind == "O":
        times = _plain_times(times)
    if times.dtype.kind in "mM":
        unit = unit or "days"
        if unit not in SECONDS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)} for dates, got {unit!r}.")
        if times.dtype.kind == "M":
            return seconds_since_1970(times) / SECONDS[unit], True, unit
        lengths = np.where(np.isnat(times), np.nan, times / np.timedelta64(1, "us"))
        return lengths / 1e6 / SECONDS[unit], False, unit
    if times.dtype.kind not in "iuf":
        raise ValueError(f"Times must be numbers or dates, got {times.dtype}.")
    return times.astype(np.float64), False, unit or "units"


def _plain_times(times: np.ndarray) -> np.ndarray:
    """Return Python dates, with or without a time zone, as dates of numpy in UTC."""
    values = times.tolist()
    if not any(isinstance(t, datetime) for t in values):
        return np.array(values)
    plain = [
        t.astimezone(UTC).replace(tzinfo=None) if getattr(t, "tzinfo", None) else t for t in values
    ]
    return np.array(plain, dtype="datetime64[us]")


def _type_words(labels: Sequence[object]) -> list[str]:
    """Return types as text; 3.0 and 3 are the same."""
    plain = []
    for label in labels:
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if label is None or (isinstance(label, float) and np.isnan(label)):
            raise ValueError("A type of an event is missing; leave it out or name it.")
        if isinstance(label, dict | list | set | np.ndarray):
            raise ValueError(
                f"A type of an event is a {type(label).__name__}; it must be a word or a number."
            )
        plain.append(label)
    return as_words(plain, "types of events")


def _sorted_names(words: set[str]) -> list[str]:
    """Return names in order; whole numbers by value."""
    if all(w.lstrip("-").isdigit() for w in words):
        return sorted(words, key=int)
    return sorted(words)
