"""Search for the smallest sets of tokens whose removal changes a decision.

The order comes from a graph: near tokens first, and tokens with much attention first. The proof
comes from the model, which runs without each set. Results are kept, so that all heads and
baselines share them.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from primal_attention.analysis.causes.subjects import Outcome, Subject

__all__ = [
    "Evaluations",
    "Influence",
    "LevelSearch",
    "legal_subsets",
    "ordered_subsets",
    "radius_sets",
    "search_levels",
    "shrink",
]

Positions = tuple[int, ...]
_MOST_SETS = 200_000
"""Largest number of sets of one size to look at, legal or not."""


class Influence(NamedTuple):
    """Tokens around the explained one in a graph, as the search needs them.

    Example:
        >>> chain = Influence({1: 1, 2: 2}, {1: (frozenset(),), 2: (frozenset({1}),)}, {})
        >>> chain.is_connected((1, 2)), chain.is_connected((2,))
        (True, False)
    """

    distance: Mapping[int, int]
    """Distance from the explained token, by position; 1 for a neighbour."""
    paths: Mapping[int, tuple[frozenset[int], ...]]
    """Inner tokens of each path from the explained token, by position."""
    attention: Mapping[int, float]
    """Attention of the explained token, by position; orders tokens of one distance."""

    def is_connected(self, positions: Iterable[int]) -> bool:
        """Return whether every token is reached through tokens of the set only."""
        chosen = frozenset(positions)
        return all(any(inner <= chosen for inner in self.paths[i]) for i in chosen)

    def key(self, position: int) -> tuple[float, float]:
        """Return what orders the tokens: distance, then attention, the largest first."""
        return float(self.distance[position]), -float(self.attention.get(position, 0.0))


class Evaluations:
    """Decisions of a model without sets of tokens; every set runs once.

    A set has one number for each token, or for each word: the position of its first piece.

    Args:
        subject: The decision.
        max_evals: Largest number of sets to run.
        batch_size: Sets to run at once.
        words: Positions of the pieces of words, by the first of them; other tokens are alone.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        max_evals: int,
        batch_size: int = 64,
        words: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if max_evals < 1 or batch_size < 1:
            raise ValueError(
                f"max_evals and batch_size must be at least 1, got {max_evals} and {batch_size}."
            )
        self.subject, self.max_evals, self.batch_size = subject, max_evals, batch_size
        self.words = dict(words or {})
        self.found: dict[Positions, Outcome] = {}

    @property
    def used(self) -> int:
        """Number of sets that the model has run."""
        return len(self.found)

    @property
    def spent(self) -> bool:
        """Whether no further set may run."""
        return self.used >= self.max_evals

    def run(self, sets: Sequence[Positions]) -> list[Outcome | None]:
        """Return the decision without each set; ``None`` where the budget is spent."""
        sets = [tuple(sorted(positions)) for positions in sets]
        new = [s for s in dict.fromkeys(sets) if s not in self.found]
        new = new[: max(self.max_evals - self.used, 0)]
        for start in range(0, len(new), self.batch_size):
            part = new[start : start + self.batch_size]
            outcomes = self.subject.evaluate([self.pieces(s) for s in part])
            self.found.update(zip(part, outcomes, strict=True))
        return [self.found.get(s) for s in sets]

    def pieces(self, positions: Positions) -> Positions:
        """Return the positions of all pieces of a set of words."""
        return tuple(sorted({i for word in positions for i in self.words.get(word, (word,))}))

    def extended(self, max_evals: int) -> "Evaluations":
        """Return evaluations with the same results and a larger budget on top of them."""
        other = Evaluations(
            self.subject,
            max_evals=self.used + max_evals,
            batch_size=self.batch_size,
            words=self.words,
        )
        other.found = self.found
        return other


def ordered_subsets(keys: Mapping[int, tuple[float, float]], size: int) -> Iterator[Positions]:
    """Yield all sets of a size in the order of the sum of their keys.

    Sums compare like the keys themselves, first by the first number, then by the second. A heap
    gives the sets one by one, so a budget can stop early.

    Args:
        keys: What orders each position.
        size: Number of positions in a set.

    Example:
        >>> list(ordered_subsets({7: (1, 0), 8: (2, 0), 9: (4, 0)}, 2))
        [(7, 8), (7, 9), (8, 9)]
    """
    order = sorted(keys, key=lambda i: (keys[i], i))
    if size < 1 or size > len(order):
        return

    def total(chosen: tuple[int, ...]) -> tuple[float, float]:
        parts = [keys[order[i]] for i in chosen]
        # rounding makes equal sums equal, whatever the order of their parts
        return sum(p[0] for p in parts), round(sum(p[1] for p in parts), 12)

    first = tuple(range(size))
    heap, seen = [(total(first), first)], {first}
    while heap:
        _, chosen = heapq.heappop(heap)
        yield tuple(sorted(order[i] for i in chosen))
        for j, index in enumerate(chosen):
            limit = chosen[j + 1] if j + 1 < size else len(order)
            if index + 1 < limit:
                after = (*chosen[:j], index + 1, *chosen[j + 1 :])
                if after not in seen:
                    seen.add(after)
                    heapq.heappush(heap, (total(after), after))


