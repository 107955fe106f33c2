"""Orientation rules one by one: where they apply, where one condition fails, and conflicts."""

import numpy as np

from primal_attention.analysis.causes import PAG
from primal_attention.analysis.causes.rules import (
    orient_arrows,
    orient_colliders,
    orient_pc,
    orient_tails,
    uncovered_path,
)

ENDS = {"o-o": (1, 1), "o→": (1, 2), "→": (3, 2), "↔": (2, 2), "-": (3, 3), "-o": (3, 1)}


def graph(n, *edges):
    marks = np.zeros((n, n), dtype=np.int8)
    for edge in edges:
        a, symbol, b = edge.split()
        marks[int(b), int(a)], marks[int(a), int(b)] = ENDS[symbol]
    return marks


def separators(n, **pairs):
    found = np.zeros((n, n, n), dtype=bool)
    for pair, given in pairs.items():
        a, b = map(int, pair[1:])
        found[a, b, given] = found[b, a, given] = True
    return found


def arrows(n, *edges, **pairs):
    return PAG(orient_arrows(graph(n, *edges), separators(n, **pairs))).edges()


def tails(n, *edges, selection=False):
    return PAG(orient_tails(graph(n, *edges), separators(n), selection_bias=selection)).edges()


def test_rule_0():
    chain = graph(3, "0 o-o 1", "1 o-o 2")
    assert PAG(orient_colliders(chain, separators(3))).edges() == ["0 o→ 1", "2 o→ 1"]
    assert PAG(orient_colliders(chain, separators(3, _02=[1]))).edges() == PAG(chain).edges()


def test_rule_1():
    assert arrows(3, "0 o→ 1", "1 o-o 2") == ["0 o→ 1", "1 → 2"]
    assert arrows(3, "0 o→ 1", "1 o-o 2", "0 o-o 2")[-1] == "1 o-o 2"


def test_rule_2():
    assert "0 o→ 2" in arrows(3, "0 → 1", "1 o→ 2", "0 o-o 2")
    assert "0 o→ 2" in arrows(3, "0 o→ 1", "1 → 2", "0 o-o 2")
    assert "0 o-o 2" in arrows(3, "0 o→ 1", "1 o→ 2", "0 o-o 2")


def test_rule_3():
    square = ["0 o→ 1", "2 o→ 1", "0 o-o 3", "2 o-o 3"]
    assert "3 o→ 1" in arrows(4, *square, "3 o-o 1")
    # 0 and 2 adjacent: nothing follows
    assert "1 o-o 3" in arrows(4, *square, "3 o-o 1", "0 o-o 2")


def test_rule_4():
    # ⟨0, 1, 2, 3⟩: 1 is a collider and a parent of 3, 0 and 3 are not adjacent
    path = ["0 o→ 1", "2 o→ 1", "1 → 3", "2 o-o 3"]
    assert arrows(4, *path, _03=[1, 2]) == ["0 o→ 1", "1 → 3", "2 o→ 1", "2 → 3"]
    assert arrows(4, *path, _03=[1]) == ["0 o→ 1", "1 ↔ 2", "1 → 3", "2 ↔ 3"]
    # 1 is not a parent of 3
    path[2] = "1 ↔ 3"
    assert "2 o-o 3" in arrows(4, *path, _03=[1, 2])
    # on ⟨0, 1, 2, 3, 4⟩, 1 is a parent of 4 but not a collider
    path = ["0 o→ 1", "1 → 2", "3 o→ 2", "1 → 4", "2 → 4", "3 o→ 4"]
    assert "3 o→ 4" in arrows(5, *path, _04=[1, 2, 3])
    path[1] = "1 ↔ 2"
    assert "3 → 4" in arrows(5, *path, _04=[1, 2, 3])


def test_rule_4_over_a_long_path():
    # 0 o→ 1 ↔ 2 ↔ … ↔ 60 ←o 61, all inner nodes parents of 62
    inner = range(1, 61)
    edges = ["0 o→ 1", *(f"{k} ↔ {k + 1}" for k in range(1, 60)), "61 o→ 60", "61 o→ 62"]
    edges += [f"{k} → 62" for k in inner]
    given = {"_062": [*inner, 61]}
    marks = graph(63, *edges)
    known = np.zeros((63, 63, 63), dtype=bool)
    known[0, 62, given["_062"]] = known[62, 0, given["_062"]] = True
    assert "61 → 62" in PAG(orient_arrows(marks, known)).edges()
    assert "61 ↔ 62" in PAG(orient_arrows(marks, separators(63))).edges()


def test_rules_5_to_7():
    square = ["0 o-o 1", "1 o-o 2", "2 o-o 3", "3 o-o 0"]
    assert tails(4, *square, selection=True) == ["0 - 1", "0 - 3", "1 - 2", "2 - 3"]
    assert tails(4, *square) == ["0 o-o 1", "0 o-o 3", "1 o-o 2", "2 o-o 3"]
    # a chord covers the path
    assert "0 o-o 1" in tails(4, *square, "0 o-o 2", selection=True)
    assert tails(3, "0 - 1", "1 o→ 2", selection=True) == ["0 - 1", "1 → 2"]  # R6
    assert tails(3, "0 -o 1", "1 o→ 2", selection=True) == ["0 -o 1", "1 → 2"]  # R7
    assert "1 o→ 2" in tails(3, "0 -o 1", "1 o→ 2", "0 o→ 2", selection=True)


