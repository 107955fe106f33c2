"""Collections of series with unequal lengths and missing values, standardised and batched.

A collection is one array ``[cases, time, channels]`` with the true length of every case. Beyond a
case's length the array holds zeros that nothing reads; inside it NaN means missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.datasets.words import as_words
from primal_attention.tasks.splits import class_indices
from primal_attention.training.data import pad_collate

__all__ = [
    "SeriesCollection",
    "SeriesDataset",
    "Standardizer",
    "as_float32",
    "collate_series",
    "jittered",
    "label_words",
    "series_from_arrays",
    "whole_numbers",
]

_ROUGH = 1.8
"""Mean squared step over variance above which a series is rough; white noise has 2."""


@dataclass(frozen=True)
class SeriesCollection:
    """A collection of series, some perhaps shorter than others.

    Example:
        >>> s = series_from_arrays([np.ones((2, 5)), np.zeros((2, 3))], ["a", "b"])
        >>> len(s), s.x.shape, s.length.tolist(), s.classes
        (2, (2, 5, 2), [5, 3], ('a', 'b'))
    """

    x: NDArray[np.float32]
    """Values ``[cases, time, channels]``; NaN where one is missing, zero beyond the length."""
    length: NDArray[np.int64]
    """True lengths, from 1 to the time axis of ``x``."""
    y: NDArray[np.int64] | NDArray[np.float64] | None = None
    """Classes of the cases, whole numbers that index ``classes``, or numbers of type ``float64``;
    ``None`` if the series have no targets."""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty if the targets are numbers."""

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
        if self.y.dtype.kind == "f":
            self._check_numbers(self.y)
        elif len(self.y) and not 0 <= self.y.min() <= self.y.max() < len(self.classes):
            raise ValueError(
                f"y must index the {len(self.classes)} classes, got values from {self.y.min()} to "
                f"{self.y.max()}."
            )

    def _check_numbers(self, y: np.ndarray) -> None:
        """Raise unless all targets are finite numbers of single precision's range."""
        if self.classes:
            raise ValueError(
                f"y must index the {len(self.classes)} classes with whole numbers, got the type "
                f"{y.dtype}; leave classes out if the targets are numbers."
            )
        broken = np.flatnonzero(~(np.abs(y) <= np.finfo(np.float32).max))
        if len(broken):
            raise ValueError(
                f"Case {broken[0]}, counted from 0, has the target {y[broken[0]]}; a target must "
                "be a finite number below 3.4e38."
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

    def take(self, index: np.ndarray) -> "SeriesCollection":
        """Return some of the cases, by index or boolean mask."""
        y = None if self.y is None else self.y[index]
        return replace(self, x=self.x[index], length=self.length[index], y=y)

    def append(self, more: "SeriesCollection") -> "SeriesCollection":
        """Return these cases and then others with as many channels."""
        steps = max(self.x.shape[1], more.x.shape[1])
        x = [np.pad(s.x, ((0, 0), (0, steps - s.x.shape[1]), (0, 0))) for s in (self, more)]
        y = None
        if self.y is not None and more.y is not None:
            y = np.concatenate([self.y, more.y])
        length = np.concatenate([self.length, more.length])
        return replace(self, x=np.concatenate(x), length=length, y=y)

    def cut(self, length: int | None) -> "SeriesCollection":
        """Return the first ``length`` steps of every series; all of them if ``None``."""
        if length is None or self.x.shape[1] <= length:
            return self
        return replace(self, x=self.x[:, :length], length=np.minimum(self.length, length))


def series_from_arrays(
    X: np.ndarray | Sequence[np.ndarray],
    y: Sequence[object] | np.ndarray | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> SeriesCollection:
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
    check_filled(X)
    arrays = [as_float32(case) for case in X]
    if not all(array.ndim for array in arrays):
        raise ValueError("X must be a list of series, got a single value instead of a series.")
    cases = [np.atleast_2d(array) for array in arrays]
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
        return SeriesCollection(x, length)
    labels = as_words(y, "labels")
    names = tuple(sorted(set(labels)) if classes is None else classes)
    return SeriesCollection(x, length, class_indices(labels, names), names)


def check_filled(X: Sequence[object] | np.ndarray) -> None:
    """Raise unless there is a series, and every series has a time step."""
    if not len(X):
        raise ValueError("X holds no series; give at least one.")
    for i, case in enumerate(X):
        if getattr(case, "size", 1) == 0 or (isinstance(case, list) and not case):
            raise ValueError(
                f"Case {i}, counted from 0, has no channel or no time step; a series needs one of "
                "each. Leave empty series out."
            )


def as_float32(values: object) -> NDArray[np.float32]:
    """Return values in single precision; too large ones become infinite, which is refused later.

    Raises:
        ValueError: If they are no real numbers, or rows have unequal lengths.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biufO":
            raise ValueError
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    except (ValueError, TypeError):
        kind = getattr(getattr(values, "dtype", None), "name", type(values).__name__)
        raise ValueError(
            f"series need real numbers in rows of equal length, got {kind}; leave words, dates "
            "and complex numbers out."
        ) from None


def whole_numbers(values: np.ndarray, name: str) -> NDArray[np.int64]:
    """Return an array of whole numbers; floating point numbers must be whole too.

    Raises:
        ValueError: If one is not.
    """
    is_whole = values.dtype.kind in "iu"
    if values.dtype.kind == "f":
        is_whole = bool((np.abs(values) < 2**53).all() and (values == np.round(values)).all())
    if not is_whole:
        raise ValueError(f"{name} must hold whole numbers, got {_example(values)}.")
    return values.astype(np.int64)


def _example(values: np.ndarray) -> str:
    """Return the type of an array, and the first number that is not whole."""
    if values.dtype.kind != "f":
        return f"the type {values.dtype}"
    broken = values[~(values == np.round(values)) | ~(np.abs(values) < 2**53)]
    return str(broken.ravel()[0])


def label_words(labels: np.ndarray) -> list[str]:
    """Return labels of any kind as words.

    Raises:
        ValueError: If they are complex numbers, or one is missing.
    """
    if labels.dtype.kind not in "biufUS":
        raise ValueError(f"labels must be words or numbers, got the type {labels.dtype}.")
    found = labels.astype(str) if labels.dtype.kind == "S" else labels
    words = [str(value) for value in found.tolist()]
    missing = [i for i, word in enumerate(words) if word in ("", "nan")]
    if missing:
        raise ValueError(f"case {missing[0]}, counted from 0, has no label.")
    return words


def _observed_length(case: NDArray[np.float32]) -> int:
    """Return the length up to the last step with a value in any channel, at least one."""
    seen = np.flatnonzero(~np.isnan(case).all(0))
    return int(seen[-1]) + 1 if len(seen) else min(1, case.shape[1])


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
    def fit(cls, series: SeriesCollection) -> "Standardizer":
        """Return the means and deviations of the observed values."""
        values = np.where(series.keep[:, :, None], series.x, np.nan).astype(np.float64)
        values = values.reshape(-1, series.num_channels)
        count = np.maximum((~np.isnan(values)).sum(0), 1)
        mean = np.nansum(values, 0) / count
        std = np.sqrt(np.nansum((values - mean) ** 2, 0) / count)
        # rounding leaves a little spread in a constant channel of large values
        flat = std <= 1e-6 * np.maximum(np.abs(mean), np.finfo(np.float32).tiny)
        return cls(mean, np.where(flat, 1.0, std))

    def __call__(self, series: SeriesCollection) -> SeriesCollection:
        """Return the series standardised, without missing values, zero beyond their lengths."""
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


def jittered(x: Float[Tensor, "time channels"], strength: float) -> Float[Tensor, "time channels"]:
    """Return a standardised series with small random changes.

    Its pace changes by up to ``strength``, its start by up to half of that share of its length;
    every channel gets a factor of deviation ``strength`` around one, and every value noise of twice
    that deviation. Values between two steps are interpolated; a rough series, whose mean squared
    step is more than 1.8 times its variance, gets those of the nearest step instead, because
    interpolation would smooth it. Draws from torch's generator, so that the seed of a training
    decides it.

    Example:
        >>> jittered(torch.zeros(50, 3), 0.1).shape
        torch.Size([50, 3])
    """
    last = len(x) - 1
    faster, later = strength * (2 * torch.rand(2) - 1)
    at = (torch.arange(len(x)) - last / 2) * (1 + faster) + last / 2 + later / 2 * len(x)
    at = at.clamp(0, last)  # the ends are held
    if _is_rough(x):
        x = x[at.round().long()]
    else:
        left = at.long()
        x = torch.lerp(x[left], x[(left + 1).clamp(max=last)], (at - left)[:, None])
    x = x * (1 + strength * torch.randn(x.shape[1]))
    return x + 2 * strength * torch.randn(x.shape)


def _is_rough(x: Float[Tensor, "time channels"]) -> bool:
    """Return whether a series changes from step to step almost as white noise does, or more."""
    # the mean over no step is NaN, which is not larger
    return bool(x.diff(dim=0).square().mean() > _ROUGH * x.var(0, correction=0).mean())


class SeriesDataset(Dataset[dict[str, Tensor]]):
    """Data set of cases ``{"x": [time, channels], "labels": target}``, without padding.

    Args:
        series: Standardised series.
        jitter: Strength of the changes of every case each time it is read; for training only.
    """

    def __init__(self, series: SeriesCollection, jitter: float = 0.0) -> None:
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be from 0 up to, not including, 1, got {jitter}.")
        self.series, self.jitter = series, jitter

    def __len__(self) -> int:
        return len(self.series)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Time steps of every case."""
        return self.series.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        series = self.series
        x = torch.from_numpy(series.x[index, : series.length[index]])
        item = {"x": jittered(x, self.jitter) if self.jitter else x}
        if series.y is not None:
            item["labels"] = torch.tensor(series.y[index].item())  # numbers in single precision
        return item


def collate_series(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch padded to its longest series, always with a ``key_mask``."""
    batch = pad_collate(items)
    batch.setdefault("key_mask", torch.ones(batch["x"].shape[:2], dtype=torch.bool))
    return batch
