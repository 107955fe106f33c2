"""Options of the analyses. This module does not import torch, so commands parse them fast."""

from dataclasses import dataclass

__all__ = ["SpectrumOptions"]


@dataclass(frozen=True)
class SpectrumOptions:
    """Singular values of the attention layers of a model."""

    sequences: int = 32
    """Number of sequences to measure, taken from the first batch."""
    first: int = 16
    """Number of singular values to draw."""

    def __post_init__(self) -> None:
        for name in ("sequences", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
