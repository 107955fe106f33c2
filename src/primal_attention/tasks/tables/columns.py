"""Columns of a table: what their cells are, and what training learns of each."""

import math
import numbers
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import UnionType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeGuard, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LARGEST",
    "Cells",
    "EncodedTable",
    "TableColumn",
    "TableLike",
    "ValidTable",
    "is_frame",
    "read_cells",
    "take_items",
]

TableLike: TypeAlias = Union["pd.DataFrame", ArrayLike]
"""A table as users have it."""
ValidTable: TypeAlias = Union["pd.DataFrame", np.ndarray]
"""A table that was checked: a frame of pandas, or an array with a column for each feature."""

Form = Literal["boolean", "datetime", "duration", "float", "integer", "text"]

LARGEST = 1e4
"""Standardised numbers are clipped to this magnitude; n training rows stay below the root of n."""
_BINS = 16
"""Most bins between the quantiles of a column."""
_EMPTY = -1
"""Code of an unknown category in a column without a bucket of rare ones."""
_MICROSECONDS = 1e6


class EncodedTable(NamedTuple):
    """A table as numbers, one for each cell."""

    values: NDArray[np.float32]
    """Standardised number, or code of the category; 0 where missing. ``[n d]``."""
    missing: NDArray[np.bool_]
    """Whether the cell is missing. ``[n d]``."""


class Cells(NamedTuple):
    """A column as it arrived."""

    values: np.ndarray
    """Numbers (dates as seconds since 1970, durations as seconds) with NaN where missing, or
    objects with ``None`` where missing."""
    form: Form
    """What the cells are."""
    dtype: str
    """Their type in the table."""

    @property
    def is_numeric(self) -> bool:
        """Whether the values are numbers, dates or durations."""
        return self.form not in ("boolean", "text") and self.dtype != "category"

    def ranks(self) -> NDArray[np.int64]:
        """Return the rank of every cell among the distinct ones; -1 where missing."""
        if self.values.dtype != object:
            found = np.unique(self.values, return_inverse=True)[1]
            return np.where(self.values != self.values, -1, found)
        words = _words(self)
        order = {word: i for i, word in enumerate(sorted({w for w in words if w is not None}))}
        return np.array([-1 if w is None else order[w] for w in words])


