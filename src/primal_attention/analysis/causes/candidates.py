"""Sets of nodes that may separate a pair: which ones a search tries, and in what order."""

import math
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int8

from .marks import influence_steps, possible_ancestors

__all__ = ["Candidates", "InfluenceCandidates", "SubsetCandidates", "in_order", "influence_reach"]

MAX_SETS = 4_000_000
"""Largest number of sets that are listed for one pair."""


class Candidates(NamedTuple):
    """Sets of one size, and the sum of the distances of their nodes from an end of the pair."""

    sets: Int[np.ndarray, "t k"]
    distance: Int[np.ndarray, " t"]


class TooManySetsError(Exception):
    """A pair has more sets than any search can try."""


class SubsetCandidates:
    """Subsets of a group of nodes around either end of a pair; PC takes its neighbours.

    Args:
        groups: ``[i, v]`` = v belongs to the group of i.
        known: ``[i, v]``; sets within such a group were tried before and are left out.
        position: Place of each node in a known order, or ``None``.
    """

    def __init__(
        self,
        groups: Bool[np.ndarray, "n n"],
        *,
        known: Bool[np.ndarray, "n n"] | None = None,
        position: Int[np.ndarray, " n"] | None = None,
    ) -> None:
        self.groups, self.known, self.position = groups, known, position

    def __call__(self, i: int, j: int, size: int) -> Candidates:
        """Return the sets of a size for a pair."""
        allowed = _allowed(len(self.groups), i, j, self.position)
        lists = [subsets(np.flatnonzero(self.groups[root] & allowed), size) for root in (i, j)]
        both = np.concatenate(lists)
        sets, distance = _distinct(both, np.zeros(len(both), dtype=np.intp))
        if self.known is not None:
            fresh = ~(self.known[i][sets].all(1) | self.known[j][sets].all(1))
            sets, distance = sets[fresh], distance[fresh]
        return Candidates(sets, distance)


class InfluenceCandidates:
    """Sets in which paths of potential influence lead from one end of a pair to every node.

    Every node of such a set is a possible cause of an end of the pair. A path from the end to the
    node uses nodes of the set only. Sets near the end come first.

    Args:
        marks: The graph found so far.
        position: Place of each node in a known order, or ``None``. Then sets contain no node that
            comes after both ends.
    """

    def __init__(
        self, marks: Int8[np.ndarray, "n n"], position: Int[np.ndarray, " n"] | None = None
    ) -> None:
        self.edge = marks > 0
        self.steps = influence_steps(marks)
        self.ancestors = possible_ancestors(marks)
        self.position = position

    def __call__(self, i: int, j: int, size: int) -> Candidates:
        """Return the sets of a size for a pair; a set of both ends has the smaller distance."""
        if size == 0:
            return Candidates(np.zeros((1, 0), dtype=np.intp), np.zeros(1, dtype=np.intp))
        allowed = _allowed(len(self.edge), i, j, self.position)
        allowed &= self.ancestors[:, i] | self.ancestors[:, j]
        first, second = (self._around(root, allowed, size) for root in (i, j))
        return _distinct(
            np.concatenate([first.sets, second.sets]),
            np.concatenate([first.distance, second.distance]),
        )

    def _around(self, root: int, allowed: Bool[np.ndarray, " n"], size: int) -> Candidates:
        near = self.edge[root] & allowed
        if size == 1:
            sets = np.flatnonzero(near)[:, None]
            return Candidates(sets, np.ones(len(sets), dtype=np.intp))
        reach = near | _far(self.steps, root, near, allowed, size)
        sets = subsets(np.flatnonzero(reach), size)
        # without far nodes every set is connected, and no path needs a search
        if (reach == near).all():
            return Candidates(sets, np.full(len(sets), size))
        depth = _depths(self.steps, root, near, sets)
        closed = (depth > 0).all(1)
        return Candidates(sets[closed], depth[closed].sum(1))


