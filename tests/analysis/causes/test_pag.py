"""Partial ancestral graphs as text, files and trees."""

import numpy as np
import pytest
from tests.analysis.causes.graphs import connected_subsets, is_connected

from primal_attention.analysis.causes import PAG
from primal_attention.analysis.causes.marks import influence_steps

# 0 o→ 1, 1 ↔ 2, 3 → 2, 3 o-o 4, 5 - 4, 0 -o 5
MARKS = np.zeros((6, 6), dtype=np.int8)
for a, b, at_a, at_b in [
    (0, 1, 1, 2),
    (1, 2, 2, 2),
    (3, 2, 3, 2),
    (3, 4, 1, 1),
    (5, 4, 3, 3),
    (0, 5, 3, 1),
]:
    MARKS[b, a], MARKS[a, b] = at_a, at_b


def test_edges_as_text():
    pag = PAG(MARKS)
    assert pag.edges() == ["0 o→ 1", "0 -o 5", "1 ↔ 2", "3 → 2", "3 o-o 4", "4 - 5"]
    named = PAG(MARKS, names=list("abcdef"))
    assert named.edges()[2] == "b ↔ c"
    assert pag.symbol(2, 3) == "←"
    assert pag.symbol(1, 0) == "←o"
    assert pag.symbol(5, 0) == "o-"
    assert repr(PAG(np.zeros((2, 2)))) == "PAG(2 nodes: no edges)"
    assert pag.marks.dtype == np.int8
    with pytest.raises(ValueError, match="read-only"):
        pag.marks[0, 1] = 0
    with pytest.raises(ValueError, match="no edge between '0' and '2'"):
        pag.symbol(0, 2)


def test_graph_survives_json_and_other_formats():
    pag = PAG(MARKS, names=('say "a"', "b", "c", "d", "e", "f"), warnings=("copies",))
    back = PAG.from_json(pag.to_json())
    assert back == pag
    assert hash(back) == hash(pag)
    assert back.warnings == ("copies",)
    assert back != PAG(MARKS)
    assert PAG.from_json(PAG(np.zeros((0, 0))).to_json()) == PAG(np.zeros((0, 0)))
    dot = pag.to_dot()
    assert '0 [label="say \\"a\\""];' in dot
    assert "0 -> 1 [dir=both, arrowtail=odot, arrowhead=normal];" in dot
    assert "4 -> 5 [dir=both, arrowtail=none, arrowhead=none];" in dot
    graph = pag.to_networkx()
    assert graph.edges[0, 1]["mark"] == "arrow"
    assert graph.edges[1, 0]["mark"] == "circle"
    assert graph.nodes[1]["name"] == "b"


def test_possible_ancestors_follow_edges_without_contradiction():
    found = PAG(MARKS).possible_ancestors()
    assert found.diagonal().all()
    assert found[0, 1]  # 0 o→ 1
    assert not found[1, 0]
    assert not found[1, 2]  # 1 ↔ 2
    assert found[4, 2]  # 4 o-o 3 → 2
    assert not found[2, 4]
    # a tail at the far end says that the far end is the cause
    assert not found[4, 5]
    assert found[0, 5]
    assert not found[5, 0]


def chain(n):
    marks = np.zeros((n, n), dtype=np.int8)
    for k in range(n - 1):
        marks[k, k + 1] = marks[k + 1, k] = 2
    return marks


def test_trees_follow_colliders_and_triangles():
    # 0 ↔ 1 ↔ 2 ↔ 3: every inner node is a collider
    assert PAG(chain(4)).tree(0).distances == {0: 0, 1: 1, 2: 2, 3: 3}
    assert PAG(chain(4)).tree(0, max_range=2).distances == {0: 0, 1: 1, 2: 2}
    assert PAG(chain(4)).tree(0, max_range=0).distances == {0: 0}
    # a circle chain has neither colliders nor triangles
    assert PAG((chain(4) > 0).astype(int)).tree(0).distances == {0: 0, 1: 1}
    triangle = np.ones((3, 3), dtype=int) - np.eye(3, dtype=int)
    tree = PAG(triangle).tree(0, mode="all")
    assert sorted(tree.path(k) for k in range(len(tree.entries))) == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 2),
        (0, 2, 1),
    ]
    assert tree.distances == {0: 0, 1: 1, 2: 1}


