"""What a model must know of its training log, to read other logs the same way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from primal_attention.tasks.events.settings import EventSettings

if TYPE_CHECKING:
    from primal_attention.datasets.events.log import EventSequences, LogColumn

__all__ = ["ColumnScheme", "LogScheme"]

_QUANTILES = 101
"""Quantiles of the gaps that are kept."""
_SMALLEST = 1e-6
"""Least value of the smallest gap, in median gaps."""


@dataclass(frozen=True)
class ColumnScheme:
    """A mark or covariate of the training log."""

    name: str
    """Name of the column."""
    levels: tuple[str, ...] | None
    """Levels of a category; ``None`` for numbers."""
    mean: float = 0.0
    """Mean of the numbers."""
    std: float = 1.0
    """Deviation of the numbers; one if they are constant."""

    @classmethod
    def fit(cls, name: str, column: "LogColumn") -> "ColumnScheme":
        """Return the scheme of a column."""
        if column.levels is not None:
            return cls(name, column.levels)
        seen = column.values[~np.isnan(column.values)]
        mean, std = (float(seen.mean()), float(seen.std())) if len(seen) else (0.0, 1.0)
        return cls(name, None, mean, std if std > 1e-9 * max(abs(mean), 1e-30) else 1.0)

    def apply(self, columns: "Mapping[str, LogColumn]", kind: str) -> "LogColumn":
        """Return the column of another log with the same levels, or standardised."""
        if self.name not in columns:
            raise ValueError(f"The log lacks the {kind} {self.name!r} of the training log.")
        column = columns[self.name].relevel(self.levels, self.name)
        if self.levels is not None:
            return column
        return column._replace(values=(column.values - self.mean) / self.std)


@dataclass(frozen=True)
class LogScheme:
    """Types, unit, scale and columns of a training log."""

    names: tuple[str, ...]
    """Types of events, in the order of the logits."""
    unit: str
    """Unit of the log's times."""
    is_dated: bool
    """Whether times are dates."""
    scale: float
    """Median gap in units of the log, which is the unit of time inside a model."""
    smallest_gap: float
    """Shorter gaps count as this in likelihoods, in units of the log: the smallest positive gap,
    at least a millionth of the median."""
    longest_gap: float
    """Longest gap, in units of the log."""
    span: float
    """Longest sequence, in units of the log."""
    gap_quantiles: tuple[float, ...]
    """Evenly spaced quantiles of the positive gaps, in units of the log."""
    marks: tuple[ColumnScheme, ...] = ()
    """Values beside the type of an event."""
    covariates: tuple[ColumnScheme, ...] = ()
    """Values of a sequence."""
    columns: tuple[str | None, ...] = (None, None, None)
    """Files: columns of time, event and sequence; ``None`` where recognised by name."""
    length: int | None = None
    """Events of a window."""

    @classmethod
    def fit(cls, log: "EventSequences", settings: EventSettings | None = None) -> Self:
        """Return the scheme of a training log.

        Raises:
            ValueError: If no sequence has two events at different times.
        """
        settings = settings or EventSettings()
        gaps = log.gaps
        gaps = gaps[gaps > 0]
        if not len(gaps):
            raise ValueError(
                "No sequence of the log has two events at different times, so there is no waiting "
                "time to learn. Check the column of the sequences."
            )
        scale = float(np.median(gaps))
        starts, ends = log.times[log.offsets[:-1]], log.last_times
        return cls(
            log.names,
            log.unit,
            log.is_dated,
            scale,
            max(float(gaps.min()), _SMALLEST * scale),
            float(gaps.max()),
            float((ends - starts).max()),
            tuple(np.quantile(gaps, np.linspace(0, 1, _QUANTILES)).tolist()),
            tuple(ColumnScheme.fit(name, c) for name, c in log.marks.items()),
            tuple(ColumnScheme.fit(name, c) for name, c in log.covariates.items()),
            (settings.time, settings.event, settings.sequence),
            settings.length,
        )

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Sizes of a model that the log decides."""
        return {
            "num_types": len(self.names),
            "mark_numbers": sum(c.levels is None for c in self.marks),
            "mark_levels": tuple(len(c.levels) for c in self.marks if c.levels is not None),
            "covariate_numbers": sum(c.levels is None for c in self.covariates),
            "covariate_levels": tuple(
                len(c.levels) for c in self.covariates if c.levels is not None
            ),
        }

    def prepare(self, log: "EventSequences") -> "EventSequences":
        """Return a log with the types, levels and standardised numbers of the training log.

        Raises:
            ValueError: If it has other types, another unit, or lacks a column.
        """
        if (log.unit, log.is_dated) != (self.unit, self.is_dated):
            kinds = {True: "dates", False: "numbers"}
            raise ValueError(
                f"The log has {kinds[log.is_dated]} in {log.unit!r}, the training log had "
                f"{kinds[self.is_dated]} in {self.unit!r}; read it with unit={self.unit!r}."
            )
        return replace(
            log.with_names(self.names),
            marks={c.name: c.apply(log.marks, "mark") for c in self.marks},
            covariates={c.name: c.apply(log.covariates, "covariate") for c in self.covariates},
        )

    @property
    def given(self) -> dict[str, Any]:
        """Which column of a file is which, as :meth:`EventSequences.from_frame` takes them."""
        return {
            **dict(zip(("time", "event", "sequence"), self.columns, strict=True)),
            "marks": [c.name for c in self.marks],
            "covariates": [c.name for c in self.covariates],
            "unit": self.unit,
        }

    def read_frame(self, frame: object) -> "EventSequences":
        """Return the log in a frame with the columns of the training file."""
        from primal_attention.datasets.events.log import EventSequences

        return EventSequences.from_frame(frame, **self.given)

    def read(self, path: Path) -> "EventSequences":
        """Return the log in a file with the columns of the training file."""
        from primal_attention.datasets.events.tables import read_log_table

        return self.read_frame(read_log_table(path))

    def start(self, model: Any) -> None:
        """Set the frequencies and scales of an untrained model."""
        import torch

        gaps = torch.tensor(self.gap_quantiles, dtype=torch.float64) / self.scale
        model.start_from(gaps, max(self.span / self.scale, float(gaps[-1])))
