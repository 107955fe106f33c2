"""Partial ancestral graphs: which causes the independences between nodes allow.

``marks[i, j]`` is the mark **at j** on the edge between ``i`` and ``j``:

    0 none    no edge
    1 circle  unknown: some graphs have an arrowhead here, others a tail
    2 arrow   ``j`` does not cause ``i``
    3 tail    ``j`` causes ``i``, or selection

    a → b     a causes b
    a ↔ b     neither causes the other: a hidden common cause
    a o→ b    b does not cause a
    a o-o b   nothing is known
    a - b     selection; also a -o b
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
from jaxtyping import Bool, Int8

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import parse_json
from primal_attention.support.output import to_json

from .marks import ARROW, CIRCLE, NONE, TAIL, possible_ancestors
from .tree import InfluenceTree, grow_tree

if TYPE_CHECKING:
    import networkx

__all__ = ["PAG"]

_LEFT = {CIRCLE: "o", ARROW: "←", TAIL: "-"}
_RIGHT = {CIRCLE: "o", ARROW: "→", TAIL: "-"}
_WORDS = {CIRCLE: "circle", ARROW: "arrow", TAIL: "tail"}
_DOT = {CIRCLE: "odot", ARROW: "normal", TAIL: "none"}


@dataclass(frozen=True, eq=False)
class PAG:
    """Partial ancestral graph: an ``int8`` matrix of marks, and names of the nodes.

    Example:
        >>> pag = PAG([[0, 2, 0], [1, 0, 1], [0, 2, 0]], names=("a", "b", "c"))
        >>> pag.edges()
        ['a o→ b', 'c o→ b']
    """

    marks: Int8[np.ndarray, "n n"]
    """``marks[i, j]`` is the mark at ``j`` on the edge between ``i`` and ``j``. Read-only."""
    names: tuple[str, ...] | None = None
    """Names of the nodes, used in texts only; names may repeat, as words do."""
    warnings: tuple[str, ...] = ()
    """What happened during the search that a reader should know."""

    def __post_init__(self) -> None:
        marks = np.array(self.marks)
        if marks.ndim != 2 or marks.shape[0] != marks.shape[1]:
            raise ValueError(f"marks must be a square matrix, got shape {marks.shape}.")
        if marks.size and not np.isin(marks, (NONE, CIRCLE, ARROW, TAIL)).all():
            raise ValueError(
                f"marks must be 0 (none), 1 (circle), 2 (arrow) or 3 (tail), "
                f"got {sorted(set(marks.ravel().tolist()))}."
            )
        if np.diagonal(marks).any() or ((marks > 0) != (marks > 0).T).any():
            raise ValueError(
                "marks must have a zero diagonal, and a mark at both ends of each edge; "
                "set marks[i, j] and marks[j, i] together."
            )
        marks = marks.astype(np.int8)
        marks.setflags(write=False)
        object.__setattr__(self, "marks", marks)
        if self.names is not None:
            names = tuple(str(name) for name in self.names)
            if len(names) != len(marks):
                raise ValueError(
                    f"There are {len(names)} names for {len(marks)} nodes; give one name a node."
                )
            object.__setattr__(self, "names", names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PAG):
            return NotImplemented
        return np.array_equal(self.marks, other.marks) and self.names == other.names

    def __hash__(self) -> int:
        return hash((self.marks.tobytes(), self.names))

    def __len__(self) -> int:
        return len(self.marks)

    def __repr__(self) -> str:
        return f"PAG({len(self)} nodes: {', '.join(self.edges()) or 'no edges'})"

    def name(self, node: int) -> str:
        """Return the name of a node, or its number if there are no names."""
        return str(node) if self.names is None else self.names[node]

    def edges(self) -> list[str]:
        """Return the edges as text, such as ``"0 o→ 1"``.

        The stronger mark comes last: an arrow points to the right wherever possible.
        """
        return [
            f"{self.name(a)} {self.symbol(a, b)} {self.name(b)}" for a, b in self.ordered_pairs()
        ]

    def ordered_pairs(self) -> list[tuple[int, int]]:
        """Return the two ends of each edge, in the order of ``edges()``."""
        found = []
        for i, j in np.argwhere(np.triu(self.marks) > 0).tolist():
            at_i, at_j = int(self.marks[j, i]), int(self.marks[i, j])
            turned = (at_i == ARROW and at_j != ARROW) or (at_i, at_j) == (CIRCLE, TAIL)
            found.append((j, i) if turned else (i, j))
        return sorted(found)

    def symbol(self, a: int, b: int) -> str:
        """Return the edge from ``a`` to ``b`` as text: ``→``, ``↔``, ``o→``, ``o-o``, ``-``..."""
        at_a, at_b = int(self.marks[b, a]), int(self.marks[a, b])
        if NONE in (at_a, at_b):
            raise ValueError(f"There is no edge between {self.name(a)!r} and {self.name(b)!r}.")
        if at_a == at_b:
            return {CIRCLE: "o-o", ARROW: "↔", TAIL: "-"}[at_a]
        left, right = _LEFT[at_a], _RIGHT[at_b]
        if TAIL in (at_a, at_b):
            # a tail is the bare end of the line: "→", "←", "-o", "o-"
            return (left + right).replace("-", "") if ARROW in (at_a, at_b) else left + right
        return left + right

    def adjacency(self) -> Bool[np.ndarray, "n n"]:
        """Return ``True`` where two nodes have an edge."""
        return self.marks > 0

    def possible_ancestors(self) -> Bool[np.ndarray, "n n"]:
        """Return ``[i, j]`` = ``i`` may cause ``j``; a node may cause itself.

        There is a path from ``i`` to ``j`` on which no arrowhead points back and no tail forward.
        """
        return possible_ancestors(self.marks)

    def tree(
        self, root: int, max_range: int | None = None, mode: Literal["bfs", "all"] = "bfs"
    ) -> InfluenceTree:
        """Return the paths of potential influence around a node.

        Args:
            root: Node to start from.
            max_range: Largest number of edges between the root and a node; all by default.
            mode: ``"bfs"`` follows an edge only at the smallest depth at which it is reached.
                ``"all"`` follows all simple paths, up to 100,000.

        Example:
            >>> pag = PAG([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
            >>> pag.tree(1).distances, pag.tree(0).distances
            ({1: 0, 0: 1, 2: 1}, {0: 0, 1: 1})
        """
        return grow_tree(self.marks, root, max_range=max_range, mode=mode)

    def to_networkx(self) -> "networkx.DiGraph":
        """Return a graph with both directions of each edge: ``edges[i, j]["mark"]`` is at ``j``.

        Raises:
            ImportError: If networkx is not installed.
        """
        try:
            import networkx
        except ImportError as error:
            raise ImportError(
                "to_networkx needs networkx, which is not installed; pip install networkx."
            ) from error
        graph = networkx.DiGraph()
        for node in range(len(self)):
            graph.add_node(node, name=self.name(node))
        for i, j in np.argwhere(self.marks > 0).tolist():
            graph.add_edge(i, j, mark=_WORDS[int(self.marks[i, j])])
        return graph

    def to_dot(self) -> str:
        """Return the graph in the language of Graphviz."""
        lines = ["digraph {"]
        lines += [f"  {node} [label={_quoted(self.name(node))}];" for node in range(len(self))]
        for a, b in self.ordered_pairs():
            tail, head = _DOT[int(self.marks[b, a])], _DOT[int(self.marks[a, b])]
            lines.append(f"  {a} -> {b} [dir=both, arrowtail={tail}, arrowhead={head}];")
        return "\n".join([*lines, "}"]) + "\n"

    def to_json(self) -> str:
        """Return marks, names, edges and warnings as JSON."""
        return to_json(
            {
                "marks": self.marks.tolist(),
                "names": None if self.names is None else list(self.names),
                "edges": self.edges(),
                "warnings": list(self.warnings),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "PAG":
        """Return the graph that ``to_json`` wrote.

        Raises:
            UserError: If the text is no such graph.

        Example:
            >>> pag = PAG([[0, 2], [2, 0]])
            >>> PAG.from_json(pag.to_json()) == pag
            True
        """
        data = parse_json(text, "the graph")
        marks, names, warnings = (data.get(key) for key in ("marks", "names", "warnings"))
        if not _is_matrix(marks):
            raise UserError(
                "the graph: marks must be a square matrix of whole numbers, a list of lists."
            )
        for key, words in (("names", names), ("warnings", warnings)):
            if words is not None and not _are_words(words):
                raise UserError(f"the graph: {key} must be a list of words or null.")
        matrix = np.array(marks, dtype=np.int64).reshape(len(marks), len(marks))
        with user_errors("the graph", ValueError):
            return cls(matrix, None if names is None else tuple(names), tuple(warnings or ()))


def _is_matrix(rows: object) -> TypeGuard[list[list[int]]]:
    """Return whether rows are a square matrix of whole numbers that numpy can hold."""
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == len(rows)
        and all(type(mark) is int and 0 <= mark < 128 for mark in row)
        for row in rows
    )


def _are_words(words: object) -> TypeGuard[list[str]]:
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
