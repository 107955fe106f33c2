"""Pictures of causal graphs: the marks at both ends of every edge, and trees around a target.

A filled triangle is an arrowhead, an open circle an unknown mark, and a bare end a tail. So all six
kinds of edges look different: ``→``, ``↔``, ``o→``, ``o-o``, ``-`` and ``-o``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primal_attention.analysis.causes.marks import ARROW, CIRCLE, TAIL
from primal_attention.analysis.causes.pag import PAG
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["EDGE_MEANING", "draw_graphs", "draw_tree", "edge_color"]

Place = tuple[float, float]
Point = NDArray[np.float64]

_INK, _SOFT, _ACCENT = "#1c2330", "#5b6472", "#c2410c"
_COLORS = {"→": "#c2410c", "↔": "#7c3aed", "o→": "#1d4ed8", "o-o": "#8a93a1"}
EDGE_MEANING = {
    "→": "causes",
    "↔": "hidden common cause",
    "o→": "not caused by",
    "o-o": "unknown",
    "-": "selection",
    "-o": "selection possible",
}
"""What the kinds of edges say."""
_NODE, _HEAD, _RING = 0.035, 0.07, 0.022
"""Radius of a node, length of an arrowhead, and radius of an open circle."""


def edge_color(kind: str) -> str:
    """Return the colour of a kind of edge, such as ``"o→"``."""
    return _COLORS.get(kind, "#047857")


def draw_graphs(pags: Mapping[str, PAG], *, target: int | None = None) -> "Figure":
    """Return a figure with one panel for each graph, and a legend of the kinds of edges.

    Args:
        pags: Graphs by title; nodes are on a circle in their order, clockwise from the top.
        target: A node to emphasise.

    Example:
        >>> pag = PAG([[0, 2], [1, 0]], names=("rain", "wet"))
        >>> [text.get_text() for text in draw_graphs({"": pag}, target=1).axes[0].texts]
        ['rain', 'wet']
    """
    with needs("analysis", "A picture"):
        from matplotlib import pyplot as plt

    columns = min(len(pags), 4)
    rows = -(-len(pags) // columns)
    size = 6.0 if len(pags) == 1 else 3.6
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(pags) :]:
        axis.set_axis_off()
    kinds: set[str] = set()
    for axis, (title, pag) in zip(axes.flat, pags.items(), strict=False):
        places = [
            (math.sin(2 * math.pi * i / len(pag)), math.cos(2 * math.pi * i / len(pag)))
            for i in range(len(pag))
        ]
        pairs = pag.ordered_pairs()
        kinds |= _draw_edges(axis, pag, dict(enumerate(places)), pairs)
        _draw_nodes(axis, pag, dict(enumerate(places)), target, 9 if len(pags) == 1 else 7)
        _frame(axis, title, 1.0)
    _legend(figure, kinds)
    return figure


def draw_tree(pag: PAG, root: int, *, max_range: int | None = 3, title: str = "") -> "Figure":
    """Return a figure of the tree of potential influence around a node.

    Nodes at distance ``d`` are on ring ``d``. Every node is drawn once, at its smallest distance,
    with the edge that reaches it first; the marks are those of the graph.

    Args:
        pag: The graph.
        root: The node in the middle.
        max_range: Largest distance; ``None`` for all.
        title: Heading of the figure.

    Example:
        >>> figure = draw_tree(PAG([[0, 1, 0], [1, 0, 1], [0, 1, 0]], names=("a", "b", "c")), 1)
        >>> sorted(text.get_text() for text in figure.axes[0].texts)
        ['a', 'b', 'c']
    """
    with needs("analysis", "A picture"):
        from matplotlib import pyplot as plt
        from matplotlib.patches import Circle

    tree = pag.tree(root, max_range)
    parents: dict[int, int] = {}
    depth: dict[int, int] = {root: 0}
    for entry in tree.entries[1:]:
        if entry.node not in depth:
            depth[entry.node] = entry.depth
            parents[entry.node] = tree.entries[entry.parent].node
    places = _radial(root, parents)
    radius = max(depth.values(), default=0) or 1
    figure, axis = plt.subplots(figsize=(6.5, 6.5), layout="constrained")
    for ring in range(1, radius + 1):
        axis.add_patch(Circle((0, 0), ring / radius, fill=False, ec="#e3e7ee", lw=1, zorder=0))
    scaled = {node: (x / radius, y / radius) for node, (x, y) in places.items()}
    chosen = [(a, b) for a, b in pag.ordered_pairs() if parents.get(a) == b or parents.get(b) == a]
    kinds = _draw_edges(axis, pag, scaled, chosen)
    _draw_nodes(axis, pag, scaled, root, 9)
    _frame(axis, title, 1.0)
    _legend(figure, kinds)
    return figure


def _radial(root: int, parents: Mapping[int, int]) -> dict[int, Place]:
    """Return a place for each node of a tree: ring by depth, sectors by number of leaves."""
    children: dict[int, list[int]] = {}
    for node, parent in parents.items():
        children.setdefault(parent, []).append(node)

    def leaves(node: int) -> int:
        return sum(map(leaves, children.get(node, []))) or 1

    places: dict[int, Place] = {}
    # a stack instead of recursion keeps the order of the children
    waiting = [(root, 0.0, 2 * math.pi, 0)]
    while waiting:
        node, start, width, depth = waiting.pop()
        angle = start + width / 2
        places[node] = (depth * math.sin(angle), depth * math.cos(angle))
        total, at = leaves(node), start
        for child in sorted(children.get(node, [])):
            share = width * leaves(child) / total
            waiting.append((child, at, share, depth + 1))
            at += share
    return places


def _draw_edges(
    axis: "Axes",
    pag: PAG,
    places: Mapping[int, Place],
    pairs: Sequence[tuple[int, int]],
) -> set[str]:
    """Draw edges with their marks and return their kinds."""
    kinds = set()
    for a, b in pairs:
        kind = pag.symbol(a, b)
        color = edge_color(kind)
        kinds.add(kind)
        start, end = np.array(places[a]), np.array(places[b])
        along = (end - start) / np.linalg.norm(end - start)
        # ends of the line, after the marks took their part
        first = _draw_mark(axis, int(pag.marks[b, a]), start, along, color, f"mark:{b}:{a}")
        last = _draw_mark(axis, int(pag.marks[a, b]), end, -along, color, f"mark:{a}:{b}")
        axis.plot(
            [first[0], last[0]],
            [first[1], last[1]],
            color=color,
            lw=1.3,
            zorder=1,
            solid_capstyle="butt",
            gid=f"edge:{a}:{b}",
        )
    return kinds


def _draw_mark(axis: "Axes", mark: int, node: Point, away: Point, color: str, name: str) -> Point:
    """Draw the mark at a node and return where the line begins.

    ``away`` is the unit vector from the node along the edge.
    """
    from matplotlib.patches import Circle, Polygon

    touch = node + 1.3 * _NODE * away
    if mark == TAIL:
        return touch
    if mark == CIRCLE:
        center = touch + _RING * away
        middle = float(center[0]), float(center[1])
        axis.add_patch(Circle(middle, _RING, fc="white", ec=color, lw=1.3, zorder=3, gid=name))
        return touch + 2 * _RING * away
    if mark != ARROW:
        raise ValueError(f"mark must be 1, 2 or 3, got {mark}.")
    base, side = touch + _HEAD * away, np.array([-away[1], away[0]]) * _HEAD * 0.4
    points = [touch, base + side, base - side]
    axis.add_patch(Polygon(points, closed=True, fc=color, ec=color, lw=0, zorder=3, gid=name))
    return base


def _draw_nodes(
    axis: "Axes", pag: PAG, places: Mapping[int, Place], target: int | None, fontsize: int
) -> None:
    from matplotlib.patches import Circle

    for node, (x, y) in sorted(places.items()):
        is_target = node == target
        axis.add_patch(
            Circle((x, y), _NODE, fc=_ACCENT if is_target else _INK, ec="white", lw=1, zorder=4)
        )
        length = math.hypot(x, y)
        # names point away from the middle; a node in the middle has its name above
        dx, dy = (x / length, y / length) if length > 1e-9 else (0.0, 1.0)
        is_crowded = len(places) > 16 and length > 1e-9
        angle = math.degrees(math.atan2(dy, dx))
        axis.annotate(
            pag.name(node),
            (x + 2 * _NODE * dx, y + 2 * _NODE * dy),
            # many names do not fit side by side, so they follow the radius
            rotation=(angle if dx >= 0 else angle + 180) if is_crowded else 0,
            rotation_mode="anchor",
            ha=_side(dx, "left", "right", 0.0 if is_crowded else 0.35),
            va="center" if is_crowded else _side(dy, "bottom", "top", 0.35),
            fontsize=fontsize,
            color=_ACCENT if is_target else _INK,
            fontweight="bold" if is_target else "normal",
            zorder=5,
            parse_math=False,
        )


def _side(value: float, positive: str, negative: str, center: float) -> str:
    if abs(value) < center:
        return "center"
    return positive if value >= 0 else negative


def _frame(axis: "Axes", title: str, radius: float) -> None:
    axis.set(xlim=(-1.45 * radius, 1.45 * radius), ylim=(-1.25 * radius, 1.25 * radius))
    axis.set_aspect("equal")
    axis.set_axis_off()
    if title:
        axis.set_title(title, fontsize=10, color=_SOFT)


def _legend(figure: "Figure", kinds: set[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [kind for kind in EDGE_MEANING if kind in kinds or kind[::-1] in kinds]
    if shown:
        figure.legend(
            [Line2D([], [], color=edge_color(kind), lw=2) for kind in shown],
            [f"{kind}  {EDGE_MEANING[kind]}" for kind in shown],
            loc="outside lower center",
            ncols=min(len(shown), 4),
            frameon=False,
            fontsize=9,
        )