def legal_subsets(
    influence: Influence, candidates: Iterable[int], size: int
) -> Iterator[Positions]:
    """Yield the sets that are connected to the explained token, nearest and most attended first.

    Args:
        influence: The tokens around the explained one.
        candidates: Positions that may be removed.
        size: Number of positions in a set.

    Example:
        >>> chain = Influence({1: 1, 2: 2}, {1: (frozenset(),), 2: (frozenset({1}),)}, {})
        >>> list(legal_subsets(chain, [1, 2], 1)), list(legal_subsets(chain, [1, 2], 2))
        ([(1,)], [(1, 2)])
    """
    keys = {i: influence.key(i) for i in candidates if i in influence.distance}
    for count, positions in enumerate(ordered_subsets(keys, size)):
        if count >= _MOST_SETS:
            return
        if influence.is_connected(positions):
            yield positions


def radius_sets(influence: Influence, candidates: Iterable[int]) -> list[Positions]:
    """Return all candidates within distance 1, within distance 2, and so on.

    Example:
        >>> chain = Influence({1: 1, 2: 2}, {1: (frozenset(),), 2: (frozenset({1}),)}, {})
        >>> radius_sets(chain, [1, 2])
        [(1,), (1, 2)]
    """
    reached = {i: influence.distance[i] for i in candidates if i in influence.distance}
    sets = [
        tuple(sorted(i for i, d in reached.items() if d <= radius))
        for radius in sorted(set(reached.values()))
    ]
    return [s for s in sets if s]


@dataclass
class LevelSearch:
    """What a search found."""

    hits: dict[int, list[Positions]] = field(default_factory=dict)
    """Sets that change the decision, by the head whose graph has them."""
    calls: int = 0
    """Sets tried, up to and including the first that changes the decision."""
    size: int | None = None
    """Size of the first set that changes the decision."""
    complete: bool = True
    """Whether all sets were tried up to the size of the hits; ``False`` if the budget ended."""


def search_levels(
    evaluations: Evaluations,
    levels: Iterable[Sequence[tuple[int, Iterator[Positions]]]],
) -> LevelSearch:
    """Run sets level by level and stop after the first level with a hit.

    Args:
        evaluations: Runs the model.
        levels: For each level, the sets of each head in the order to run them.
    """
    found, seen = LevelSearch(), set[Positions]()
    for level in levels:
        for head, sets in level:
            for outcome, positions in _in_batches(evaluations, sets):
                if outcome is None:
                    found.complete = False
                    break
                if positions not in seen and found.size is None:
                    seen.add(positions)
                    found.calls += 1
                if outcome.changed:
                    found.size = found.size or len(positions)
                    found.hits.setdefault(head, []).append(positions)
        if found.hits or not found.complete:
            break
    return found


def _in_batches(
    evaluations: Evaluations, sets: Iterator[Positions]
) -> Iterator[tuple[Outcome | None, Positions]]:
    batch: list[Positions] = []
    for positions in sets:
        batch.append(positions)
        if len(batch) == evaluations.batch_size:
            yield from zip(evaluations.run(batch), batch, strict=True)
            batch = []
    yield from zip(evaluations.run(batch), batch, strict=True)


def shrink(evaluations: Evaluations, positions: Positions) -> list[Positions]:
    """Return the smallest sets inside a set that change the decision.

    A set of the graph is connected, but a part of it that is not connected may suffice. All parts
    are tried, smallest first.

    Args:
        evaluations: Runs the model; a spent budget is no limit here.
        positions: A small set that changes the decision.
    """
    # a found set must be smallest even if the budget is spent; it has few parts
    more = evaluations.extended(1 << len(positions))
    for size in range(1, len(positions)):
        parts = list(combinations(positions, size))
        changed = [p for p, o in zip(parts, more.run(parts), strict=True) if o and o.changed]
        if changed:
            return changed
    return [positions]
