"""Pictures: every edge has the marks of the graph at its ends."""

import numpy as np
import pytest

from primal_attention.analysis.causes import ARROW, CIRCLE, PAG, TAIL
from primal_attention.analysis.causes.drawing import draw_graphs, draw_tree
from primal_attention.report.page import to_png

pytest.importorskip("matplotlib")

SIX = {(TAIL, ARROW): "→", (ARROW, ARROW): "↔", (CIRCLE, ARROW): "o→"}
SIX |= {(CIRCLE, CIRCLE): "o-o", (TAIL, TAIL): "-", (TAIL, CIRCLE): "-o"}


def marks_drawn(axis):
    """What is drawn at each end ``(i, j)`` of an edge, which is the one at node ``j``."""
    found = {}
    for patch in axis.patches:
        name = patch.get_gid() or ""
        if name.startswith("mark:"):
            _, i, j = name.split(":")
            kind = ARROW if len(patch.get_path().vertices) == 4 else CIRCLE
            found[int(i), int(j)] = kind, patch
    return found


def pair(at_a, at_b):
    return PAG([[0, at_b], [at_a, 0]], names=("a", "b"))


@pytest.mark.parametrize(("marks", "symbol"), SIX.items())
def test_six_kinds_of_edges(marks, symbol):
    pag = pair(*marks)
    assert pag.symbol(0, 1) == symbol
    figure = draw_graphs({"": pag})
    drawn = marks_drawn(figure.axes[0])
    # marks[i, j] is the mark at j; a tail is nothing but the line
    expected = {(1, 0): marks[0], (0, 1): marks[1]}
    assert {end: kind for end, (kind, _) in drawn.items()} == {
        end: kind for end, kind in expected.items() if kind != TAIL
    }
    places = {0: np.array([0.0, 1.0]), 1: np.array([0.0, -1.0])}
    for (_, j), (kind, patch) in drawn.items():
        if kind == ARROW:
            tip, *base = patch.get_path().vertices[:3]
            # the tip is at j, the base towards i
            assert np.linalg.norm(tip - places[j]) < min(
                np.linalg.norm(b - places[j]) for b in base
            )
        else:
            assert np.linalg.norm(patch.center - places[j]) < 0.1
            assert patch.get_facecolor()[:3] == (1, 1, 1)
    (line,) = [x for x in figure.axes[0].lines if x.get_gid()]
    ends = np.array(line.get_xydata())
    assert abs(np.linalg.norm(ends[0] - ends[1])) > 1.5
    assert to_png(figure).startswith(b"\x89PNG")


def test_graphs_share_one_figure_with_a_legend_of_what_occurs():
    figure = draw_graphs({"one": pair(TAIL, ARROW), "two": pair(ARROW, ARROW)}, target=0)
    assert [axis.get_title() for axis in figure.axes] == ["one", "two"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [word.split()[0] for word in words] == ["→", "↔"]
    assert figure.axes[0].texts[0].get_fontweight() == "bold"
    to_png(figure)
    # no edges: no legend; many names: along the radius
    many = PAG(np.zeros((20, 20), np.int8), names=tuple("$" + c for c in "abcdefghijklmnopqrst"))
    figure = draw_graphs({"": many})
    assert not figure.legends
    assert len({text.get_rotation() for text in figure.axes[0].texts}) > 5
    to_png(figure)


def test_tree_puts_nodes_on_rings_by_distance():
    # a triangle 0, 1, 2 and an edge 2 o→ 3; 0 o→ 2, so 2 is a collider and 3 is behind it
    marks = np.zeros((5, 5), np.int8)
    for i, j, at_i, at_j in [(0, 1, 1, 1), (0, 2, 1, 2), (1, 2, 1, 2), (2, 3, 2, 1)]:
        marks[j, i], marks[i, j] = at_i, at_j
    pag = PAG(marks, names=tuple("abcde"))
    tree = pag.tree(0, None)
    assert tree.distances == {0: 0, 1: 1, 2: 1, 3: 2}
    figure = draw_tree(pag, 0, max_range=None, title="tree")
    axis = figure.axes[0]
    assert {text.get_text() for text in axis.texts} == {pag.name(node) for node in tree.distances}
    places = {text.get_text(): np.array(text.xy) for text in axis.texts}
    radius = max(tree.distances.values())
    for node, distance in tree.distances.items():
        if node:
            length = np.linalg.norm(places[pag.name(node)])
            assert length == pytest.approx(distance / radius + 0.07, abs=1e-6)
    # each node other than the root has the one edge that reaches it
    assert len([line for line in axis.lines if line.get_gid()]) == len(tree.distances) - 1
    to_png(figure)


def test_tree_of_a_lonely_node():
    figure = draw_tree(PAG(np.zeros((3, 3), np.int8)), 1)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1"]
    to_png(figure)
