"""All methods on one decision: the first set of tokens that each finds, and what it cost."""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from primal_attention.analysis.causes.baselines import compare_methods, graph_order
from primal_attention.analysis.causes.graph import causal_graph
from primal_attention.analysis.causes.graph_result import CausalGraphs, HeadGraph
from primal_attention.analysis.causes.search import Evaluations, Influence, legal_subsets
from primal_studies.causes.compare import GRAPH

__all__ = ["SearchSettings", "explain_by_all"]

RADIUS = 3
Positions = tuple[int, ...]


class SearchSettings(NamedTuple):
    """What all methods share."""

    max_evals: int
    """Calls of the model that a method may make for one decision."""
    max_size: int
    """Largest sets of methods that try all sets of a size."""
    is_exhaustive: bool
    """Whether the budget suffices to try all sets."""
    nodes: int
    """Tokens of a graph at most, those with the most attention first."""


def explain_by_all(
    subject: Any,
    settings: SearchSettings,
    *,
    seed: int = 0,
    orders: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, list[Any]]:
    """Return size, calls and rank of the new decision for every method.

    Args:
        subject: The decision; see :class:`~primal_attention.analysis.causes.subjects.Subject`.
        settings: Budget and sizes.
        seed: Seed of random orders.
        orders: Further orders of the candidates, by name.
    """
    captured, candidates = subject.captured(), list(subject.candidates)
    at = slice(subject.target, subject.target + 1)
    attention = captured.weights(rows=at)[:, 0]
    narrow, wide = (_graphs(subject, captured, attention, settings, m) for m in (None, "hidden"))
    near = {graph.head or 0: _influence(narrow, graph, attention) for graph in narrow.heads}
    runner = _Runner(subject, settings)
    results = compare_methods(
        runner.evaluations,
        candidates,
        attention,
        influences=near,
        importances=subject.importances(),
        max_evals=settings.max_evals,
        max_size=settings.max_size,
        seed=seed,
    )
    found = {
        result.method: runner.entry(result.positions, result.calls)
        for result in results
        if not result.note and (settings.is_exhaustive or "haust" not in result.method)
    }
    by_head = [dict(enumerate(row.tolist())) for row in attention]
    by_graph = {
        head: graph_order(influence, candidates, by_head[head]) for head, influence in near.items()
    }
    sure = narrow.best.head or 0
    generator = random.Random(seed + 1)
    shuffled = [generator.sample(candidates, len(candidates)) for _ in by_head]
    found["graph order, surest head"] = runner.prefixes([by_graph[sure]])
    found["graph order, consensus"] = runner.prefixes([_consensus(narrow, candidates, attention)])
    found["attention, surest head"] = runner.prefixes(
        [sorted(candidates, key=lambda i: (-by_head[sure][i], i))]
    )
    found[f"random, best of {len(by_head)}"] = runner.prefixes(shuffled)
    found["graph sets"] = runner.graph_sets(narrow, near, candidates)
    far = {graph.head or 0: _influence(wide, graph, attention) for graph in wide.heads}
    found[f"{GRAPH}, m = width"] = runner.prefixes(
        [graph_order(influence, candidates, by_head[head]) for head, influence in far.items()]
    )
    found["graph sets, m = width"] = runner.graph_sets(wide, far, candidates)
    return found | {name: runner.prefixes([order]) for name, order in (orders or {}).items()}


def _graphs(
    subject: Any, captured: Any, attention: Any, settings: SearchSettings, m: Any
) -> CausalGraphs:
    """Return the graphs of all heads over the candidates with the most attention."""
    strongest = attention.max(0).values
    chosen = sorted(subject.candidates, key=lambda i: (-float(strongest[i]), i))[: settings.nodes]
    return causal_graph(
        captured,
        tokens=[str(i) for i in range(attention.shape[1])],
        target=subject.target,
        m=m,
        options={"nodes": sorted(chosen), "group": "token"},
    )


def _influence(graphs: CausalGraphs, graph: HeadGraph, attention: Any) -> Influence:
    """Return the tree around the decision by position."""
    root = graphs.nodes.target or 0
    place = [member[0] for member in graphs.nodes.members]
    tree = graph.pag.tree(root, max_range=RADIUS)
    paths: dict[int, set[frozenset[int]]] = {}
    for index, entry in enumerate(tree.entries):
        if entry.node != root:
            inner = frozenset(place[node] for node in tree.path(index)[1:-1])
            paths.setdefault(place[entry.node], set()).add(inner)
    distance = {place[node]: depth for node, depth in tree.distances.items() if node != root}
    weight = dict(enumerate(attention[graph.head or 0].tolist()))
    return Influence(distance, {i: tuple(p) for i, p in paths.items()}, weight)


def _consensus(graphs: CausalGraphs, candidates: Sequence[int], attention: Any) -> list[int]:
    """Return tokens by the share of heads that join them with the decision, then attention."""
    frequency, mean = graphs.consensus.frequency[graphs.nodes.target or 0], attention.mean(0)
    share = dict(zip((member[0] for member in graphs.nodes.members), frequency, strict=True))
    return sorted(candidates, key=lambda i: (-share.get(i, 0.0), -float(mean[i]), i))


class _Runner:
    """Runs sets of one decision; all methods share the results, and each counts its own."""

    def __init__(self, subject: Any, settings: SearchSettings) -> None:
        self.settings = settings
        # the budget is that of a method; together they may run more
        self.evaluations = Evaluations(subject, max_evals=10**9)

    def entry(self, positions: Positions | None, calls: int) -> list[Any]:
        """Return size, calls and rank."""
        if positions is None:
            return [None, calls, None]
        outcome = self.evaluations.run([positions])[0]
        return [len(positions), calls, None if outcome is None else outcome.rank]

    def prefixes(self, orders: Iterable[Sequence[int]]) -> list[Any]:
        """Return the smallest first set over orders; one is followed as long as it can win."""
        asked, best = set[Positions](), None
        for order in orders:
            limit = len(order) if best is None else len(best) - 1
            found = self._first(asked, (tuple(order[:k]) for k in range(1, limit + 1)))
            best = found or best
        return self.entry(best, len(asked))

    def graph_sets(
        self, graphs: CausalGraphs, near: Mapping[int, Influence], candidates: Sequence[int]
    ) -> list[Any]:
        """Return the first set that is connected in a graph, by size, surest head first."""
        asked = set[Positions]()
        sets = (
            positions
            for size in range(1, self.settings.max_size + 1)
            for graph in graphs.ranked()
            for positions in legal_subsets(near[graph.head or 0], candidates, size)
        )
        found = self._first(asked, sets)
        return self.entry(found, len(asked))

    def _first(self, asked: set[Positions], sets: Iterable[Positions]) -> Positions | None:
        """Return the first set that changes the decision within the budget; count up to it."""
        remaining = (tuple(sorted(positions)) for positions in sets)
        while batch := list(islice(remaining, self.evaluations.batch_size)):
            for positions, outcome in zip(batch, self.evaluations.run(batch), strict=True):
                if positions not in asked and len(asked) >= self.settings.max_evals:
                    return None
                asked.add(positions)
                if outcome is not None and outcome.changed:
                    return positions
        return None
