"""Files of series: ``.ts``, ``.npz`` and tables, and the sets of the UEA archive.

A set is named exactly: part ``train`` of the set ``Name`` is ``Name/Name.npz`` or
``Name/Name_TRAIN.ts`` under the root, and nothing else. Archives also ship copies such as
``Name_eq_TRAIN.ts``; a reader that takes the first match may train on a copy.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.files import TABLE_SUFFIXES, list_some, read_table, take_column
from primal_attention.tasks.timeseries.data import (
    SeriesCollection,
    as_float32,
    class_indices,
    series_from_arrays,
)

__all__ = [
    "list_series",
    "load_series",
    "packaged_root",
    "read_npz",
    "read_series",
    "read_ts",
    "series_root",
]

Part = Literal["train", "test"]


def read_series(
    path: Path,
    part: Part = "train",
    *,
    classes: Sequence[str] | None = None,
    target: str = "label",
    case: str = "case",
) -> SeriesCollection:
    """Return the series of a file of any known kind.

    Args:
        path: ``.ts``; ``.npz`` with parts or with ``X``; ``.csv``, ``.tsv`` or ``.parquet``.
        part: Which part of an ``.npz`` file with several.
        classes: Names of the classes in their order; by default those of the file.
        target: Tables: column of the classes.
        case: Tables with one row a time step: column with the name of the series.
    """
    path = Path(path)
    if path.suffix == ".ts":
        return read_ts(path, classes=classes)
    if path.suffix == ".npz":
        return read_npz(path, part, classes=classes)
    if path.suffix in TABLE_SUFFIXES:
        return _read_frame(path, classes, target, case)
    kinds = ", ".join((".ts", ".npz", *TABLE_SUFFIXES))
    raise ValueError(f"a file of time series ends in {kinds}, got {path.name!r}.")


def _read_frame(
    path: Path, classes: Sequence[str] | None, target: str, case: str
) -> SeriesCollection:
    """Return the series of a table: one row a time step, or one row a series."""
    frame = read_table(path)
    labels: list[str] | None = None
    if classes is not None or target in frame.columns:
        labels = [str(label) for label in take_column(frame, target, path, "target")]
    values = frame.drop(columns=[target], errors="ignore")
    if case in frame.columns:
        groups = frame.groupby(case, sort=False).indices.values()
        numbers = _numeric(values.drop(columns=[case]), path)
        cases = [numbers[rows].T for rows in groups]
        if labels is not None:
            labels = [labels[rows[0]] for rows in groups]
    else:
        cases = list(_numeric(values, path))
    return series_from_arrays(cases, labels, classes=classes)


def _numeric(frame: Any, path: Path) -> NDArray[np.float64]:
    words = [str(name) for name, kind in frame.dtypes.items() if kind.kind not in "iufb"]
    if words or not len(frame.columns):
        raise ValueError(
            f"{path}: the columns {list_some(words)} hold no numbers; --data.target names the "
            "classes and --data.case the series, all other columns must be values."
        )
    return np.asarray(frame, dtype=np.float64)


def read_ts(path: str | Path, *, classes: Sequence[str] | None = None) -> SeriesCollection:
    """Return the series of a UEA/UCR ``.ts`` file.

    Reads unequal lengths, ``?`` and ``NaN`` as missing, comments anywhere, and files whose header
    is incomplete or missing. What the header says of dimensions, equal lengths and classes is
    checked, what it leaves out is read off the data; ``@missing`` is not looked at. Without
    ``@classLabel`` a last field without a comma is the label.

    Args:
        path: The file.
        classes: Names in the order of the class indices, to read a test file like its training
            file; by default those of the header, else the sorted labels.

    Raises:
        ValueError: If the file breaks the format; the message names the line.
    """
    path = Path(path)
    header: dict[str, list[str]] = {}
    rows: list[tuple[int, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith(("#", "%")):
            continue
        if line.startswith("@"):
            tag, *values = line[1:].replace(",", " ").split()
            if rows:
                raise ValueError(f"{path}, line {number}: @{tag} after the first series.")
            header[tag.lower()] = values
        else:
            rows.append((number, line))
    if not rows:
        raise ValueError(f"{path} holds no series; it is empty or truncated.")
    if header.get("timestamps", ["false"])[0].lower() == "true":
        raise ValueError(f"{path} has time stamps, which are not supported; resample it evenly.")
    declared = header.get("classlabel", [])
    if declared:
        labelled = declared[0].lower() == "true"
    else:
        labelled = all(":" in row and "," not in row.rpartition(":")[2] for _, row in rows)
    equal = header.get("equallength", ["false"])[0].lower() == "true"
    length = _header_number(header, "serieslength")
    dimensions = _header_number(header, "dimensions")
    cases, labels = [], []
    for number, row in rows:
        fields = [field.strip() for field in row.split(":")]
        if labelled:
            labels.append(fields.pop())
        channels = _parse_case(fields, f"{path}, line {number}")
        if equal and length is None:
            length = len(channels[0])
        dimensions = dimensions or len(channels)
        steps = {len(c) for c in channels}
        if len(channels) != dimensions or (equal and steps != {length}):
            raise ValueError(
                f"{path}, line {number}: {len(channels)} dimensions of {_range(steps)} steps, "
                f"expected {dimensions}{f' of {length}' if equal else ''}; the line is damaged or "
                "the header is wrong."
            )
        cases.append(_pad_channels(channels))
    names = (declared[1:] or None) if classes is None else list(classes)
    try:
        return series_from_arrays(cases, labels if labelled else None, classes=names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _header_number(header: Mapping[str, list[str]], tag: str) -> int | None:
    """Return a number of the header; ``None`` if it is not there."""
    return int(header[tag][0]) if header.get(tag) else None


def _parse_case(fields: list[str], where: str) -> list[list[float]]:
    """Return the values of one series, channel by channel."""
    channels = []
    for field in fields:
        words = [w.strip() for w in field.split(",")] if field else []
        try:
            channels.append([np.nan if w in ("?", "") else float(w) for w in words])
        except ValueError:
            bad = next(w for w in words if not _is_number(w))
            raise ValueError(f"{where}: {bad!r} is not a number; write ? for missing.") from None
    if not any(channels):
        raise ValueError(f"{where}: a series without values.")
    return channels


def _pad_channels(channels: list[list[float]]) -> NDArray[np.float64]:
    """Return one series ``[channels, time]``; shorter channels end in missing values."""
    case = np.full((len(channels), max(map(len, channels))), np.nan)
    for row, values in zip(case, channels, strict=True):
        row[: len(values)] = values
    return case


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word in ("?", "")
    return True


def read_npz(
    path: str | Path, part: Part = "train", *, classes: Sequence[str] | None = None
) -> SeriesCollection:
    """Return one part of an ``.npz`` file: ``X_train``, ``len_train``, ``y_train``, ``classes``.

    Arrays are ``X [cases, time, channels]``, zero-padded beyond ``len``; ``y`` indexes ``classes``.
    ``len`` may be left out if all series are equally long. A file with one part has ``X``, and may
    have ``length`` and labels ``y`` of any kind. Nothing is unpickled.

    Args:
        path: The file.
        part: ``"train"`` or ``"test"``.
        classes: Names of the classes of a file with ``X``; by default the sorted labels.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            ends = f"_{part}", "classes", "X", "y", "length"
            found = {key: file[key] for key in file.files if key.endswith(ends)}
    except (OSError, ValueError) as error:
        if not path.exists():
            raise
        raise ValueError(f"{path} is not a readable .npz file ({error}).") from None
    if "X" in found:
        return _one_part(found, classes)
    missing = {f"X_{part}", f"y_{part}", "classes"} - found.keys()
    if missing:
        raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}.")
    x = as_float32(found[f"X_{part}"])
    if not len(x):
        raise ValueError(f"{path} has no {part} part; this copy of the set is not complete.")
    length = found.get(f"len_{part}", np.full(len(x), x.shape[1])).astype(np.int64)
    names = tuple(str(name) for name in found["classes"])
    try:
        return SeriesCollection(x, length, found[f"y_{part}"].astype(np.int64), names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _one_part(found: Mapping[str, NDArray[Any]], classes: Sequence[str] | None) -> SeriesCollection:
    x = as_float32(found["X"])
    length = found.get("length", np.full(len(x), x.shape[1])).astype(np.int64)
    if "y" not in found:
        return SeriesCollection(x, length)
    words = [str(label) for label in found["y"].tolist()]
    names = tuple(sorted(set(words)) if classes is None else classes)
    return SeriesCollection(x, length, class_indices(words, names), names)


def series_root(root: str | Path | None = None) -> Path:
    """Return the folder of the UEA sets: ``root``, else ``uea`` in that of ``PRIMAL_DATA``."""
    if root is not None:
        return Path(root)
    if "PRIMAL_DATA" not in os.environ:
        raise ValueError(
            "No folder of data sets: set the environment variable PRIMAL_DATA to the folder that "
            "contains uea/, or pass root."
        )
    return Path(os.environ["PRIMAL_DATA"]) / "uea"


def packaged_root(name: str) -> Path | None:
    """Return aeon's folder of data sets if the set is there and not in that of ``PRIMAL_DATA``."""
    if (Path(os.environ.get("PRIMAL_DATA", "")) / "uea" / name).is_dir():
        return None
    found = importlib.util.find_spec("aeon")
    if found is not None and found.submodule_search_locations:
        root = Path(found.submodule_search_locations[0]) / "datasets" / "data"
        if (root / name).is_dir():
            return root
    return None


def list_series(root: str | Path | None = None) -> list[str]:
    """Return the names of the sets in a folder, sorted."""
    folder = series_root(root)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; set PRIMAL_DATA, or pass root.")
    return sorted(p.name for p in folder.iterdir() if any(f.exists() for f in _files(p, "train")))


def load_series(
    name: str, part: Part = "train", *, root: str | Path | None = None
) -> SeriesCollection:
    """Return one part of a set by its exact name.

    Args:
        name: Name of the set: ``name/name.npz``, or ``name/name_TRAIN.ts`` and ``name_TEST.ts``.
        part: ``"train"`` or ``"test"``.
        root: Folder of the sets; by default ``uea`` in the folder of ``PRIMAL_DATA``.

    Raises:
        ValueError: If there is no such set; the message lists those there are.
    """
    if part not in ("train", "test"):
        raise ValueError(f"part must be 'train' or 'test', got {part!r}.")
    known = list_series(root)
    if name not in known:
        raise ValueError(
            f"No set named {name!r} in {series_root(root)}; there are: {', '.join(known)}."
        )
    folder = series_root(root) / name
    npz, text = _files(folder, part)
    if npz.exists() and text.exists():
        raise ValueError(f"Both {npz} and {text} exist; remove one.")
    if npz.exists():
        return read_npz(npz, part)
    if part == "train":
        return read_ts(text)
    return read_ts(text, classes=read_ts(_files(folder, "train")[1]).classes)


def _files(folder: Path, part: Part) -> tuple[Path, Path]:
    name = folder.name
    return folder / f"{name}.npz", folder / f"{name}_{part.upper()}.ts"
