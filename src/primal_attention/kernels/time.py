"""Times as feature vectors whose inner products depend on the gap alone.

Functional time representation (Xu et al., NeurIPS 2019, arXiv 1911.12864):

    Bochner   Φ(t) = m^{-1/2} [cos ω_i t ; sin ω_i t]           Φ(t)·Φ(t') = mean_i cos ω_i (t − t')
    Mercer    Φ(t) = [√c_0 ; √c_j cos jΩt ; √c_j sin jΩt]       Φ(t)·Φ(t') = Σ_j c_j cos jΩ (t − t')

Bochner: the Fourier transform of a distribution of frequencies is a stationary kernel, and every
such kernel with ``ψ(0) = 1`` has one. Mercer: sines and cosines are the eigenfunctions of a
periodic stationary kernel, and their coefficients its eigenvalues.

Angles are computed in float64 and reduced to one turn before the cast. In float32 the product of a
frequency and a long time has no correct digits. Gaps should be of order one:
:class:`~primal_attention.kernels.TimeScaler` divides by a unit of time.
"""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.types import Device

from primal_attention.kernels.base import Factory, FeatureMap, Relation, widen
from primal_attention.kernels.quantiles import (
    FreeQuantile,
    NormalQuantile,
    Quantile,
    SplineQuantile,
)
from primal_attention.kernels.time_base import (
    DEFAULT_PERIODS,
    Spectrum,
    TimeFeatures,
    period_grid,
    turn_back,
    waves,
)

__all__ = ["BochnerTime", "MercerTime", "TimeColumn", "TimeKernel"]

SpectrumName = Literal["free", "normal", "inverse-cdf"]
Resample = Literal["train", "never", "always"]


