"""Explanation of one decision: sets whose removal changes it, graphs, and what was tried."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from primal_attention.analysis.causes.baselines import MethodResult
from primal_attention.analysis.causes.drawing import draw_tree
from primal_attention.analysis.causes.graph_result import CausalGraphs, HeadGraph
from primal_attention.analysis.causes.page import (
    HeadView,
    add_caveats,
    add_explorer,
    consensus_view,
)
from primal_attention.analysis.registry import AnalysisResult, ShownTable
from primal_attention.report.page import Report, to_png
from primal_attention.support.output import to_json

__all__ = ["EvaluatedSet", "Explanation", "FoundSet", "HeadSearch"]

_ROWS = 60
"""Evaluated sets that the page lists."""


class FoundSet(NamedTuple):
    """A set of tokens without which the model decides otherwise, run again on its own."""

    positions: tuple[int, ...]
    """Where the tokens are; of words, all pieces."""
    tokens: tuple[str, ...]
    """The tokens or words."""
    before: float
    """Probability of the decision on the whole input."""
    after: float
    """Its probability without the set."""
    label: str
    """The decision without the set."""
    rank: int | None
    """Rank of that decision on the whole input; 2 is the runner-up."""
    heads: tuple[int, ...]
    """Heads whose graph led to the set, those with a high confidence first."""


class EvaluatedSet(NamedTuple):
    """A set of tokens that the model ran without."""

    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    changed: bool
    label: str
    score: float
    """Probability of the original decision."""
    rank: int | None


class HeadSearch(NamedTuple):
    """The graph of one head, and what the search around the decision found in it."""

    graph: HeadGraph
    """The graph and its confidence."""
    distances: dict[int, int]
    """Distance from the decision of each node that the tree reaches."""
    sets: tuple[tuple[int, ...], ...] = ()
    """Positions of the found sets that this graph led to."""


@dataclass(frozen=True)
class Explanation(AnalysisResult):
    """Smallest sets of tokens whose removal changes a decision, with the evidence."""

    tokens: tuple[str, ...]
    """Tokens of the input, the decision included where it belongs."""
    target: int | None
    """Token that stands for the decision; ``None`` for the mean of all."""
    decision: str
    score: float
    """Probability of the decision."""
    sets: tuple[FoundSet, ...]
    """Sets that change the decision; the first is the best one. Empty if none was found."""
    winner: int | None
    """Head whose graph led to the first set."""
    graphs: CausalGraphs
    """Graphs of all heads over the same nodes, and their consensus."""
    heads: tuple[HeadSearch, ...]
    """Tree and finds of each head, the most confident head first."""
    candidates: tuple[int, ...]
    """Positions that a graph connects with the decision: suggestions, not explanations."""
    evaluated: tuple[EvaluatedSet, ...]
    """All sets that the model ran without, in that order."""
    evals: int
    """Sets that the model ran without."""
    max_evals: int
    """The budget."""
    is_complete: bool
    """Whether the budget sufficed for all sets up to the largest size."""
    comparison: tuple[MethodResult, ...] = ()
    """What other methods found, with ``compare=True``."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Layer, removal, threshold and everything else that the answer depends on."""

    def verdict(self) -> str:
        """Return the smallest set and what the model decides without it."""
        what = f"{self.decision!r} ({self.score:.3f})"
        runs = f"{self.evals} runs of the model"
        if not self.sets:
            advice = (
                "A lower threshold (tau, or a larger m or alpha) connects more of them."
                if self.is_complete
                else "The budget ended before all sets were tried; raise max_evals."
            )
            return (
                f"No set that the graphs connect with the decision {what} changes it, after "
                f"{runs}. The graphs connect {len(self.candidates)} of {len(self.tokens)} tokens; "
                f"none is an explanation. {advice}"
            )
        best, more = self.sets[0], len(self.sets) - 1
        others = f" {more} other {'set does' if more == 1 else 'sets do'} so, too." if more else ""
        return (
            f"Without {_words(best.tokens)} the model decides {best.label!r} instead of {what}; "
            f"the probability of {self.decision!r} falls to {best.after:.3f}.{others} "
            f"Head {self.winner} led to the set, after {runs}."
        )

    def table(self) -> ShownTable:
        """Return the sets that change the decision, with scores before and after."""
        header = ["without", "decision", "score before", "score after", "rank", "heads"]
        rows: list[list[object]] = [
            [
                _words(found.tokens),
                found.label,
                f"{found.before:.3f}",
                f"{found.after:.3f}",
                "" if found.rank is None else found.rank,
                " ".join(map(str, found.heads)),
            ]
            for found in self.sets
        ]
        return header, rows

    def details(self) -> list[ShownTable]:
        """Return what other methods found, if they ran."""
        return [self.comparison_table()] if self.comparison else []

    def plot(self) -> bytes:
        """Return the tree around the decision as PNG, in the graph of the winner."""
        graph = self._shown()[0].graph
        title = f"{graph.name}, around {graph.pag.name(self.graphs.root)}"
        return to_png(draw_tree(graph.pag, self.graphs.root, max_range=self._radius, title=title))

    def to_json(self) -> str:
        """Return the sets, the graphs, all runs and all settings as JSON."""
        return to_json(
            {
                "tokens": list(self.tokens),
                "target": self.target,
                "decision": self.decision,
                "score": self.score,
                "sets": [found._asdict() for found in self.sets],
                "winner": self.winner,
                "candidates": list(self.candidates),
                "evals": self.evals,
                "max_evals": self.max_evals,
                "is_complete": self.is_complete,
                "heads": [
                    {
                        "head": head.graph.head,
                        "distances": {
                            head.graph.pag.name(node): distance
                            for node, distance in head.distances.items()
                        },
                        "sets": head.sets,
                    }
                    for head in self.heads
                ],
                "graphs": json.loads(self.graphs.to_json()),
                "evaluated": [one._asdict() for one in self.evaluated],
                "comparison": [result._asdict() for result in self.comparison],
                "settings": dict(self.settings),
            }
        )

    def limits(self) -> str:
        """Return what the explanation does not show."""
        return (
            "The sets change this model's decision when tokens are removed in this way; they do "
            "not show what causes what in the world, nor that no other set would do."
        )

    def report(self) -> Report:
        """Return the page: tokens, graphs by head, sets with scores, and caveats."""
        page = Report("Why this decision", "Tokens without which the model decides otherwise.")
        page.verdict(self.verdict())
        smallest = len(self.sets[0].tokens) if self.sets else "none"
        page.tiles(
            {
                "decision": self.decision,
                "its probability": f"{self.score:.3f}",
                "tokens in the smallest set": smallest,
                "sets found": len(self.sets),
                "runs of the model": f"{self.evals} of {self.max_evals}",
                "confidence of the first graph": f"{_confidence(self._shown()[0]):.2f}",
            }
        )
        self.add_explorer(page)
        if self.sets:
            page.section("Sets that change the decision").table(*self.table())
        page.section("Sets that were tried").table(*self._evaluated_table())
        if len(self.evaluated) > _ROWS:
            page.text(f"The first {_ROWS} of {len(self.evaluated)} sets; the JSON has all.")
        if self.comparison:
            page.section("Other methods").table(*self.comparison_table())
            page.text(
                "Size: tokens in the first set that changes the decision. Tried: sets up to that "
                "one. An advantage over the mean of heads only is none: methods that choose the "
                "best head are the fair comparison."
            )
        add_caveats(page)
        return page.config(dict(self.settings))

    def add_explorer(self, page: Report) -> None:
        """Add tokens, slider and graphs to a page."""
        chosen = self.sets[0].positions if self.sets else ()
        outlined = "" if self.target is None else " The outlined token stands for the decision."
        underlined = " The first set is underlined." if chosen else ""
        legend = (
            "Darker tokens are nearer to the decision in the graph of the chosen head."
            f"{outlined}{underlined}"
        )
        add_explorer(
            page, self.tokens, self.views(), target=self.target, chosen=chosen, legend=legend
        )

    def views(self) -> list[HeadView]:
        """Return the graphs as tabs of a page, the winner first."""
        found = []
        for head in self._shown():
            graph = head.graph
            star = " ★" if head.sets and graph.head == self.winner else ""
            count = {0: "no set", 1: "one set"}.get(len(head.sets), f"{len(head.sets)} sets")
            note = (
                f"Confidence {_confidence(head):.2f}; {len(graph.pag.edges())} edges between "
                f"{len(graph.pag)} nodes after {graph.num_tests} tests; it led to {count}."
            )
            members = self.graphs.nodes.members
            found.append(
                HeadView(
                    graph.name + star, graph.pag, members, self.graphs.root, head.distances, note
                )
            )
        if len(self.heads) > 1:
            found.append(consensus_view(self.graphs, self.graphs.root, self._radius))
        return found

    def comparison_table(self) -> ShownTable:
        """Return what each method found: size, sets tried, head and tokens."""
        header = ["method", "size", "tried", "head", "tokens"]
        rows: list[list[object]] = []
        for result in self.comparison:
            size = result.note or "not found" if result.size is None else result.size
            tokens = _words([self.tokens[i] for i in result.positions or ()])
            head = "" if result.head is None else result.head
            rows.append([result.method, size, result.calls, head, tokens])
        return header, rows

    def _evaluated_table(self) -> ShownTable:
        header = ["without", "decision", "changed", "score before", "score after", "rank"]
        # sets that change the decision first, then those that nearly do
        order = sorted(self.evaluated, key=lambda one: (not one.changed, one.score))
        rows: list[list[object]] = [
            [
                _words(one.tokens),
                one.label,
                "yes" if one.changed else "",
                f"{self.score:.3f}",
                f"{one.score:.3f}",
                "" if one.rank is None else one.rank,
            ]
            for one in order[:_ROWS]
        ]
        return header, rows

    def _shown(self) -> list[HeadSearch]:
        return sorted(self.heads, key=lambda head: head.graph.head != self.winner)

    @property
    def _radius(self) -> int | None:
        radius = self.settings.get("radius")
        return radius if isinstance(radius, int) else None


def _confidence(head: HeadSearch) -> float:
    return head.graph.confidence.low_margin


def _words(tokens: Sequence[str]) -> str:
    return ", ".join(tokens)
