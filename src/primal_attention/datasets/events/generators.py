"""Event logs and irregular series with known answers.

Each generator has a few parameters and an exact truth: the log-density of every event, mean rates,
the best possible accuracy, or the values between the observations. A model that is trained on the
samples can be compared with the process itself. All times are plain numbers in one unit, and
densities are per that unit.

* :class:`PoissonProcess`: independent types at constant rates.
* :class:`HawkesProcess`: every event raises the rates for a while, with an exponential kernel;
  sampled by thinning (Ogata 1981).
* :class:`PeriodicMarks`: constant total rate, types that come and go with a period.
* :class:`GapMarks`: a renewal process; the type of an event depends only on the gap before it.
* :class:`IrregularSinusoids`: several channels, observed at random times, with missing values.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from primal_attention.datasets.events.log import EventSequences

__all__ = [
    "EventProcess",
    "GapMarks",
    "HawkesProcess",
    "IrregularSinusoids",
    "PeriodicMarks",
    "PoissonProcess",
    "SampledEvents",
    "SampledSeries",
]

_NODES = 2_000
"""Nodes of means over the normal distribution."""


class SampledEvents(NamedTuple):
    """Sequences of equal length, one a row, times ascending."""

    times: Float[np.ndarray, "b n"]
    """Times of the events."""
    types: Int[np.ndarray, "b n"]
    """Types of the events, counted from 0."""

    def to_log(self, unit: str | None = None) -> "EventSequences":
        """Return the sequences as a log; the types are named by their numbers.

        Example:
            >>> PoissonProcess((1.0, 0.5)).sample(2, 5).to_log(unit="hours")
            EventSequences(2 sequences, 10 events, 2 types, times in 'hours')
        """
        from primal_attention.datasets.events.log import EventSequences

        return EventSequences.from_arrays(list(self.times), list(self.types), unit=unit)


class EventProcess(ABC):
    """A point process whose log-likelihood is known."""

    @property
    @abstractmethod
    def num_types(self) -> int:
        """Number of event types."""

    @property
    @abstractmethod
    def mean_rates(self) -> Float[np.ndarray, " k"]:
        """Events of each type per unit of time in the long run."""

    @abstractmethod
    def _draw(
        self, num_sequences: int, num_events: int, random: np.random.Generator
    ) -> SampledEvents:
        """Return sequences; the arguments are checked."""

    @abstractmethod
    def log_density(
        self, times: Float[np.ndarray, "b n"], types: Int[np.ndarray, "b n"]
    ) -> Float[np.ndarray, "b n-1"]:
        """Return the log-density of time and type of every event but the first, given its past.

        The sum over a sequence is its log-likelihood between its first and its last event. There
        is no term for the time after the last event.
        """

    def sample(self, num_sequences: int, num_events: int, *, seed: int = 0) -> SampledEvents:
        """Return sequences with a fixed number of events.

        A fixed number, and not a fixed time, keeps the gaps unbiased: a window would cut long ones.

        Raises:
            ValueError: If a number is not positive.

        Example:
            >>> events = PoissonProcess((1.0, 0.5)).sample(2, 5)
            >>> events.times.shape, bool((np.diff(events.times) > 0).all())
            ((2, 5), True)
        """
        _check_counts(num_sequences=num_sequences, num_events=num_events)
        return self._draw(num_sequences, num_events, np.random.default_rng(seed))

    def log_likelihood(self, events: SampledEvents) -> float:
        """Return the mean log-density in nats per event; the first events are given."""
        return float(self.log_density(*events).mean())


@dataclass(frozen=True)
class PoissonProcess(EventProcess):
    """Events of each type at a constant rate, independent of everything.

    Example:
        >>> process = PoissonProcess((2.0,))
        >>> round(process.log_likelihood(process.sample(10, 1_000)), 1)  # log 2 - 1
        -0.3
    """

    rates: tuple[float, ...] = (1.0,)
    """Events of each type per unit of time."""

    def __post_init__(self) -> None:
        _check_positive("rates", self.rates)

    @property
    def num_types(self) -> int:
        """Number of event types."""
        return len(self.rates)

    @property
    def mean_rates(self) -> Float[np.ndarray, " k"]:
        """The rates."""
        return np.array(self.rates)

    @property
    def mean_log_likelihood(self) -> float:
        """Expected nats per event: ``log Λ - 1`` of the gap, less the entropy of the type."""
        rates = self.mean_rates
        share = rates / rates.sum()
        return float(np.log(rates.sum()) - 1 + (share * np.log(share)).sum())

    def _draw(
        self, num_sequences: int, num_events: int, random: np.random.Generator
    ) -> SampledEvents:
        shape, rates = (num_sequences, num_events), self.mean_rates
        gaps = random.exponential(1 / rates.sum(), shape)
        types = random.choice(self.num_types, shape, p=rates / rates.sum())
        return SampledEvents(gaps.cumsum(axis=1), types)

    def log_density(
        self, times: Float[np.ndarray, "b n"], types: Int[np.ndarray, "b n"]
    ) -> Float[np.ndarray, "b n-1"]:
        """Return ``log λ_k - Λ gap`` for every event but the first."""
        rates = self.mean_rates
        return np.log(rates)[types[:, 1:]] - rates.sum() * np.diff(times)


@dataclass(frozen=True)
class HawkesProcess(EventProcess):
    """Events that excite each other: ``λ_i(t) = μ_i + Σ_j Σ_l N_ij β exp(-β (t - t_jl))``.

    Example:
        >>> process = HawkesProcess((0.2,), ((0.5,),), decay=1.0)
        >>> process.mean_rates  # μ / (1 - N)
        array([0.4])
    """

    baseline: tuple[float, ...] = (0.2, 0.1)
    """Rates ``μ`` without any event."""
    branching: tuple[tuple[float, ...], ...] = ((0.5, 0.2), (0.1, 0.4))
    """``N_ij``: expected number of events of type i that one event of type j causes."""
    decay: float = 1.0
    """Rate ``β`` at which the excitation fades."""

    def __post_init__(self) -> None:
        _check_positive("baseline", self.baseline)
        _check_positive("decay", (self.decay,))
        matrix = self._matrix
        count = len(self.baseline)
        if matrix.shape != (count, count) or not (matrix >= 0).all():
            raise ValueError(
                f"branching must be a {count} by {count} table of numbers that are not negative, "
                f"as baseline has {count} types, got {self.branching}."
            )
        radius = float(np.abs(np.linalg.eigvals(matrix)).max())
        if radius >= 1:
            raise ValueError(
                f"branching has spectral radius {radius:.3g}; it must be below 1, or the number "
                "of events explodes. Lower its entries."
            )

    @property
    def _matrix(self) -> Float[np.ndarray, "k k"]:
        try:
            return np.array(self.branching, dtype=float)
        except ValueError as error:
            raise ValueError(
                f"branching must have rows of equal length, got {self.branching}."
            ) from error

    @property
    def num_types(self) -> int:
        """Number of event types."""
        return len(self.baseline)

    @property
    def mean_rates(self) -> Float[np.ndarray, " k"]:
        """The stationary rates ``(I - N)⁻¹ μ``."""
        return np.linalg.solve(np.eye(self.num_types) - self._matrix, np.array(self.baseline))

    def _draw(
        self, num_sequences: int, num_events: int, random: np.random.Generator
    ) -> SampledEvents:
        """Sample by thinning, all sequences at once, each starting without a past.

        Between events the rates fall, so the present total rate bounds all later ones. A candidate
        comes at the bound and is kept with the share of the bound that is left at its time.
        """
        baseline, jumps = np.array(self.baseline), self.decay * self._matrix
        now = np.zeros(num_sequences)
        excited = np.zeros((num_sequences, self.num_types))
        count = np.zeros(num_sequences, dtype=int)
        times = np.empty((num_sequences, num_events))
        types = np.empty((num_sequences, num_events), dtype=int)
        while (open_ := np.flatnonzero(count < num_events)).size:
            bound = baseline.sum() + excited[open_].sum(axis=1)
            wait = random.exponential(1 / bound)
            now[open_] += wait
            excited[open_] *= np.exp(-self.decay * wait)[:, None]
            reach = (baseline + excited[open_]).cumsum(axis=1)
            height = random.uniform(0, bound)
            kept = height < reach[:, -1]
            # the height also draws the type: it is uniform below the total rate
            kind = (height[:, None] >= reach).sum(axis=1)[kept]
            rows = open_[kept]
            times[rows, count[rows]], types[rows, count[rows]] = now[rows], kind
            excited[rows] += jumps.T[kind]
            count[rows] += 1
        return SampledEvents(times, types)

    def log_density(
        self, times: Float[np.ndarray, "b n"], types: Int[np.ndarray, "b n"]
    ) -> Float[np.ndarray, "b n-1"]:
        """Return ``log λ_k(t)`` less the integral of the total rate since the event before."""
        baseline, jumps = np.array(self.baseline), self.decay * self._matrix
        excited = np.zeros((len(times), self.num_types))
        found = np.empty((len(times), times.shape[1] - 1))
        for i, gap in enumerate(np.diff(times).T):
            excited = excited + jumps.T[types[:, i]]
            left = excited * np.exp(-self.decay * gap)[:, None]
            integral = baseline.sum() * gap + (excited - left).sum(axis=1) / self.decay
            rates = np.take_along_axis(baseline + left, types[:, i + 1, None], axis=1)[:, 0]
            found[:, i] = np.log(rates) - integral
            excited = left
        return found


@dataclass(frozen=True)
class PeriodicMarks(EventProcess):
    """Events at a constant total rate whose types take turns within a period.

    ``λ_k(t) = (rate / K) (1 + swing cos(2π (t / period - k / K)))``. A sequence starts anywhere in
    the period, so the phase must be read off the past. Two events at the distance Δ have the same
    type with probability ``(1 + swing² / 2 · cos(2π Δ / period)) / K``.

    Example:
        >>> process = PeriodicMarks(period=7.0)
        >>> bool(np.isclose(process.same_type(7.0), process.same_type(0.0)))
        True
    """

    period: float = 7.0
    """Time after which the types repeat."""
    num_types: int = 3
    """Number of event types, two or more."""
    rate: float = 1.0
    """Events per unit of time."""
    swing: float = 1.0
    """How strongly the types follow the period, from 0 to 1."""

    def __post_init__(self) -> None:
        _check_positive("period", (self.period,))
        _check_positive("rate", (self.rate,))
        if self.num_types < 2:
            raise ValueError(f"num_types must be 2 or more, got {self.num_types}.")
        if not 0 <= self.swing <= 1:
            raise ValueError(f"swing must be from 0 to 1, got {self.swing}.")

    @property
    def mean_rates(self) -> Float[np.ndarray, " k"]:
        """The same rate for every type."""
        return np.full(self.num_types, self.rate / self.num_types)

    def probabilities(self, times: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n k"]:
        """Return the probability of each type at given times."""
        turns = np.asarray(times)[..., None] / self.period
        turns = turns - np.arange(self.num_types) / self.num_types
        return (1 + self.swing * np.cos(2 * np.pi * turns)) / self.num_types

    def same_type(self, gaps: ArrayLike) -> np.ndarray:
        """Return the probability that two events at a distance have the same type."""
        wave = np.cos(2 * np.pi * np.asarray(gaps) / self.period)
        return (1 + self.swing**2 / 2 * wave) / self.num_types

    def _draw(
        self, num_sequences: int, num_events: int, random: np.random.Generator
    ) -> SampledEvents:
        start = random.uniform(0, self.period, (num_sequences, 1))
        times = start + random.exponential(1 / self.rate, (num_sequences, num_events)).cumsum(1)
        height = random.uniform(size=(num_sequences, num_events, 1))
        # the last sum is 1 up to rounding
        types = (height >= self.probabilities(times).cumsum(-1)[..., :-1]).sum(-1)
        return SampledEvents(times, types)

    def log_density(
        self, times: Float[np.ndarray, "b n"], types: Int[np.ndarray, "b n"]
    ) -> Float[np.ndarray, "b n-1"]:
        """Return the log-density of an observer who knows the phase."""
        share = np.take_along_axis(self.probabilities(times), types[..., None], axis=-1)[..., 0]
        gaps = np.log(self.rate) - self.rate * np.diff(times)
        return gaps + np.log(np.maximum(share[:, 1:], np.finfo(float).tiny))


@dataclass(frozen=True)
class GapMarks(EventProcess):
    """A renewal process with log-normal gaps; type 1 is likely after a short gap, type 0 otherwise.

    ``P(type 1 | gap) = exp(-(decay gap)² / 2)``, the kernel of a normal spectrum. The order of the
    types holds no information: only a model that knows the gap beats the more frequent type.

    Example:
        >>> process = GapMarks()
        >>> process.best_accuracy > process.blind_accuracy + 0.2
        True
    """

    decay: float = 1.0
    """How fast the probability of type 1 falls with the gap."""
    median_gap: float = 1.0
    """Median of the gaps."""
    spread: float = 1.0
    """Standard deviation of the logarithm of the gaps."""

    def __post_init__(self) -> None:
        for name in ("decay", "median_gap", "spread"):
            _check_positive(name, (getattr(self, name),))

    @property
    def num_types(self) -> int:
        """Two."""
        return 2

    @property
    def mean_rates(self) -> Float[np.ndarray, " k"]:
        """Events of each type per unit of time."""
        gap = self.median_gap * math.exp(self.spread**2 / 2)
        share = self.follow_up(self._gap_nodes).mean()
        return np.array([1 - share, share]) / gap

    @property
    def best_accuracy(self) -> float:
        """Accuracy of the true probabilities, for an observer who knows the gap."""
        share = self.follow_up(self._gap_nodes)
        return float(np.maximum(share, 1 - share).mean())

    @property
    def blind_accuracy(self) -> float:
        """Best accuracy without the gap: the share of the more frequent type."""
        share = float(self.follow_up(self._gap_nodes).mean())
        return max(share, 1 - share)

    def follow_up(self, gaps: ArrayLike) -> np.ndarray:
        """Return the probability of type 1 after a gap."""
        return np.exp(-((self.decay * np.asarray(gaps)) ** 2) / 2)

    @property
    def _gap_nodes(self) -> Float[np.ndarray, " m"]:
        return self.median_gap * np.exp(self.spread * _normal_nodes())

    def _draw(
        self, num_sequences: int, num_events: int, random: np.random.Generator
    ) -> SampledEvents:
        shape = (num_sequences, num_events)
        gaps = random.lognormal(math.log(self.median_gap), self.spread, shape)
        types = (random.uniform(size=shape) < self.follow_up(gaps)).astype(int)
        return SampledEvents(gaps.cumsum(axis=1), types)

    def log_density(
        self, times: Float[np.ndarray, "b n"], types: Int[np.ndarray, "b n"]
    ) -> Float[np.ndarray, "b n-1"]:
        """Return the log-density of the gap and of the type after it."""
        gaps = np.diff(times)
        place = np.log(gaps / self.median_gap) / self.spread
        log_gap = -(place**2) / 2 - np.log(gaps * self.spread * math.sqrt(2 * math.pi))
        exponent = (self.decay * gaps) ** 2 / 2
        tiny = np.finfo(float).tiny
        log_other = np.log(np.maximum(-np.expm1(-exponent), tiny))
        return log_gap + np.where(types[:, 1:] == 1, -exponent, log_other)


class SampledSeries(NamedTuple):
    """Irregular series of several channels, one a row."""

    times: Float[np.ndarray, "b n"]
    """Times of the observations, ascending."""
    values: Float[np.ndarray, "b n c"]
    """Observed values; NaN where a channel was not observed."""
    phases: Float[np.ndarray, "b c"]
    """Phase of each channel; with it :meth:`IrregularSinusoids.truth` gives every value."""

    @property
    def observed(self) -> Bool[np.ndarray, "b n c"]:
        """True where a channel was observed."""
        return ~np.isnan(self.values)


@dataclass(frozen=True)
class IrregularSinusoids:
    """Sinusoids with known periods and random phases, seen at random times with noise and holes.

    Example:
        >>> process = IrregularSinusoids(periods=(5.0, 8.0), noise=0.0, missing=0.5)
        >>> series = process.sample(3, 20)
        >>> truth = process.truth(series.times, series.phases)
        >>> np.testing.assert_allclose(series.values[series.observed], truth[series.observed])
    """

    periods: tuple[float, ...] = (5.0, 8.0)
    """Period of each channel."""
    rate: float = 2.0
    """Observations per unit of time."""
    noise: float = 0.1
    """Standard deviation of the noise; the sinusoids have amplitude 1."""
    missing: float = 0.3
    """Probability that a channel is not observed at a time."""

    def __post_init__(self) -> None:
        _check_positive("periods", self.periods)
        _check_positive("rate", (self.rate,))
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must not be negative, got {self.noise}.")
        if not 0 <= self.missing < 1:
            raise ValueError(f"missing must be from 0 to less than 1, got {self.missing}.")

    def sample(self, num_sequences: int, num_events: int, *, seed: int = 0) -> SampledSeries:
        """Return series with a fixed number of observation times.

        Raises:
            ValueError: If a number is not positive.
        """
        _check_counts(num_sequences=num_sequences, num_events=num_events)
        random = np.random.default_rng(seed)
        times = random.exponential(1 / self.rate, (num_sequences, num_events)).cumsum(axis=1)
        phases = random.uniform(0, 2 * np.pi, (num_sequences, len(self.periods)))
        values = self.truth(times, phases)
        values += random.normal(0, self.noise, values.shape)
        values[random.uniform(size=values.shape) < self.missing] = np.nan
        return SampledSeries(times, values, phases)

    def truth(
        self, times: Float[np.ndarray, "b n"], phases: Float[np.ndarray, "b c"]
    ) -> Float[np.ndarray, "b n c"]:
        """Return the values without noise at any times."""
        turns = np.asarray(times)[..., None] / np.array(self.periods)
        return np.sin(2 * np.pi * turns + phases[:, None, :])


def _normal_nodes() -> Float[np.ndarray, " m"]:
    """Return mid-quantiles of the standard normal distribution, for means over it."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / _NODES) for i in range(_NODES)])


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, got {count}.")


def _check_positive(name: str, values: tuple[float, ...]) -> None:
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{name} must be positive and finite, got {values}.")
