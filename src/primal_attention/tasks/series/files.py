"""Files of series: ``.npz``, tables and ``.ts``, and the sets of the UEA archive.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.public import data_folder
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import list_arrays, read_arrays
from primal_attention.support.files.tables import (
    TABLE_SUFFIXES,
    ending,
    list_some,
    read_table,
    take_column,
    take_labels,
)
from primal_attention.tasks.series.data import (
    SeriesCollection,
    as_float32,
    label_words,
    series_from_arrays,
    whole_numbers,
)
from primal_attention.tasks.series.header import is_number
from primal_attention.tasks.series.ts import read_ts
from primal_attention.tasks.sources import existing
from primal_attention.tasks.splits import class_indices

__all__ = [
    "list_series",
    "load_series",
    "npz_from_archive",
    "packaged_root",
    "read_npz",
    "read_series",
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
    numbers: bool = False,
) -> SeriesCollection:
    """Return the series of a file of any known kind.

    Args:
        path: ``.ts``; ``.npz`` with parts or with ``X``; ``.csv``, ``.tsv`` or ``.parquet``.
        part: Which part of an ``.npz`` file with several.
        classes: Names of the classes in their order; by default those of the file.
        target: Tables: column of the classes or numbers.
        case: Tables with one row a time step: column with the name of the series.
        channels: Channels of series to be predicted: labels may be missing, and are not read.
        numbers: Whether the label of a series is a number to predict, not a class.
    """
    path = existing(Path(path))
    suffix = ending(path)
    if suffix == ".ts":
        return read_ts(path, classes=classes, channels=channels, numbers=numbers)
    labelled = channels is None
    if suffix == ".npz":
        return read_npz(path, part, classes=classes, labelled=labelled, numbers=numbers)
    if suffix in TABLE_SUFFIXES:
        return _read_frame(path, classes, target, case, labelled=labelled, numbers=numbers)
    kinds = ", ".join(SUFFIXES)
    raise UserError(f"a file of time series ends in {kinds}, got {path.name!r}.")


def _read_frame(
    path: Path,
    classes: Sequence[str] | None,
    target: str,
    case: str,
    *,
    labelled: bool,
    numbers: bool,
) -> SeriesCollection:
    """Return the series of a table: one row a time step, or one row a series."""
    frame = read_table(path, words=(target, case))
    labels: list[Any] | None = None
    if labelled and (numbers or classes is not None or target in frame.columns):
        labels = (_take_numbers if numbers else take_labels)(frame, target, path)
    values = frame.drop(columns=[target], errors="ignore")
    if case in frame.columns:
        names = [str(name) for name in frame[case]]
        if frame[case].isna().any() or "" in names:
            raise UserError(f"{path}: some rows have no {case!r}; every row needs its series.")
        numeric = _numeric(values.drop(columns=[case]), path)
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        cases = [numeric[places].T for places in rows.values()]
        if labels is not None:
            labels = [_one_label(name, labels, rows[name], path) for name in rows]
    else:
        cases = list(_numeric(values, path))
    with user_errors(str(path)):
        if numbers and labels is not None:
            return replace(series_from_arrays(cases), y=np.array(labels, np.float64))
        return series_from_arrays(cases, labels, classes=classes)


def _take_numbers(frame: object, target: str, path: Path) -> list[float]:
    """Return the column of the numbers to predict."""
    words = [str(value).strip() for value in take_column(frame, target, path, "target")]
    broken = [row for row, word in enumerate(words) if not is_number(word)]
    if broken:
        raise UserError(
            f"{path}: the {target!r} of row {broken[0] + 1} is {words[broken[0]][:80]!r}, not a "
            "finite number; give every row one, or name another column with --data.target."
        )
    return [float(word) for word in words]


def _one_label(name: str, labels: Sequence[Any], rows: Sequence[int], path: Path) -> Any:
    """Return the label of a series of several rows."""
    found = sorted({labels[row] for row in rows})
    if len(found) > 1:
        raise UserError(
            f"{path}: the series {name[:80]!r} has the labels {list_some([*map(str, found)])}; all "
            "rows of a series need the same."
        )
    return found[0]


def _numeric(frame: Any, path: Path) -> NDArray[np.float64]:
    words = [str(name) for name, kind in frame.dtypes.items() if kind.kind not in "iufb"]
    if words or not len(frame.columns):
        told = f"the columns {list_some(words)} hold no numbers" if words else "no column is left"
        raise UserError(
            f"{path}: {told}; --data.target names the labels and --data.case the series, all "
            "other columns must be values."
        )
    return np.asarray(frame, dtype=np.float64)


def read_npz(
    path: str | Path,
    part: Part = "train",
    *,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
    numbers: bool = False,
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
        numbers: Whether the label of a series is a number to predict, not a class.

    Raises:
        UserError: If the file has no such part, or breaks the format.
    """
    path = Path(path)
    known = list_arrays(path)
    end = "" if "X" in known else f"_{part}"
    length_key = f"len{end}" if end else "length"
    found = read_arrays(path, (f"X{end}", f"y{end}", length_key, "classes", "axes"))
    if f"X{end}" not in found:
        raise UserError(
            f"{path} lacks the array X{end}; it has {list_some(list(known)) or 'none'}. Series are "
            "X or X_train and X_test."
        )
    length = found.get(length_key)
    is_old = length is not None or bool(end and "classes" in found)
    default = "cases,time,channels" if is_old else ""
    with user_errors(str(path)):
        x = as_float32(found[f"X{end}"])
        if x.ndim and not len(x):
            lost = f"{part} part; this copy of the set is not complete" if end else "series"
            raise UserError(f"{path} has no {lost}.")
        x = _time_first(x, str(found.get("axes", default)).replace(" ", ""), path)
        if length is None:
            series = series_from_arrays(x.transpose(0, 2, 1))
        else:
            series = SeriesCollection(x, whole_numbers(length, length_key))
        y = found.get(f"y{end}") if labelled else None
        if y is None:
            return series
        if y.shape != series.length.shape:
            raise ValueError(f"y{end} has the shape {y.shape}, and there are {len(series)} cases.")
        names = _class_names(found.get("classes"))
        if names:
            checked = replace(series, y=whole_numbers(y, f"y{end}"), classes=names).y
            words = [names[v] for v in checked]  # type: ignore[union-attr]
        else:
            words = label_words(y)
        if numbers:
            return replace(series, y=_label_numbers(words))
        order = tuple(classes or names or sorted(set(words)))
        return replace(series, y=class_indices(words, order), classes=order)


