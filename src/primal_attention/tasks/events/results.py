"""Results about events: each states its unit of time and its reference time, and prints both."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.events.units import to_dates
from primal_attention.support.output import markdown_table

if TYPE_CHECKING:
    import pandas as pd

    from primal_attention.training.scores import Scores

__all__ = ["EventSamples", "EventScores", "LogLikelihood", "NextEvents"]

_SHOWN = 10
"""Rows of a printed table."""


def time_words(time: float, unit: str, is_dated: bool) -> str:
    """Return a time as a date or a number."""
    return str(to_dates(np.array([time]), unit)[0])[:19] if is_dated else f"{time:.6g}"


@dataclass(frozen=True, repr=False)
class NextEvents:
    """The predicted next event of every sequence. Waits count from the reference time."""

    keys: tuple[str, ...]
    """Names of the sequences."""
    names: tuple[str, ...]
    """Types of events."""
    probabilities: NDArray[np.float64]
    """Probability of every type, ``[sequences, types]``."""
    mean: NDArray[np.float64]
    """Expected wait; waits beyond ten times the longest gap of the training count as that."""
    median: NDArray[np.float64]
    """Median wait."""
    lower: NDArray[np.float64]
    """Lower end of the interval of the wait."""
    upper: NDArray[np.float64]
    """Upper end of the interval of the wait."""
    level: float
    """Probability of the interval."""
    references: NDArray[np.float64]
    """Reference time of every sequence, on the time axis of the log."""
    t_ref: str
    """What the reference time is."""
    unit: str
    """Unit of all waits."""
    is_dated: bool
    """Whether times are dates."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def types(self) -> list[str]:
        """The most likely type of every sequence."""
        return [self.names[i] for i in self.probabilities.argmax(1)]

    @property
    def times(self) -> np.ndarray:
        """Reference time plus median wait: dates in UTC, or numbers."""
        times = self.references + self.median
        return to_dates(times, self.unit) if self.is_dated else times

    def to_frame(self) -> "pd.DataFrame":
        """Return a pandas frame, one row for every sequence."""
        import pandas as pd

        columns = {
            "type": self.types,
            "probability": self.probabilities.max(1),
            **{f"wait_{k}": getattr(self, k) for k in ("mean", "median", "lower", "upper")},
            "time": self.times,
            "t_ref": self.t_ref,
            "unit": self.unit,
        }
        shares = {f"p({n})": p for n, p in zip(self.names, self.probabilities.T, strict=True)}
        return pd.DataFrame(columns | shares, index=pd.Index(self.keys, name="sequence"))

    def __repr__(self) -> str:
        rows = [
            [
                key,
                f"{kind} ({p:.0%})",
                f"{self.mean[i]:.3g}",
                f"{self.median[i]:.3g}",
                f"{self.lower[i]:.3g} – {self.upper[i]:.3g}",
                time_words(self.references[i] + self.median[i], self.unit, self.is_dated),
            ]
            for i, (key, kind, p) in enumerate(
                zip(self.keys, self.types, self.probabilities.max(1), strict=True)
            )
        ][:_SHOWN]
        header = ["sequence", "next type", "mean wait", "median wait", f"{self.level:.0%} interval"]
        more = f"\n… and {len(self) - _SHOWN} more sequences" if len(self) > _SHOWN else ""
        return (
            f"Next events, t_ref={self.t_ref}, waits from t_ref in {self.unit}\n"
            f"{markdown_table([*header, 'at the median'], rows)}{more}"
        )


