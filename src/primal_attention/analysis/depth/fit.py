"""A new fit of the rule to transitions that were measured."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["TransitionFit", "fit_transition"]


class TransitionFit(NamedTuple):
    """The line ``log d = a + b L`` through measured transitions."""

    a: float
    """Intercept; 5.039 in Levine et al. 2020."""
    b: float
    """Slope; 0.0555 there."""
    covariance: tuple[tuple[float, float], tuple[float, float]]
    """Covariance of ``a`` and ``b``; infinite with two points, which leave no residual."""


def fit_transition(points: Sequence[tuple[float, float]]) -> TransitionFit:
    """Return the constants of the rule for one's own transitions, by least squares.

    A transition is a depth and the width above which this depth beats smaller ones at equal size.
    The published constants come from one data set; other data may have others.

    Args:
        points: Pairs of depth and width, at two depths or more.

    Example:
        >>> fit = fit_transition([(6, 215), (12, 300), (24, 585), (48, 2215)])
        >>> round(fit.a, 2), round(fit.b, 3)
        (5.04, 0.056)
    """
    if len({float(layers) for layers, _ in points}) < 2:
        raise ValueError(
            f"points must have at least two different depths, got {len(points)} points; measure "
            "transitions at more depths."
        )
    if any(width <= 0 for _, width in points):
        raise ValueError("every width must be positive; points are pairs (depth, width).")
    depth = np.array([layers for layers, _ in points], dtype=float)
    target = np.log([width for _, width in points])
    centered = depth - depth.mean()
    spread = float(centered @ centered)
    b = float(centered @ target) / spread
    a = float(target.mean() - b * depth.mean())
    freedom = len(points) - 2
    left = target - a - b * depth
    noise = float(left @ left) / freedom if freedom else float("inf")
    of_b, of_both = noise / spread, -noise * float(depth.mean()) / spread
    of_a = noise * (1 / len(points) + float(depth.mean()) ** 2 / spread)
    return TransitionFit(a, b, ((of_a, of_both), (of_both, of_b)))
