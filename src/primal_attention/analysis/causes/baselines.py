"""Other ways to find tokens whose removal changes a decision, to compare a graph with.

A graph is worth its cost only if it beats orders that need no graph under the same conditions. The
fair ones choose the best head too, or try all sets as the search in a graph does. Each method
reports the size of its first set that changes the decision, and the number of sets it tried.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from primal_attention.analysis.causes.search import (
    Evaluations,
    Influence,
    Positions,
    ordered_subsets,
)
from primal_attention.analysis.causes.subjects import Outcome

__all__ = ["METHODS", "MethodResult", "compare_methods", "graph_order"]

METHODS = (
    "graph order, best head",
    "attention, best head",
    "attention, mean of heads",
    "attention rollout",
    "gradient × input",
    "leave-one-out",
    "greedy",
    "random",
    "subsets by attention",
    "exhaustive",
)
"""The methods, in the order of the table."""


class MethodResult(NamedTuple):
    """What a method found."""

    method: str
    size: int | None
    """Size of the first set that changes the decision; ``None`` if the budget ended before."""
    calls: int
    """Sets tried, up to and including that set."""
    positions: Positions | None = None
    """The set."""
    head: int | None = None
    """Head that gave the set, for methods that choose one."""
    note: str = ""
    """Why the method was left out, if it was."""


class _Tally:
    """Counts the sets that one method asks for; another method may have run them already."""

    def __init__(self, evaluations: Evaluations, max_evals: int) -> None:
        self._evaluations = evaluations.extended(max_evals)
        self._max, self._asked = max_evals, set[Positions]()

    @property
    def calls(self) -> int:
        return len(self._asked)

    def first(self, sets: Iterable[Positions]) -> Positions | None:
        """Return the first set that changes the decision; later ones are not counted."""
        for batch in _batches(sets, self._evaluations.batch_size):
            for positions, outcome in zip(batch, self._evaluations.run(batch), strict=True):
                if positions not in self._asked and self.calls >= self._max:
                    return None
                self._asked.add(positions)
                if outcome is not None and outcome.changed:
                    return positions
        return None

    def every(self, sets: Sequence[Positions]) -> list[Outcome] | None:
        """Return the outcomes of all sets; ``None`` if the budget does not allow them."""
        if len(self._asked | set(sets)) > self._max:
            return None
        self._asked.update(sets)
        return [outcome for outcome in self._evaluations.run(sets) if outcome is not None]


def _batches(sets: Iterable[Positions], size: int) -> Iterator[list[Positions]]:
    batch: list[Positions] = []
    for positions in sets:
        batch.append(tuple(sorted(positions)))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def graph_order(
    influence: Influence, candidates: Sequence[int], attention: Mapping[int, float]
) -> list[int]:
    """Return candidates by distance in the graph, then by attention; unreached ones come last.

    Example:
        >>> near = Influence({4: 2, 5: 1}, {}, {4: 0.5, 5: 0.1})
        >>> graph_order(near, [3, 4, 5], {3: 0.2, 4: 0.5, 5: 0.1})
        [5, 4, 3]
    """
    far = float("inf")
    return sorted(candidates, key=lambda i: (influence.distance.get(i, far), -attention[i], i))


def compare_methods(
    evaluations: Evaluations,
    candidates: Sequence[int],
    attention: Float[Tensor, "h n"],
    *,
    influences: Mapping[int, Influence] | None = None,
    importances: Mapping[str, Sequence[float]] | None = None,
    max_evals: int | None = None,
    max_size: int = 3,
    seed: int = 0,
) -> list[MethodResult]:
    """Return what each method of :data:`METHODS` finds for one decision.

    An order removes its first token, then its first two, and so on, until the decision changes.
    ``exhaustive`` tries all sets up to ``max_size``, so its size is the smallest there is.
    ``subsets by attention`` tries the same sets, those with much attention first.

    Args:
        evaluations: Runs the model; the methods share its results, and each counts its own sets.
        candidates: Positions that may be removed; for words, those of the first pieces.
        attention: Attention of the explained token to every position, one row for each head.
        influences: Tokens around the explained one, by head, for the order of the graph.
        importances: Further importances of all positions, by the name of the method.
        max_evals: Budget of each method; by default that of ``evaluations``.
        max_size: Largest sets of the exhaustive search.
        seed: Seed of the random order.

    Example:
        >>> import torch
        >>> from primal_attention.analysis.causes import RecommenderSubject
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> model = EncoderClassifier(EncoderConfig(num_classes=9, vocab_size=9, dim=16)).eval()
        >>> subject = RecommenderSubject(model, [3, 1, 4])
        >>> found = compare_methods(
        ...     Evaluations(subject, max_evals=50), subject.candidates, torch.rand(2, 4)
        ... )
        >>> [result.method for result in found][-1]
        'exhaustive'
    """
    budget = evaluations.max_evals if max_evals is None else max_evals
    weight = [_by_word(row.tolist(), candidates, evaluations) for row in attention]
    mean = _by_word(attention.mean(0).tolist(), candidates, evaluations)
    given = {
        name: _by_word(values, candidates, evaluations)
        for name, values in (importances or {}).items()
    }
    orders = {
        head: graph_order(found, candidates, weight[head])
        for head, found in (influences or {}).items()
    }
    shuffled = random.Random(seed).sample(list(candidates), len(candidates))
    subsets = {i: (0.0, -value) for i, value in mean.items()}
    runs: dict[str, Callable[[_Tally], tuple[Positions | None, int | None]]] = {
        "graph order, best head": lambda t: _best_head(t, orders),
        "attention, best head": lambda t: _best_head(
            t, {head: _sorted(values) for head, values in enumerate(weight)}
        ),
        "attention, mean of heads": lambda t: (t.first(_prefixes(_sorted(mean))), None),
        **{
            name: lambda t, values=values: (t.first(_prefixes(_sorted(values))), None)  # type: ignore[misc]
            for name, values in given.items()
        },
        "leave-one-out": lambda t: (_leave_one_out(t, candidates), None),
        "greedy": lambda t: (_greedy(t, candidates), None),
        "random": lambda t: (t.first(_prefixes(shuffled)), None),
        "subsets by attention": lambda t: (
            t.first(s for k in range(1, max_size + 1) for s in ordered_subsets(subsets, k)),
            None,
        ),
        "exhaustive": lambda t: (
            t.first(s for k in range(1, max_size + 1) for s in combinations(sorted(candidates), k)),
            None,
        ),
    }
    if not orders:
        del runs["graph order, best head"]
    results = []
    for name in dict.fromkeys((*METHODS, *runs)):
        if name not in runs:
            results.append(MethodResult(name, None, 0, note="not available for this model"))
            continue
        tally = _Tally(evaluations, budget)
        positions, head = runs[name](tally)
        size = None if positions is None else len(positions)
        results.append(MethodResult(name, size, tally.calls, positions, head))
    return results


def _by_word(
    values: Sequence[float], candidates: Sequence[int], evaluations: Evaluations
) -> dict[int, float]:
    """Return the value of each candidate; a word has the sum of its pieces."""
    return {i: sum(values[j] for j in evaluations.pieces((i,))) for i in candidates}


def _sorted(values: Mapping[int, float]) -> list[int]:
    return sorted(values, key=lambda i: (-values[i], i))


def _prefixes(order: Sequence[int]) -> Iterator[Positions]:
    return (tuple(order[:size]) for size in range(1, len(order) + 1))


def _best_head(
    tally: _Tally, orders: Mapping[int, Sequence[int]]
) -> tuple[Positions | None, int | None]:
    """Return the smallest first set over heads, and its head.

    A head is followed only as long as it can beat the best one before it.
    """
    best: Positions | None = None
    winner: int | None = None
    for head, order in orders.items():
        limit = len(order) if best is None else len(best) - 1
        found = tally.first(_prefixes(order[:limit]))
        if found is not None:
            best, winner = found, head
    return best, winner


def _leave_one_out(tally: _Tally, candidates: Sequence[int]) -> Positions | None:
    outcomes = tally.every([(i,) for i in candidates])
    if outcomes is None:
        return None
    drop = dict(zip(candidates, (-outcome.score for outcome in outcomes), strict=True))
    # a single token that changes the decision comes first, whatever its score
    for i, outcome in zip(candidates, outcomes, strict=True):
        if outcome.changed:
            return (i,)
    return tally.first(_prefixes(_sorted(drop)))


def _greedy(tally: _Tally, candidates: Sequence[int]) -> Positions | None:
    """Add the token that lowers the score of the decision most, until the decision changes."""
    chosen: Positions = ()
    while len(chosen) < len(candidates):
        sets = [tuple(sorted((*chosen, i))) for i in candidates if i not in chosen]
        outcomes = tally.every(sets)
        # a round beyond the budget is not begun: half of it would favour early tokens
        if outcomes is None:
            return None
        # A set that changes the decision comes before a lower score: with many classes the score
        # may be lowest where the decision stays. Of equal sets the earlier token stays first.
        ranked = sorted(
            zip(sets, outcomes, strict=True), key=lambda x: (not x[1].changed, x[1].score)
        )
        chosen, outcome = ranked[0]
        if outcome.changed:
            return chosen
    return None