@dataclass(frozen=True, repr=False)
class EventSamples:
    """Sampled futures: every row is an event of one path of one sequence."""

    keys: tuple[str, ...]
    """Names of the sequences."""
    names: tuple[str, ...]
    """Types of events."""
    sequence: NDArray[np.int64]
    """Number of the sequence."""
    path: NDArray[np.int64]
    """Number of the path, from 0 to ``n − 1``."""
    step: NDArray[np.int64]
    """Place of the event on its path, from 1."""
    wait: NDArray[np.float64]
    """Time from the reference time to the event."""
    type: NDArray[np.int64]
    """Type of the event, an index into ``names``."""
    n: int
    """Paths of every sequence."""
    horizon: float
    """How far ahead of the reference time the paths go."""
    references: NDArray[np.float64]
    """Reference time of every sequence, on the time axis of the log."""
    t_ref: str
    """What the reference time is."""
    unit: str
    """Unit of waits and horizon."""
    is_dated: bool
    """Whether times are dates."""

    @property
    def times(self) -> np.ndarray:
        """Times of the events: dates in UTC, or numbers."""
        times = self.references[self.sequence] + self.wait
        return to_dates(times, self.unit) if self.is_dated else times

    def counts(self) -> NDArray[np.float64]:
        """Return the mean number of events until the horizon, ``[sequences, types]``."""
        return self._tally(np.ones(len(self.type))) / self.n

    def chances(self) -> NDArray[np.float64]:
        """Return the probability of at least one event until the horizon, by sequence and type."""
        rows = np.stack([self.sequence, self.path, self.type])
        first = np.unique(rows, axis=1, return_index=True)[1]
        seen = np.zeros(len(self.type))
        seen[first] = 1
        return self._tally(seen) / self.n

    def _tally(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        table = np.zeros((len(self.keys), len(self.names)))
        np.add.at(table, (self.sequence, self.type), weight)
        return table

    def to_frame(self) -> "pd.DataFrame":
        """Return a pandas frame, one row for every sampled event."""
        import pandas as pd

        return pd.DataFrame(
            {
                "sequence": np.array(self.keys, dtype=object)[self.sequence],
                "path": self.path,
                "step": self.step,
                "type": np.array(self.names, dtype=object)[self.type],
                "wait": self.wait,
                "time": self.times,
                "t_ref": self.t_ref,
                "unit": self.unit,
            }
        )

    def __repr__(self) -> str:
        return (
            f"EventSamples({len(self.keys)} sequences, {self.n} paths of each, "
            f"{len(self.type):,} events within {self.horizon:.6g} {self.unit}, "
            f"t_ref={self.t_ref}, {len(self.type) / self.n / len(self.keys):.3g} events per path)"
        )


@dataclass(frozen=True, repr=False)
class LogLikelihood:
    """Log-likelihood of a log, in nats; densities are per unit of time.

    Comparable with that of other point processes, such as those of EasyTPP, if times have the same
    unit. The first event of a sequence and the time after the last one do not count. In another
    unit, ``u`` times as long, add ``log u`` to every event.
    """

    per_event: float
    """Mean over all events but the first of each sequence."""
    time: float
    """The part of the waiting time, ``log p(gap | past)``, per event."""
    type: float
    """The part of the type, ``log p(type | gap, past)``, per event."""
    by_sequence: NDArray[np.float64]
    """Sum over the events of every sequence; zero for a single event."""
    events: int
    """Events that count."""
    unit: str
    """Unit of the densities."""

    t_ref: str = "target"
    """The type is predicted at the time of its event; the joint likelihood has no other form."""

    @property
    def total(self) -> float:
        """Sum over all events."""
        return float(self.by_sequence.sum())

    def __float__(self) -> float:
        return self.per_event

    def __repr__(self) -> str:
        return (
            f"LogLikelihood({self.per_event:.4f} nats per event = time {self.time:.4f} + type "
            f"{self.type:.4f}; {self.events:,} events, densities per unit of {self.unit!r}, "
            f"t_ref={self.t_ref})"
        )


@dataclass(frozen=True, repr=False)
class EventScores:
    """Named scores of a model on a log."""

    scores: "Scores"
    """Scores with their standard error, by name; the names state t_ref and unit."""
    events: int
    """Events that were predicted."""
    unit: str
    """Unit of times."""

    def __getitem__(self, name: str) -> float:
        return float(self.scores[name].value)

    def __repr__(self) -> str:
        rows = [[name, str(score)] for name, score in self.scores.items() if name != "loss"]
        return (
            f"{self.events:,} events, times in {self.unit}\n{markdown_table(['score', ''], rows)}"
        )
