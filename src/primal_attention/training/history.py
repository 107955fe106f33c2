"""The history of a run, epoch by epoch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from primal_attention.support.settings import build

__all__ = ["EpochRecord", "History"]

Ending = Literal["running", "epochs", "patience", "seconds"]


@dataclass(frozen=True)
class EpochRecord:
    """One epoch."""

    epoch: int
    """Number of the epoch, from 1."""
    step: int
    """Optimiser steps done by its end."""
    loss: float
    """Mean training objective, without the KSVD term."""
    ksvd: float | None
    """Mean KSVD term, unweighted; ``None`` if no layer has one."""
    lr: float
    """Learning rate of the last step."""
    seconds: float
    """Training time since the start, without evaluation (processor time on a CPU)."""
    valid: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Scores on the validation data by name; ``loss`` is the objective."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers from ``fit(evaluate=…)``."""

    def row(self) -> dict[str, float | None]:
        """Return the record as one flat dictionary, for tables."""
        fields = asdict(self)
        valid, metrics = fields.pop("valid"), fields.pop("metrics")
        return {**fields, **{f"valid_{name}": value for name, value in valid.items()}, **metrics}


@dataclass(frozen=True)
class History:
    """All epochs of a run.

    Example:
        >>> record = EpochRecord(1, 10, loss=0.5, ksvd=None, lr=1e-3, seconds=2.0)
        >>> History((record,), best_epoch=1).best.loss
        0.5
    """

    records: tuple[EpochRecord, ...] = ()
    """One record per epoch, first to last."""
    best_epoch: int | None = None
    """The epoch whose weights the model ends with; ``None`` before the first."""
    ended: Ending = "running"
    """Why the run ended: all epochs done, no better epoch for ``patience``, or out of time."""

    @property
    def best(self) -> EpochRecord:
        """The record of the best epoch."""
        if self.best_epoch is None:
            raise RuntimeError("No epoch has been finished, so there is no best one.")
        return self.records[self.best_epoch - 1]

    def rows(self) -> list[dict[str, float | None]]:
        """Return one flat dictionary per epoch, all with the same keys."""
        rows = [record.row() for record in self.records]
        keys = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in keys} for row in rows]

    def to_dict(self) -> dict[str, object]:
        """Return the history as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "History":
        """Return the history that :meth:`to_dict` wrote."""
        return build(cls, values)
