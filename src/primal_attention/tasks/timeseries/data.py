"""Series of unequal length with missing values: readers, standardisation, splits, batches.

A collection is one array ``[cases, time, channels]`` with the true length of every case. Behind a
case's length the array holds zeros that no reader should look at; inside it NaN means missing.

Files are named, never searched for: part ``train`` of the set ``Name`` is ``Name/Name.npz`` or
``Name/Name_TRAIN.ts`` under the root, and nothing else. Archives also ship copies such as
``Name_eq_TRAIN.ts``; a reader that takes the first match trains on whatever comes first.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.training.data import pad_collate

__all__ = [
    "Series",
    "SeriesDataset",
    "Standardizer",
    "collate_series",
    "jittered",
    "list_series",
    "load_series",
    "read_npz",
    "read_ts",
    "series_from_arrays",
    "series_root",
    "stratified_sample",
    "stratified_split",
]

Part = Literal["train", "test"]


@dataclass(frozen=True)
class Series:
    """A collection of series, some perhaps shorter than others.

    Example:
        >>> s = series_from_arrays([np.ones((2, 5)), np.zeros((2, 3))], ["a", "b"])
        >>> len(s), s.x.shape, s.length.tolist(), s.classes
        (2, (2, 5, 2), [5, 3], ('a', 'b'))
    """

    x: NDArray[np.float32]
    """Values ``[cases, time, channels]``; NaN where one is missing, zero behind the length."""
    length: NDArray[np.int64]
    """True lengths, from 1 to the time axis of ``x``."""
    y: NDArray[np.int64] | None = None
    """Class of every case, an index into ``classes``; ``None`` if the series have no labels."""
    classes: tuple[str, ...] = ()
    """Names of the classes."""

    def __post_init__(self) -> None:
        if self.x.ndim != 3 or not self.x.shape[2]:
            raise ValueError(
                f"x must have shape [cases, time, channels] with at least one channel, got "
                f"{self.x.shape}; use series_from_arrays for arrays with channels first."
            )
        if self.length.shape != self.x.shape[:1]:
            raise ValueError(
                f"length must hold one number a case, got {self.length.shape} for {len(self.x)}."
            )
        if len(self.x) and not 1 <= self.length.min() <= self.length.max() <= self.x.shape[1]:
            raise ValueError(
                f"Lengths must be from 1 to {self.x.shape[1]}, got {self.length.min()} to "
                f"{self.length.max()}; leave empty series out."
            )
        broken = np.flatnonzero((np.isinf(self.x).any(2) & self.keep).any(1))
        if len(broken):
            raise ValueError(
                f"Case {broken[0]}, counted from 0, holds a value that is infinite or too large; "
                "only NaN means missing."
            )
        if self.y is None:
            return
        if self.y.shape != self.length.shape:
            raise ValueError(f"y must hold one label a case, got {self.y.shape} for {len(self.x)}.")
        if len(self.y) and not 0 <= self.y.min() <= self.y.max() < len(self.classes):
            raise ValueError(
                f"y must index the {len(self.classes)} classes, got values from {self.y.min()} to "
                f"{self.y.max()}."
            )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_channels(self) -> int:
        """Channels of every time step."""
        return self.x.shape[2]

    @property
    def keep(self) -> NDArray[np.bool_]:
        """``True`` where a time step is real, ``[cases, time]``."""
        keep: NDArray[np.bool_] = np.arange(self.x.shape[1]) < self.length[:, None]
        return keep

    def take(self, index: NDArray[Any]) -> "Series":
        """Return some of the cases, by index or boolean mask."""
        y = None if self.y is None else self.y[index]
        return replace(self, x=self.x[index], length=self.length[index], y=y)


def series_from_arrays(
    X: NDArray[Any] | Sequence[NDArray[Any]],
    y: Sequence[Any] | NDArray[Any] | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Series:
    """Return a collection from arrays with channels first, as aeon and sktime hold them.

    Args:
        X: ``[cases, channels, time]``, ``[cases, time]`` for one channel, or a list of
            ``[channels, time]`` (or ``[time]``) arrays of any lengths. NaN means missing; steps at
            the end that are missing in every channel count as padding.
        y: Labels of any kind; compared as strings.
        classes: Names in the order of the class indices; by default the sorted labels.

    Example:
        >>> series_from_arrays(np.zeros((4, 3, 10))).x.shape
        (4, 10, 3)
    """
    cases = [np.atleast_2d(as_float32(case)) for case in X]
    if not cases:
        raise ValueError("X holds no series; give at least one.")
    channels = {case.shape[0] for case in cases}
    if any(case.ndim != 2 for case in cases) or len(channels) > 1:
        raise ValueError(
            "Every series must have shape [channels, time] with the same channels, got "
            f"{sorted({case.shape for case in cases})}; transpose arrays with time first."
        )
    length = np.array([_observed_length(case) for case in cases], dtype=np.int64)
    x = np.zeros((len(cases), max(int(length.max()), 1), channels.pop()), dtype=np.float32)
    for row, case, n in zip(x, cases, length, strict=True):
        row[:n] = case[:, :n].T
    if y is None:
        return Series(x, length)
    labels = [str(label) for label in y]
    names = tuple(sorted(set(labels)) if classes is None else classes)
    return Series(x, length, _indices(labels, names), names)


def as_float32(values: Any) -> NDArray[np.float32]:
    """Return values in single precision; the too large become infinite, for Series to tell."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32)


