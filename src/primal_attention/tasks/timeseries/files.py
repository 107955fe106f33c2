"""Files of series: ``.ts``, ``.npz`` and tables, and the sets of the UEA archive.

A set is named exactly: part ``train`` of the set ``Name`` is ``Name/Name.npz`` or
``Name/Name_TRAIN.ts`` under the root, and nothing else. Archives also ship copies such as
``Name_eq_TRAIN.ts``; a reader that takes the first match may train on a copy.
"""

import importlib.util
import io
import os
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.datasets import data_folder
from primal_attention.tasks.files import (
    TABLE_SUFFIXES,
    check_size,
    ending,
    list_some,
    read_table,
    take_labels,
)
from primal_attention.tasks.sources import existing
from primal_attention.tasks.splits import class_indices
from primal_attention.tasks.timeseries.data import (
    SeriesCollection,
    as_float32,
    series_from_arrays,
)

__all__ = [
    "list_series",
    "load_series",
    "npz_from_archive",
    "packaged_root",
    "read_npz",
    "read_series",
    "read_ts",
    "series_root",
]

Part = Literal["train", "test"]
SUFFIXES = (".ts", ".npz", *TABLE_SUFFIXES)


def read_series(
    path: Path,
    part: Part = "train",
    *,
    classes: Sequence[str] | None = None,
    target: str = "label",
    case: str = "case",
    channels: int | None = None,
) -> SeriesCollection:
    """Return the series of a file of any known kind.

    Args:
        path: ``.ts``; ``.npz`` with parts or with ``X``; ``.csv``, ``.tsv`` or ``.parquet``.
        part: Which part of an ``.npz`` file with several.
        classes: Names of the classes in their order; by default those of the file.
        target: Tables: column of the classes.
        case: Tables with one row a time step: column with the name of the series.
        channels: Channels of series to be predicted: labels may be missing, and are not read.
    """
    path = existing(Path(path))
    check_size(path)
    suffix = ending(path)
    if suffix == ".ts":
        return read_ts(path, classes=classes, channels=channels)
    if suffix == ".npz":
        return read_npz(path, part, classes=classes, labelled=channels is None)
    if suffix in TABLE_SUFFIXES:
        return _read_frame(path, classes, target, case, channels is None)
    kinds = ", ".join(SUFFIXES)
    raise ValueError(f"a file of time series ends in {kinds}, got {path.name!r}.")


def _read_frame(
    path: Path, classes: Sequence[str] | None, target: str, case: str, labelled: bool
) -> SeriesCollection:
    """Return the series of a table: one row a time step, or one row a series."""
    frame = read_table(path)
    labels: list[str] | None = None
    if labelled and (classes is not None or target in frame.columns):
        labels = take_labels(frame, target, path)
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


