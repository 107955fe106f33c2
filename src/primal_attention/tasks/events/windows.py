"""Windows of a log as items of a data set, and their batches."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from primal_attention.datasets.events.log import EventSequences, LogColumn
from primal_attention.training.scores import IGNORED

__all__ = ["EventWindows", "Window", "collate_events", "last_windows", "tile_windows"]


class Window(NamedTuple):
    """Consecutive events of a sequence."""

    sequence: int
    """Number of the sequence."""
    start: int
    """First event, among all events of the log."""
    stop: int
    """End."""
    target: int
    """First event to be predicted; those before it are history only."""


def tile_windows(log: EventSequences, length: int | None, *, context: bool) -> list[Window]:
    """Return windows in which every event but the first of a sequence is predicted once.

    Args:
        log: The events.
        length: Events of a window that predict the next one; one window a sequence if ``None``.
        context: Give every window half of its length as history, if there is one. Otherwise
            windows share one event only, which costs half as much.
    """
    windows = []
    for i, part in enumerate(log):
        if part.stop - part.start < 2:
            continue  # a single event has no gap
        size = part.stop - part.start if length is None else length
        step = max(size // 2, 1) if context and part.stop - part.start > size + 1 else size
        target = part.start + 1
        while target < part.stop:
            stop = min(target + (size if target == part.start + 1 else step), part.stop)
            windows.append(Window(i, max(part.start, stop - size - 1), stop, target))
            if not context and target > part.start + 1:
                windows[-1] = Window(i, target - 1, stop, target)
            target = stop
    return windows


def last_windows(log: EventSequences, length: int | None) -> list[Window]:
    """Return the most recent window of every sequence, in which nothing is to be predicted."""
    return [
        Window(i, max(part.start, part.stop - (length or part.stop)), part.stop, part.stop)
        for i, part in enumerate(log)
    ]


class EventWindows(Dataset[dict[str, Tensor]]):
    """Data set of windows ``{"types", "times", "labels", …}`` in scaled time.

    Times count from the first event of the window, in float64. Labels are the type of the next
    event, −100 where there is none to predict, or one label for each sequence.

    Args:
        log: The events; numbers of marks and covariates are standardised.
        windows: What to read of it.
        scale: Unit of the items' times, in units of the log.
        labels: One class for each sequence, instead of the next types.
        references: Reference time of each sequence, in units of the log.
    """

    def __init__(
        self,
        log: EventSequences,
        windows: Sequence[Window],
        scale: float,
        *,
        labels: NDArray[np.int64] | None = None,
        references: NDArray[np.float64] | None = None,
    ) -> None:
        self.log, self.windows, self.scale = log, list(windows), scale
        self.labels, self.references = labels, references
        self._marks = _split(log.marks)
        self._covariates = _split(log.covariates)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Events of every window."""
        return np.array([w.stop - w.start for w in self.windows], dtype=np.int64)

    @property
    def group_by(self) -> NDArray[np.int64]:
        """Lengths, by which :func:`~primal_attention.training.fit` groups windows in batches."""
        return self.lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window, log = self.windows[index], self.log
        span = slice(window.start, window.stop)
        times = log.times[span]
        item = {
            "types": torch.from_numpy(log.types[span]),
            "times": torch.from_numpy((times - times[0]) / self.scale),
        }
        for name, columns, at in (
            ("marks", self._marks, span),
            ("covariates", self._covariates, window.sequence),
        ):
            for kind, values in zip(("numbers", "levels"), columns, strict=True):
                if values is not None:
                    item[f"{name}_{kind}"] = torch.from_numpy(values[at])
        if self.references is not None:
            reference = (self.references[window.sequence] - times[0]) / self.scale
            item["t_ref"] = torch.tensor([reference], dtype=torch.float64)
        if self.labels is not None:
            item["labels"] = torch.tensor(self.labels[window.sequence])
        else:
            after = np.full(window.stop - window.start, IGNORED, dtype=np.int64)
            after[:-1] = log.types[window.start + 1 : window.stop]
            after[: max(window.target - 1 - window.start, 0)] = IGNORED
            item["labels"] = torch.from_numpy(after)
        return item


def _split(columns: Mapping[str, LogColumn]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the numbers and the levels of some columns as two arrays; ``None`` without any."""
    numbers = [c.values for c in columns.values() if c.levels is None]
    levels = [c.values for c in columns.values() if c.levels is not None]
    return (
        np.stack(numbers, -1).astype(np.float32) if numbers else None,
        np.stack(levels, -1) if levels else None,
    )


_OF_SEQUENCE = frozenset({"covariates_numbers", "covariates_levels", "t_ref"})


def collate_events(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch padded at the end, always with a ``key_mask``."""
    batch: dict[str, Tensor] = {}
    for name in items[0]:
        rows = [item[name] for item in items]
        if name in _OF_SEQUENCE or rows[0].dim() == 0:
            batch[name] = torch.stack(rows)
        else:
            value = IGNORED if name == "labels" else 0
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=value)
    lengths = torch.tensor([len(item["types"]) for item in items])
    batch["key_mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
    return batch
