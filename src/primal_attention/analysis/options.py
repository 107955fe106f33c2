"""Options of the analyses. This module does not import torch, so commands parse them fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "CausesOptions",
    "DepthOptions",
    "FlowOptions",
    "HeadsOptions",
    "SpectrumOptions",
    "TransportOptions",
]


@dataclass(frozen=True)
class CausesOptions:
    """Causal graphs of attention, and tokens whose removal changes a decision."""

    text: str | None = None
    """Text to explain; by default the first inputs."""
    inputs: int = 3
    """Number of inputs."""
    layer: int = -1
    """Attention layer, in the order of the forward."""
    alpha: float = 0.01
    """Level of the tests of independence; with the width of a head it sets their threshold."""
    max_evals: int = 200
    """Largest number of runs of the model for each input."""

    def __post_init__(self) -> None:
        if self.inputs < 1 or self.max_evals < 1 or not 0 < self.alpha < 1:
            raise ValueError(
                f"inputs and max_evals must be at least 1 and alpha between 0 and 1, got "
                f"{self.inputs}, {self.max_evals} and {self.alpha}."
            )


@dataclass(frozen=True)
class DepthOptions:
    """Shape of a model beside the rule for depth, and its separation spectrum."""

    templates: int = 12
    """Halves of sequences on each side of the grid of the spectrum; 0 measures no spectrum."""
    tokens: int = 64
    """Largest number of tokens of a recombined sequence."""

    def __post_init__(self) -> None:
        if self.tokens < 2 or 0 < self.templates < 3 or self.templates < 0:
            raise ValueError(
                f"templates must be 0 or at least 3 and tokens at least 2, got {self.templates} "
                f"and {self.tokens}."
            )


@dataclass(frozen=True)
class FlowOptions:
    """Shares of attention between modalities, compared with chance."""

    sequences: int = 16
    """Number of samples to measure, taken from the first batch."""
    weighting: Literal["attention", "norm", "energy", "gradient"] = "attention"
    """What a key contributes: its weight, the norm of its weighted value, its squared weight, or
    its relevance for the largest logit."""
    mode: Literal["layer", "rollout"] = "layer"
    """Each layer by itself, or what has crossed up to it."""
    special: Literal["separate", "text", "drop"] = "separate"
    """Tokens such as [CLS] and [SEP]: a modality of their own, words, or left out."""
    modalities: Literal["auto", "segments"] = "auto"
    """Modalities that the kind of model implies, or the segments of pairs of texts."""
    primal: Literal["energy", "contribution"] = "energy"
    """What to read of primal layers: energy of the kernel, or contributions to scores."""
    ablate: Literal["zeros", "shuffle", "none"] = "zeros"
    """What takes the place of a modality for blind scores, which need labels in the batch."""

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences must be at least 1, got {self.sequences}.")


@dataclass(frozen=True)
class HeadsOptions:
    """Query-key logits of single words beside their pairs in a corpus."""

    counts: Path | None = None
    """File of counts from ``primal distrib count``; by default the inputs and the help texts of
    Python are counted."""
    words: int = 500
    """Number of words, the most frequent ones that are one token."""
    layers: tuple[int, ...] = (0,)
    """Attention layers, counted from 0. Deeper layers see single words after the layers before."""
    min_count: float = 2.0
    """Smallest weighted count of a pair of words."""

    def __post_init__(self) -> None:
        if self.words < 2 or not self.min_count > 0 or min(self.layers, default=-1) < 0:
            raise ValueError(
                f"words must be at least 2, min_count positive and layers at least 0, got "
                f"{self.words}, {self.min_count} and {self.layers}."
            )


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
