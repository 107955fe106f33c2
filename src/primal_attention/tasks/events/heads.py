"""Waiting times as a mixture of log-normal distributions, in the log domain.

    p(g) = Σ_k w_k N(log g; μ_k, σ_k) / g

``g`` is a gap in units of the scale of the log, its median gap. The density is per unit of ``g``;
divide by the scale, or subtract ``log scale`` in nats, for a density per unit of the log.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.kernels import TimeFeatures

__all__ = ["GapFeatures", "LogNormalMixture", "Nodes", "TypeHead", "WaitingHead"]

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_STD = (-5.0, 1.2)
"""Smallest and largest logarithm of a component's deviation, in deviations of all log gaps. A
narrower component would fit single events, a wider one has no useful mean."""
_BISECTIONS = 40
"""Steps of the search for a quantile; each halves the interval of log gaps."""


class LogNormalMixture(NamedTuple):
    """Distributions of waiting times, one for every place in the batch.

    Example:
        >>> one = LogNormalMixture(torch.zeros(1), torch.zeros(1), torch.zeros(1))
        >>> round(one.quantile(torch.tensor(0.5)).item(), 4), round(one.mean(1e9).item(), 4)
        (1.0, 1.6487)
    """

    log_weight: Float[Tensor, "*batch k"]
    """Logarithm of the weights, which add up to one."""
    location: Float[Tensor, "*batch k"]
    """Means of the logarithm."""
    log_std: Float[Tensor, "*batch k"]
    """Logarithm of the deviations of the logarithm."""

    def double(self) -> "LogNormalMixture":
        """Return the same distributions in float64."""
        return LogNormalMixture(*(t.double() for t in self))

    def flatten(self) -> "LogNormalMixture":
        """Return the distributions with one batch axis."""
        return LogNormalMixture(*(t.flatten(0, -2) for t in self))

    def log_prob(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the log-density of positive gaps."""
        log_gap = gap.log()[..., None]
        z = (log_gap - self.location) * (-self.log_std).exp()
        each = self.log_weight - 0.5 * z.square() - self.log_std
        return each.logsumexp(-1) - _HALF_LOG_TAU - log_gap[..., 0]

    def log_survival(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the log-probability of a longer wait; zero at a gap of zero."""
        return self._log_tails(gap).logsumexp(-1)

    def cdf(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the probability of a wait up to a gap: the probability integral transform."""
        return (self.log_weight.exp() * torch.special.ndtr(self._z(gap))).sum(-1)

    def after(self, gap: Float[Tensor, "*batch"]) -> "LogNormalMixture":
        """Return the mixture with the weights that its components have after a wait of ``gap``."""
        tails = self._log_tails(gap)
        return self._replace(log_weight=tails - tails.logsumexp(-1, keepdim=True))

    def quantile(
        self, share: Float[Tensor, "*batch"], after: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """Return the gap below which a share of the waits lies, given a wait beyond ``after``."""
        gone = torch.zeros_like(share) if after is None else after
        std = self.log_std.exp()
        # ten deviations on either side of all components
        low = (self.location - 10 * std).amin(-1)
        high = torch.maximum((self.location + 10 * std).amax(-1), gone.clamp_min(1e-300).log() + 1)
        target = self.log_survival(gone) + torch.log1p(-share)
        low, high = low + torch.zeros_like(target), high + torch.zeros_like(target)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            is_short = self.log_survival(middle.exp()) > target
            low, high = torch.where(is_short, middle, low), torch.where(is_short, high, middle)
        return torch.maximum(((low + high) / 2).exp(), gone)

    def mean(
        self, most: float, after: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """Return the mean of ``min(wait, most)``, given a wait beyond ``after``.

        The bound keeps a far tail, which no data have shown, from deciding the mean.
        """
        mixture = self.double()
        gone = (
            torch.zeros(self.location.shape[:-1], dtype=torch.float64) if after is None else after
        )
        gone = gone.double().to(self.location.device)
        limit = torch.full_like(gone, most).maximum(gone)
        std = mixture.log_std.exp()
        # E[g; a < g < b] of a log-normal is its mean times a normal probability, shifted by σ
        shift = [mixture._z(edge) - std for edge in (gone, limit)]
        inside = torch.special.ndtr(shift[1]) - torch.special.ndtr(shift[0])
        body = (mixture.location + std.square() / 2 + inside.clamp_min(1e-300).log()).exp()
        weight = mixture.log_weight.exp()
        tail = limit * mixture.log_survival(limit).exp()
        total = mixture.log_survival(gone).exp().clamp_min(1e-300)
        return ((weight * body).sum(-1) + tail) / total

    def sample(
        self,
        generator: torch.Generator | None = None,
        after: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*batch"]:
        """Return one wait for every place, given a wait beyond ``after``."""
        mixture = self.double()
        gone = torch.zeros_like(mixture.location[..., 0]) if after is None else after.double()
        weights = mixture.after(gone).log_weight.exp()
        chosen = torch.multinomial(weights.flatten(0, -2), 1, generator=generator)
        chosen = chosen.view(*weights.shape[:-1], 1)
        location, log_std = (t.gather(-1, chosen)[..., 0] for t in mixture[1:])
        tail = torch.special.ndtr(-mixture._z(gone).gather(-1, chosen)[..., 0])
        draw = torch.rand(tail.shape, dtype=tail.dtype, generator=generator)
        # computed from the upper tail, where probabilities lose no digits
        z = -torch.special.ndtri((draw * tail).clamp_min(1e-300))
        return (location + z * log_std.exp()).exp().maximum(gone)

    def nodes(self, count: int = 3) -> "Nodes":
        """Return gaps and weights that integrate functions of the gap, by Gauss–Hermite."""
        import numpy as np

        points, shares = np.polynomial.hermite_e.hermegauss(count)
        z = torch.as_tensor(points, dtype=self.location.dtype, device=self.location.device)
        share = torch.as_tensor(shares / shares.sum(), dtype=z.dtype, device=z.device)
        gaps = (self.location[..., None] + self.log_std.exp()[..., None] * z).exp()
        weights = self.log_weight[..., None] + share.log()
        return Nodes(gaps.flatten(-2), weights.flatten(-2))

    def _z(self, gap: Tensor) -> Float[Tensor, "*batch k"]:
        log_gap = gap.clamp_min(1e-300 if gap.dtype == torch.float64 else 1e-37).log()
        return (log_gap[..., None] - self.location) * (-self.log_std).exp()

    def _log_tails(self, gap: Tensor) -> Float[Tensor, "*batch k"]:
        tails = torch.special.log_ndtr(-self._z(gap))
        return self.log_weight + torch.where(gap[..., None] > 0, tails, 0.0)


class Nodes(NamedTuple):
    """Gaps at which to evaluate a function, and the weights of its integral."""

    gap: Float[Tensor, "*batch nodes"]
    log_weight: Float[Tensor, "*batch nodes"]


class GapFeatures(nn.Module):
    """Features of a gap or an elapsed time: its logarithm, standardised, and a map of the time.

    Args:
        time: Features of the time; ``None`` for the logarithm alone.
        log: Whether to give the logarithm.
    """

    def __init__(self, time: TimeFeatures | None, *, log: bool = True) -> None:
        super().__init__()
        self.time, self.log = time, log
        self.num_features = (0 if time is None else time.num_features) + 2 * log
        self.register_buffer("log_mean", torch.zeros(()))
        self.register_buffer("log_std", torch.ones(()))

    log_mean: Tensor
    log_std: Tensor

    def start_from(self, gaps: Float[Tensor, " n"]) -> None:
        """Standardise by some gaps."""
        logs = gaps.clamp_min(1e-30).log()
        self.log_mean.copy_(logs.mean())
        self.log_std.copy_(logs.std(correction=0).clamp_min(0.1))

    def standardize(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Return the standardised logarithm in single precision."""
        dtype = self.log_mean.dtype
        return (gap.clamp_min(1e-30).log().to(dtype) - self.log_mean) / self.log_std

    def forward(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch p"]:
        """Return the features of finite, not negative gaps in float64."""
        parts = []
        if self.time is not None:
            # stationary features have norm one; beside types, single entries must be of order one
            gain = self.time.num_features**0.5 if self.time.is_stationary else 1.0
            parts.append(gain * self.time(gap))
        if self.log:
            # log(1 + g) also tells zero from small where the logarithm is cut off
            parts += [self.standardize(gap)[..., None].clamp(-6, 6), gap.log1p()[..., None]]
        if not parts:
            return gap.new_zeros(*gap.shape, 0, dtype=self.log_mean.dtype)
        return torch.cat([p.to(self.log_mean.dtype) for p in parts], -1)


class WaitingHead(nn.Module):
    """From the history to the distribution of the next gap.

    Args:
        dim: Width of the history.
        components: Components of the mixture.
    """

    def __init__(self, dim: int, components: int) -> None:
        super().__init__()
        self.components = components
        self.linear = nn.Linear(dim, 3 * components)
        nn.init.normal_(self.linear.weight, std=0.02)
        self.register_buffer("log_mean", torch.zeros(()))
        self.register_buffer("log_width", torch.ones(()))

    log_mean: Tensor
    log_width: Tensor

    @torch.no_grad()
    def start_from(self, gaps: Float[Tensor, " n"]) -> None:
        """Start every distribution at that of some gaps: a component at each of their quantiles."""
        logs = gaps.clamp_min(1e-30).log().float()
        self.log_mean.copy_(logs.mean())
        self.log_width.copy_(logs.std(correction=0).clamp_min(0.1))
        standard = (logs - self.log_mean) / self.log_width
        edges = torch.linspace(0, 1, self.components + 1).to(standard)
        means = standard.quantile((edges[1:] + edges[:-1]) / 2)
        widths = standard.quantile(edges).diff()
        # as wide as the distance of its quantiles: the outer ones reach the far gaps
        spread = (0.75 * widths).clamp(0.1, 2.0).log()
        self.linear.bias.copy_(torch.cat([torch.zeros_like(means), means, spread]))

    def forward(self, hidden: Float[Tensor, "*batch c"]) -> LogNormalMixture:
        """Return a mixture for every place."""
        weight, location, spread = self.linear(hidden).float().chunk(3, -1)
        low, high = _LOG_STD
        log_std = low + (high - low) * torch.sigmoid(
            (spread - (low + high) / 2) * (4 / (high - low))
        )
        return LogNormalMixture(
            weight.log_softmax(-1),
            self.log_mean + self.log_width * location,
            log_std + self.log_width.log(),
        )


class TypeHead(nn.Module):
    """From the history and features of the gap to the type of the next event.

    Args:
        dim: Width of the history.
        num_features: Width of the features of the gap; may be zero.
        num_types: Types of events.
    """

    def __init__(self, dim: int, num_features: int, num_types: int) -> None:
        super().__init__()
        self.from_history = nn.Linear(dim, dim)
        self.from_gap = nn.Linear(num_features, dim, bias=False) if num_features else None
        self.out = nn.Linear(dim, num_types)

    def forward(
        self, hidden: Float[Tensor, "*batch c"], features: Float[Tensor, "*places p"]
    ) -> Float[Tensor, "*places types"]:
        """Return the logits given the gap, or given each of several gaps."""
        mixed = self.from_history(hidden)
        if features.dim() > hidden.dim():
            mixed = mixed[..., None, :].expand(*features.shape[:-1], -1)
        if self.from_gap is not None:
            mixed = mixed + self.from_gap(features)
        return self.out(nn.functional.gelu(mixed))
