"""Options of the analyses. This module does not import torch, so commands parse them fast."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SpectrumOptions", "TransportOptions"]


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


@dataclass(frozen=True)
class TransportOptions:
    """Attention layers as maps of tokens, compared with optimal transport."""

    sequences: int = 8
    """Number of sequences to measure, taken from the first batch."""
    tokens: int = 256
    """Largest number of tokens of a sequence, evenly spaced."""
    p: Literal[1, 2] = 2
    """Exponent of the distance in the cost."""

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.tokens < 2:
            raise ValueError(
                f"sequences must be at least 1 and tokens at least 2, got {self.sequences} and "
                f"{self.tokens}."
            )
        if self.p not in (1, 2):
            raise ValueError(f"p must be 1 or 2, got {self.p}.")
