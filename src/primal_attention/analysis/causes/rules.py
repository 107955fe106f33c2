"""Orientation rules R0 to R10 of partial ancestral graphs (Zhang, 2008), and those of PC (Meek).

A pass of a rule looks at one fixed matrix of marks, and sets all marks it finds together. So the
result does not depend on the numbering of the nodes. A rule replaces circles only. If statements
contradict each other, one pass may want an arrowhead and a tail at the same place: then the
arrowhead is set, because an arrowhead claims less ("is not a cause").

``marks[i, j]`` is the mark at ``j``. Below, ``*`` is any mark, ``o`` a circle.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Int8

from .marks import ARROW, CIRCLE, TAIL

__all__ = ["orient_arrows", "orient_colliders", "orient_pc", "orient_tails", "uncovered_path"]

Marks = Int8[np.ndarray, "n n"]
Flags = Bool[np.ndarray, "n n"]
Separated = Bool[np.ndarray, "n n n"]
Rule = Callable[[Marks, Separated], tuple[Flags, Flags]]


def orient_colliders(marks: Marks, separators: Separated) -> Marks:
    """Return marks after R0: ``a *-* b *-* c`` is a collider if ``b`` does not separate its ends.

    Args:
        marks: Marks to start from.
        separators: ``[a, c, b]`` = ``b`` is in the set that separates ``a`` and ``c``.
    """
    edge = marks > 0
    apart = ~edge & ~np.eye(len(marks), dtype=bool)
    # [a, b, c]: a and c are neighbours of b, and not of each other
    triple = edge[:, :, None] & edge[None, :, :] & apart[:, None, :]
    collider = triple & ~separators.transpose(0, 2, 1)
    return _set(marks, collider.any(2), np.zeros_like(edge))


def orient_arrows(marks: Marks, separators: Separated) -> Marks:
    """Return marks after R1 to R4, repeated until nothing changes."""
    return _closure(marks, separators, (_rule_1, _rule_2, _rule_3, _rule_4))


def orient_tails(marks: Marks, separators: Separated, *, selection_bias: bool = False) -> Marks:
    """Return marks after R8 to R10, and before them R5 to R7 if there may be selection bias."""
    if selection_bias:
        marks = _closure(marks, separators, (_rule_5,))
        marks = _closure(marks, separators, (_rule_6, _rule_7))
    return _closure(marks, separators, (_rule_8, _rule_9, _rule_10))


def orient_pc(marks: Marks, separators: Separated) -> Marks:
    """Return marks after the rules of PC: colliders, then Meek's rules, until nothing changes.

    Without hidden causes, an arrowhead at one end is a tail at the other. Contradictory colliders
    leave ``a ↔ b``.
    """
    marks = _finish_edges(orient_colliders(marks, separators))
    while True:
        # Meek's fourth rule only matters with orientations that are known beforehand
        found = marks
        for rule in (_rule_1, _rule_2, _rule_3):
            found = _finish_edges(_set(found, *rule(found, separators)))
        if (found == marks).all():
            return marks
        marks = found


def _closure(marks: Marks, separators: Separated, rules: tuple[Rule, ...]) -> Marks:
    while True:
        found = marks
        for rule in rules:
            found = _set(found, *rule(found, separators))
        if (found == marks).all():
            return marks
        marks = found


def _set(marks: Marks, arrows: Flags, tails: Flags) -> Marks:
    """Replace circles by the wanted marks; arrowheads win."""
    found = marks.copy()
    found[tails & (marks == CIRCLE)] = TAIL
    found[arrows & (marks == CIRCLE)] = ARROW
    return found


def _finish_edges(marks: Marks) -> Marks:
    """Put a tail opposite to each single arrowhead."""
    return _set(marks, np.zeros(marks.shape, dtype=bool), marks.T == ARROW)


def _exists(left: Flags, right: Flags) -> Flags:
    """Return ``[i, j]`` = there is a ``k`` with ``left[i, k]`` and ``right[k, j]``."""
    # products of float32 use the fast matrix product; bool would not
    found: Flags = (left.astype(np.float32) @ right.astype(np.float32)) > 0
    return found


def _apart(marks: Marks) -> Flags:
    return (marks == 0) & ~np.eye(len(marks), dtype=bool)


def _directed(marks: Marks) -> Flags:
    """Return ``[i, j]`` = ``i → j``."""
    return (marks == ARROW) & (marks.T == TAIL)


def _rule_1(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a *→ b o-* c``, a and c not adjacent: ``b → c``."""
    found = _exists((marks == ARROW).T, _apart(marks)) & (marks.T == CIRCLE)  # [b, c]
    return found, found.T


