"""The search around one decision, in the graphs of all heads."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.causes.baselines import MethodResult, compare_methods
from primal_attention.analysis.causes.explanation import (
    EvaluatedSet,
    Explanation,
    FoundSet,
    HeadSearch,
)
from primal_attention.analysis.causes.graph_result import CausalGraphs
from primal_attention.analysis.causes.search import (
    Evaluations,
    Influence,
    LevelSearch,
    Positions,
    legal_subsets,
    radius_sets,
    search_levels,
    shrink,
)
from primal_attention.analysis.causes.subjects import Subject
from primal_attention.analysis.causes.tree import InfluenceTree
from primal_attention.hosts import CapturedLayer

__all__ = ["Reasoning", "target_attention"]


class Reasoning:
    """The search around one decision, in the graphs of all heads.

    Args:
        subject: The decision.
        captured: Attention of the layer, with the decision in its place.
        graphs: Graphs of the layer with the decision as target.
        radius: Largest distance from the decision; ``None`` for all.
        max_evals: Largest number of sets to run the model without.
        batch_size: Sets to run at once.
    """

    def __init__(
        self,
        subject: Subject,
        captured: CapturedLayer,
        graphs: CausalGraphs,
        radius: int | None,
        max_evals: int,
        batch_size: int,
    ) -> None:
        self.subject, self.graphs = subject, graphs
        nodes, root = graphs.nodes, graphs.root
        removable = set(subject.candidates)
        # a node is known by the position of its first piece
        self.unit = {
            node: member[0]
            for node, member in enumerate(nodes.members)
            if node != root and removable.issuperset(member)
        }
        self.words = {member[0]: member for member in nodes.members if len(member) > 1}
        self.names = {self.unit[node]: nodes.labels[node] for node in self.unit}
        self.evaluations = Evaluations(
            subject,
            max_evals=max_evals,
            batch_size=batch_size,
            words={i: member for i, member in self.words.items() if i in self.names},
        )
        self.attention = target_attention(captured, subject.target)
        self.ranked = graphs.ranked()
        self.trees = [graph.pag.tree(root, radius) for graph in self.ranked]
        self.influences = [
            self._influence(tree, graph.head)
            for tree, graph in zip(self.trees, self.ranked, strict=True)
        ]

    def _influence(self, tree: InfluenceTree, head: int | None) -> Influence:
        row = self.attention.mean(0) if head is None else self.attention[head]
        paths: dict[int, list[frozenset[int]]] = {}
        for index, entry in enumerate(tree.entries):
            inner = tree.path(index)[1:-1]
            # a path through a token that cannot be removed leads to no set
            if entry.node in self.unit and all(node in self.unit for node in inner):
                units = frozenset(self.unit[node] for node in inner)
                paths.setdefault(self.unit[entry.node], []).append(units)
        return Influence(
            {self.unit[n]: d for n, d in tree.distances.items() if self.unit.get(n) in paths},
            {unit: tuple(found) for unit, found in paths.items()},
            {unit: float(row[list(self.evaluations.pieces((unit,)))].sum()) for unit in self.names},
        )

    def _levels(
        self, search: str, max_size: int
    ) -> Iterator[list[tuple[int, Iterator[Positions]]]]:
        units = sorted(self.names)
        if search == "subset":
            for size in range(1, max_size + 1):
                yield [
                    (number, legal_subsets(influence, units, size))
                    for number, influence in enumerate(self.influences)
                ]
            return
        sets = [radius_sets(influence, units) for influence in self.influences]
        for level in range(max(map(len, sets), default=0)):
            yield [(number, iter(found[level : level + 1])) for number, found in enumerate(sets)]

    def run(
        self, search: str, max_size: int, compare: bool, settings: dict[str, object]
    ) -> Explanation:
        """Return the explanation."""
        found = search_levels(self.evaluations, self._levels(search, max_size))
        first = next((sets[0] for sets in found.hits.values()), None)
        calls, used = found.calls, self.evaluations.used
        if search == "subset" and first is not None:
            shrink(self.evaluations, first)
            calls += self.evaluations.used - used
        leads = self._verified(found, search)
        evals, evaluated = self.evaluations.used, self._evaluated()
        sets = tuple(self._found_set(units, numbers) for units, numbers in leads.items())
        winner = self.ranked[next(iter(leads.values()))[0]].head if leads else None
        reached = sorted({i for influence in self.influences for i in influence.distance})
        heads = tuple(
            HeadSearch(
                graph,
                tree.distances,
                tuple(self.evaluations.pieces(u) for u, numbers in leads.items() if i in numbers),
            )
            for i, (graph, tree) in enumerate(zip(self.ranked, self.trees, strict=True))
        )
        comparison: tuple[MethodResult, ...] = ()
        if compare:
            best = next(iter(leads), None)
            size = None if best is None else len(best)
            mine = MethodResult(f"graph, {search} search", size, calls, best, winner)
            comparison = (mine, *self._compare(max_size))
        return Explanation(
            tokens=tuple(self.subject.tokens),
            target=self.subject.target,
            decision=self.subject.decision,
            score=self.subject.score,
            sets=sets,
            winner=winner,
            graphs=self.graphs,
            heads=heads,
            candidates=self.evaluations.pieces(tuple(reached)),
            evaluated=evaluated,
            evals=evals,
            max_evals=self.evaluations.max_evals,
            is_complete=found.complete,
            comparison=comparison,
            settings=settings,
        )

    def _verified(self, found: LevelSearch, search: str) -> dict[Positions, list[int]]:
        """Return the sets that change the decision on their own, and the graphs that led to each.

        The smallest sets come first, then those of confident heads.
        """
        leads: dict[Positions, list[int]] = {}
        for number, sets in found.hits.items():
            for units in sets:
                parts = shrink(self.evaluations, units) if search == "subset" else [units]
                for part in parts:
                    numbers = leads.setdefault(part, [])
                    if number not in numbers:
                        numbers.append(number)
        # from scratch: each set alone, nothing from memory
        sure = {
            units: numbers
            for units, numbers in leads.items()
            if self.subject.evaluate([self.evaluations.pieces(units)])[0].changed
        }
        return dict(sorted(sure.items(), key=lambda item: len(item[0])))

    def _found_set(self, units: Positions, numbers: Sequence[int]) -> FoundSet:
        outcome = self.evaluations.found[units]
        heads = tuple(head for head in (self.ranked[i].head for i in numbers) if head is not None)
        return FoundSet(
            self.evaluations.pieces(units),
            self._tokens(units),
            self.subject.score,
            outcome.score,
            outcome.label,
            outcome.rank,
            heads,
        )

    def _evaluated(self) -> tuple[EvaluatedSet, ...]:
        return tuple(
            EvaluatedSet(
                self.evaluations.pieces(units),
                self._tokens(units),
                outcome.changed,
                outcome.label,
                outcome.score,
                outcome.rank,
            )
            for units, outcome in self.evaluations.found.items()
        )

    def _tokens(self, units: Positions) -> tuple[str, ...]:
        # names of nodes tell words apart that occur twice
        return tuple(self.names.get(i, self.subject.tokens[i]) for i in units)

    def _compare(self, max_size: int) -> list[MethodResult]:
        importances = getattr(self.subject, "importances", None)
        # baselines may remove any token, also those that are no nodes
        inside = {i for member in self.words.values() for i in member[1:]}
        attention = self.attention.clone()
        # the first token of a decoder collects attention; what graphs leave out comes last here too
        attention[:, list(self.graphs.settings["dropped_columns"])] = 0.0
        return compare_methods(
            self.evaluations,
            [i for i in self.subject.candidates if i not in inside],
            attention,
            influences={
                graph.head: influence
                for graph, influence in zip(self.ranked, self.influences, strict=True)
                if graph.head is not None
            },
            importances=importances() if callable(importances) else None,
            max_size=max_size,
        )


def target_attention(captured: CapturedLayer, target: int | None) -> Float[Tensor, "h n"]:
    """Return the attention of a token to all tokens, for each head.

    Primal layers have no weights; for them it is the size of the kernel, with sum 1.

    Args:
        captured: The layer.
        target: The token; ``None`` for the mean over all tokens.

    Example:
        >>> from primal_attention.hosts import capture
        >>> from primal_attention.attention import create_attention
        >>> layer = capture(create_attention("softmax", 8, 2), torch.randn(1, 5, 8))[0]
        >>> torch.equal(target_attention(layer, 3), layer.weights()[:, 3])
        True
    """
    if captured.has_weights:
        if target is not None:
            return captured.weights(rows=slice(target, target + 1))[:, 0]
        total = torch.zeros(captured.num_heads, int(captured.keep[0].sum()), dtype=torch.float64)
        for _, rows in captured.row_blocks():
            total += rows.sum(1)
        return total / int(captured.query_keep[0].sum())
    e, r, lam = captured.scores()
    row = e.mean(1, keepdim=True) if target is None else e[:, target : target + 1]
    kernel = ((row * lam[:, None]) @ r.transpose(1, 2))[:, 0].abs()
    return kernel / kernel.sum(-1, keepdim=True).clamp_min(1e-12)