def in_order(
    candidates: Candidates, strength: Float[np.ndarray, "n n"], i: int, j: int
) -> Int[np.ndarray, "t k"]:
    """Return the sets, nearest first; among equals, those that depend most on the pair.

    The numbering of nodes decides only between sets that are equal in both.
    """
    sets, distance = candidates
    weight = (strength[i] + strength[j])[sets].sum(1).round(9)
    return sets[np.lexsort((*sets.T[::-1], -weight, distance))]


def influence_reach(marks: Int8[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """Return ``[i, v]`` = a path of potential influence leads from i to v (*possible-d-sep*)."""
    n, steps, edge = len(marks), influence_steps(marks), marks > 0
    reach = edge.copy()
    for root in range(n):
        others = np.ones(n, dtype=bool)
        others[root] = False
        reach[root] |= _far(steps, root, edge[root], others, n)
    return reach


def subsets(nodes: Int[np.ndarray, " k"], size: int) -> Int[np.ndarray, "t size"]:
    """Return all subsets of a size, each sorted."""
    if math.comb(len(nodes), size) > MAX_SETS:
        raise TooManySetsError
    return nodes[_combinations(len(nodes), size)]


@lru_cache(maxsize=256)
def _combinations(count: int, size: int) -> Int[np.ndarray, "t size"]:
    if size == 0:
        return np.zeros((1, 0), dtype=np.intp)
    if size == 2:
        return np.stack(np.triu_indices(count, 1), axis=1)
    return np.array(list(combinations(range(count), size)), dtype=np.intp).reshape(-1, size)


def _distinct(sets: Int[np.ndarray, "t k"], distance: Int[np.ndarray, " t"]) -> Candidates:
    """Return each set once, with its smallest distance."""
    order = np.lexsort((distance, *sets.T[::-1]))
    sets, distance = sets[order], distance[order]
    fresh = np.ones(len(sets), dtype=bool)
    fresh[1:] = (sets[1:] != sets[:-1]).any(1)
    return Candidates(sets[fresh], distance[fresh])


def _allowed(
    n: int, i: int, j: int, position: Int[np.ndarray, " n"] | None
) -> Bool[np.ndarray, " n"]:
    """Return the nodes other than the pair that are not later than both ends."""
    allowed = np.ones(n, dtype=bool) if position is None else position <= position[[i, j]].max()
    allowed[[i, j]] = False
    return allowed


def _far(
    steps: Bool[np.ndarray, "n n n"],
    root: int,
    near: Bool[np.ndarray, " n"],
    allowed: Bool[np.ndarray, " n"],
    radius: int,
) -> Bool[np.ndarray, " n"]:
    """Return the allowed nodes at the end of a path of 2 to ``radius`` edges in allowed nodes."""
    # The search walks over edges, not nodes: whether a path may go on to w depends on the node
    # before v. [v, w]: the path steps from v to w
    state = steps[root] & near[:, None] & allowed
    far = state.any(0)
    total = state
    for _ in range(radius - 2):
        ends = np.flatnonzero(state.any(0))
        following = np.zeros_like(state)
        for v in ends.tolist():
            following[v] = steps[state[:, v], v].any(0)
        state = following & allowed & ~total
        if not state.any():
            break
        total = total | state
        far = far | state.any(0)
    return far


def _depths(
    steps: Bool[np.ndarray, "n n n"],
    root: int,
    near: Bool[np.ndarray, " n"],
    sets: Int[np.ndarray, "t k"],
) -> Int[np.ndarray, "t k"]:
    """Return the length of the shortest path within each set to each of its nodes; 0 for none."""
    size = sets.shape[1]
    depth = near[sets].astype(np.intp)
    # [t, v, w]: a path within the set steps from v to w
    state = steps[root][sets[:, :, None], sets[:, None, :]] & near[sets][:, :, None]
    for length in range(2, size + 1):
        found = state.any(1) & (depth == 0)
        depth[found] = length
        if length == size:
            break
        # [t, u, v, w]
        triple = steps[sets[:, :, None, None], sets[:, None, :, None], sets[:, None, None, :]]
        state = (state[:, :, :, None] & triple).any(1)
    return depth
