"""Analyses of a model, by name: what ``primal analyze MODEL NAME`` runs.

An analysis is a dataclass of options and a function ``run(model, batches, options)`` that returns
an :class:`AnalysisResult`. The registry stores where both are defined, as ``"module:name"``, and
imports them on first use. Names and summaries are listed without importing torch. A command can
print the help of an analysis without importing torch if its options are in a module that does not
import torch.

What a subject can do without a model is a :class:`Tool`, a row of ``primal analyze SUBJECT``.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from primal_attention.report.page import Report
from primal_attention.support.command import UserError, did_you_mean
from primal_attention.support.output import write_atomically

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.hosts import Batch

__all__ = [
    "AnalysisEntry",
    "AnalysisResult",
    "Runnable",
    "ShownTable",
    "Tool",
    "analysis_entry",
    "check_file",
    "list_analyses",
    "register_analysis",
    "registered_analyses",
]


ShownTable = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Header and rows."""
FILES = (".html", ".json", ".png")
"""Endings of files that a result can be written to."""


class AnalysisResult(ABC):
    """Result of an analysis: words, one table, one picture, JSON, and an HTML page."""

    @abstractmethod
    def verdict(self) -> str:
        """Return the main finding in one or two sentences."""

    @abstractmethod
    def table(self) -> ShownTable:
        """Return header and rows of the main table."""

    @abstractmethod
    def plot(self) -> bytes:
        """Return the main picture as PNG. Needs matplotlib."""

    @abstractmethod
    def to_json(self) -> str:
        """Return all numbers as indented JSON."""

    @abstractmethod
    def limits(self) -> str:
        """Return in one sentence what the numbers do not show."""

    @abstractmethod
    def report(self) -> Report:
        """Return the page: tables, text and the picture."""

    def details(self) -> list[ShownTable]:
        """Return further tables to print below the main one."""
        return []

    def to_html(self, path: Path | str) -> None:
        """Write the page to a self-contained HTML file."""
        self.report().caution(self.limits()).write(Path(path))

    def write(self, path: Path) -> None:
        """Write the page (.html), the numbers (.json) or the picture (.png)."""
        check_file(path)
        if path.suffix == ".html":
            self.to_html(path)
        else:
            write_atomically(path, self.plot() if path.suffix == ".png" else self.to_json())


def check_file(path: Path) -> None:
    """Raise if a result cannot be written to a file of this name."""
    if path.suffix not in FILES:
        raise UserError(f"--out must end in {', '.join(FILES)}, got {path}.")


class Tool(NamedTuple):
    """What a subject can do without a model: a row of ``primal analyze SUBJECT``."""

    name: str
    """What users type after the subject."""
    summary: str
    """One line: what comes out."""
    where: str
    """Where it is, as ``"module:Class"``: a frozen dataclass of options, in a module that does not
    import torch, with a method ``run()`` that prints and writes what comes out."""

    def load(self) -> "type[Runnable]":
        """Return the class of the options, imported now."""
        found: type[Runnable] = _import(self.where)
        return found


class Runnable(Protocol):
    """Options of a tool, which run it."""

    def run(self) -> None:
        """Print and write what comes out."""


@dataclass(frozen=True)
class AnalysisEntry:
    """An analysis in the registry."""

    name: str
    """What users type."""
    summary: str
    """One sentence: what the analysis measures."""
    options: str
    """Where its options are defined, as ``"module:Class"``: a frozen dataclass with a default for
    every field. The docstrings under the fields are the help of the command. A property
    ``needs_inputs`` may say that no batches are read with these options."""
    function: str
    """Where its function is defined, as ``"module:function"``."""
    needs_our_layers: bool = True
    """Whether it measures attention layers of this library. The command then converts the softmax
    layers of another library's model, which does not change its output."""
    needs_tokenizer: bool = False
    """Whether its function takes the model's tokenizer too, as the keyword ``tokenizer``; it is
    ``None`` for models without one."""
    tools: tuple[Tool, ...] = ()
    """What the subject can do without a model."""

    def load_options(self) -> type[Any]:
        """Return the class of the options."""
        return _import(self.options)

    def run(
        self,
        model: "nn.Module",
        batches: "Sequence[Batch]",
        options: object = None,
        *,
        tokenizer: object = None,
    ) -> AnalysisResult:
        """Run the analysis and return its result.

        Args:
            model: The model, in any mode; it is not changed.
            batches: Inputs of the model. Each batch is a mapping of keyword arguments, a sequence
                of positional arguments, or one tensor.
            options: An instance of the options class; by default one with its default values.
            tokenizer: The model's tokenizer, for analyses that show or change tokens.
        """
        kind = self.load_options()
        options = kind() if options is None else options
        if not isinstance(options, kind):
            raise TypeError(
                f"options of the analysis {self.name!r} must be of type {kind.__name__}, got "
                f"{type(options).__name__}; build them with entry.load_options()."
            )
        extra = {"tokenizer": tokenizer} if self.needs_tokenizer else {}
        return _import(self.function)(model, batches, options, **extra)


