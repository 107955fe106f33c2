"""Series in the ``.ts`` format of the UEA archive."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import read_lines
from primal_attention.support.files.tables import list_some
from primal_attention.tasks.series.data import SeriesCollection, series_from_arrays
from primal_attention.tasks.series.header import is_number, last_is_single

__all__ = ["is_number", "read_ts"]

_VALUES = re.compile(r"[-+.,?0-9eENnAa\s]*", re.ASCII)
"""Characters of numbers, ``NaN`` and ``?``; ``float`` alone also reads ``1_0`` and ``infinity``."""
_FLAGS = ("classlabel", "equallength", "targetlabel", "timestamps")
_CHECKED = (*_FLAGS, "dimensions", "serieslength")
"""Tags whose values are used; others may be repeated."""


def read_ts(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    channels: int | None = None,
    numbers: bool = False,
) -> SeriesCollection:
    """Return the series of a UEA/UCR ``.ts`` file.

    Reads unequal lengths, ``?`` and ``NaN`` as missing, comments anywhere, and files whose header
    is incomplete or missing. What the header says of dimensions, equal lengths and classes is
    checked, what it leaves out is read off the data; ``@missing`` is not looked at. Without
    ``@classLabel`` and ``@targetLabel`` a last field without a comma is the label. A number has
    digits, a point and an exponent: ``1_0`` and ``inf`` are none.

    Args:
        path: The file.
        classes: Names in the order of the class indices, to read a test file like its training
            file; by default those of the header, else the sorted labels.
        channels: Channels of series to be predicted: labels may be missing, and are not read.
        numbers: Whether the label of a series is a number to predict, not a class. With
            ``@classLabel false``, too, a last field without a comma is then the label.

    Raises:
        UserError: If the file breaks the format; the message names the line.
    """
    path = Path(path)
    header, rows = _split_header(path)
    declared = header.get("classlabel", [])
    has_numbers, has_classes = (
        _header_flag(header, tag, path) for tag in ("targetlabel", "classlabel")
    )
    labelled = has_numbers or has_classes
    if not labelled and (numbers or not declared):
        labelled = all(last_is_single(row) for _, row in rows)
    is_read = labelled and channels is None
    if is_read and has_numbers and not numbers:
        raise UserError(
            f"{path} has @targetLabel, numbers to predict; this task predicts classes. Choose "
            "--task series-values."
        )
    equal = _header_flag(header, "equallength", path)
    length = _header_number(header, "serieslength", path)
    dimensions = _header_number(header, "dimensions", path)
    cases, labels = [], []
    for number, row in rows:
        where = f"{path}, line {number}"
        fields = [field.strip() for field in row.split(":")]
        if labelled and len(fields) != channels:
            labels.append(fields.pop())
            if is_read:
                _check_label(labels[-1], where, numbers=numbers)
        rows_of_case = _parse_case(fields, where)
        if equal and length is None:
            length = len(rows_of_case[0])
        dimensions = dimensions or len(rows_of_case)
        steps = {len(row) for row in rows_of_case}
        if len(rows_of_case) != dimensions or (equal and steps != {length}):
            raise UserError(
                f"{where}: {len(rows_of_case)} dimensions of {_range(steps)} steps, expected "
                f"{dimensions}{f' of {length}' if equal else ''}; the line is damaged or the "
                "header is wrong."
            )
        cases.append(_pad_channels(rows_of_case))
    with user_errors(str(path)):
        if numbers and is_read:
            return replace(series_from_arrays(cases), y=np.array(labels, np.float64))
        names = (declared[1:] or None) if classes is None else list(classes)
        return series_from_arrays(cases, labels if is_read else None, classes=names)


def _check_label(label: str, where: str, *, numbers: bool) -> None:
    """Raise if a label is missing, or is no number where one is needed."""
    if not label:
        what = "number" if numbers else "class"
        raise UserError(f"{where}: the {what} behind the last colon is missing.")
    if numbers and not is_number(label):
        raise UserError(
            f"{where}: {label[:80]!r} behind the last colon is not a finite number; give every "
            "series a number to predict."
        )


def _split_header(path: Path) -> tuple[dict[str, list[str]], list[tuple[int, str]]]:
    """Return the words behind every tag of a ``.ts`` file, and its series with their lines."""
    header: dict[str, list[str]] = {}
    rows: list[tuple[int, str]] = []
    for number, line in enumerate(read_lines(path), 1):
        line = line.strip()
        if not line or line.startswith(("#", "%")):
            continue
        if not line.startswith("@"):
            rows.append((number, line))
            continue
        words = line[1:].replace(",", " ").split()
        tag = words[0].lower() if words else ""
        is_other = tag in _CHECKED and header.get(tag, words[1:]) != words[1:]
        if rows or not tag or is_other:
            told = f"@{tag[:80]} after the first series" if rows else f"@{tag[:80]} is given twice"
            raise UserError(f"{path}, line {number}: {told if tag else '@ has no name behind it'}.")
        header[tag] = words[1:]
    if not rows:
        raise UserError(f"{path} holds no series; it is empty or truncated.")
    if _header_flag(header, "timestamps", path):
        raise UserError(f"{path} has time stamps, which are not supported; resample it evenly.")
    names = header.get("classlabel", [])[1:]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: @classLabel names a class twice: {list_some(names)}.")
    return header, rows


def _header_flag(header: Mapping[str, list[str]], tag: str, path: Path) -> bool:
    """Return whether a tag of the header says true; false if it is not there."""
    word = (header.get(tag, ["false"]) or [""])[0]
    if word.lower() not in ("true", "false"):
        raise UserError(f"{path}: @{tag} must be followed by true or false, got {word[:80]!r}.")
    return word.lower() == "true"


def _header_number(header: Mapping[str, list[str]], tag: str, path: Path) -> int | None:
    """Return a number of the header; ``None`` if it is not there."""
    if tag not in header:
        return None
    word = " ".join(header[tag])
    if not re.fullmatch("[1-9][0-9]{0,8}", word):
        raise UserError(f"{path}: @{tag} must be followed by a whole number, got {word[:80]!r}.")
    return int(word)


def _parse_case(fields: list[str], where: str) -> list[list[float]]:
    """Return the values of one series, channel by channel."""
    channels = []
    for field in fields:
        words = [w.strip() for w in field.split(",")] if field else []
        try:
            if not _VALUES.fullmatch(field):
                raise ValueError
            channels.append([np.nan if w in ("?", "") else float(w) for w in words])
        except ValueError:
            bad = next(w for w in field.split(",") if not _is_value(w))
            raise UserError(
                f"{where}: {bad[:80]!r} is not a finite number; write ? for missing."
            ) from None
    if not any(channels):
        raise UserError(f"{where}: a series without values.")
    return channels


def _is_value(word: str) -> bool:
    """Return whether a word is a number or means a missing one; spaces are those of ASCII."""
    plain = word.strip()
    return bool(_VALUES.fullmatch(word)) and (is_number(plain) or plain.lower() in ("?", "", "nan"))


def _pad_channels(channels: list[list[float]]) -> NDArray[np.float64]:
    """Return one series ``[channels, time]``; shorter channels end in missing values."""
    case = np.full((len(channels), max(map(len, channels))), np.nan)
    for row, values in zip(case, channels, strict=True):
        row[: len(values)] = values
    return case


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
