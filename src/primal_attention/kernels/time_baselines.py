"""Time features without a stationary kernel: baselines, and the names of all time features.

    log-gap    an MLP of log(1 + τ)
    Time2Vec   [ω_0 t + φ_0 ; sin(ω_i t + φ_i)]                   (Kazemi et al. 2019, 1907.05321)
    TGAT       p^{-1/2} cos(ω_i t + φ_i)                          (Xu et al. 2020, 2002.07962)

A cosine without its sine is no stationary feature map: ``cos ωt cos ωt'`` also depends on
``t + t'``. TGAT is stationary only in the mean over random phases.
"""

import math
from collections.abc import Callable
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.kernels.base import Factory
from primal_attention.kernels.time import BochnerTime, MercerTime
from primal_attention.kernels.time_base import DEFAULT_PERIODS, TimeFeatures, period_grid

__all__ = ["TIME_FEATURES", "LogGapTime", "TGATTime", "Time2VecTime", "create_time"]


class LogGapTime(TimeFeatures):
    """An MLP of the logarithm of a gap; a strong baseline. Not stationary.

    Args:
        num_features: Width of the features and of the hidden layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> LogGapTime(8)(torch.tensor([0.0, 1.0, 1e6])).shape
        torch.Size([3, 8])
    """

    def __init__(
        self, num_features: int = 32, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        _check_width(num_features)
        factory: Factory = {"device": device, "dtype": dtype}
        self.num_features = num_features
        self.hidden = nn.Linear(1, num_features, **factory)
        self.out = nn.Linear(num_features, num_features, **factory)
        self.register_buffer("mean", torch.zeros((), **factory))
        self.register_buffer("deviation", torch.ones((), **factory))

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        # the sign keeps the direction of time
        log = time.sign() * time.abs().log1p()
        log = (log - self.get_buffer("mean")) / self.get_buffer("deviation")
        return self.out(self.hidden(log[..., None].to(self._dtype)).relu())

    def _start(self, gaps: Tensor, shortest: float, longest: float) -> None:
        logs = gaps.log1p()
        self.get_buffer("mean").fill_(logs.mean().item())
        self.get_buffer("deviation").fill_(max(logs.std(correction=0).item(), 1e-3))


class _PhaseTime(TimeFeatures):
    """Waves with a frequency and a phase each."""

    undecayed: tuple[str, ...] = ("omega", "phase")
    slow: tuple[str, ...] = ("omega",)

    def __init__(
        self, num_features: int, num_waves: int, device: Device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        self.num_features = num_features
        self.omega = nn.Parameter(torch.empty(num_waves, **factory))
        self.phase = nn.Parameter(torch.zeros(num_waves, **factory))
        self._set(*DEFAULT_PERIODS)

    def frequencies(self) -> Float[Tensor, " m"]:
        """Return the frequencies."""
        return self.omega.double()

    def _start(self, gaps: Tensor, shortest: float, longest: float) -> None:
        self._set(shortest, longest)

    @torch.no_grad()
    def _set(self, shortest: float, longest: float) -> None:
        self.omega.copy_(2 * math.pi / period_grid(shortest, longest, len(self.omega)))


class Time2VecTime(_PhaseTime):
    """A linear function of time and sines of free phase (Time2Vec). Not stationary.

    Args:
        num_features: Width; the first feature is the linear one.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> Time2VecTime(8)(torch.tensor([0.0, 1.0])).shape
        torch.Size([2, 8])
    """

    undecayed = (*_PhaseTime.undecayed, "trend")

    def __init__(
        self, num_features: int = 32, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        _check_width(num_features, least=2)
        super().__init__(num_features, num_features - 1, device, dtype)
        self.trend = nn.Parameter(torch.tensor([1.0, 0.0], device=device, dtype=dtype))

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        cos, sin = self._waves(time, self.frequencies())
        line = (self.trend[0].double() * time + self.trend[1].double()).to(sin.dtype)
        # sin(ωt + φ): the reduced angle of ωt stays exact, whatever the phase
        sin = sin * self.phase.cos() + cos * self.phase.sin()
        return torch.cat([line[..., None], sin], dim=-1)


class TGATTime(_PhaseTime):
    """Cosines of free phase, as in TGAT. Not stationary.

    Args:
        num_features: Width.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> TGATTime(8)(torch.tensor([0.0, 1.0])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self, num_features: int = 32, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        _check_width(num_features)
        super().__init__(num_features, num_features, device, dtype)

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        cos, sin = self._waves(time, self.frequencies())
        return (cos * self.phase.cos() - sin * self.phase.sin()) * self.num_features**-0.5


def _check_width(num_features: int, least: int = 1) -> None:
    if num_features < least:
        raise ValueError(f"num_features must be at least {least}, got {num_features}.")


def _mercer(num_features: int, **factory: Unpack[Factory]) -> MercerTime:
    degree = 3
    width = 2 * degree + 1
    _check_width(num_features, least=width)
    return MercerTime(num_features // width, degree, **factory)


TIME_FEATURES: dict[str, Callable[..., TimeFeatures]] = {
    "bochner": BochnerTime,
    "bochner-inverse-cdf": lambda p, **f: BochnerTime(p, spectrum="inverse-cdf", **f),
    "bochner-normal": lambda p, **f: BochnerTime(p, spectrum="normal", **f),
    "log-gap": LogGapTime,
    "mercer": _mercer,
    "tgat": TGATTime,
    "time2vec": Time2VecTime,
}
"""Names of time features; each value takes the width, ``device`` and ``dtype``."""


def create_time(
    name: str, num_features: int = 32, *, device: Device = None, dtype: torch.dtype | None = None
) -> TimeFeatures:
    """Build time features by name, with default options.

    Args:
        name: A name in :data:`TIME_FEATURES`.
        num_features: Width of the features. ``"mercer"`` has a multiple of seven: the largest one
            that is not above this.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> create_time("bochner-normal", 16).is_stationary
        True
    """
    if name not in TIME_FEATURES:
        raise ValueError(
            f"There are no time features named {name!r}. Known names: {', '.join(TIME_FEATURES)}."
        )
    return TIME_FEATURES[name](num_features, device=device, dtype=dtype)
