"""Units of time: durations in words, and moments as numbers."""

import re
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SECONDS", "UNITS", "duration", "moment", "seconds_since_1970", "to_dates"]

SECONDS = {
    "milliseconds": 1e-3,
    "seconds": 1.0,
    "minutes": 60.0,
    "hours": 3600.0,
    "days": 86400.0,
    "weeks": 604800.0,
}
"""Length of every known unit in seconds."""
UNITS = tuple(SECONDS)
_SUFFIXES = {
    "ms": "milliseconds",
    "s": "seconds",
    "min": "minutes",
    "h": "hours",
    "d": "days",
    "w": "weeks",
}


def duration(value: str | float, unit: str) -> float:
    """Return a duration in units of a log.

    Args:
        value: A positive number in ``unit``, or a number with ms, s, min, h, D or W.
        unit: Unit of the log.

    Example:
        >>> duration("7D", "hours"), duration(2.5, "hours")
        (168.0, 2.5)
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z]+)\s*", value.lower())
        if found is None or found[2] not in _SUFFIXES:
            raise ValueError(
                f"{value!r} is not a duration; write a number in {unit}, or one with ms, s, min, "
                "h, D or W, as in '7D'."
            )
        if unit not in SECONDS:
            raise ValueError(
                f"{value!r} cannot be converted: the times of the log are numbers in {unit!r}. "
                f"Give a number, or make the log with unit= one of {', '.join(UNITS)}."
            )
        length = float(found[1]) * SECONDS[_SUFFIXES[found[2]]] / SECONDS[unit]
    else:
        length = float(value)
    if not 0 < length < np.inf:
        raise ValueError(f"A duration must be positive and finite, got {value!r}.")
    return length


def moment(value: Any, unit: str, is_dated: bool) -> float:
    """Return a moment on the time axis of a log.

    Args:
        value: A number, or for a log with dates a date: ``datetime``, ``datetime64``, pandas
            ``Timestamp`` or ISO 8601 text. Without a time zone it is UTC.
        unit: Unit of the log.
        is_dated: Whether its times count from 1970.

    Example:
        >>> moment("1970-01-02T12:00+00:00", "days", True), moment(7, "days", False)
        (1.5, 7.0)
    """
    if isinstance(value, str | date | np.datetime64):
        if not is_dated:
            raise ValueError(f"{value!r} is a date, but the times of the log are numbers.")
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(
                    f"{value!r} is not a date; write it as 2024-05-31T12:00."
                ) from None
        if isinstance(value, np.datetime64):
            found = float(seconds_since_1970(np.array([value]))[0])
        else:
            if not isinstance(value, datetime):
                value = datetime(value.year, value.month, value.day)
            found = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        found /= SECONDS[unit]
    else:
        found = float(value)
    if not np.isfinite(found):
        raise ValueError(f"A time must be finite, got {value!r}.")
    return found


def seconds_since_1970(dates: NDArray[np.datetime64]) -> NDArray[np.float64]:
    """Return dates as seconds since 1970; NaN where one is missing."""
    counted = dates.astype("datetime64[us]")
    seconds: NDArray[np.float64] = counted.astype(np.int64) / 1e6
    return np.where(np.isnat(counted), np.nan, seconds)


def to_dates(times: NDArray[np.float64], unit: str) -> NDArray[np.datetime64]:
    """Return times of a dated log as dates in UTC, to the microsecond; NaT where not finite."""
    micros = np.round(times * SECONDS[unit] * 1e6)
    known = np.isfinite(micros) & (np.abs(micros) < 2**62)
    dates = np.where(known, micros, 0).astype(np.int64).astype("datetime64[us]")
    return np.where(known, dates, np.datetime64("NaT", "us"))
