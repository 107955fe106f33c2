"""Options of the advice. This module does not import torch, so commands parse them fast."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["AdviceConfig", "PositionMethod"]

PositionMethod = Literal["auto", "interpolate", "repeat", "linear", "ntk", "dynamic"]
"""How :func:`~primal_attention.surgery.extend_positions` makes longer positions."""


@dataclass(frozen=True)
class AdviceConfig:
    """Which layers of a model can be converted, into what, and what that saves."""

    attentions: tuple[str, ...] = ()
    """Mechanisms to try; by default every linear one that fits the model."""
    length: int | None = None
    """Tokens at which time and memory are measured; by default the longest input of the model, at
    most 4096, or the longest in the data if the model has no limit."""
    rank: int = 16
    """Singular values whose share of the sum is measured."""
    threshold: float = 0.9
    """Lowest R² at which a mechanism may replace a layer."""
    steps: int = 0
    """Training steps after the closed-form fit, all layers at once."""

    def __post_init__(self) -> None:
        if isinstance(self.attentions, str):
            raise TypeError(
                f"attentions must be a sequence of names, got the string {self.attentions!r}; "
                f"write ({self.attentions!r},)."
            )
        object.__setattr__(self, "attentions", tuple(self.attentions))
        for name, least in (("length", 1), ("rank", 1), ("steps", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        if not 0 <= self.threshold <= 1:
            raise ValueError(
                f"threshold must be between 0 and 1, got {self.threshold}; a layer with an R² "
                "below 0 is worse than its mean output."
            )