def test_steps_never_turn_back():
    steps = influence_steps(chain(3))
    assert np.argwhere(steps).tolist() == [[0, 1, 2], [2, 1, 0]]


def test_connected_subsets_use_their_own_nodes():
    tree = PAG(chain(4)).tree(0)
    assert connected_subsets(tree, 1) == [(1,)]
    assert connected_subsets(tree, 2) == [(1, 2)]
    assert connected_subsets(tree, 3) == [(1, 2, 3)]
    assert not is_connected(tree, [1, 3])
    assert not is_connected(tree, [9])
    star = np.zeros((4, 4), dtype=int)
    star[0, 1:] = star[1:, 0] = 1
    assert connected_subsets(PAG(star).tree(0), 2) == [(1, 2), (1, 3), (2, 3)]


def test_all_paths_find_what_one_use_of_an_edge_hides():
    # root 0 - 1, 0 - 2, 1 - 2 (triangle), and 2 ↔ 3 with 1 *→ 2 ← 3, but 0 - 2 has no arrowhead:
    # 3 is reached over 0, 1, 2 only
    marks = np.zeros((4, 4), dtype=int)
    for i, j, at_i, at_j in [(0, 1, 1, 1), (0, 2, 1, 1), (1, 2, 1, 2), (2, 3, 2, 2)]:
        marks[j, i], marks[i, j] = at_i, at_j
    for mode in ("bfs", "all"):
        tree = PAG(marks).tree(0, mode=mode)
        assert tree.distances == {0: 0, 1: 1, 2: 1, 3: 3}
        assert is_connected(tree, [1, 2, 3])
        assert not is_connected(tree, [2, 3])
    assert len(PAG(marks).tree(0, mode="all").entries) >= len(PAG(marks).tree(0).entries)


def test_trees_do_not_depend_on_the_numbering():
    rng = np.random.default_rng(0)
    for _ in range(10):
        marks = np.triu(rng.integers(1, 4, (8, 8)) * (rng.random((8, 8)) < 0.4), 1)
        marks += (rng.integers(1, 4, (8, 8)) * (marks.T > 0)).astype(marks.dtype)
        order = rng.permutation(8)
        new = PAG(marks[np.ix_(order, order)])
        for mode in ("bfs", "all"):
            tree, other = PAG(marks).tree(int(order[0]), 3, mode), new.tree(0, 3, mode)
            assert {order[k]: d for k, d in other.distances.items()} == tree.distances
            for size in (1, 2, 3):
                assert sorted(
                    tuple(sorted(order[list(s)].tolist())) for s in connected_subsets(other, size)
                ) == (sorted(connected_subsets(tree, size)))


def test_long_and_many_paths_need_no_recursion():
    assert PAG(chain(64)).tree(0).distances[63] == 63
    full = PAG(np.ones((30, 30), dtype=int) - np.eye(30, dtype=int))
    tree = full.tree(0, mode="all")
    assert tree.is_capped
    assert len(tree.entries) == 100_000
    assert not full.tree(0).is_capped


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PAG(np.zeros((2, 3))), "square"),
        (lambda: PAG([[0, 5], [1, 0]]), "0 .none., 1 .circle."),
        (lambda: PAG([[0, 1], [0, 0]]), "both ends"),
        (lambda: PAG([[1]]), "zero diagonal"),
        (lambda: PAG(np.zeros((2, 2)), names=("a",)), "1 names for 2 nodes"),
        (lambda: PAG(MARKS).tree(6), "root must be a node from 0 to 5, got 6"),
        (lambda: PAG(MARKS).tree(0, mode="dfs"), "'bfs' or 'all', got 'dfs'"),
        (lambda: PAG(MARKS).tree(0, -1), "max_range must not be negative"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
