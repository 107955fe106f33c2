"""Trees of potential influence around one node of a graph.

A path of potential influence leads from the root to a node. Each inner node, with its two
neighbours on the path, is a collider or lies in a triangle. Every neighbour of the root is reached.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int8

from .marks import influence_steps

__all__ = ["InfluenceTree", "TreeEntry", "grow_tree"]

_MAX_ENTRIES = 100_000


class TreeEntry(NamedTuple):
    """A node of a tree, at the end of one path."""

    node: int
    parent: int
    """Index of the entry before it; ``-1`` for the root."""
    depth: int


@dataclass(frozen=True)
class InfluenceTree:
    """Paths of potential influence from a root, and the distance of every node they reach."""

    root: int
    entries: tuple[TreeEntry, ...]
    """The root first, then by depth. A node has an entry for each path that leads to it."""
    is_capped: bool = False
    """Whether there were too many paths to keep them all."""

    @cached_property
    def distances(self) -> dict[int, int]:
        """Smallest depth of each node, the root included."""
        found: dict[int, int] = {}
        for entry in self.entries:
            found.setdefault(entry.node, entry.depth)
        return found

    def path(self, index: int) -> tuple[int, ...]:
        """Return the nodes from the root to an entry, both included."""
        found = []
        while index >= 0:
            found.append(self.entries[index].node)
            index = self.entries[index].parent
        return tuple(reversed(found))


def grow_tree(
    marks: Int8[np.ndarray, "n n"],
    root: int,
    *,
    max_range: int | None = None,
    mode: Literal["bfs", "all"] = "bfs",
) -> InfluenceTree:
    """Return the tree of potential influence; see ``PAG.tree``."""
    n = len(marks)
    if not 0 <= root < n:
        raise ValueError(f"root must be a node from 0 to {n - 1}, got {root}.")
    if mode not in ("bfs", "all"):
        raise ValueError(f"mode must be 'bfs' or 'all', got {mode!r}.")
    if max_range is not None and max_range < 0:
        raise ValueError(f"max_range must not be negative, got {max_range}.")
    steps, limit = influence_steps(marks), n - 1 if max_range is None else max_range
    entries = [TreeEntry(root, -1, 0)]
    on_path = [1 << root]  # nodes on the path to each entry, as bit masks
    used = np.zeros((n, n), dtype=bool)
    level = [0]
    for depth in range(1, limit + 1):
        following: list[int] = []
        # edges of this depth close only after it, so that the order of nodes does not matter
        now = np.zeros((n, n), dtype=bool)
        for index in level:
            node, parent, _ = entries[index]
            allowed = marks[root] > 0 if parent < 0 else steps[entries[parent].node, node]
            if mode == "bfs":
                allowed = allowed & ~used[node]
            for other in np.flatnonzero(allowed).tolist():
                if on_path[index] >> other & 1:
                    continue
                if len(entries) == _MAX_ENTRIES:
                    return InfluenceTree(root, tuple(entries), is_capped=True)
                now[node, other] = now[other, node] = True
                following.append(len(entries))
                entries.append(TreeEntry(other, index, depth))
                on_path.append(on_path[index] | 1 << other)
        used |= now
        level = following
        if not level:
            break
    return InfluenceTree(root, tuple(entries))