class BochnerTime(TimeFeatures):
    """Fourier features of a learned distribution of frequencies; their norm is one.

    Features are the cosines, then the sines. A random spectrum puts one frequency into each of
    ``m`` equal parts of its distribution, so that a feature keeps its place in the spectrum. In
    evaluation frequencies are the mid-quantiles ``u_i = (i − ½) / m``.

    Args:
        num_features: Width; even: a cosine and a sine of each frequency.
        spectrum: ``"free"``: the frequencies are parameters. ``"normal"``: a normal distribution
            with learned mean and deviation. ``"inverse-cdf"``: a free distribution, through a
            monotone spline.
        resample: When a random spectrum draws frequencies. ``"train"``: in every training forward.
            ``"never"``: once, independently; the draw is saved and also used in evaluation.
            ``"always"``: in every forward, also in evaluation, which is then not deterministic.
        amplitudes: Learn a weight for each frequency; by default all weights are equal.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> phi = BochnerTime(16)
        >>> features = phi(torch.tensor([[0.0, 1.5, 40.0]], dtype=torch.float64))
        >>> features.shape, bool((features.norm(dim=-1) - 1).abs().max() < 1e-6)
        (torch.Size([1, 3, 16]), True)
    """

    is_stationary = True
    undecayed = ("amplitude",)

    def __init__(
        self,
        num_features: int = 32,
        *,
        spectrum: SpectrumName = "free",
        resample: Resample = "train",
        amplitudes: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_features < 2 or num_features % 2:
            raise ValueError(
                f"num_features is {num_features}; it must be even and positive: each frequency has "
                "a cosine and a sine."
            )
        for name, value, choices in (
            ("spectrum", spectrum, get_args(SpectrumName)),
            ("resample", resample, get_args(Resample)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        factory: Factory = {"device": device, "dtype": dtype}
        self.num_features, self.resample = num_features, resample
        num = num_features // 2
        self.quantile: Quantile
        if spectrum == "free":
            self.quantile = FreeQuantile(num, **factory)
        else:
            kind = NormalQuantile if spectrum == "normal" else SplineQuantile
            self.quantile = kind(**factory)
        self.is_deterministic = not self.quantile.is_random or resample == "never"
        if resample == "never" and self.quantile.is_random:
            draw = torch.rand(num, dtype=torch.float64).sort().values
            self.register_buffer("nodes", draw.to(device=device))
        if amplitudes:
            self.amplitude = nn.Parameter(torch.zeros(num, **factory))
        self.quantile.start(period_grid(*DEFAULT_PERIODS, num), 1.0)

    def frequencies(self) -> Float[Tensor, " m"]:
        """Return the frequencies of one forward; a random spectrum draws them in training."""
        num, device = self.num_features // 2, self._device
        if "nodes" in self._buffers:
            nodes = self.get_buffer("nodes").double()
        else:
            nodes = torch.arange(num, dtype=torch.float64, device=device) + 0.5
            if self.quantile.is_random and (self.resample == "always" or self.training):
                nodes = nodes + torch.rand(num, dtype=torch.float64, device=device) - 0.5
            nodes = nodes / num
        # the quantiles of zero and one are infinite
        return self.quantile(nodes.clamp(1e-6, 1 - 1e-6))

    def spectrum(self) -> Spectrum:
        """Return the frequencies of one forward and their weights."""
        omega = self.frequencies()
        return Spectrum(omega, self._root_weights().square().expand_as(omega))

    def advance(
        self, features: Float[Tensor, "*batch p"], gap: Float[Tensor, "*#batch"]
    ) -> Float[Tensor, "*batch p"]:
        """Return the features after the origin of time moves forward by a gap.

        Example:
            >>> phi, t = BochnerTime(8), torch.tensor([3.0, 5.0])
            >>> moved = phi.advance(phi(t), torch.tensor(2.0))
            >>> bool((moved - phi(t - 2)).abs().max() < 1e-6)
            True
        """
        cos, sin = features.chunk(2, dim=-1)
        turned = turn_back(cos, sin, *waves(gap, self.frequencies(), features.dtype))
        return torch.cat(turned, dim=-1)

    def extra_repr(self) -> str:
        """Return the options of the map."""
        return f"{self.num_features}, resample={self.resample!r}"

    def _root_weights(self) -> Tensor:
        """Return the square roots of the weights of all frequencies, in float64."""
        if "amplitude" not in self._parameters:
            num = self.num_features // 2
            return torch.full((1,), num**-0.5, dtype=torch.float64, device=self._device)
        return self.amplitude.double().softmax(-1).sqrt()

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        cos, sin = self._waves(time, self.frequencies())
        weight = self._root_weights().to(cos.dtype)
        return torch.cat([cos * weight, sin * weight], dim=-1)

    def _start(self, gaps: Tensor, shortest: float, longest: float) -> None:
        grid = period_grid(shortest, longest, self.num_features // 2)
        self.quantile.start(grid, gaps.median().item())


class MercerTime(TimeFeatures):
    """Truncated Fourier series with learned periods and non-negative coefficients.

    Args:
        num_periods: Number ``k`` of base periods.
        degree: Number ``q`` of harmonics of each period.
        tie: Let the sine and the cosine of a harmonic share a coefficient. Without it the kernel is
            positive semi-definite but *not* stationary.
        learn_periods: Whether the base periods are parameters.
        summed: Sum over the harmonics with free weights and add a bias, as the published code does;
            one feature for each period, *not* stationary. ``tie`` is then ignored.
        device: Device of the parameters.
        dtype: Dtype of the parameters and of the features.

    Example:
        >>> phi = MercerTime(4, 3)
        >>> phi(torch.zeros(2, 5)).shape
        torch.Size([2, 5, 28])
    """

    undecayed = ("log_period", "gamma")

    def __init__(
        self,
        num_periods: int = 4,
        degree: int = 3,
        *,
        tie: bool = True,
        learn_periods: bool = True,
        summed: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("num_periods", num_periods), ("degree", degree)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        factory: Factory = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        self.num_periods, self.degree = num_periods, degree
        self.tie, self.summed = tie, summed
        self.is_stationary = tie and not summed
        self.num_features = num_periods if summed else num_periods * (2 * degree + 1)
        log_period = period_grid(*DEFAULT_PERIODS, num_periods).log10().to(**factory)
        if learn_periods:
            self.log_period = nn.Parameter(log_period)
        else:
            self.register_buffer("log_period", log_period)
        if summed:
            self.weight = nn.Parameter(torch.empty(num_periods, 2 * degree, **factory))
            self.bias = nn.Parameter(torch.zeros(num_periods, **factory))
            nn.init.normal_(self.weight, std=(2 * degree) ** -0.5)
        else:
            # equal coefficients with the sum one: softplus(gamma) = coefficient
            level = math.log(math.expm1(1 / (num_periods * (degree + 1))))
            shape = num_periods, (degree if tie else 2 * degree) + 1
            self.gamma = nn.Parameter(torch.full(shape, level, **factory))

    @property
    def periods(self) -> Float[Tensor, " k"]:
        """The base periods, in float64."""
        return 10 ** self.log_period.double()

    @property
    def coefficients(self) -> Float[Tensor, "k q"]:
        """The coefficients ``c_0, c_1, …`` of each period, in float64; untied: cosines, sines."""
        return softplus(self.gamma.double())

    def frequencies(self) -> Float[Tensor, " m"]:
        """Return the frequencies of all harmonics, period by period."""
        return self._harmonics().flatten()

    def spectrum(self) -> Spectrum:
        """Return frequency zero with the constant terms, then all harmonics."""
        if not self.is_stationary:
            return super().spectrum()
        constant = self.coefficients[:, :1].sum(0)
        frequency = torch.cat([torch.zeros_like(constant), self.frequencies()])
        return Spectrum(frequency, torch.cat([constant, self.coefficients[:, 1:].flatten()]))

    def advance(
        self, features: Float[Tensor, "*batch p"], gap: Float[Tensor, "*#batch"]
    ) -> Float[Tensor, "*batch p"]:
        """Return the features after the origin of time moves forward by a gap; needs ``tie``."""
        if not self.is_stationary:
            return super().advance(features, gap)
        q = self.degree
        constant, cos, sin = features.unflatten(-1, (self.num_periods, -1)).split([1, q, q], -1)
        cos_gap, sin_gap = waves(gap, self.frequencies(), features.dtype)
        angles = (t.unflatten(-1, (-1, q)) for t in (cos_gap, sin_gap))
        return torch.cat([constant, *turn_back(cos, sin, *angles)], dim=-1).flatten(-2)

    def extra_repr(self) -> str:
        """Return the options of the map."""
        return f"{self.num_periods}, {self.degree}, tie={self.tie}, summed={self.summed}"

    def _harmonics(self) -> Float[Tensor, "k q"]:
        order = torch.arange(1, self.degree + 1, dtype=torch.float64, device=self.log_period.device)
        return 2 * math.pi * order / self.periods[:, None]

    def _features(self, time: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        cos, sin = self._waves(time, self.frequencies())
        cos, sin = (t.unflatten(-1, (self.num_periods, self.degree)) for t in (cos, sin))
        if self.summed:
            both = torch.cat([sin, cos], dim=-1)
            return (both * self.weight).sum(-1) + self.bias
        root = self.coefficients.sqrt().to(cos.dtype)
        first, of_cos = root[:, :1], root[:, 1 : self.degree + 1]
        of_sin = of_cos if self.tie else root[:, self.degree + 1 :]
        constant = first.expand(*time.shape, -1, -1)
        return torch.cat([constant, cos * of_cos, sin * of_sin], dim=-1).flatten(-2)

    @torch.no_grad()
    def _start(self, gaps: Tensor, shortest: float, longest: float) -> None:
        # the highest harmonic, not the base period, must be longer than two gaps
        shortest = min(self.degree * shortest, longest / 2)
        self.log_period.copy_(period_grid(shortest, longest, self.num_periods).log10())


class TimeKernel(nn.Module):
    """The kernel of time features, to look at.

    Args:
        features: The map.

    Example:
        >>> kernel = TimeKernel(MercerTime())
        >>> bool((kernel.psi(torch.zeros(1)) - 1).abs() < 1e-6)
        True
    """

    def __init__(self, features: TimeFeatures) -> None:
        super().__init__()
        self.features = features

    def gram(
        self, t1: Float[Tensor, "*batch n"], t2: Float[Tensor, "*batch m"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the matrix ``Φ(t1_i)·Φ(t2_j)``."""
        n = t1.shape[-1]
        # one pass: a random spectrum must use the same frequencies for both
        first, second = self.features(torch.cat([t1, t2], dim=-1)).split([n, t2.shape[-1]], dim=-2)
        return widen(first) @ widen(second).transpose(-1, -2)

    def psi(self, delta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return ``ψ(Δ)``, the kernel of two times at distance ``Δ``, in float64."""
        if not self.features.is_stationary:
            raise ValueError(
                f"{type(self.features).__name__} is not stationary: its kernel is no function of "
                "the gap. Use gram(t1, t2), BochnerTime, or MercerTime with tie=True."
            )
        frequency, weight = self.features.spectrum()
        cos, _ = waves(delta.double(), frequency, torch.float64)
        return (cos * weight).sum(-1)

    def forward(
        self, t1: Float[Tensor, "*batch n"], t2: Float[Tensor, "*batch m"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return ``gram(t1, t2)``."""
        return self.gram(t1, t2)


class TimeColumn(FeatureMap):
    """Time features of rows that hold one time each, to combine with kernels of other columns.

    Args:
        features: The map; in training a random spectrum differs from call to call.

    Example:
        >>> TimeColumn(BochnerTime(8)).query_features(torch.randn(5, 1)).shape
        torch.Size([5, 8])
    """

    relation: Relation = "exact"
    is_positive = False

    def __init__(self, features: TimeFeatures) -> None:
        super().__init__()
        self.features = features
        self.num_features = features.num_features

    def gram(
        self, x: Float[Tensor, "*batch n 1"], y: Float[Tensor, "*batch m 1"]
    ) -> Float[Tensor, "*batch n m"]:
        """Return the matrix of the time kernel."""
        return TimeKernel(self.features).gram(x[..., 0], y[..., 0])

    def query_features(self, x: Float[Tensor, "*batch n 1"]) -> Float[Tensor, "*batch n p"]:
        """Return the features of the times."""
        return widen(self.features(x[..., 0]))
