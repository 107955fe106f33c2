"""Causal graphs of the heads of one layer, with their confidence and their consensus."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from primal_attention.analysis.causes.confidence import (
    Confidence,
    Consensus,
    Stability,
    consensus,
)
from primal_attention.analysis.causes.covariance import Correlation
from primal_attention.analysis.causes.drawing import draw_graphs, draw_tree
from primal_attention.analysis.causes.nodes import GraphNodes
from primal_attention.analysis.causes.pag import PAG
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

__all__ = ["CausalGraphs", "HeadGraph"]

_PANELS = 4
_SHOWN = 12
"""Graphs in the picture, and edges of the consensus in the report."""


@dataclass(frozen=True)
class HeadGraph:
    """Causal graph of one head, and how it was found."""

    head: int | None
    """Number of the head; ``None`` for estimators that join all heads."""
    pag: PAG
    """The graph."""
    correlation: Correlation
    """Correlations between the nodes."""
    confidence: Confidence
    """How clearly the tests decided."""
    num_tests: int
    """Number of tests of the search."""
    is_complete: bool
    """``False`` if the budget of tests ended the search."""
    warnings: tuple[str, ...]
    """What makes this graph doubtful."""
    stability: Stability | None = None
    """How often edges occur in resamples, where it was asked for."""

    @property
    def name(self) -> str:
        """Name of the head."""
        return "all heads" if self.head is None else f"head {self.head}"

    @property
    def density(self) -> float:
        """Share of the pairs of nodes that have an edge."""
        k = len(self.pag)
        return float(self.pag.adjacency().sum()) / max(k * (k - 1), 1)


@dataclass(frozen=True)
class CausalGraphs(AnalysisResult):
    """Causal graphs between the tokens of one sequence: one for each head of a layer."""

    layer: str
    """Name of the layer."""
    nodes: GraphNodes
    """Which tokens the nodes of all graphs stand for, and the target."""
    heads: tuple[HeadGraph, ...]
    """One graph for each head, in the order of the heads."""
    settings: Mapping[str, Any]
    """Everything that decides the result, dropped columns included."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return self.nodes.labels

    @property
    def root(self) -> int:
        """Node of the target, or an error if there is none."""
        if self.nodes.target is None:
            raise ValueError("The graphs have no target; give target= to causal_graph.")
        return self.nodes.target

    @cached_property
    def consensus(self) -> Consensus:
        """How often edges occur over the heads, weighted by the confidence of the heads."""
        return consensus(
            [graph.pag for graph in self.heads],
            [graph.confidence.low_margin for graph in self.heads],
        )

    def ranked(self) -> list[HeadGraph]:
        """Return the graphs, the most confident head first."""
        return sorted(
            self.heads, key=lambda g: (-g.confidence.low_margin, -1 if g.head is None else g.head)
        )

    @property
    def best(self) -> HeadGraph:
        """The graph of the most confident head."""
        return self.ranked()[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of all heads, each with the heads it belongs to."""
        found: dict[str, list[str]] = {}
        for graph in self.heads:
            for text in graph.warnings:
                found.setdefault(text, []).append(graph.name)
        return (
            *self.settings["notes"],
            *(f"{', '.join(names)}: {text}" for text, names in found.items()),
        )

    def edges(self, threshold: float = 0.5) -> list[tuple[str, float]]:
        """Return the edges of at least this share of heads as text, the most frequent first.

        Heads count by their confidence, and each mark is that of the majority. These edges
        summarise heads. They are not the outcome of one search.
        """
        graph = self.consensus.graph(threshold, self.labels)
        pairs = graph.ordered_pairs()
        found = [
            (text, float(self.consensus.frequency[a, b]))
            for (a, b), text in zip(pairs, graph.edges(), strict=True)
        ]
        return sorted(found, key=lambda edge: -edge[1])

    def verdict(self) -> str:
        """Return density, the most confident head, and the edges that most heads share."""
        density = float(np.median([graph.density for graph in self.heads]))
        words = (
            f"{len(self.nodes)} nodes of {self.layer}: "
            f"{100 * density:.0f} % of the pairs have an edge"
        )
        if len(self.heads) == 1:
            return f"{words}. Nine of ten decisions have a margin of {self._score(self.best)}."
        words += (
            f", median over {len(self.heads)} heads. The clearest is {self.best.name}: nine of "
            f"ten decisions have a margin of {self._score(self.best)}."
        )
        shared = [f"{text} ({100 * share:.0f} %)" for text, share in self.edges(0.5)[:3]]
        if shared:
            return f"{words} Most frequent edges over heads: {', '.join(shared)}."
        return f"{words} No edge occurs in half of the heads."

    @staticmethod
    def _score(graph: HeadGraph) -> str:
        return f"{graph.confidence.low_margin:.2f} or more"

    def table(self) -> ShownTable:
        """Return edges, confidence and condition of each head."""
        header = [
            "head",
            "edges",
            "density",
            "low margin",
            "mean margin",
            "entropy difference",
            "median ρ",
            "condition",
            "tests",
            "warnings",
        ]
        rows: list[list[object]] = []
        for graph in self.heads:
            sure, rho = graph.confidence, graph.correlation
            entropy = sure.entropy_difference
            rows.append(
                [
                    "all" if graph.head is None else graph.head,
                    int(graph.pag.adjacency().sum()) // 2,
                    f"{graph.density:.2f}",
                    f"{sure.low_margin:.2f}",
                    f"{sure.margin:.2f}",
                    "—" if entropy is None else f"{entropy:.2f}",
                    f"{rho.median:.2f}",
                    f"{rho.condition:.0e}",
                    graph.num_tests,
                    len(graph.warnings),
                ]
            )
        return header, rows

    def plot(self) -> bytes:
        """Return the graphs of the most confident heads as PNG. Needs matplotlib."""
        shown = self.ranked()[:_PANELS]
        pags = {
            f"{graph.name}, margin {graph.confidence.low_margin:.2f}": graph.pag for graph in shown
        }
        return to_png(draw_graphs(pags, target=self.nodes.target))

    def plot_tree(self, head: int | None = None, *, max_range: int | None = 3) -> bytes:
        """Return the paths of potential influence around the target as PNG. Needs matplotlib.

        Args:
            head: Which head; by default the most confident one.
            max_range: Largest distance from the target; ``None`` for all.
        """
        graph = self.best if head is None else self.of_head(head)
        return to_png(draw_tree(graph.pag, self.root, max_range=max_range, title=graph.name))

    def of_head(self, head: int) -> HeadGraph:
        """Return the graph of a head by its number in the layer."""
        for graph in self.heads:
            if graph.head == head:
                return graph
        raise ValueError(
            f"There is no graph of head {head!r}; heads: {[graph.head for graph in self.heads]}."
        )

    def to_json(self) -> str:
        """Return graphs, confidence, consensus, settings and versions as JSON."""
        return to_json(
            {
                "layer": self.layer,
                "nodes": {
                    "labels": list(self.labels),
                    "members": [list(member) for member in self.nodes.members],
                    "target": self.nodes.target,
                },
                "settings": dict(self.settings),
                "versions": _versions(),
                "heads": [_head_record(graph) for graph in self.heads],
                "consensus": {
                    "frequency": self.consensus.frequency.round(6).tolist(),
                    "weights": list(self.consensus.weights),
                    "edges": [[text, round(share, 6)] for text, share in self.edges(0.0)],
                },
            }
        )

    def limits(self) -> str:
        """Return what the graphs do not show."""
        return (
            "The graphs show dependence as the model encodes it, not causes in the world; they "
            "change with the head, the layer, the threshold and the choice of nodes."
        )

    def report(self) -> Report:
        """Return a page with the verdict, pictures, the heads, the consensus and the settings."""
        page = Report(
            "Causal graphs of attention",
            "Attention is read as a linear model between the tokens of one sequence. Tests of "
            "independence between tokens give a graph for each head; tokens that are not nodes "
            "act as hidden causes.",
        )
        page.verdict(self.verdict())
        page.figure(
            self.plot(),
            "Graphs of the most confident heads. A triangle is an arrowhead, an open circle an "
            "unknown mark, a bare end a tail.",
        )
        if self.nodes.target is not None:
            name = self.labels[self.nodes.target]
            page.figure(self.plot_tree(), f"Paths of potential influence on {name}, by distance.")
        page.section("Heads").table(*self.table())
        page.text(
            "Margin: distance of a partial correlation from the threshold, log10, 0 to 2; the low "
            "margin is exceeded by nine of ten pairs. Compare entropy differences only for the "
            "same model, head, number of nodes and threshold."
        )
        shared = [[text, f"{100 * share:.0f} %"] for text, share in self.edges(0.0)[:_SHOWN]]
        if len(self.heads) > 1 and shared:
            page.section("Edges over heads").table(["edge", "weighted share of heads"], shared)
            page.text("Heads count by their low margin; each mark is that of the majority.")
        if self.warnings:
            page.section("Warnings").table(["warning"], [[text] for text in self.warnings])
        return page.section("Settings").config(dict(self.settings))


def _head_record(graph: HeadGraph) -> dict[str, object]:
    record = {
        "head": graph.head,
        "edges": graph.pag.edges(),
        "marks": graph.pag.marks.tolist(),
        "density": graph.density,
        "confidence": graph.confidence._asdict(),
        "median_correlation": graph.correlation.median,
        "condition": graph.correlation.condition
        if np.isfinite(graph.correlation.condition)
        else None,
        "num_tests": graph.num_tests,
        "is_complete": graph.is_complete,
        "warnings": list(graph.warnings),
    }
    if graph.stability is not None:
        record["stability"] = {
            "edges": graph.stability.edges.tolist(),
            "marks": graph.stability.marks.tolist(),
            "replicates": graph.stability.replicates,
        }
    return record


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that take part."""
    from primal_attention import __version__

    found = {
        "primal_attention": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    for name in ("transformers", "timm"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found
