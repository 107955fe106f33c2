"""The base class of time features, and what all of them share: angles, periods, gaps."""

import math
import warnings
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Real
from numpy.typing import ArrayLike
from torch import Tensor, nn

__all__ = [
    "DEFAULT_PERIODS",
    "Gaps",
    "Spectrum",
    "TimeFeatures",
    "observed_gaps",
    "period_grid",
    "turn_back",
    "waves",
]

DEFAULT_PERIODS = 0.5, 4096.0
"""Shortest and longest period before data are seen, for gaps of order one."""
Gaps = Tensor | ArrayLike
"""Times between consecutive events."""

# run-time shape checks do not know Self
Map = TypeVar("Map", bound="TimeFeatures")
# above this many radians in the median gap, features carry no information
_MOST_RADIANS = 50.0


class Spectrum(NamedTuple):
    """The frequencies of a stationary kernel: ``ψ(Δ) = Σ weight · cos(frequency · Δ)``."""

    frequency: Float[Tensor, " m"]
    """Angular frequencies, in radians per unit of time."""
    weight: Float[Tensor, " m"]
    """Non-negative weights."""


class TimeFeatures(nn.Module):
    """Base class: a map from times to feature vectors.

    Attributes:
        num_features: Width ``p`` of the features.
        is_stationary: Whether inner products of features depend on the gap of two times alone.
        is_deterministic: Whether two training forwards agree.
    """

    num_features: int
    is_stationary: bool = False
    is_deterministic: bool = True

    def forward(
        self, time: Real[Tensor, "*batch"], mask: Bool[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch p"]:
        """Return the features of every time, in the dtype of the parameters.

        Args:
            time: Times or gaps in scaled units; float64 where spans are long.
            mask: ``True`` where a time is real; features of the other slots are zero, whatever
                their time.
        """
        time = time.double()
        if mask is not None:
            # before the features: the cosine of infinity is NaN, and so is its gradient
            time = torch.where(mask, time, 0.0)
        features = self._features(time).to(self._dtype)
        return features if mask is None else torch.where(mask[..., None], features, 0.0)

    def frequencies(self) -> Float[Tensor, " m"]:
        """Return the angular frequencies in float64; empty if the map has none."""
        return torch.empty(0, dtype=torch.float64)

    def spectrum(self) -> Spectrum:
        """Return frequencies and weights of the kernel, in float64; for stationary maps."""
        raise ValueError(
            f"{type(self).__name__} has no spectrum: its kernel is not stationary. Use "
            "BochnerTime, or MercerTime with tie=True."
        )

    def advance(
        self, features: Float[Tensor, "*batch p"], gap: Float[Tensor, "*#batch"]
    ) -> Float[Tensor, "*batch p"]:
        """Return ``Φ(t − gap)`` from ``Φ(t)``, or sums of the one from sums of the other.

        The result counts times from an origin that has moved forward by the gap. For stationary
        maps this is a rotation, so a sum over a whole history moves without its events.

        Args:
            features: Features, or weighted sums of features.
            gap: How far the origin moves; broadcast against the leading axes.
        """
        raise ValueError(
            f"{type(self).__name__} cannot move its origin: its kernel is not stationary. Use "
            "BochnerTime, or MercerTime with tie=True."
        )

    def start_from(self: Map, gaps: Gaps, span: float) -> Map:
        """Set the frequencies from the data, in place, and return the map.

        Periods are spaced logarithmically from twice the 10 % quantile of the gaps to four times
        the span. Smaller gaps are often those of events that come together. A normal spectrum gets
        the deviation ``1 / median gap``.

        Args:
            gaps: Gaps between consecutive events, in scaled units; gaps of zero are left out.
            span: Longest time from the first to the last event of a sequence.
        """
        gaps = observed_gaps(gaps)
        if not (math.isfinite(span) and span > 0):
            raise ValueError(
                f"span is {span}; it must be positive and finite: the longest time from the first "
                "to the last event of a sequence."
            )
        shortest = 2 * gaps.quantile(0.1).item()
        self._start(gaps, shortest, max(4 * span, 2 * shortest))
        return self

    def warn_about(self, gaps: Gaps) -> None:
        """Warn if the frequencies do not suit the gaps between events.

        Args:
            gaps: Gaps between consecutive events, in the units that the map receives.
        """
        gaps = observed_gaps(gaps)
        omega = self.frequencies().detach().abs().cpu()
        omega = omega[omega > 0]
        if not len(omega):
            return
        probe = gaps.quantile(torch.linspace(0, 1, min(101, len(gaps)), dtype=torch.float64))
        radians = (omega[:, None] * probe).median().item()
        fastest = omega.max().item() * gaps.min().item()
        if radians > _MOST_RADIANS:
            warnings.warn(
                f"The median of frequency times gap is {radians:.3g} radians, above "
                f"{_MOST_RADIANS:.0f}: at such angles time features carry no information. Are "
                "these seconds, fed raw? Divide times by a unit with TimeScaler, or call "
                "start_from(gaps, span).",
                stacklevel=2,
            )
        elif fastest > math.pi * (1 + 1e-6):
            warnings.warn(
                f"The highest frequency turns {fastest:.3g} radians in the smallest gap, above π: "
                "it aliases with a lower one. Call start_from(gaps, span), or use a smaller unit "
                "of time.",
                stacklevel=2,
            )

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        """Return the features of finite times in float64."""
        raise NotImplementedError  # abstract

    def _start(self, gaps: Tensor, shortest: float, longest: float) -> None:
        """Set the parameters from the gaps and the range of periods."""
        raise NotImplementedError  # abstract

    def _waves(self, time: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        return waves(time, omega, self._dtype)


def waves(
    time: Float[Tensor, "*batch"], omega: Float[Tensor, " m"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m"]]:
    """Return ``cos(ω t)`` and ``sin(ω t)``; the angle is reduced in float64, then cast.

    Args:
        time: Times.
        omega: Angular frequencies.
        dtype: Dtype of the results.

    Example:
        >>> day = torch.tensor([1.7e9], dtype=torch.float64) / 86400
        >>> cos, sin = waves(day, torch.tensor([2 * math.pi], dtype=day.dtype), torch.float32)
        >>> round(math.atan2(sin, cos) / (2 * math.pi) % 1, 5), round(1.7e9 / 86400 % 1, 5)
        (0.92593, 0.92593)
    """
    turns = time.double()[..., None] * (omega.double() / (2 * math.pi))
    angle = 2 * math.pi * (turns - turns.round()).to(dtype)
    return angle.cos(), angle.sin()


def turn_back(
    cos: Float[Tensor, "*batch m"], sin: Float[Tensor, "*batch m"], c: Tensor, s: Tensor
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m"]]:
    """Return cosines and sines whose angle is smaller by a given one.

    Args:
        cos: Cosines, or sums of them.
        sin: Sines, or sums of them.
        c: Cosines of the angles to subtract; broadcast against the others.
        s: Sines of these angles.
    """
    return cos * c + sin * s, sin * c - cos * s


def period_grid(shortest: float, longest: float, num: int) -> Float[Tensor, " num"]:
    """Return periods on a logarithmic grid, in float64; a single one lies in the middle.

    Example:
        >>> period_grid(1.0, 100.0, 3)
        tensor([  1.,  10., 100.], dtype=torch.float64)
    """
    if num == 1:
        return torch.tensor([math.sqrt(shortest * longest)], dtype=torch.float64)
    return torch.logspace(math.log10(shortest), math.log10(longest), num, dtype=torch.float64)


def observed_gaps(gaps: Gaps) -> Float[Tensor, " n"]:
    """Return the positive gaps in float64 on the CPU; raise if there are none.

    Args:
        gaps: Gaps between consecutive events, as a tensor, an array or a sequence.

    Example:
        >>> observed_gaps([2.0, 0.0, 3.0])
        tensor([2., 3.], dtype=torch.float64)
    """
    flat = torch.as_tensor(gaps, dtype=torch.float64).detach().cpu().flatten()
    if not flat.isfinite().all() or (flat < 0).any():
        raise ValueError(
            "gaps must be finite and not negative; sort the events by time and leave out padding."
        )
    flat = flat[flat > 0]
    if not len(flat):
        raise ValueError(
            "gaps holds no positive gap, so there is no scale of time to learn; give at least two "
            "events at different times."
        )
    # enough for quantiles; torch.quantile refuses more than 16 million values
    return flat if len(flat) <= 1_000_000 else flat[:: -(-len(flat) // 1_000_000)]