def _import(location: str) -> Any:
    module, name = location.split(":")
    return getattr(importlib.import_module(module), name)


_ENTRIES: dict[str, AnalysisEntry] = {}


def register_analysis(
    name: str,
    *,
    summary: str,
    options: str,
    function: str,
    needs_our_layers: bool = True,
    needs_tokenizer: bool = False,
    tools: tuple[Tool, ...] = (),
) -> None:
    """Add an analysis under a new name; the arguments are the fields of :class:`AnalysisEntry`."""
    if name in _ENTRIES:
        raise ValueError(f"An analysis named {name!r} is already registered; choose another name.")
    _ENTRIES[name] = AnalysisEntry(
        name, summary, options, function, needs_our_layers, needs_tokenizer, tools
    )


def list_analyses() -> list[str]:
    """Return the names of all analyses, sorted.

    Example:
        >>> "spectrum" in list_analyses()
        True
    """
    return sorted(_ENTRIES)


def registered_analyses() -> list[str]:
    """Return the names of all analyses in the order of a report."""
    return list(_ENTRIES)


def analysis_entry(name: str) -> AnalysisEntry:
    """Return the registry entry of an analysis.

    Example:
        >>> analysis_entry("spectrum").load_options()().first
        16
    """
    if name not in _ENTRIES:
        raise UserError(
            f"there is no analysis {name!r}.{did_you_mean(name, _ENTRIES)} "
            f"Analyses: {', '.join(list_analyses())}."
        )
    return _ENTRIES[name]


# entries are strings, so a package that may import this one can have its analysis listed here;
# the order is that of the report
register_analysis(
    "spectrum",
    summary="Singular values, effective rank and KSVD diagnostics of every attention layer.",
    options="primal_attention.analysis.options:SpectrumOptions",
    function="primal_attention.analysis.spectrum:analyze_spectrum",
    needs_our_layers=False,
)
register_analysis(
    "advice",
    summary="Which layers can be converted, into what, and what that saves.",
    options="primal_attention.surgery.options:AdviceConfig",
    function="primal_attention.surgery.advisor:advise",
    needs_our_layers=False,
)
register_analysis(
    "depth",
    summary="Whether depth and width suit the size of the model, by a published rule.",
    options="primal_attention.analysis.options:DepthOptions",
    function="primal_attention.analysis.depth.inspection:analyze_depth",
    needs_our_layers=False,
    tools=(
        Tool(
            "plan",
            "depth, width and heads for a budget of parameters, with reasons",
            "primal_attention.analysis.depth.tools:DepthPlanTool",
        ),
        Tool(
            "rank",
            "exact separation rank of a small network without softmax",
            "primal_attention.analysis.depth.tools:DepthRankTool",
        ),
        Tool(
            "regime",
            "on which side of the thresholds a shape is",
            "primal_attention.analysis.depth.tools:DepthRegimeTool",
        ),
    ),
)
register_analysis(
    "causes",
    summary="Which tokens lead to a decision: causal graphs, checked by runs without the tokens.",
    options="primal_attention.analysis.options:CausesOptions",
    function="primal_attention.analysis.causes.analyze:analyze_causes",
    needs_our_layers=False,
    needs_tokenizer=True,
    tools=(
        Tool(
            "graph",
            "causal graphs of attention matrices in a file",
            "primal_attention.analysis.causes.tools:CausesGraphTool",
        ),
    ),
)
register_analysis(
    "counts",
    summary="How much the heads of the first layer follow the word pairs of a corpus.",
    options="primal_attention.analysis.options:CountsOptions",
    function="primal_attention.analysis.counts.analyze:analyze_counts",
    needs_our_layers=False,
    needs_tokenizer=True,
    tools=(
        Tool(
            "count",
            "counts of the word pairs of text files",
            "primal_attention.analysis.counts.tools:CountsCountTool",
        ),
        Tool(
            "attend",
            "attention between the words of a text, from counts",
            "primal_attention.analysis.counts.tools:CountsAttendTool",
        ),
        Tool(
            "vectors",
            "word vectors from counts: neighbours, or a file of word2vec",
            "primal_attention.analysis.counts.tools:CountsVectorsTool",
        ),
    ),
)
register_analysis(
    "flow",
    summary="How much text, images and other modalities receive from each other in every layer.",
    options="primal_attention.analysis.options:FlowOptions",
    function="primal_attention.analysis.flow.analyze:analyze_flow",
    needs_our_layers=False,
    needs_tokenizer=True,
)
register_analysis(
    "transport",
    summary="How far every attention layer is from an optimal map of its tokens.",
    options="primal_attention.analysis.options:TransportOptions",
    function="primal_attention.analysis.transport.maps:analyze_transport",
)
