"""A test that knows the true graph, to check searches without any data."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

from primal_attention.analysis.causes.independence import Outcomes
from primal_attention.analysis.causes.marks import ARROW, CIRCLE, TAIL
from primal_attention.analysis.causes.pag import PAG

__all__ = ["GraphOracleTest"]


class GraphOracleTest:
    """Test by d-separation in a graph of causes, some of which may be hidden.

    Args:
        edges: Pairs of a cause and its effect. Nodes have any name that can be a key.
        observed: The nodes of the search, in the order of their numbers. All others are hidden.
        selected: Nodes that every test conditions on: the data were selected by them.

    Example:
        >>> test = GraphOracleTest([("H", 0), ("H", 1), (2, 1)], observed=[0, 1, 2])
        >>> test.is_independent(0, 2), test.is_independent(0, 2, [1]), test.is_independent(0, 1)
        (True, False, False)
    """

    alpha: float | None = None
    max_size: int | None = None
    chunk = 1
    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        edges: Iterable[tuple[Hashable, Hashable]],
        observed: Sequence[Hashable],
        *,
        selected: Sequence[Hashable] = (),
    ) -> None:
        edges = list(edges)
        if len(set(observed)) != len(observed):
            raise ValueError(f"Observed nodes must be distinct, got {list(observed)}.")
        self.num_nodes = len(observed)
        index: dict[Hashable, int] = {node: i for i, node in enumerate(observed)}
        for node in (*(node for edge in edges for node in edge), *selected):
            index.setdefault(node, len(index))
        self._parents = [0] * len(index)
        self._children = [0] * len(index)
        for cause, effect in edges:
            self._parents[index[effect]] |= 1 << index[cause]
            self._children[index[cause]] |= 1 << index[effect]
        self._selected = sum(1 << index[node] for node in set(selected))
        for node, i in index.items():
            if any(self._above(p) >> i & 1 for p in _bits(self._parents[i])):
                raise ValueError(f"The graph has a cycle through {node!r}; causes have none.")

    @classmethod
    def from_mag(cls, mag: PAG) -> "GraphOracleTest":
        """Return the test of a graph without circles: ``↔`` is a hidden cause, ``-`` selection.

        Example:
            >>> GraphOracleTest.from_mag(PAG([[0, 2], [2, 0]])).is_independent(0, 1)
            False
        """
        if (mag.marks == CIRCLE).any():
            raise ValueError("The graph has circles; a test needs every mark. Orient it first.")
        edges: list[tuple[Hashable, Hashable]] = []
        selected: list[Hashable] = []
        for a, b in mag.ordered_pairs():
            ends = int(mag.marks[b, a]), int(mag.marks[a, b])
            if ends == (TAIL, ARROW):
                edges.append((a, b))
            elif ends == (ARROW, ARROW):
                edges += [(("hidden", a, b), a), (("hidden", a, b), b)]
            else:
                edges += [(a, ("selected", a, b)), (b, ("selected", a, b))]
                selected.append(("selected", a, b))
        return cls(edges, range(len(mag)), selected=selected)

    def is_independent(self, i: int, j: int, given: Iterable[int] = ()) -> bool:
        """Return whether the nodes with these numbers are d-separated by the given ones."""
        known = self._selected
        for node in given:
            known |= 1 << node
        # nodes reached from one of their effects, and from one of their causes
        from_below, from_above = 0, 0
        new_below, new_above = 1 << i, 0
        while new_below or new_above:
            from_below, from_above = from_below | new_below, from_above | new_above
            if (from_below | from_above) >> j & 1:
                return False
            below = above = 0
            for node in _bits(new_below & ~known):
                below |= self._parents[node]
                above |= self._children[node]
            for node in _bits(new_above):
                # a known node turns the walk around, also below the collider that it opens
                if known >> node & 1:
                    below |= self._parents[node]
                else:
                    above |= self._children[node]
            new_below, new_above = below & ~from_below, above & ~from_above
        return True

    def evaluate(self, i: int, j: int, sets: Int[np.ndarray, "t k"]) -> Outcomes:
        """Return the outcomes for one pair and several sets: 0 if separated, else 1."""
        rho = np.array([0.0 if self.is_independent(i, j, s) else 1.0 for s in sets.tolist()])
        return Outcomes(rho, np.full(len(sets), 0.5), np.zeros(len(sets), dtype=bool))

    def strength(self) -> Float[np.ndarray, "n n"]:
        """Return zeros: a graph has no strengths."""
        return np.zeros((self.num_nodes, self.num_nodes))

    def _above(self, node: int) -> int:
        """Return a node and all its causes, as bits."""
        found, new = 0, 1 << node
        while new:
            found |= new
            above = 0
            for one in _bits(new):
                above |= self._parents[one]
            new = above & ~found
        return found


def _bits(mask: int) -> Iterable[int]:
    """Yield the positions of the ones."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
