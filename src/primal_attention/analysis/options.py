"""Options of the analyses. This module does not import torch, so commands parse them fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

__all__ = [
    "CausesOptions",
    "CountsOptions",
    "DepthOptions",
    "FlowOptions",
    "GraphOptions",
    "SpectrumOptions",
    "TransportOptions",
]


class GraphArguments(TypedDict, total=False):
    """What :class:`GraphOptions` sets of a graph."""

    alpha: float
    m: int | Literal["hidden"] | None
    tau: float | None
    options: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """How causal graphs are learned from attention."""

    heads: tuple[int, ...] = ()
    """Numbers of the heads; by default all."""
    target: int | str | None = None
    """Token in the middle of the graphs: a position, a word, or mean."""
    alpha: float = 0.01
    """Level of the tests of independence; with m it sets their threshold."""
    m: int | Literal["hidden"] | None = None
    """Effective number of samples; by default the width of a head. hidden is that of the model."""
    tau: float | None = None
    """Threshold of partial correlations, instead of alpha and m."""
    algorithm: Literal["auto", "icd", "ordered-icd", "fci", "pc"] = "auto"
    """How graphs are learned; auto is ordered-icd for causal attention, else icd."""
    nodes: int | None = None
    """Largest number of words in a graph; by default 32, and all with much attention."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}.")

    def graph_options(self) -> GraphArguments:
        """Return the options as :func:`~primal_attention.analysis.causes.causal_graph` takes them.

        The target is not among them, since explanations have their own.
        """
        return {
            "alpha": self.alpha,
            "m": self.m,
            "tau": self.tau,
            "options": {
                "heads": self.heads or None,
                "algorithm": self.algorithm,
                "nodes": "auto" if self.nodes is None else self.nodes,
            },
        }


@dataclass(frozen=True, kw_only=True)
class CausesOptions(GraphOptions):
    """Causal graphs of attention, and tokens whose removal changes a decision.

    With a target, graphs around it are drawn and no decision is explained.
    """

    text: str | None = None
    """Text to explain; by default the first inputs."""
    inputs: int = 3
    """Number of inputs."""
    layer: int | str = -1
    """Attention layer: a number in the order of the forward, or a name."""
    removal: Literal["auto", "mask", "pad", "drop", "attend", "zero", "resample"] = "auto"
    """How words are removed; auto is mask if the tokenizer has a mask token, else attend."""
    search: Literal["subset", "radius"] = "subset"
    """All connected sets by size, or everything within a radius: few runs, large sets."""
    radius: int = 3
    """Largest distance from the decision in a graph."""
    max_size: int = 3
    """Largest set."""
    max_evals: int = 200
    """Largest number of runs of the model for each input."""
    compare: bool = False
    """Also run the baselines: attention with the best head, gradients, exhaustive and others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs < 1 or self.max_evals < 1:
            raise ValueError(
                f"inputs and max_evals must be at least 1, got {self.inputs} and {self.max_evals}."
            )

    @property
    def needs_inputs(self) -> bool:
        """Whether the inputs of the model are read at all."""
        return self.text is None


@dataclass(frozen=True)
class CountsOptions:
    """Query-key logits of single words beside their pairs in a corpus."""

    file: Path | None = None
    """File of counts from ``primal analyze counts count``; by default the inputs and the help texts
    of Python are counted."""
    words: int = 500
    """Number of words, the most frequent ones that are one token."""
    layers: tuple[int, ...] = (0,)
    """Attention layers, counted from 0. Deeper layers see single words after the layers before."""
    min_count: float = 2.0
    """Smallest weighted count of a pair of words."""
    offsets: tuple[int, ...] = ()
    """Places from the key to the query; several give curves. By default 1 for rotary positions,
    otherwise 0."""
    text: str | None = None
    """Also draw the attention of one head in this text beside that of the counts; needs head."""
    head: int | None = None
    """Head of the first of the layers to draw."""

    def __post_init__(self) -> None:
        if self.words < 2 or not self.min_count > 0 or min(self.layers, default=-1) < 0:
            raise ValueError(
                f"words must be at least 2, min_count positive and layers at least 0, got "
                f"{self.words}, {self.min_count} and {self.layers}."
            )
        if (self.text is None) != (self.head is None):
            raise ValueError("text and head belong together: give both or neither.")

    @property
    def needs_inputs(self) -> bool:
        """Whether the inputs of the model are read at all."""
        return self.file is None


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
