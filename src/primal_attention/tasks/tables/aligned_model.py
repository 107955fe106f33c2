"""The small network that carries rows to their targets, and its losses."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.models import PretrainedModel
from primal_attention.training import Columns

__all__ = [
    "AlignedConfig",
    "AlignedMap",
    "MappedPoints",
    "RowBatches",
    "learned_loss",
    "map_loss",
]


@dataclass(frozen=True)
class AlignedConfig:
    """Sizes of an :class:`AlignedMap`."""

    num_inputs: int
    """Coordinates of a row."""
    num_outputs: int
    """Coordinates of a mapped point."""
    num_centres: int
    """Number of centres."""
    hidden: tuple[int, ...] = (32, 32)
    """Widths of the hidden layers."""
    learn_centres: bool = False
    """Whether training moves the centres."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden must hold widths of at least 1, got {self.hidden}.")


@dataclass(frozen=True)
class MappedPoints:
    """Output of an :class:`AlignedMap`."""

    points: Float[Tensor, "b t q"]
    """Where the rows go."""
    centres: Float[Tensor, "k q"]
    """The centres, which may be learned."""


class AlignedMap(PretrainedModel):
    """Multilayer perceptron from rows to points, with the centres of the classes.

    Example:
        >>> model = AlignedMap(AlignedConfig(num_inputs=3, num_outputs=2, num_centres=2))
        >>> model(torch.zeros(5, 1, 3)).points.shape
        torch.Size([5, 1, 2])
    """

    config_class = AlignedConfig

    def __init__(
        self,
        config: AlignedConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        widths = (config.num_inputs, *config.hidden)
        layers: list[nn.Module] = []
        for before, after in zip(widths, config.hidden, strict=False):
            layers += [nn.Linear(before, after, device=device, dtype=dtype), nn.ReLU()]
        layers.append(nn.Linear(widths[-1], config.num_outputs, device=device, dtype=dtype))
        self.layers = nn.Sequential(*layers)
        start = torch.eye(config.num_inputs, config.num_outputs, device=device, dtype=dtype)
        self.projection: Tensor
        """From rows to the points where the map starts; not learned."""
        self.register_buffer("projection", start)
        centres = torch.zeros(config.num_centres, config.num_outputs, device=device, dtype=dtype)
        self.undecayed = ("centres",)
        self.centres: Tensor
        if config.learn_centres:
            self.centres = nn.Parameter(centres)
        else:
            self.register_buffer("centres", centres)

    def forward(self, x: Float[Tensor, "b t r"]) -> MappedPoints:
        """Return where rows go."""
        return MappedPoints(self.layers(x), self.centres)


class RowBatches(Columns):
    """Rows and labels that are read a whole batch at once."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        super().__init__(x=x, labels=labels)
        self.x, self.labels = x, labels

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"x": self.x[indices], "labels": self.labels[indices]}


def map_loss(output: MappedPoints, labels: Float[Tensor, "b t q2"]) -> Float[Tensor, ""]:
    """Return the weighted mean squared error of mapped points.

    Args:
        output: What the model returns.
        labels: Targets, then the weight and the class of every point.
    """
    targets, weights = labels[..., :-2], labels[..., -2]
    return (weights * (output.points - targets).square().mean(-1)).mean()


def learned_loss(output: MappedPoints, labels: Float[Tensor, "b t q2"]) -> Float[Tensor, ""]:
    """Return the squared error around moving centres, plus the cross-entropy of the nearest one.

    Args:
        output: What the model returns.
        labels: Targets minus their first centres, then weight and class of every point.
    """
    offsets, weights, classes = labels[..., :-2], labels[..., -2], labels[..., -1].long()
    targets = torch.cat([offsets + output.centres[classes], labels[..., -2:]], -1)
    distances = torch.cdist(output.points, output.centres)  # [b t k]
    entropy = nn.functional.cross_entropy(
        -distances.flatten(0, 1), classes.flatten(), reduction="none"
    )
    return map_loss(output, targets) + (weights.flatten() * entropy).mean()