def _observed_length(case: NDArray[np.float32]) -> int:
    """Return the length up to the last step with a value in any channel, at least one."""
    seen = np.flatnonzero(~np.isnan(case).all(0))
    return int(seen[-1]) + 1 if len(seen) else min(1, case.shape[1])


def _indices(labels: Sequence[str], classes: tuple[str, ...]) -> NDArray[np.int64]:
    index = {name: i for i, name in enumerate(classes)}
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(
            f"Labels {', '.join(unknown)} are not among the classes {', '.join(classes)}; "
            "name every class, or correct the labels."
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


def read_ts(path: str | Path, *, classes: Sequence[str] | None = None) -> Series:
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
    length, dimensions = _number(header, "serieslength"), _number(header, "dimensions")
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


def _number(header: Mapping[str, list[str]], tag: str) -> int | None:
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


def read_npz(path: str | Path, part: Part = "train") -> Series:
    """Return one part of an ``.npz`` file: ``X_train``, ``len_train``, ``y_train``, ``classes``.

    Arrays are ``X [cases, time, channels]``, zero-padded behind ``len``; ``y`` indexes ``classes``.
    ``len`` may be left out if all series are equally long. Nothing is unpickled.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files if key.endswith((f"_{part}", "classes"))}
    except (OSError, ValueError) as error:
        if not path.exists():
            raise
        raise ValueError(f"{path} is not a readable .npz file ({error}).") from None
    missing = {f"X_{part}", f"y_{part}", "classes"} - found.keys()
    if missing:
        raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}.")
    x = as_float32(found[f"X_{part}"])
    if not len(x):
        raise ValueError(f"{path} has no {part} part; this copy of the set is not complete.")
    length = found.get(f"len_{part}", np.full(len(x), x.shape[1])).astype(np.int64)
    names = tuple(str(name) for name in found["classes"])
    try:
        return Series(x, length, found[f"y_{part}"].astype(np.int64), names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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


def list_series(root: str | Path | None = None) -> list[str]:
    """Return the names of the sets in a folder, sorted."""
    folder = series_root(root)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; set PRIMAL_DATA, or pass root.")
    return sorted(p.name for p in folder.iterdir() if any(f.exists() for f in _files(p, "train")))


def load_series(name: str, part: Part = "train", *, root: str | Path | None = None) -> Series:
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


@dataclass(frozen=True)
class Standardizer:
    """Shift and scale every channel, then fill what is missing.

    Fitted on training series alone; padding and missing values count for nothing. A missing value
    is interpolated between the observed neighbours of its channel, held constant at the ends, and
    zero, the training mean, where a channel was not observed at all.

    Example:
        >>> train = series_from_arrays(np.array([[1.0, np.nan, 3.0, 2.0]]))
        >>> print(Standardizer.fit(train)(train).x.ravel().round(2))
        [-1.22  0.    1.22  0.  ]
    """

    mean: NDArray[np.float64]
    """Mean of every channel."""
    std: NDArray[np.float64]
    """Standard deviation of every channel; one where a channel is constant."""

    @classmethod
    def fit(cls, series: Series) -> "Standardizer":
        """Return the means and deviations of the observed values."""
        values = np.where(series.keep[:, :, None], series.x, np.nan).astype(np.float64)
        values = values.reshape(-1, series.num_channels)
        count = np.maximum((~np.isnan(values)).sum(0), 1)
        mean = np.nansum(values, 0) / count
        std = np.sqrt(np.nansum((values - mean) ** 2, 0) / count)
        # rounding leaves a little spread in a constant channel of large values
        flat = std <= 1e-6 * np.maximum(np.abs(mean), np.finfo(np.float32).tiny)
        return cls(mean, np.where(flat, 1.0, std))

    def __call__(self, series: Series) -> Series:
        """Return the series standardised, without missing values, zero behind their lengths."""
        if series.num_channels != len(self.mean):
            raise ValueError(
                f"The series have {series.num_channels} channels, but the statistics were fitted "
                f"on {len(self.mean)}."
            )
        x = as_float32((series.x - self.mean) / self.std)
        keep = series.keep[:, :, None]
        for case, channel in np.argwhere((np.isnan(x) & keep).any(1)):
            line = x[case, : series.length[case], channel]
            seen = np.flatnonzero(~np.isnan(line))
            line[:] = np.interp(np.arange(len(line)), seen, line[seen]) if len(seen) else 0.0
        return replace(series, x=np.where(keep, x, np.float32(0)))


class Split(NamedTuple):
    """Indices of two disjoint sets of cases, both in their old order."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]


def stratified_split(y: NDArray[np.int64], fraction: float = 0.2, *, seed: int = 0) -> Split:
    """Return a split that holds out the same fraction of every class, the same for a seed always.

    Each class gives ``round(fraction · size)`` cases, at least one if it has two or more; a class
    with a single case stays in training.

    Example:
        >>> stratified_split(np.array([0, 0, 0, 0, 0, 1, 1, 1]), 0.25).valid.shape
        (2,)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}.")
    rng = np.random.default_rng(seed)
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[:count]] = True
    return Split(np.flatnonzero(~held), np.flatnonzero(held))


def stratified_sample(y: NDArray[np.int64], size: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the indices of ``size`` cases, the same share of every class, in their old order.

    Example:
        >>> stratified_sample(np.array([0, 0, 0, 0, 0, 0, 1, 1, 1]), 3).shape
        (3,)
    """
    rng = np.random.default_rng(seed)
    place = np.zeros(len(y))
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        place[members] = np.arange(len(members)) / len(members)
    return np.sort(np.argsort(place, kind="stable")[:size])


def jittered(x: Float[Tensor, "time channels"], strength: float) -> Float[Tensor, "time channels"]:
    """Return a standardised series changed a little, another way each time.

    Its pace changes by up to ``strength``, its start by up to half of that share of its length;
    every channel gets a factor of deviation ``strength`` around one, and every value noise of twice
    that deviation. Draws from torch's generator, so that the seed of a training decides it.

    Example:
        >>> jittered(torch.zeros(50, 3), 0.1).shape
        torch.Size([50, 3])
    """
    last = len(x) - 1
    faster, later = strength * (2 * torch.rand(2) - 1)
    at = (torch.arange(len(x)) - last / 2) * (1 + faster) + last / 2 + later / 2 * len(x)
    at = at.clamp(0, last)  # the ends are held
    left = at.long()
    x = torch.lerp(x[left], x[(left + 1).clamp(max=last)], (at - left)[:, None])
    x = x * (1 + strength * torch.randn(x.shape[1]))
    return x + 2 * strength * torch.randn(x.shape)


class SeriesDataset(Dataset[dict[str, Tensor]]):
    """Cases as ``{"x": [time, channels], "labels": class}``, without padding.

    Args:
        series: Standardised series.
        jitter: Strength of the changes of every case each time it is read; for training only.
    """

    def __init__(self, series: Series, jitter: float = 0.0) -> None:
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be from 0 up to, not including, 1, got {jitter}.")
        self.series, self.jitter = series, jitter

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        series = self.series
        x = torch.from_numpy(series.x[index, : series.length[index]])
        item = {"x": jittered(x, self.jitter) if self.jitter else x}
        if series.y is not None:
            item["labels"] = torch.tensor(series.y[index])
        return item


def collate_series(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch padded to its longest series, always with a ``key_mask``."""
    batch = pad_collate(items)
    batch.setdefault("key_mask", torch.ones(batch["x"].shape[:2], dtype=torch.bool))
    return batch
