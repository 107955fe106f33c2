"""Prefixes of sequences, each with the type of the event that follows."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.datasets.events.log import EventSequences

__all__ = ["Prefixes", "Reference"]

Reference = Literal["target", "last_event"]
"""From when elapsed time counts: from the event to be predicted, or from the last one before."""


class Prefixes(Dataset[dict[str, Tensor]]):
    """Data set of prefixes ``{"types", "times", "t_ref", "labels"}`` in scaled time.

    With ``t_ref="target"`` a model is told how long the wait until the next event is. With
    ``"last_event"`` it is not.

    Args:
        log: The events.
        targets: Events to be predicted, as indices into the log; none is the first of a sequence.
        scale: Unit of the items' times, in units of the log.
        length: Most events of a prefix, the most recent ones.
        t_ref: The reference time.

    Example:
        >>> log = EventSequences.from_arrays([[0.0, 1.0, 4.0]], ["aba"])
        >>> Prefixes(log, np.array([2]), 1.0, length=8, t_ref="target")[0]["t_ref"]
        tensor([4.], dtype=torch.float64)
    """

    def __init__(
        self,
        log: EventSequences,
        targets: NDArray[np.int64],
        scale: float,
        *,
        length: int,
        t_ref: Reference,
    ) -> None:
        self.log, self.targets, self.scale, self.t_ref = log, targets, scale, t_ref
        self.sequence = np.searchsorted(log.offsets, targets, side="right") - 1
        self.starts = np.maximum(log.offsets[self.sequence], targets - length)
        if (self.starts >= targets).any():
            raise ValueError("targets must not be the first event of a sequence: it has no prefix.")

    @classmethod
    def all_targets(cls, log: EventSequences) -> NDArray[np.int64]:
        """Return every event that has a prefix."""
        return np.flatnonzero(~np.isnan(log.gaps))

    @property
    def group_by(self) -> NDArray[np.int64]:
        """Lengths, by which :func:`~primal_attention.training.fit` groups prefixes in batches."""
        return self.targets - self.starts

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, target = self.starts[index], self.targets[index]
        times = (self.log.times[start : target + 1] - self.log.times[start]) / self.scale
        reference = times[-1:] if self.t_ref == "target" else times[-2:-1]
        return {
            "types": torch.from_numpy(self.log.types[start:target]),
            "times": torch.from_numpy(times[:-1]),
            "t_ref": torch.from_numpy(reference),
            "labels": torch.tensor(self.log.types[target]),
        }
