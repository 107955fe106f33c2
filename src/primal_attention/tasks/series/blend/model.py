"""The model of the estimators: three parts and their shares.

    p(class | series)  ∝  (Σ share · p(class | part, series)) ^ sharpness

The convolution and the quantile part read series that are padded to one length, the attention part
reads them as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.types import Device

from primal_attention.models import ModelOutput, PretrainedModel
from primal_attention.tasks.series.blend.convolutions import Convolutions, RocketSizes
from primal_attention.tasks.series.blend.forest import ForestSizes
from primal_attention.tasks.series.blend.quantiles import Quantiles
from primal_attention.tasks.series.blend.shares import sharpened
from primal_attention.tasks.series.model import SeriesConfig, SeriesNetwork
from primal_attention.tasks.series.settings import PARTS, Part

__all__ = ["BlendConfig", "SeriesBlend", "most_steps", "padded"]

_FLOOR = 1e-4
"""Least probability of a class."""
_MOST_ATTENTIONS = 64


@dataclass(frozen=True, kw_only=True)
class BlendConfig(SeriesConfig):
    """Configuration of a :class:`SeriesBlend`: sizes of its parts; ``None`` if it lacks one."""

    length: int
    """Time steps to which the series are padded."""
    rockets: tuple[RocketSizes, ...] | None = None
    """The convolution part."""
    forest: ForestSizes | None = None
    """The quantile part."""
    num_attentions: int = 0
    """Models of the attention part, whose mean answer counts; the other settings describe them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("length")
        # limits for files with wrong numbers: those would take memory, or for ever
        if self.length > most_steps(self):
            raise ValueError(
                f"length must be at most {most_steps(self):,}, four times patch · max_tokens, got "
                f"{self.length:,}."
            )
        if not 0 <= self.num_attentions <= _MOST_ATTENTIONS:
            raise ValueError(
                f"num_attentions must be from 0 to {_MOST_ATTENTIONS}, got {self.num_attentions:,}."
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """Names of the parts that are there."""
        there = (self.rockets is not None, self.forest is not None, self.num_attentions > 0)
        return tuple(part for part, is_there in zip(PARTS, there, strict=True) if is_there)


class SeriesBlend(PretrainedModel):
    """Answers to whole series by convolutions, quantiles and attention together.

    With one output the answers are numbers, with several log-probabilities of classes. The module
    ``fitting`` beside this one makes such models; gradients do not flow through them.

    Args:
        config: Configuration of the model.
        device: Where to create the parameters.
        dtype: Type of the parameters.
    """

    config_class: ClassVar[type[BlendConfig]] = BlendConfig
    config: BlendConfig
    shares: Tensor
    sharpness: Tensor
    final: Tensor

    def __init__(
        self, config: BlendConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        outputs = config.num_classes
        if config.rockets is not None:
            self.convolutions = Convolutions(config.rockets, outputs)
        if config.forest is not None:
            self.quantiles = Quantiles(config.forest, outputs)
        if config.num_attentions:
            models = (SeriesNetwork(config) for _ in range(config.num_attentions))
            self.attention = nn.ModuleList(models)
        self.register_buffer("shares", torch.zeros(len(config.parts)))
        self.register_buffer("sharpness", torch.ones(2))  # of convolutions and attention
        self.register_buffer("final", torch.ones(()))
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "b time channels"],
        *,
        key_mask: Bool[Tensor, "b time"] | None = None,
    ) -> ModelOutput:
        """Return log-probabilities of the classes, or numbers.

        Args:
            x: Standardised series without missing values.
            key_mask: ``True`` where a time step is real; padding comes at the end.
        """
        if key_mask is None:
            key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        answers = np.stack(list(self.answers(x, key_mask).values()))
        mean = np.tensordot(self.shares.double().numpy(), answers, 1)
        if self.config.num_classes > 1:
            mean = np.log(sharpened(np.log(np.maximum(mean, _FLOOR)), float(self.final)))
        return ModelOutput(torch.from_numpy(mean).to(x.dtype))

    def answers(
        self, x: Float[Tensor, "b time channels"], key_mask: Bool[Tensor, "b time"]
    ) -> dict[Part, NDArray[np.float64]]:
        """Return the answer of every part, ``[cases, outputs]``: probabilities or numbers."""
        found: dict[Part, NDArray[np.float64]] = {}
        even = padded(x.numpy(), key_mask.sum(1).numpy(), self.config.length)
        if self.config.rockets is not None:
            scores = self.convolutions(even)
            found["convolutions"] = sharpened(scores, float(self.sharpness[0]))
        if self.config.forest is not None:
            found["quantiles"] = self.quantiles(even)
        if self.config.num_attentions:
            with torch.no_grad():
                raw = [model(x, key_mask=key_mask).logits.double() for model in self.attention]
            answers = [sharpened(scores.numpy(), float(self.sharpness[1])) for scores in raw]
            found["attention"] = np.mean(answers, axis=0)
        return found


def most_steps(config: SeriesConfig) -> int:
    """Return the largest length of a blend: the patch depends on the longest training series."""
    return 4 * max(config.patch * config.max_tokens, 16)


def padded(x: NDArray[np.float32], length: NDArray[np.int64], steps: int) -> NDArray[np.float32]:
    """Return series of one length with channels first: zeros behind short ones, long ones cut.

    Zero is the mean of the training series. On development sets this was better than to stretch
    the series.

    Args:
        x: Standardised series ``[cases, time, channels]``.
        length: True lengths.
        steps: Length of the result.

    Example:
        >>> x = np.array([[[1.0], [2.0], [9.0]]], np.float32)
        >>> padded(x, np.array([2]), 4).ravel()
        array([1., 2., 0., 0.], dtype=float32)
    """
    found = np.zeros((len(x), x.shape[2], steps), np.float32)
    count = min(steps, x.shape[1])
    keep = np.arange(count) < length[:, None]
    found[:, :, :count] = np.where(keep[:, :, None], x[:, :count], 0).transpose(0, 2, 1)
    return found
