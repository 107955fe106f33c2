"""A network for whole series, with any attention of the registry.

    tokens = stem(x)  →  blocks  →  means over segments of the series  →  linear

The stem turns ``patch`` time steps into one token. The head averages the tokens near each of
``segments`` evenly spaced points of the series and classifies the averages together. So the order
of events counts, for series of any length. The published model has a classifier over all ``L · c``
outputs instead, with a fixed ``L``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torch.types import Device

from primal_attention.functional.precision import accumulator
from primal_attention.models import (
    BlockStack,
    ModelOutput,
    PretrainedModel,
    sinusoidal_positions,
)
from primal_attention.tasks.series.settings import CONV_WIDTHS, SeriesOptions, Stem

__all__ = ["SeriesConfig", "SeriesNetwork", "evenly_spaced_means", "patch_for"]

_DENSE = 8
"""Up to this patch the convolutions look at every step, beyond only at four places per patch."""


@dataclass(frozen=True, kw_only=True)
class SeriesConfig(SeriesOptions):
    """Configuration of a :class:`SeriesNetwork`.

    Example:
        >>> options = {"attention": "primal", "primal_layers": "last:1"}
        >>> SeriesConfig(num_classes=9, num_channels=12, **options).layer_attentions
        ('softmax', 'primal')
    """

    num_classes: int
    """Number of classes."""
    num_channels: int
    """Channels of every time step."""
    patch: int = 1
    """Time steps per token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_classes", "num_channels", "patch"):
            self._check_count(name)


def patch_for(length: int, max_tokens: int) -> int:
    """Return the smallest patch that leaves at most ``max_tokens``; a multiple of 4 above 8.

    Example:
        >>> patch_for(29, 64), patch_for(315, 64), patch_for(896, 64)
        (1, 5, 16)
    """
    patch = -(-length // max_tokens)
    return patch if patch <= _DENSE else 4 * -(-patch // 4)


class SeriesNetwork(PretrainedModel):
    """Classify series of any length; padding at their end changes nothing.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.

    Example:
        >>> model = SeriesNetwork(SeriesConfig(num_classes=3, num_channels=2, patch=4))
        >>> keep = torch.arange(50) < torch.tensor([[50], [31]])
        >>> model(torch.randn(2, 50, 2), key_mask=keep).logits.shape
        torch.Size([2, 3])
    """

    config_class: ClassVar[type[SeriesConfig]] = SeriesConfig
    config: SeriesConfig

    def __init__(
        self, config: SeriesConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.stem: nn.Module = _STEMS[config.stem](config)
        self.blocks = BlockStack(config)
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.segments * config.dim, config.num_classes)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "b time channels"],
        *,
        key_mask: Bool[Tensor, "b time"] | None = None,
    ) -> ModelOutput:
        """Return the logits of every series.

        Args:
            x: Standardised series without missing values.
            key_mask: ``True`` where a time step is real; padding comes at the end.
        """
        if x.dim() != 3 or x.shape[-1] != self.config.num_channels:
            raise ValueError(
                f"x must have shape [batch, time, {self.config.num_channels}], got "
                f"{tuple(x.shape)}; move the channels to the last axis."
            )
        if key_mask is None:
            key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        # where, not multiply: a NaN in a padded slot must not survive
        x = torch.where(key_mask[:, :, None], x, 0.0)
        missing = -x.shape[1] % self.config.patch
        x, key_mask = pad(x, (0, 0, 0, missing)), pad(key_mask, (0, missing))
        keep = key_mask.unflatten(1, (-1, self.config.patch)).any(-1)
        x = self.stem(x, key_mask)
        position = torch.arange(x.shape[1], device=x.device)
        x = x + sinusoidal_positions(position, self.config.dim).to(x.dtype)
        hidden, terms = self.blocks(x, key_mask=keep)
        means = evenly_spaced_means(self.norm(hidden), keep, self.config.segments)
        logits = self.head(self.dropout(means.flatten(1)))
        return ModelOutput(logits, self.collect("blocks", terms))