@dataclass(frozen=True)
class TableColumn:
    """What training learned of a column; plain values only.

    Example:
        >>> TableColumn("colour", "categorical", categories=("red", "blue"), has_other=True).width
        3
    """

    name: str
    """Name of the column."""
    kind: Literal["numeric", "categorical"]
    """Whether cells are numbers or categories."""
    mean: float = 0.0
    """Numbers: mean of the training rows; seconds since 1970 for dates."""
    scale: float = 1.0
    """Numbers: deviation of the training rows; one if they are constant."""
    quantiles: tuple[float, ...] = ()
    """Numbers: distinct quantiles of the standardised training rows, increasing; none if they are
    constant."""
    categories: tuple[str, ...] = ()
    """Categories in words, the most frequent first."""
    has_other: bool = False
    """Whether the code after the last category is that of all rarer categories."""
    missing_share: float = 0.0
    """Share of the training rows without a value."""
    form: Form = "float"
    """What cells are in the user's table."""
    dtype: str = "float64"
    """Type of the cells in the user's table."""

    @classmethod
    def fit(
        cls,
        name: str,
        cells: Cells,
        weights: NDArray[np.float64],
        *,
        is_categorical: bool,
        max_categories: int,
    ) -> "TableColumn":
        """Return the column that the training rows describe.

        Args:
            name: Its name.
            cells: The training rows.
            weights: Positive weight of each row.
            is_categorical: Whether equal numbers are one category.
            max_categories: Most codes of a category.

        Raises:
            ValueError: If a number is infinite.
        """
        if is_categorical:
            return _fit_categories(name, cells, weights, max_categories)
        return _fit_numbers(name, cells, weights)

    @property
    def width(self) -> int:
        """Number of codes of a category, at least one; 1 for numbers."""
        return max(1, len(self.categories) + self.has_other) if self.is_categorical else 1

    @property
    def is_categorical(self) -> bool:
        """Whether cells are categories."""
        return self.kind == "categorical"

    def encode(self, cells: Cells) -> NDArray[np.float64]:
        """Return standardised numbers or codes, with NaN where missing.

        Raises:
            ValueError: If a number is infinite, or a text is no number.
        """
        if self.missing_share == 1:
            return np.full(len(cells.values), np.nan)  # nothing is known of such a column
        if self.is_categorical:
            return self._codes(cells)
        with np.errstate(over="ignore"):
            standardised = (_to_numbers(self.name, cells) - self.mean) / self.scale
        return np.clip(standardised, -LARGEST, LARGEST)

    def _codes(self, cells: Cells) -> NDArray[np.float64]:
        other = len(self.categories) if self.has_other else _EMPTY
        codes: dict[str | None, float] = {word: i for i, word in enumerate(self.categories)}
        if self.form == "boolean":
            # 1 and 0 are how arrays of numbers store them
            codes |= {w: codes[b] for w, b in (("1", "True"), ("0", "False")) if b in codes}
        found = np.array([math.nan if w is None else codes.get(w, other) for w in _words(cells)])
        return np.where(found == _EMPTY, np.nan, found)

    def decode(self, encoded: np.ndarray) -> np.ndarray:
        """Return cells in their own units from standardised numbers or codes; NaN is missing.

        Numbers come back as float64, dates as ``datetime64[us]``, durations as
        ``timedelta64[us]``, everything else as objects with ``None`` where missing. The bucket of
        rare categories has no value, so it is missing.
        """
        if self.is_categorical:
            return self._decode_codes(encoded)
        largest = np.finfo(np.float64).max
        with np.errstate(over="ignore"):
            numbers_ = encoded.astype(np.float64) * self.scale + self.mean
        return self._restore(np.clip(numbers_, -largest, largest))

    def _decode_codes(self, encoded: np.ndarray) -> np.ndarray:
        values = self.category_values()
        codes = np.where(np.isnan(encoded), len(values), encoded).astype(np.int64)
        if values.dtype == object:
            values = np.append(values, np.array([None], object))
        else:
            values = np.append(values, np.array(["NaT"], values.dtype))
        return values[np.minimum(codes, len(values) - 1)]

    def category_values(self) -> np.ndarray:
        """Return the categories in their own type."""
        parse: dict[Form, Callable[[str], object]] = {
            "integer": int,
            "float": float,
            "boolean": "True".__eq__,
        }
        if self.form in ("datetime", "duration"):
            return self._restore(np.array([float(w) for w in self.categories]))
        values = np.empty(len(self.categories), object)
        values[:] = [parse.get(self.form, str)(word) for word in self.categories]
        return values

    def _restore(self, numbers_: NDArray[np.float64]) -> np.ndarray:
        """Return dates and durations from seconds, whole numbers from numbers."""
        if self.form == "integer":
            return np.round(numbers_)
        unit = {"datetime": "datetime64[us]", "duration": "timedelta64[us]"}.get(self.form)
        if unit is None:
            return numbers_
        whole = np.nan_to_num(np.round(numbers_ * _MICROSECONDS)).astype(np.int64).astype(unit)
        whole[np.isnan(numbers_)] = np.array("NaT", unit)
        return whole


def _fit_categories(
    name: str, cells: Cells, weights: NDArray[np.float64], max_categories: int
) -> TableColumn:
    counts: Counter[str | None] = Counter()
    for word, weight in zip(_words(cells), weights.tolist(), strict=True):
        counts[word] += weight
    missing = counts.pop(None, 0) / weights.sum() if counts.keys() != {None} else 1.0
    # equal counts in the order of their words, so that the order of the rows has no effect
    ordered = sorted((w for w in counts if w is not None), key=lambda w: (-counts[w], w))
    has_other = len(ordered) > max_categories
    return TableColumn(
        name,
        "categorical",
        categories=tuple(ordered[: max_categories - 1] if has_other else ordered),
        has_other=has_other,
        missing_share=float(missing),
        form=cells.form,
        dtype=cells.dtype,
    )