def test_rule_8():
    assert "0 → 2" in tails(3, "0 → 1", "1 → 2", "0 o→ 2")
    assert "0 → 2" in tails(3, "0 -o 1", "1 → 2", "0 o→ 2")
    assert "0 o→ 2" in tails(3, "0 o→ 1", "1 → 2", "0 o→ 2")


def test_rule_9():
    # ⟨0, 1, 2, 3⟩ is uncovered, 1 and 3 are not adjacent
    path = ["0 o-o 1", "1 o-o 2", "2 o→ 3"]
    assert "0 → 3" in tails(4, *path, "0 o→ 3")
    assert "0 o→ 3" in tails(4, *path, "0 o→ 3", "0 o-o 2")
    assert "0 o→ 3" in tails(4, "1 o→ 0", "1 o-o 2", "2 o→ 3", "0 o→ 3")


def test_rule_10():
    # 1 → 4 ← 2, paths ⟨0, 1⟩ and ⟨0, 3, 2⟩
    edges = ["0 o-o 1", "0 o-o 3", "3 o-o 2", "1 → 4", "2 → 4", "0 o→ 4", "3 o→ 4"]
    assert "0 → 4" in tails(5, *edges)
    # the neighbours of 0 are adjacent, or the path is not possible, or covered
    assert "0 o→ 4" in tails(5, *edges, "1 o-o 3")
    assert "0 o→ 4" in tails(5, *(e.replace("0 o-o 3", "3 o→ 0") for e in edges))
    assert "0 o→ 4" in tails(5, *edges, "0 ↔ 2")
    # both paths end in the same parent of 4, and the other parent is not reached
    edges = ["0 o-o 1", "0 o-o 3", "3 o-o 2", "1 o-o 2", "2 → 4", "5 → 4", "0 o→ 4"]
    assert "0 o→ 4" in tails(6, *edges, "1 o→ 4", "3 o→ 4")


def test_rules_of_pc():
    y = graph(4, "0 o-o 2", "1 o-o 2", "2 o-o 3")
    known = separators(4, _03=[2], _13=[2])
    assert PAG(orient_pc(y, known)).edges() == ["0 → 2", "1 → 2", "2 → 3"]
    # 0 → 1 → 2 with 0 o-o 2: Meek's second rule avoids a cycle
    cycle = graph(5, "3 o-o 0", "4 o-o 0", "0 o-o 1", "1 o-o 2", "0 o-o 2")
    found = PAG(orient_pc(cycle, separators(5, _31=[0], _41=[0], _32=[0], _42=[0]))).edges()
    assert {"0 → 1", "0 → 2", "1 o-o 2"} <= set(found)
    # Meek's third rule
    square = graph(4, "0 o-o 1", "2 o-o 1", "0 o-o 3", "2 o-o 3", "3 o-o 1")
    found = PAG(orient_pc(square, separators(4, _02=[3]))).edges()
    assert {"0 → 1", "2 → 1", "3 → 1", "0 o-o 3", "2 o-o 3"} == set(found)


def test_contradictions_give_arrowheads_at_both_ends():
    # both ends of 1 o-o 2 would get a tail by R1; the arrowheads win
    assert arrows(4, "0 o→ 1", "3 o→ 2", "1 o-o 2") == ["0 o→ 1", "1 ↔ 2", "3 o→ 2"]


def test_paths_are_found_when_the_shortest_walk_visits_a_node_twice():
    # 0 1 2 5 is covered because 1 and 5 are adjacent; a walk around 2 3 4 6 is uncovered
    links = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 2), (2, 5), (1, 5)]
    assert uncovered(11, links, without=(1, 5)) is None
    # a path beside it, longer than the walk
    links += [(4, 7), (7, 8), (8, 9), (9, 10), (10, 5)]
    found = uncovered(11, links, without=(1, 5))
    assert found in ((0, 1, 2, k, 4, 7, 8, 9, 10, 5) for k in (3, 6))


def uncovered(n, links, *, without):
    edge = np.zeros((n, n), dtype=bool)
    for a, b in links:
        edge[a, b] = edge[b, a] = True
    step = edge.copy()
    step[without] = False
    return uncovered_path(step, ~edge & ~np.eye(n, dtype=bool), 0, 1, 5)


def test_long_uncovered_paths_need_no_recursion():
    n = 40
    edges = [f"{k} o-o {k + 1}" for k in range(n - 2)]
    found = tails(n, *edges, f"{n - 2} o→ {n - 1}", f"0 o→ {n - 1}")
    assert f"0 → {n - 1}" in found
