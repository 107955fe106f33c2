"""Values of irregular series at any time, through reference points and attention::

    observations [values ; observed ; Φ(t)]  →  attention onto reference points  →  blocks
    query [Φ(t) ; neighbours]  →  attention onto reference points and observations
                               →  linear interpolation + correction, and a deviation

After mTAN (Shukla and Marlin, ICLR 2021), with any attention of the registry that allows a context.
A query also sees the observations before and after it in every channel. So the model starts as
linear interpolation, and attention learns what that misses.
Times count from the last observation, so a shift of all times changes nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.types import Device

from primal_attention.attention import create_attention
from primal_attention.kernels import create_time
from primal_attention.models import BlockStack, PretrainedModel
from primal_attention.tasks.events.heads import GapFeatures
from primal_attention.tasks.events.settings import InterpolationOptions

__all__ = ["InterpolationConfig", "InterpolationModel", "QueriedValues"]

_LOG_STD = (-5.0, 2.0)
"""Smallest and largest logarithm of a predicted deviation, in deviations of the channel."""


@dataclass(frozen=True, kw_only=True)
class InterpolationConfig(InterpolationOptions):
    """Configuration of an :class:`InterpolationModel`.

    Example:
        >>> InterpolationConfig(num_channels=3).attention
        'softmax'
    """

    num_channels: int
    """Channels of the series."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("num_channels")


@dataclass(frozen=True)
class QueriedValues:
    """Normal distributions of all channels at the queries."""

    mean: Float[Tensor, "b q channels"]
    """Means, standardised."""
    log_std: Float[Tensor, "b q channels"]
    """Logarithms of the deviations."""
    aux_loss: Float[Tensor, ""] | None = None
    """Mean regulariser of the layers, unweighted."""