def _fit_numbers(name: str, cells: Cells, weights: NDArray[np.float64]) -> TableColumn:
    found = _to_numbers(name, cells)
    is_missing = np.isnan(found)
    seen, mass = found[~is_missing], weights[~is_missing]
    mean, scale = _mean_and_scale(seen, mass)
    with np.errstate(over="ignore"):
        standardised = np.clip((seen - mean) / scale, -LARGEST, LARGEST)
    missing = weights[is_missing].sum() / weights.sum() if len(seen) else 1.0
    return TableColumn(
        name,
        "numeric",
        mean=mean,
        scale=scale,
        quantiles=_quantiles(standardised, mass),
        missing_share=float(missing),
        form=cells.form,
        dtype=cells.dtype,
    )


def _mean_and_scale(seen: NDArray[np.float64], mass: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation, without overflow; the deviation of a constant is one."""
    largest = float(np.abs(seen).max()) if len(seen) else 0.0
    if largest == 0:
        return 0.0, 1.0
    if seen.min() == seen.max():
        return float(seen[0]), 1.0
    unit = seen / largest  # squares of 1e300 would overflow
    mean = float(np.average(unit, weights=mass))
    scale = float(np.sqrt(np.average((unit - mean) ** 2, weights=mass)))
    is_rounding = scale < 10 * np.finfo(np.float64).eps
    is_tiny = scale * largest < np.finfo(np.float64).tiny
    return mean * largest, 1.0 if is_rounding or is_tiny else scale * largest


def _quantiles(seen: NDArray[np.float64], mass: NDArray[np.float64]) -> tuple[float, ...]:
    """Return evenly spaced quantiles, distinct as float32 too; none of a constant."""
    if not len(seen):
        return ()
    order = np.argsort(seen)
    shares = np.cumsum(mass[order])
    levels = np.linspace(0, 1, _BINS + 1) * shares[-1]
    chosen = np.minimum(np.searchsorted(shares, levels), len(seen) - 1)
    found = np.unique(seen[order][chosen].astype(np.float32))
    return tuple(found.tolist()) if len(found) > 1 else ()


def _to_numbers(name: str, cells: Cells) -> NDArray[np.float64]:
    """Return the cells as float64 with NaN where missing."""
    if cells.values.dtype != object:
        found = cells.values.astype(np.float64)
    else:
        found = np.array([_number(name, v) for v in cells.values], np.float64)
    if np.isinf(found).any():
        raise ValueError(
            f"column {name!r} holds infinity or a number too large for float64; numbers must be "
            "finite. Replace it, or mark it as missing with NaN."
        )
    return found


def _number(name: str, value: object) -> float:
    if value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise ValueError(
            f"column {name!r} held numbers in training, got {value!r}; pass a number, or NaN "
            "where it is missing."
        ) from None


def _words(cells: Cells) -> list[str | None]:
    """Return the cells as words, ``None`` where missing; 1 and 1.0 are the same word."""
    if cells.values.dtype == object:
        return [None if v is None else _word(v) for v in cells.values]
    distinct, where = np.unique(cells.values, return_inverse=True)
    words = [None if v != v else _word(v) for v in distinct.tolist()]
    return [words[i] for i in where]


def _word(value: object) -> str:
    if not _is_number(value):
        return str(value)
    number = float(value)
    return str(int(value)) if number.is_integer() else repr(number)


def _is_number(value: object) -> "TypeGuard[int | float | Decimal]":
    return isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool)


def is_frame(table: object) -> "TypeGuard[pd.DataFrame]":
    """Return whether a table is a frame of pandas, without importing pandas."""
    return hasattr(table, "iloc") and hasattr(table, "columns")


def take_items(items: ValidTable, chosen: np.ndarray) -> ValidTable:
    """Return some rows of a frame, or some items of a column or an array, by number or mask."""
    rows: ValidTable = getattr(items, "iloc", items)
    return rows[chosen]


def read_cells(column: "pd.Series | ArrayLike") -> Cells:
    """Return what a column of a frame, or an array, holds.

    Example:
        >>> read_cells([1, 2]).form, read_cells(["1", "b"]).form
        ('integer', 'text')
    """
    return _read_series(column) if hasattr(column, "iloc") else _read_array(np.asarray(column))


def _read_series(series: "pd.Series") -> Cells:
    dtype, name = series.dtype, str(series.dtype)
    kind = getattr(dtype, "kind", "O")
    if kind == "c":
        raise ValueError(f"Complex data not supported, got column {series.name!r} of type {name}.")
    if name == "category":
        # through the codes: with missing values pandas turns whole numbers into floats
        levels = np.array([*dtype.categories, None], object)
        return _read_objects(levels[series.cat.codes.to_numpy()], name)
    if kind not in "iufMm":
        return _read_objects(series.to_numpy(object), name)
    if kind == "M":
        if getattr(dtype, "tz", None) is not None:
            series = series.dt.tz_convert("UTC").dt.tz_localize(None)
        return Cells(_seconds(series.to_numpy("datetime64[us]")), "datetime", name)
    if kind == "m":
        return Cells(_seconds(series.to_numpy("timedelta64[us]")), "duration", name)
    form: Form = "float" if kind == "f" else "integer"
    if form == "integer" and not series.isna().any():
        # float64 would merge identifiers beyond 2**53
        return Cells(series.to_numpy("uint64" if kind == "u" else "int64"), form, name)
    return Cells(series.to_numpy(np.float64, na_value=np.nan), form, name)


def _read_array(column: np.ndarray) -> Cells:
    kind, name = column.dtype.kind, str(column.dtype)
    if kind == "M":
        return Cells(_seconds(column.astype("datetime64[us]")), "datetime", name)
    if kind == "m":
        return Cells(_seconds(column.astype("timedelta64[us]")), "duration", name)
    if kind in "iu":
        return Cells(column, "integer", name)
    if kind == "f":
        return Cells(column.astype(np.float64), "float", name)
    return _read_objects(column.astype(object), name)


def _seconds(moments: np.ndarray) -> NDArray[np.float64]:
    whole = moments.astype(np.int64) / _MICROSECONDS
    return np.where(np.isnat(moments), np.nan, whole)


def _read_objects(values: np.ndarray, dtype: str) -> Cells:
    """Return cells of any type; numbers and dates are recognised if all are of one kind."""
    cells: np.ndarray = np.empty(len(values), object)
    cells[:] = [None if _is_missing(v) else v for v in values]
    kinds = {_form_of(v) for v in cells if v is not None}
    form: Form = next(iter(kinds)) if len(kinds) == 1 else "text"
    if kinds == {"integer", "float"}:
        form = "float"
    if form in ("datetime", "duration"):
        cells = np.array([math.nan if v is None else _moment(v) for v in cells], np.float64)
    return Cells(cells, form, dtype)


def _form_of(value: object) -> Form:
    kinds: list[tuple[Form, type | UnionType]] = [
        ("text", str),
        ("boolean", bool | np.bool_),
        ("integer", numbers.Integral),
        ("float", numbers.Real | Decimal),
        ("datetime", date | np.datetime64),
        ("duration", timedelta | np.timedelta64),
    ]
    if isinstance(value, dict | list | set | np.ndarray):
        raise TypeError(
            f"a cell holds {value!r}, a {type(value).__name__}; it must be a string, a number, a "
            "boolean or a date. Split it into columns."
        )
    return next((form for form, types in kinds if isinstance(value, types)), "text")


def _moment(value: date | timedelta | np.datetime64 | np.timedelta64) -> float:
    """Return seconds since 1970 of a date, in UTC unless it has a zone; seconds of a duration."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        unit = "datetime64[us]" if isinstance(value, np.datetime64) else "timedelta64[us]"
        return float(value.astype(unit).astype(np.int64)) / _MICROSECONDS
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return float((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())


def _is_missing(value: object) -> bool:
    """Return whether a cell is ``None``, NaN, NaT or ``pd.NA``."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except TypeError:
        return True  # pd.NA compares to neither true nor false
    except ValueError:
        return False  # an array