def _label_numbers(words: Sequence[str]) -> NDArray[np.float64]:
    """Return labels as numbers."""
    broken = [case for case, word in enumerate(words) if not is_number(word)]
    if broken:
        raise ValueError(
            f"case {broken[0]}, counted from 0, has the label {words[broken[0]][:80]!r}, not a "
            "finite number; give every series a number to predict."
        )
    return np.array(words, np.float64)


def _class_names(array: np.ndarray | None) -> tuple[str, ...]:
    """Return the names of the classes in a file; none if it has none."""
    if array is None:
        return ()
    names = tuple(map(str, array.tolist())) if array.ndim == 1 else ()
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"classes must be one row of different names, got {list_some(names) or array.shape}."
        )
    return names


def _time_first(x: NDArray[np.float32], axes: str, path: Path) -> NDArray[np.float32]:
    """Return ``[cases, time, channels]``; without ``axes`` channels come first."""
    if x.ndim == 2:
        return x[:, :, None]
    if x.ndim != 3:
        raise UserError(f"{path}: X must have two or three axes, got the shape {x.shape}.")
    if axes == "cases,time,channels":
        return x
    if axes not in ("", "cases,channels,time"):
        raise UserError(
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
                read_ts(path).classes, key=lambda c: (float(c) if is_number(c) else 0.0, c)
            )
            parts[part] = read_ts(path, classes=classes)
    longest = max(series.x.shape[1] for series in parts.values())
    arrays: dict[str, np.ndarray] = {"classes": np.array(parts["train"].classes)}
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
    name: str,
    part: Part = "train",
    *,
    root: str | Path | None = None,
    numbers: bool = False,
) -> SeriesCollection:
    """Return one part of a set by its exact name.

    Args:
        name: Name of the set: ``name/name.npz``, or ``name/name_TRAIN.ts`` and ``name_TEST.ts``.
        part: ``"train"`` or ``"test"``.
        root: Folder of the sets; by default ``uea`` in the folder of ``PRIMAL_DATA``.
        numbers: Whether the label of a series is a number to predict, not a class.

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
        return read_npz(npz, part, numbers=numbers)
    if part == "train" or numbers:
        return read_ts(text, numbers=numbers)
    return read_ts(text, classes=read_ts(_files(folder, "train")[1]).classes)


def _files(folder: Path, part: Part) -> tuple[Path, Path]:
    name = folder.name
    return folder / f"{name}.npz", folder / f"{name}_{part.upper()}.ts"
