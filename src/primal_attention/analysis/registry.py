"""Analyses of a model, by name: what ``primal analyze MODEL NAME`` runs.

An analysis is a dataclass of options and a function ``run(model, batches, options)`` that returns
an :class:`AnalysisResult`. The registry stores where both are defined, as ``"module:name"``, and
imports them on first use. Names and summaries are listed without importing torch. A command can
print the help of an analysis without importing torch if its options are in a module that does not
import torch.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.report.page import Report
from primal_attention.support.command import did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "AnalysisEntry",
    "AnalysisResult",
    "analysis_entry",
    "list_analyses",
    "register_analysis",
    "registered_analyses",
]


class AnalysisResult(ABC):
    """Result of an analysis: words, one table, one picture, JSON, and an HTML page."""

    @abstractmethod
    def verdict(self) -> str:
        """Return the main finding in one or two sentences."""

    @abstractmethod
    def table(self) -> tuple[list[str], list[list[Any]]]:
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

    def to_html(self, path: Path | str) -> None:
        """Write the page to a self-contained HTML file."""
        self.report().caution(self.limits()).write(Path(path))


@dataclass(frozen=True)
class AnalysisEntry:
    """An analysis in the registry."""

    name: str
    """What users type."""
    summary: str
    """One sentence: what the analysis measures."""
    options: str
    """Where its options are defined, as ``"module:Class"``: a frozen dataclass with a default for
    every field. The docstrings under the fields are the help of the command."""
    function: str
    """Where its function is defined, as ``"module:function"``."""
    needs_our_layers: bool = True
    """Whether it measures attention layers of this library. The command then converts the softmax
    layers of another library's model, which does not change its output."""
    needs_tokenizer: bool = False
    """Whether its function takes the model's tokenizer too, as the keyword ``tokenizer``; it is
    ``None`` for models without one."""

    def load_options(self) -> type[Any]:
        """Return the class of the options."""
        return _import(self.options)

    def run(
        self,
        model: "nn.Module",
        batches: Sequence[Any],
        options: Any = None,
        *,
        tokenizer: Any = None,
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
) -> None:
    """Add an analysis under a new name; the arguments are the fields of :class:`AnalysisEntry`."""
    if name in _ENTRIES:
        raise ValueError(f"An analysis named {name!r} is already registered; choose another name.")
    _ENTRIES[name] = AnalysisEntry(
        name, summary, options, function, needs_our_layers, needs_tokenizer
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
        raise ValueError(
            f"There is no analysis named {name!r}.{did_you_mean(name, _ENTRIES)} "
            f"Known names: {', '.join(list_analyses())}."
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
)
register_analysis(
    "causes",
    summary="Which tokens lead to a decision: causal graphs, checked by runs without the tokens.",
    options="primal_attention.analysis.options:CausesOptions",
    function="primal_attention.analysis.causes.analysis:analyze_causes",
    needs_our_layers=False,
    needs_tokenizer=True,
)
register_analysis(
    "heads",
    summary="How much the heads of the first layer follow the word pairs of a corpus.",
    options="primal_attention.analysis.options:HeadsOptions",
    function="primal_attention.analysis.counts.heads:analyze_heads",
    needs_our_layers=False,
    needs_tokenizer=True,
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
