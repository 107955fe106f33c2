"""Why did the model decide this? Smallest sets of tokens without which it decides otherwise.

Three steps. *Abduction*: the decision is put into the sequence where it belongs, and the attention
of one layer is read. *Discovery*: a causal graph of the tokens for each head. *Reasoning*: sets of
tokens near the decision in a graph are removed, small and near ones first, and the model runs
without them. Only a set that changes the decision is an explanation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from primal_attention.analysis.capture import CapturedLayer
from primal_attention.analysis.causal.baselines import MethodResult, compare_methods
from primal_attention.analysis.causal.covariance import Method
from primal_attention.analysis.causal.discovery import Algorithm
from primal_attention.analysis.causal.explanation import (
    EvaluatedSet,
    Explanation,
    FoundSet,
    HeadSearch,
)
from primal_attention.analysis.causal.graph import causal_graph
from primal_attention.analysis.causal.graph_result import CausalGraphs
from primal_attention.analysis.causal.nodes import Columns, NodeChoice
from primal_attention.analysis.causal.recommend import RecommenderSubject
from primal_attention.analysis.causal.search import (
    Evaluations,
    Influence,
    LevelSearch,
    Positions,
    legal_subsets,
    radius_sets,
    search_levels,
    shrink,
)
from primal_attention.analysis.causal.subjects import Subject
from primal_attention.analysis.causal.text import Target, text_subject
from primal_attention.analysis.causal.tree import InfluenceTree

__all__ = [
    "ExplainOptions",
    "explain",
    "explain_recommendation",
    "explain_subject",
    "target_attention",
]


class ExplainOptions(TypedDict, total=False):
    """Options of :func:`explain_subject`, which all functions of this module take."""

    heads: int | Sequence[int] | None
    method: Method | None
    algorithm: Algorithm | Literal["auto"]
    alpha: float
    m: int | Literal["hidden"] | None
    tau: float | None
    nodes: NodeChoice
    group: Literal["word", "token"]
    drop_columns: Columns
    radius: int | None
    search: Literal["subset", "radius"]
    max_size: int
    max_evals: int
    batch_size: int
    compare: bool


def explain(
    model: nn.Module,
    tokenizer: Any,
    text: str | Mapping[str, Tensor],
    *,
    layer: int | str = -1,
    removal: str = "auto",
    target: Target = "auto",
    samples: int = 5,
    proposal: Sequence[int] | None = None,
    seed: int = 0,
    **options: Unpack[ExplainOptions],
) -> Explanation:
    """Return the smallest sets of tokens without which a model of transformers decides otherwise.

    The decision is the class of a sequence classifier, the next token of a decoder, or the token
    that a masked language model fills in.

    Args:
        model: The model; it is not changed.
        tokenizer: Its tokenizer.
        text: The text, or arguments of the forward for one sequence.
        layer: Attention layer to read: an index in the order of the forward, or a name.
        removal: How tokens are removed: ``"mask"``, ``"pad"``, ``"drop"``, ``"attend"``,
            ``"zero"`` or ``"resample"``; ``"auto"`` is ``"mask"`` if the tokenizer has a mask
            token, else ``"attend"``.
        target: Token that stands for the decision. ``"auto"`` finds the token that a classifier
            reads, or the mask token; a masked model may also be given a position to mask.
        samples: Inputs to draw for each set, for ``"resample"``.
        proposal: Ids to draw from, for ``"resample"``.
        seed: Seed of the draws.
        options: Options of :func:`explain_subject`, such as ``compare=True``.

    Raises:
        ValueError: If the model makes no decision.
    """
    subject = text_subject(
        model,
        tokenizer,
        text,
        layer=layer,
        removal=removal,
        target=target,
        samples=samples,
        proposal=proposal,
        seed=seed,
    )
    return explain_subject(subject, **options)


def explain_recommendation(
    model: nn.Module,
    items: Sequence[int],
    *,
    mask_id: int | None = None,
    pad_id: int | None = None,
    names: Any = None,
    layer: int | str = -1,
    removal: str = "auto",
    exclude_seen: bool = True,
    exclude: Sequence[int] = (),
    **options: Unpack[ExplainOptions],
) -> Explanation:
    """Return the items of a history without which a recommender puts another item first.

    Args:
        model: The recommender; see
            :class:`~primal_attention.analysis.causal.recommend.RecommenderSubject`.
        items: Ids of the history, oldest first.
        mask_id: Id of the mask item, for models in the style of BERT4Rec.
        pad_id: Id of padding.
        names: Names of the items by id.
        layer: Attention layer to read.
        removal: How items are removed; ``"auto"`` is ``"mask"`` with ``mask_id``, else ``"drop"``.
        exclude_seen: Whether items of the history are never recommended.
        exclude: Further ids that are never recommended.
        options: Options of :func:`explain_subject`.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> config = EncoderConfig(num_classes=12, vocab_size=13, dim=16, attention="softmax")
        >>> model = EncoderClassifier(config).eval()
        >>> found = explain_recommendation(model, [3, 1, 4, 7, 5], mask_id=12)
        >>> found.tokens[-1] == found.decision
        True
    """
    subject = RecommenderSubject(
        model,
        items,
        mask_id=mask_id,
        pad_id=pad_id,
        names=names,
        layer=layer,
        removal=removal,
        exclude_seen=exclude_seen,
        exclude=exclude,
    )
    return explain_subject(subject, **options)


def explain_subject(
    subject: Subject,
    *,
    heads: int | Sequence[int] | None = None,
    method: Method | None = None,
    algorithm: Algorithm | Literal["auto"] = "auto",
    alpha: float = 0.01,
    m: int | Literal["hidden"] | None = None,
    tau: float | None = None,
    nodes: NodeChoice = "auto",
    group: Literal["word", "token"] = "word",
    drop_columns: Columns = "auto",
    radius: int | None = 3,
    search: Literal["subset", "radius"] = "subset",
    max_size: int = 3,
    max_evals: int = 2000,
    batch_size: int = 64,
    compare: bool = False,
) -> Explanation:
    """Return the smallest sets of tokens without which a subject decides otherwise.

    Heads share all runs of the model. All heads finish the sets of one size before the next size
    begins, and the search ends after the first size that changes the decision. Every set that is
    returned was run again on its own, and no part of it suffices.

    Args:
        subject: The decision.
        heads: Heads whose graphs to use; by default all.
        method: Covariance between tokens; see
            :mod:`~primal_attention.analysis.causal.covariance`. The search has no model for
            ``"rollout"``.
        algorithm: ``"icd"``, ``"ordered-icd"``, ``"fci"`` or ``"pc"``; ``"auto"`` is the second for
            causal attention, else the first.
        alpha: Level of the tests of independence.
        m: Effective sample size of the tests; by default the width of a head.
        tau: Threshold of partial correlations, instead of ``alpha`` and ``m``.
        nodes: Tokens of the graph; by default the 32 that the decision attends to most.
        group: Whether to remove and count words, or the tokens that they consist of.
        drop_columns: Columns of attention to condition on; by default the first token of decoders.
        radius: Largest distance from the decision; ``None`` for all.
        search: ``"subset"`` tries all connected sets by size and gives sets of which no part
            suffices. ``"radius"`` removes everything within distance 1, 2, …: few runs, large sets.
        max_size: Largest sets of ``search="subset"``.
        max_evals: Largest number of sets to run the model without.
        batch_size: Sets to run at once.
        compare: Whether to run the baselines too, each with a budget of ``max_evals``.
    """
    if search not in ("subset", "radius"):
        raise ValueError(f"search must be 'subset' or 'radius', got {search!r}.")
    if group not in ("token", "word"):
        raise ValueError(f"group must be 'token' or 'word', got {group!r}.")
    if max_size < 1:
        raise ValueError(f"max_size must be at least 1, got {max_size}.")
    captured = subject.captured()
    graphs = causal_graph(
        captured,
        tokens=getattr(subject, "pieces", None) or subject.tokens,
        heads=heads,
        method=method,
        alpha=alpha,
        m=m,
        tau=tau,
        algorithm=algorithm,
        nodes=nodes,
        group=group,
        drop_columns=drop_columns,
        target="mean" if subject.target is None else subject.target,
    )
    work = _Reasoning(subject, captured, graphs, radius, max_evals, batch_size)
    settings = {
        "search": search,
        "radius": radius,
        "max_size": max_size,
        "batch_size": batch_size,
        "removal": getattr(getattr(subject, "remover", None), "kind", "of the subject"),
        "layer": graphs.layer,
        **graphs.settings,
    }
    return work.run(search, max_size, compare, settings)


class _Reasoning:
    """The search around one decision, in the graphs of all heads."""

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
        nodes, root = graphs.nodes, graphs.nodes.target
        if root is None:
            raise ValueError("The graphs have no target; give target= to causal_graph.")
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
        self, search: str, max_size: int, compare: bool, settings: dict[str, Any]
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
