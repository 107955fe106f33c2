"""Distributions of frequencies, each as its quantile function ``(0, 1) → R``.

    free          ω_i = the i-th parameter                           (an empirical distribution)
    normal        ω = μ + σ Φ⁻¹(u)
    inverse-cdf   ω = loc + scale · g(Φ⁻¹(u)),  g a monotone rational-quadratic spline

``Φ⁻¹`` is the quantile function of the standard normal distribution. All maps act on each ``u``
alone and increase with it, so each one is the inverse of a distribution function.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.types import Device

__all__ = ["FreeQuantile", "NormalQuantile", "Quantile", "SplineQuantile", "monotone_spline"]


class Quantile(nn.Module):
    """A learned quantile function of frequencies."""

    is_random: bool = True
    """Whether the nodes ``u`` matter; if not, there is nothing to draw."""

    def forward(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return the frequency of every node ``0 < u < 1``, in float64."""
        raise NotImplementedError  # abstract

    def start(self, periods: Float[Tensor, " m"], gap: float) -> None:
        """Set the parameters from a grid of periods and the typical gap between events."""
        raise NotImplementedError  # abstract


class FreeQuantile(Quantile):
    """One parameter for each frequency.

    Args:
        num: Number of frequencies.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    is_random = False
    undecayed = ("omega",)
    slow = ("omega",)

    def __init__(
        self, num: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.empty(num, device=device, dtype=dtype))

    def forward(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return the frequencies, whatever the nodes."""
        return self.omega.double()

    @torch.no_grad()
    def start(self, periods: Float[Tensor, " m"], gap: float) -> None:
        """Set one frequency for each period."""
        self.omega.copy_(2 * math.pi / periods)


class NormalQuantile(Quantile):
    """A normal distribution with learned mean ``mu`` and deviation ``exp(log_sigma)``.

    Args:
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    undecayed = ("mu", "log_sigma")

    def __init__(self, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.zeros((), device=device, dtype=dtype))
        self.log_sigma = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return ``μ + σ Φ⁻¹(u)``."""
        return self.mu.double() + self.log_sigma.double().exp() * torch.special.ndtri(u.double())

    @torch.no_grad()
    def start(self, periods: Float[Tensor, " m"], gap: float) -> None:
        """Set the mean to zero and the deviation to one over the typical gap."""
        self.mu.zero_()
        self.log_sigma.fill_(-math.log(gap))


class SplineQuantile(Quantile):
    """A free distribution: a monotone spline of the normal quantile, moved and scaled.

    Args:
        num_bins: Pieces of the spline.
        reach: The spline bends between ``±reach`` normal deviations and is linear outside.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    undecayed = ("loc", "log_scale", "widths", "heights", "slopes")

    def __init__(
        self,
        num_bins: int = 8,
        *,
        reach: float = 3.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.reach = reach
        for name, count in (("widths", num_bins), ("heights", num_bins), ("slopes", num_bins - 1)):
            zeros = torch.zeros(count, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(zeros))
        self.loc = nn.Parameter(torch.zeros((), device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Return ``loc + scale · g(Φ⁻¹(u))``."""
        widths, heights, slopes = (
            self.get_parameter(name).double() for name in ("widths", "heights", "slopes")
        )
        z = monotone_spline(torch.special.ndtri(u.double()), widths, heights, slopes, self.reach)
        return self.loc.double() + self.log_scale.double().exp() * z

    @torch.no_grad()
    def start(self, periods: Float[Tensor, " m"], gap: float) -> None:
        """Start as a normal distribution with deviation one over the typical gap."""
        for parameter in self.parameters():
            parameter.zero_()
        self.log_scale.fill_(-math.log(gap))


def monotone_spline(
    x: Float[Tensor, "*batch"],
    widths: Float[Tensor, " k"],
    heights: Float[Tensor, " k"],
    slopes: Float[Tensor, " inner"],
    reach: float,
    *,
    least: float = 1e-3,
) -> Float[Tensor, "*batch"]:
    """Return an increasing rational-quadratic spline of ``x`` (Durkan et al. 2019, 1906.04032).

    The spline maps ``[-reach, reach]`` onto itself and is the identity outside. With all parameters
    zero it is the identity everywhere.

    Args:
        x: Where to evaluate it.
        widths: Logits of the widths of the pieces.
        heights: Logits of the heights of the pieces.
        slopes: Derivatives at the inner knots; ``softplus`` makes them positive.
        reach: Half the width of the interval that bends.
        least: Smallest slope, and smallest share of a piece in width and height.

    Example:
        >>> x = torch.linspace(-5, 5, 11)
        >>> zero = torch.zeros(4)
        >>> torch.equal(monotone_spline(x, zero, zero, zero[:3], 3.0).round(decimals=5), x)
        True
    """
    count = len(widths)

    def knots(logits: Tensor) -> Tensor:
        share = least + (1 - least * count) * logits.softmax(-1)
        return reach * (2 * pad(share.cumsum(-1), (1, 0)) - 1)

    at, value = knots(widths), knots(heights)
    # softplus(0 + this) + least is one: the identity
    one = math.log(math.expm1(1 - least))
    slope = pad(softplus(slopes + one) + least, (1, 1), value=1.0)
    inside = x.clamp(-reach, reach)
    piece = torch.searchsorted(at[1:-1].detach(), inside)
    width, height = at.diff()[piece], value.diff()[piece]
    left, right, mean = slope[piece], slope[piece + 1], height / width
    share = ((inside - at[piece]) / width).clamp(0, 1)
    mixed = share * (1 - share)
    rise = height * (mean * share.square() + left * mixed)
    y = value[piece] + rise / (mean + (left + right - 2 * mean) * mixed)
    return torch.where(x.abs() < reach, y, x)