def _rule_2(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a → b *→ c`` or ``a *→ b → c``, and ``a *-o c``: ``a *→ c``."""
    into, directed = marks == ARROW, _directed(marks)
    found = (_exists(directed, into) | _exists(into, directed)) & (marks == CIRCLE)
    return found, np.zeros_like(found)


def _rule_3(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a *→ b ←* c``, ``a *-o t o-* c``, a and c not adjacent, ``t *-o b``: ``t *→ b``."""
    arrows, apart = np.zeros(marks.shape, dtype=bool), _apart(marks)
    # t is no collider between a and c, so it causes one of them. If b caused t, b would cause that
    # one too, but the arrowheads at b say that it does not.
    for t, b in np.argwhere(marks == CIRCLE).tolist():
        ends = np.flatnonzero((marks[:, b] == ARROW) & (marks[:, t] == CIRCLE))
        arrows[t, b] = apart[np.ix_(ends, ends)].any()
    return arrows, np.zeros_like(arrows)


def _rule_4(marks: Marks, separators: Separated) -> tuple[Flags, Flags]:
    """Discriminating path ``⟨t, …, a, b, c⟩`` for b, ``b o-* c``: by the set between t and c.

    If b is in the set, ``b → c``; otherwise ``a ↔ b ↔ c``.
    """
    arrows, tails = np.zeros(marks.shape, dtype=bool), np.zeros(marks.shape, dtype=bool)
    directed = _directed(marks)
    for c, b in np.argwhere(marks == CIRCLE).tolist():
        # a is a parent of c with an arrowhead from b
        for a in np.flatnonzero(directed[:, c] & (marks[b] == ARROW)).tolist():
            starts = _discriminating_starts(marks, directed, a, b, c)
            if not starts:
                continue
            # c is an effect of b or shares a cause with it, either way an arrowhead
            arrows[b, c] = True
            # several paths may contradict each other; the tail is set only if all agree
            if separators[starts, c, b].all():
                tails[c, b] = True
            else:
                arrows[c, b] = arrows[a, b] = True
    return arrows, tails


def _discriminating_starts(marks: Marks, directed: Flags, a: int, b: int, c: int) -> list[int]:
    """Return the first vertices of the shortest discriminating paths that end in ``a, b, c``."""
    seen, level = {a, b, c}, [a]
    while level:
        starts: set[int] = set()
        following: set[int] = set()
        for v in level:
            for u in np.flatnonzero(marks[:, v] == ARROW).tolist():
                if u in seen:
                    continue
                if marks[u, c] == 0:
                    starts.add(u)
                # an inner vertex is a parent of c and a collider: v has an arrowhead into it
                elif directed[u, c] and marks[v, u] == ARROW:
                    following.add(u)
        # all starts at the smallest distance, so that the numbering of nodes cannot decide
        if starts:
            return sorted(starts)
        seen |= following
        level = sorted(following)
    return []


def _rule_5(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a o-o b`` and an uncovered circle path ``⟨a, g, …, t, b⟩``: all these edges undirected.

    a and t are not adjacent, nor are g and b.
    """
    circles, apart = (marks == CIRCLE) & (marks.T == CIRCLE), _apart(marks)
    tails = np.zeros(marks.shape, dtype=bool)
    for a, b in np.argwhere(np.triu(circles)).tolist():
        for path in _cycles_through(circles, apart, a, b):
            for u, v in zip((*path, b), (*path[1:], b, a), strict=True):
                tails[u, v] = tails[v, u] = True
    return np.zeros_like(tails), tails


def _cycles_through(circles: Flags, apart: Flags, a: int, b: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each pair (g, t) it has, an uncovered path ``⟨a, g, …, t⟩`` beside ``a o-o b``."""
    for g in np.flatnonzero(circles[a] & apart[b]).tolist():
        for t in np.flatnonzero(circles[b] & apart[a]).tolist():
            if g == t:
                continue
            path = uncovered_path(circles, apart, a, g, t, end=b)
            if path is not None:
                yield path


def _rule_6(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a - b o-* c``: tail at b."""
    undirected = (marks == TAIL) & (marks.T == TAIL)
    tails = undirected.any(0)[None, :] & (marks == CIRCLE)  # [c, b]
    return np.zeros_like(tails), tails


def _rule_7(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a -o b o-* c``, a and c not adjacent: tail at b."""
    half = (marks == CIRCLE) & (marks.T == TAIL)  # [a, b]
    tails = _exists(_apart(marks), half) & (marks == CIRCLE)  # [c, b]
    return np.zeros_like(tails), tails


def _rule_8(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a → b → c`` or ``a -o b → c``, and ``a o→ c``: ``a → c``."""
    directed = _directed(marks)
    first = directed | ((marks == CIRCLE) & (marks.T == TAIL))
    found = _exists(first, directed) & (marks == ARROW) & (marks.T == CIRCLE)  # [a, c]
    return np.zeros_like(found), found.T


def _rule_9(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a o→ c``, uncovered possible path ``⟨a, b, t, …, c⟩``, b and c not adjacent: ``a → c``."""
    tails, apart, step = np.zeros(marks.shape, dtype=bool), _apart(marks), _possible(marks)
    for a, c in np.argwhere((marks == ARROW) & (marks.T == CIRCLE)).tolist():
        tails[c, a] = any(
            uncovered_path(step, apart, a, b, c) is not None
            for b in np.flatnonzero(step[a] & apart[c]).tolist()
        )
    return np.zeros_like(tails), tails


def _rule_10(marks: Marks, _: Separated) -> tuple[Flags, Flags]:
    """``a o→ c``, ``b → c ← t``, uncovered possible paths from a to b and to t: ``a → c``.

    The neighbours of a on the two paths are distinct and not adjacent.
    """
    tails, apart, step = np.zeros(marks.shape, dtype=bool), _apart(marks), _possible(marks)
    directed = _directed(marks)
    for a, c in np.argwhere((marks == ARROW) & (marks.T == CIRCLE)).tolist():
        parents = [p for p in np.flatnonzero(directed[:, c]).tolist() if p != a]
        if len(parents) < 2:
            continue
        # For each neighbour u of a: the parents of c that a path beginning with a, u can end at.
        # The path avoids c. One search per pair (u, parent) serves all pairs of paths.
        without = step.copy()
        without[:, c] = False
        ends = {
            u: {p for p in parents if p == u or uncovered_path(without, apart, a, u, p) is not None}
            for u in np.flatnonzero(without[a]).tolist()
        }
        tails[c, a] = any(
            # two different parents can be chosen, one from each set
            len(ends[u] | ends[w]) > 1 and ends[u] and ends[w]
            for u in ends
            for w in ends
            if u < w and apart[u, w]
        )
    return np.zeros_like(tails), tails


def _possible(marks: Marks) -> Flags:
    """Return ``[u, v]`` = a possible step from u to v: no arrowhead at u, no tail at v."""
    return (marks > 0) & (marks != TAIL) & (marks.T != ARROW)


def uncovered_path(
    step: Flags, apart: Flags, a: int, b: int, target: int, *, end: int | None = None
) -> tuple[int, ...] | None:
    """Return an uncovered path ``⟨a, b, …, target⟩``, or ``None``.

    Args:
        step: ``[u, v]`` = a path may go from u to v.
        apart: ``[u, v]`` = different nodes without an edge.
        a: First node.
        b: Second node.
        target: Last node.
        end: A node after the last one, which the path avoids; the triple with it is uncovered too.

    The ends of every three consecutive nodes are not adjacent.
    """
    if b == target:
        return (a, b)
    # a shortest walk takes polynomial time, all simple paths may not; so they are searched only if
    # the walk visits a node twice
    walk = _uncovered_walk(step, apart, a, b, target, end)
    if walk is None or len(set(walk)) == len(walk):
        return walk
    stack: list[tuple[int, ...]] = [(a, b)]
    while stack:
        path = stack.pop()
        for v in np.flatnonzero(step[path[-1]] & apart[path[-2]]).tolist():
            if v in path or v == end:
                continue
            if v != target:
                stack.append((*path, v))
            elif end is None or apart[path[-1], end]:
                return (*path, v)
    return None


def _uncovered_walk(
    step: Flags, apart: Flags, a: int, b: int, target: int, end: int | None
) -> tuple[int, ...] | None:
    """Return a shortest uncovered walk, which may visit a node twice."""
    before: dict[tuple[int, int], tuple[int, int] | None] = {(a, b): None}
    level = [(a, b)]
    while level:
        following = []
        for u, v in level:
            for w in np.flatnonzero(step[v] & apart[u]).tolist():
                # a state is an edge, not a node: the next step depends on the node before
                if (v, w) in before or w in (a, end):
                    continue
                before[v, w] = (u, v)
                if w == target and (end is None or apart[v, end]):
                    return _trace(before, (v, w))
                following.append((v, w))
        level = following
    return None


def _trace(
    before: dict[tuple[int, int], tuple[int, int] | None], state: tuple[int, int]
) -> tuple[int, ...]:
    nodes = [state[1]]
    current: tuple[int, int] | None = state
    while current is not None:
        nodes.append(current[0])
        current = before[current]
    return tuple(reversed(nodes))