def read_ts(
    path: str | Path, *, classes: Sequence[str] | None = None, channels: int | None = None
) -> SeriesCollection:
    """Return the series of a UEA/UCR ``.ts`` file.

    Reads unequal lengths, ``?`` and ``NaN`` as missing, comments anywhere, and files whose header
    is incomplete or missing. What the header says of dimensions, equal lengths and classes is
    checked, what it leaves out is read off the data; ``@missing`` is not looked at. Without
    ``@classLabel`` a last field without a comma is the label.

    Args:
        path: The file.
        classes: Names in the order of the class indices, to read a test file like its training
            file; by default those of the header, else the sorted labels.
        channels: Channels of series to be predicted: labels may be missing, and are not read.

    Raises:
        ValueError: If the file breaks the format; the message names the line.
    """
    path = Path(path)
    header: dict[str, list[str]] = {}
    rows: list[tuple[int, str]] = []
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
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
        if labelled and len(fields) != channels:
            labels.append(fields.pop())
        rows_of_case = _parse_case(fields, f"{path}, line {number}")
        if equal and length is None:
            length = len(rows_of_case[0])
        dimensions = dimensions or len(rows_of_case)
        steps = {len(row) for row in rows_of_case}
        if len(rows_of_case) != dimensions or (equal and steps != {length}):
            raise ValueError(
                f"{path}, line {number}: {len(rows_of_case)} dimensions of {_range(steps)} steps, "
                f"expected {dimensions}{f' of {length}' if equal else ''}; the line is damaged or "
                "the header is wrong."
            )
        cases.append(_pad_channels(rows_of_case))
    names = (declared[1:] or None) if classes is None else list(classes)
    is_read = labelled and channels is None
    try:
        return series_from_arrays(cases, labels if is_read else None, classes=names)
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
    path: str | Path,
    part: Part = "train",
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
) -> SeriesCollection:
    """Return one part of an ``.npz`` file: ``X_train`` and ``y_train``, or ``X`` and ``y``.

    ``X`` is ``[cases, channels, time]`` as in aeon, or ``[cases, time]``. A file may say so itself:
    ``axes`` is ``"cases,channels,time"`` or ``"cases,time,channels"``. A file without ``axes`` that
    has lengths (``len_train``, ``length``), or two parts and ``classes``, has the second order, as
    all files of this library had before.
    Steps beyond the length of a case are not read; without lengths, steps at the end that are NaN
    in every channel are padding. ``y`` indexes ``classes`` if that is there; else it holds labels
    of any kind. Nothing is unpickled.

    Args:
        path: The file.
        part: ``"train"`` or ``"test"``.
        classes: Names of the classes in their order; by default those of the file.
        labelled: Whether to read labels.

    Raises:
        ValueError: If the file has no such part, or breaks the format.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            end = "" if "X" in file.files else f"_{part}"
            length_key = f"len{end}" if end else "length"
            wanted = {f"X{end}", f"y{end}", length_key, "classes", "axes"}
            found = {key: file[key] for key in file.files if key in wanted}
            keys = ", ".join(file.files)
    except (OSError, ValueError) as error:
        if not path.exists():
            raise
        raise ValueError(f"{path} is not a readable .npz file ({error}).") from None
    if f"X{end}" not in found:
        raise ValueError(
            f"{path} lacks the array X{end}; it has {keys}. Series are X or X_train and X_test."
        )
    x, length = as_float32(found[f"X{end}"]), found.get(length_key)
    if not len(x):
        raise ValueError(f"{path} has no {part} part; this copy of the set is not complete.")
    is_old = length is not None or bool(end and "classes" in found)
    default = "cases,time,channels" if is_old else ""
    x = _time_first(x, str(found.get("axes", default)).replace(" ", ""), path)
    try:
        if length is None:
            series = series_from_arrays(x.transpose(0, 2, 1))
        else:
            series = SeriesCollection(x, length.astype(np.int64))
        y = found.get(f"y{end}") if labelled else None
        if y is None:
            return series
        words, names = [str(v) for v in y.tolist()], tuple(map(str, found.get("classes", ())))
        if names:
            checked = replace(series, y=y.astype(np.int64), classes=names).y
            words = [names[v] for v in checked]  # type: ignore[union-attr]
        order = tuple(classes or names or sorted(set(words)))
        return replace(series, y=class_indices(words, order), classes=order)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _time_first(x: NDArray[np.float32], axes: str, path: Path) -> NDArray[np.float32]:
    """Return ``[cases, time, channels]``; without ``axes`` channels come first."""
    if x.ndim == 2:
        return x[:, :, None]
    if x.ndim != 3:
        raise ValueError(f"{path}: X must have two or three axes, got the shape {x.shape}.")
    if axes == "cases,time,channels":
        return x
    if axes not in ("", "cases,channels,time"):
        raise ValueError(
            f"{path}: axes must be cases,channels,time or cases,time,channels, got {axes!r}."
        )
    if not axes and x.shape[1] > x.shape[2]:
        warnings.warn(
            f"{path}: X has the shape {x.shape} and is read as {x.shape[1]} channels of "
            f"{x.shape[2]} time steps. If time is the second axis, save X.transpose(0, 2, 1). If "
            'it is not, save axes="cases,channels,time" beside X, and this warning ends.',
            stacklevel=3,
        )
    return x.transpose(0, 2, 1)


def npz_from_archive(archive: Path, name: str) -> bytes:
    """Return the ``.npz`` file of a UEA set from the zip archive of the publisher.

    Args:
        archive: Holds ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``, at the top or in a folder.
        name: ``NAME.npz``.
    """
    parts: dict[str, SeriesCollection] = {}
    with zipfile.ZipFile(archive) as file, tempfile.TemporaryDirectory() as folder:
        for part in ("train", "test"):
            wanted = f"{name.removesuffix('.npz')}_{part.upper()}.ts"
            member = next((m for m in file.namelist() if Path(m).name == wanted), None)
            if member is None:
                raise ValueError(f"the archive lacks {wanted}.")
            path = Path(folder) / wanted
            path.write_bytes(file.read(member))
            # numbers by value, words by letter
            classes = sorted(
                read_ts(path).classes, key=lambda c: (float(c) if _is_number(c) else 0.0, c)
            )
            parts[part] = read_ts(path, classes=classes)
    longest = max(series.x.shape[1] for series in parts.values())
    arrays: dict[str, NDArray[Any]] = {"classes": np.array(parts["train"].classes)}
    for part, series in parts.items():
        beyond = longest - series.x.shape[1]
        arrays[f"X_{part}"] = np.pad(series.x, ((0, 0), (0, beyond), (0, 0)))
        arrays[f"y_{part}"] = np.asarray(series.y)
        arrays[f"len_{part}"] = series.length.astype(np.int32)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def series_root(root: str | Path | None = None) -> Path:
    """Return the folder of the UEA sets: ``root``, else ``uea`` in that of ``PRIMAL_DATA``."""
    return data_folder() / "uea" if root is None else Path(root)


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
            f"No set named {name!r} in {series_root(root)}; there are: {', '.join(known)}. "
            "primal data list shows what can be downloaded."
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