class InterpolationModel(PretrainedModel):
    """Values of all channels at any time, before, between and after the observations.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = InterpolationModel(InterpolationConfig(num_channels=2, dim=16))
        >>> times, queries = torch.rand(1, 9).double().cumsum(1), torch.rand(1, 5).double()
        >>> model(times, torch.randn(1, 9, 2), queries).mean.shape
        torch.Size([1, 5, 2])
    """

    config_class: ClassVar[type[InterpolationConfig]] = InterpolationConfig
    config: InterpolationConfig

    def __init__(
        self,
        config: InterpolationConfig,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.features = GapFeatures(create_time(config.time, config.time_features), log=False)
        width = self.features.num_features
        self.observe = nn.Linear(2 * config.num_channels + width, dim)
        self.refer = nn.Linear(width, dim)
        self.ask = nn.Linear(width + 6 * config.num_channels, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        attention = {"dropout": config.dropout, **config.attention_options}
        self.gather = create_attention(config.attention, dim, config.num_heads, **attention)
        self.read = create_attention(config.attention, dim, config.num_heads, **attention)
        self.blocks = BlockStack(config)
        self.head = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, config.mlp_dim),
            nn.GELU(),
            nn.Linear(config.mlp_dim, 2 * config.num_channels),
        )
        # linear interpolation at first
        nn.init.zeros_(self.head[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.head[-1].bias)  # type: ignore[arg-type]
        self.to(device=device, dtype=dtype)

    def start_from(self, gaps: Float[Tensor, " k"], span: float) -> None:
        """Set the frequencies from the gaps and the longest series, in scaled units."""
        if self.features.time is not None:
            self.features.time.start_from(gaps[gaps > 0], span)

    def forward(
        self,
        times: Float[Tensor, "b n"],
        values: Float[Tensor, "b n channels"],
        queries: Float[Tensor, "b q"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        query_mask: Bool[Tensor, "b q"] | None = None,
    ) -> QueriedValues:
        """Return the distributions at the queries; a query does not depend on the others.

        Args:
            times: Times of the observations in scaled units, sorted, in float64.
            values: Standardised values; NaN where not observed.
            queries: Times to predict, in scaled units.
            key_mask: ``True`` where an observation is real.
            query_mask: ``True`` where a query is real.
        """
        if values.shape[-1] != self.config.num_channels:
            raise ValueError(
                f"The model has {self.config.num_channels} channels, got {values.shape[-1]}."
            )
        if key_mask is None:
            key_mask = torch.ones(times.shape, dtype=torch.bool, device=times.device)
        # only differences of times enter: a date and a small number give the same answer
        last = torch.where(key_mask, times, -torch.inf).amax(1, keepdim=True)
        times = torch.where(key_mask, times - last, 0.0)
        queries = queries - last
        if query_mask is not None:
            queries = torch.where(query_mask, queries, 0.0)
        first = times.amin(1, keepdim=True)
        grid = torch.linspace(1, 0, self.config.references, dtype=times.dtype, device=times.device)
        there = ~values.isnan() & key_mask[..., None]
        seen = torch.cat([torch.where(there, values, 0.0), there.to(values.dtype)], -1)
        observed = self.observe(torch.cat([seen, self.features(times).to(seen.dtype)], -1))
        observed = self.norms[0](observed)
        x = self.refer(self.features(first * grid))
        x = x + self.gather(self.norms[1](x), observed, key_mask=key_mask)
        x, terms = self.blocks(x)
        context = torch.cat([self.norms[2](x), observed], 1)
        keep = torch.cat([torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), key_mask], 1)
        straight, near = _interpolate(torch.where(key_mask, times, torch.inf), seen, queries)
        y = self.ask(torch.cat([self.features(queries).to(near.dtype), near], -1))
        y = y + self.read(self.norms[3](y), context, key_mask=keep)
        mean, spread = self.head(y).chunk(2, -1)
        low, high = _LOG_STD
        log_std = low + (high - low) * torch.sigmoid(spread)
        return QueriedValues(straight + mean, log_std, self.collect("blocks", terms))


def _interpolate(
    times: Float[Tensor, "b n"], seen: Float[Tensor, "b n two_c"], queries: Float[Tensor, "b q"]
) -> tuple[Float[Tensor, "b q c"], Float[Tensor, "b q six_c"]]:
    """Return the line between the observations around each query, and these observations.

    Before the first and after the last observation the line is constant; zero without any.

    Args:
        times: Times of the observations, sorted; infinite at padded positions.
        seen: Values, zero where missing, and which of them are there.
        queries: Times of the queries.
    """
    values, there = seen.chunk(2, -1)
    n = times.shape[1]
    place = torch.arange(n, device=times.device)[:, None].expand_as(values)
    # for every channel, the last observation up to each place and the next one from it
    before = torch.where(there > 0, place, -1).cummax(1).values
    after = torch.where(there > 0, place, n).flip(1).cummin(1).values.flip(1)
    at = torch.searchsorted(times, queries.contiguous(), right=True)[..., None]
    at = at.expand(-1, -1, values.shape[-1])
    # one column more on either side: nothing before the first, nothing after the last
    left = nn.functional.pad(before, (0, 0, 1, 0), value=-1).gather(1, at)
    right = nn.functional.pad(after, (0, 0, 0, 1), value=n).gather(1, at)
    parts = []
    for index, sign in ((left, 1.0), (right, -1.0)):
        known = (index >= 0) & (index < n)
        index = index.clamp(0, n - 1)
        value = torch.where(known, values.gather(1, index), 0.0)
        stamp = times[..., None].expand(-1, -1, values.shape[-1]).gather(1, index)
        gap = torch.where(known, sign * (queries[..., None] - stamp), 0.0).clamp_min(0)
        parts.append((value, gap.to(value.dtype), known.to(value.dtype)))
    (low, since, has_low), (high, until, has_high) = parts
    share = torch.where(
        has_low * has_high > 0,
        since / (since + until).clamp_min(1e-12),
        (has_high > has_low).to(low),
    )
    near = torch.cat([low, since.log1p(), has_low, high, until.log1p(), has_high], -1)
    return low + share * (high - low), near
