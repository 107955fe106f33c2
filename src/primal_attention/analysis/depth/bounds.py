"""Bounds of the separation rank and the depth threshold of the theory.

For ``L < log₃ d`` (depth-efficient) and ``L ≥ log₃ d`` (depth-inefficient), with ``log = log₃``:

    3^(L-2) (log(d - H) + a)  ≤  log sep  ≤  (3^L - 1)/2 · log(d + H)
    a = -L + 2 - log 2

    ½ d L + b₁ + b₂  ≤  log sep  ≤  2 d L + c₁ + c₂
    b₁ = -L (H/2 + 1),   b₂ = -d (1 + ½ log((d - H)/2))
    c₁ = L,              c₂ = -2 d log(d / (2 √(2e))) + log d

The upper bound of the first regime was checked against exact ranks. The other constants are as
reported by Levine et al. 2020 and were not derived again here. The bounds are loose for small
networks; exact ranks are better there.
"""

import math
from typing import Literal, NamedTuple

__all__ = ["Regime", "SeparationBounds", "depth_threshold", "interactions", "log3_sep_bounds"]

Regime = Literal["depth-efficient", "depth-inefficient"]


class SeparationBounds(NamedTuple):
    """Bounds of the logarithm to base 3 of the separation rank."""

    lower: float
    """Holds for all weights except a set of measure zero; never negative."""
    upper: float
    """Holds for all weights."""
    regime: Regime
    """Which side of the threshold ``log₃ d`` the depth is on."""


def depth_threshold(width: int) -> float:
    """Return ``log₃ d``, the depth at which the theory changes regime.

    This is no recommended depth. The depth at which trained models change regime is several times
    larger; see :func:`~primal_attention.models.depth_rule.depth_of_width`.

    Example:
        >>> round(depth_threshold(768), 1)
        6.0
    """
    _check(1, width, 1)
    return math.log(width, 3)


def interactions(layers: int, *, bilinear: bool = False) -> int:
    """Return how many times tokens interact in a network of this depth.

    Args:
        layers: Depth.
        bilinear: Count bilinear layers, such as primal attention, instead of cubic ones.

    Example:
        >>> [interactions(layers) for layers in (1, 2, 3)]
        [1, 4, 13]
        >>> [interactions(layers, bilinear=True) for layers in (1, 2, 3)]
        [1, 3, 7]
    """
    return int(2**layers - 1 if bilinear else (3**layers - 1) // 2)


def log3_sep_bounds(layers: int, width: int, heads: int = 1) -> SeparationBounds:
    """Return bounds of ``log₃`` of the separation rank of a standard network, and its regime.

    Args:
        layers: Depth.
        width: Model width.
        heads: Heads, at most the width.

    Example:
        >>> log3_sep_bounds(2, 512, 8).regime
        'depth-efficient'
        >>> log3_sep_bounds(12, 512, 8).regime
        'depth-inefficient'
    """
    _check(layers, width, heads)
    # exact in integers: a float logarithm may miss a power of three
    if 3**layers < width:
        return SeparationBounds(*_efficient(layers, width, heads), "depth-efficient")
    return SeparationBounds(*_inefficient(layers, width, heads), "depth-inefficient")


def _efficient(layers: int, width: int, heads: int) -> tuple[float, float]:
    lower = 0.0
    if width > heads:
        lower = 3.0 ** (layers - 2) * (_log3(width - heads) - layers + 2 - _log3(2))
    if layers == 1:
        lower = max(lower, _log3(width + 1))  # exact
    return max(lower, 0.0), interactions(layers) * _log3(width + heads)


def _inefficient(layers: int, width: int, heads: int) -> tuple[float, float]:
    lower = 0.0
    if width > heads:
        lower = width * layers / 2 - layers * (heads / 2 + 1)
        lower -= width * (1 + _log3((width - heads) / 2) / 2)
    if layers == 1:
        lower = max(lower, _log3(width + 1))
    upper = 2 * width * layers + layers + _log3(width)
    upper -= 2 * width * _log3(width / (2 * math.sqrt(2 * math.e)))
    return max(lower, 0.0), upper


def _log3(x: float) -> float:
    return math.log(x) / math.log(3)


def _check(layers: int, width: int, heads: int) -> None:
    for name, value in (("layers", layers), ("width", width), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if heads > width:
        raise ValueError(f"heads must be at most width, got {heads} heads and width {width}.")