class _PatchStem(nn.Module):
    """One linear map of all values in a patch."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.embed = nn.Linear(config.patch * config.num_channels, config.dim)

    def forward(
        self, x: Float[Tensor, "b time channels"], key_mask: Bool[Tensor, "b time"]
    ) -> Float[Tensor, "b n c"]:
        return self.embed(x.unflatten(1, (-1, self.patch)).flatten(2))


class _ConvStem(nn.Module):
    """Convolutions of several widths, then one that strides over patches."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        quarter = config.dim // 4
        # half of the filters are short: they are cheap and overfit least
        sizes = (config.dim - 2 * quarter, quarter, quarter) if quarter else (1, 1, config.dim - 2)
        dense = config.patch <= _DENSE or config.patch % 4
        self.stride = 1 if dense else config.patch // 4
        self.views = nn.ModuleList(
            nn.Conv1d(config.num_channels, size, width * self.stride, stride=self.stride)
            for size, width in zip(sizes, CONV_WIDTHS, strict=True)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        patch = config.patch // self.stride
        self.gather = nn.Conv1d(config.dim, config.dim, 2 * patch + 1, stride=patch)

    def forward(
        self, x: Float[Tensor, "b time channels"], key_mask: Bool[Tensor, "b time"]
    ) -> Float[Tensor, "b n c"]:
        views = torch.cat([_convolve(view, x.mT) for view in self.views], dim=1).mT
        views = self.dropout(gelu(self.norm(views)))
        keep = key_mask.unflatten(1, (-1, self.stride)).any(-1)
        views = torch.where(keep[:, :, None], views, 0.0)
        return _convolve(self.gather, views.mT).mT


class _BothStems(nn.Module):
    """The sum of both stems."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.conv, self.patch = _ConvStem(config), _PatchStem(config)

    def forward(
        self, x: Float[Tensor, "b time channels"], key_mask: Bool[Tensor, "b time"]
    ) -> Float[Tensor, "b n c"]:
        return self.conv(x, key_mask) + self.patch(x, key_mask)


_STEMS: dict[Stem, Callable[[SeriesConfig], nn.Module]] = {
    "both": _BothStems,
    "conv": _ConvStem,
    "patch": _PatchStem,
}


def _convolve(layer: Any, x: Float[Tensor, "b channels time"]) -> Float[Tensor, "b features n"]:
    """Return one output per stride, each window centred on its stride, zeros beyond the ends."""
    extra = layer.kernel_size[0] - layer.stride[0]
    return layer(pad(x, (extra // 2, extra - extra // 2)))


def evenly_spaced_means(
    x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"], segments: int
) -> Float[Tensor, "b {segments} c"]:
    """Return averages around evenly spaced points of each sequence.

    Token ``i`` of ``n`` is at ``(i + ½) / n``, point ``j`` of ``k`` at ``(j + ½) / k``. Weights
    fall linearly to zero at a distance of ``1 / k``, or of one token where tokens are sparser. With
    one segment this is the mean, weighted towards the middle.

    Args:
        x: Tokens; the content of padded ones is ignored.
        keep: ``True`` where a token is real.
        segments: Number of points.

    Example:
        >>> x = torch.arange(4.0)[None, :, None]
        >>> evenly_spaced_means(x, torch.ones(1, 4, dtype=torch.bool), 4).flatten()
        tensor([0., 1., 2., 3.])
    """
    count = keep.sum(1, keepdim=True).clamp_min(1).float()
    token = (keep.cumsum(1) - 0.5) / count  # [b n]
    point = (torch.arange(segments, device=x.device) + 0.5) / segments
    reach = torch.maximum(1 / count, torch.full_like(count, 1 / segments))[:, :, None]
    weight = (1 - (token[:, :, None] - point).abs() / reach).clamp_min(0)  # [b n segments]
    weight = torch.where(keep[:, :, None], weight, 0.0)
    # the sum is at least a half, except for an empty sequence, which gives zeros
    weight = weight / weight.sum(1, keepdim=True).clamp_min(0.5)
    wide = torch.where(keep[:, :, None], x, 0.0).to(accumulator(x))
    return torch.einsum("bnk,bnc->bkc", weight.to(wide.dtype), wide).to(x.dtype)
