"""Structure searches find the true graph, whatever the numbering, and stop at their budget."""

import numpy as np
import pytest
from tests.analysis.causes.graphs import (
    covariance,
    dag_to_mag,
    is_connected,
    random_dag,
    random_sem,
    skeleton,
    statements,
    true_pag,
)
from tests.analysis.causes.oracle import GraphOracleTest

from primal_attention.analysis.causes import (
    PAG,
    PartialCorrelationTest,
    discover,
    learn_pag,
)
from primal_attention.analysis.causes.candidates import (
    InfluenceCandidates,
    TooManySetsError,
    influence_reach,
    subsets,
)

ALGORITHMS = ("pc", "fci", "icd", "ordered-icd")

# nodes, of which the first are observed; edges; the graph
FIXED = {
    "L1": (5, 4, "01.6 41.7 42.7 32.6", ["0 o→ 1", "1 ↔ 2", "3 o→ 2"]),
    "chain": (3, 3, "01.6 12.6", ["0 o-o 1", "1 o-o 2"]),
    "Y": (4, 4, "02.6 12.6 23.6", ["0 o→ 2", "1 o→ 2", "2 → 3"]),
    "confounded triple": (
        *(5, 4, "01.6 41.7 42.7 13.6 23.6"),
        ["0 o→ 1", "1 → 3", "2 o→ 1", "2 → 3"],
    ),
    "instrument": (4, 3, "01.6 12.5 31.7 32.7", ["0 o-o 1", "0 o-o 2", "1 o-o 2"]),
}


def sem(edges):
    return [(int(edge[0]), int(edge[1]), float(edge[2:])) for edge in edges.split()]


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("algorithm", ["icd", "fci"])
def test_fixed_cases(case, algorithm):  # T8
    total, observed, edges, wanted = FIXED[case]
    pag = learn_pag(covariance(sem(edges), total, observed), tau=1e-9, algorithm=algorithm)
    assert pag.edges() == wanted
    oracle = GraphOracleTest([(a, b) for a, b, _ in sem(edges)], range(observed))
    assert discover(oracle, observed, algorithm=algorithm).pag == pag


@pytest.mark.parametrize("algorithm", ["ordered-icd", "fci"])
def test_order_never_plants_a_tail(algorithm):  # T8, tier
    # X 0, Z 1, Q 2, Y 3, hidden U 4; "Y is last" is all that is known
    matrix = covariance(sem("01.6 03.5 41.7 43.7 12.6 23.5"), 5, 4)
    pag = learn_pag(matrix, tau=1e-9, algorithm=algorithm, order=[0, 0, 0, 1])
    assert "1 o→ 3" in pag.edges()
    # an order alone, on a complete graph, gives arrowheads and circles only
    full = discover(lambda i, j, given: False, 4, algorithm=algorithm, order=[0, 1, 1, 2]).pag
    assert full.edges() == ["0 o→ 1", "0 o→ 2", "0 o→ 3", "1 o-o 2", "1 o→ 3", "2 o→ 3"]


def test_order_is_the_place_of_each_node():
    matrix = covariance(sem("01.6 12.6"), 3, 3)
    assert learn_pag(matrix, tau=1e-9, algorithm="ordered-icd").edges() == ["0 o→ 1", "1 → 2"]
    backward = learn_pag(matrix, tau=1e-9, algorithm="ordered-icd", order=[2, 1, 0])
    assert backward.edges() == ["1 → 0", "2 o→ 1"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_population_correlations_give_the_skeleton(algorithm):  # T6
    rng = np.random.default_rng(0)
    for _ in range(30):
        edges, attention = random_sem(rng, 8)
        found = discover(
            PartialCorrelationTest(attention @ attention.T, tau=1e-6),
            8,
            algorithm=algorithm,
            max_cond=6,
        )
        np.testing.assert_array_equal(found.pag.adjacency(), skeleton(edges, 8))
        assert found.is_complete
        assert found.warnings == ()


def test_brute_force_graph_has_the_independences_of_the_dag():
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(1)
    for _ in range(20):
        edges, observed = random_dag(rng, 7, density=0.4, hidden=2)
        dag = networkx.DiGraph(edges)
        dag.add_nodes_from(range(7))
        mag = dag_to_mag(edges, observed)
        for (i, j, given), separated in statements(mag).items():
            assert networkx.is_d_separator(dag, {i}, {j}, set(given)) == separated


def check_oracle(rng, graphs, observed, density):
    for k in range(graphs):
        hidden = 1 + k % 2
        edges, n = random_dag(rng, observed + hidden, density=density, hidden=hidden)
        mag, oracle = dag_to_mag(edges, n), GraphOracleTest(edges, range(n))
        truth, ordered = true_pag(mag), true_pag(mag, places=range(n))
        for algorithm, order, wanted in (
            ("icd", None, truth),
            ("fci", None, truth),
            ("ordered-icd", None, ordered),
            ("fci", list(range(n)), ordered),
        ):
            found = discover(oracle, n, algorithm=algorithm, order=order, max_cond=n).pag
            assert found == PAG(wanted), (edges, algorithm, order)


@pytest.mark.parametrize(("observed", "density"), [(4, 0.5), (5, 0.35)])
def test_oracle_gives_the_graph_of_the_true_mag(observed, density):  # T7
    check_oracle(np.random.default_rng(2), 200 if observed == 4 else 60, observed, density)


@pytest.mark.slow
@pytest.mark.parametrize(("observed", "density"), [(5, 0.55), (6, 0.3)])
def test_oracle_gives_the_graph_of_larger_mags(observed, density):  # T7
    check_oracle(np.random.default_rng(3), 200 if observed == 5 else 60, observed, density)


HIDDEN_PAIRS = [(6, 1), (6, 2), (7, 3), (7, 4), (8, 0), (8, 5), (9, 1), (9, 5)]

# Each graph needs the rule: without it, a mark is missing. Selected nodes are the last ones.
RULES = {
    "R2": ([(0, 1), (5, 1), (5, 6), (1, 2), (6, 3), (2, 3), (6, 4)], 5, []),
    "R3": ([(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)], 4, []),
    "R4": ([(0, 2), (1, 2), (0, 3), (2, 3)], 4, []),
    "R5": ([(1, 2), (0, 3), (1, 5), (0, 5), (3, 6), (2, 6)], 4, [5, 6]),
    "R6": ([(0, 2), (1, 2), (0, 3), (2, 4), (3, 5), (4, 5)], 5, [5]),
    "R9": ([(0, 1), (0, 2), (1, 3), (2, 3)], 4, []),
    "R9 with selection": ([(4, 2), (0, 2), (0, 3), (1, 3), (1, 5), (2, 5)], 4, [5]),
    # these need sets that are not among the neighbours of either end
    "possible-d-sep": ([(1, 4), (2, 3), (5, 0), (3, 0), *HIDDEN_PAIRS], 6, []),
    "R10": ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 4), (2, 4), (3, 4)], 5, []),
}


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("algorithm", ["icd", "fci"])
def test_graphs_that_need_a_rule(case, algorithm):  # T7
    edges, n, selected = RULES[case]
    found = discover(
        GraphOracleTest(edges, range(n), selected=selected),
        n,
        algorithm=algorithm,
        max_cond=n,
        selection_bias=bool(selected),
    ).pag
    truth = true_pag(dag_to_mag(edges, n, selected), selection=bool(selected))
    assert found == PAG(truth)


def test_selected_nodes_give_the_true_graph():
    rng = np.random.default_rng(4)
    undirected = 0
    for k in range(60):
        edges, n = random_dag(rng, 4 + k % 2, density=0.35, hidden=k % 2)
        selected = list(range(4 + k % 2, 6 + k % 2))
        for node in selected:
            edges += [(int(p), node) for p in rng.choice(n, 2, replace=False)]
        truth = PAG(true_pag(dag_to_mag(edges, n, selected), selection=True))
        undirected += " - " in " ".join(truth.edges())
        oracle = GraphOracleTest(edges, range(n), selected=selected)
        for algorithm in ("icd", "fci"):
            found = discover(oracle, n, algorithm=algorithm, max_cond=n, selection_bias=True)
            assert found.pag == truth, (edges, selected, algorithm)
    assert undirected > 0


def noisy_attention(rng, n, shared=0.8):
    attention = np.exp(2 * rng.normal(size=(n, n)))
    attention /= attention.sum(1, keepdims=True)
    # rows almost parallel, as behind an attention sink
    return (1 - shared) * attention + shared * attention.mean(0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_relabelling_permutes_the_graph(algorithm):  # T9
    rng = np.random.default_rng(5)
    for n in (8, 16):
        attention = noisy_attention(rng, n)
        corr = attention @ attention.T
        places = rng.permutation(n) if algorithm == "ordered-icd" else None
        found = discover(PartialCorrelationTest(corr, 64), n, algorithm=algorithm, order=places)
        edges = found.pag.adjacency().sum() // 2
        assert 0 < edges < n * (n - 1) // 2
        for _ in range(3):
            order = rng.permutation(n)
            again = discover(
                PartialCorrelationTest(corr[np.ix_(order, order)], 64),
                n,
                algorithm=algorithm,
                order=None if places is None else places[order],
            )
            np.testing.assert_array_equal(again.pag.marks, found.pag.marks[np.ix_(order, order)])
            assert again.num_tests == found.num_tests


def test_same_input_gives_the_same_tests():
    attention = noisy_attention(np.random.default_rng(6), 12)
    first, second = (
        discover(PartialCorrelationTest(attention @ attention.T, 64), 12) for _ in "ab"
    )
    assert first.pag == second.pag
    assert first.sepsets == second.sepsets
    assert first.tests.rows() == second.tests.rows()


def test_isolated_node_changes_nothing():  # T16
    attention = noisy_attention(np.random.default_rng(7), 9)
    wider = np.eye(10)
    wider[:9, :9] = attention
    for algorithm in ALGORITHMS:
        alone = learn_pag(attention @ attention.T, m=64, algorithm=algorithm)
        beside = learn_pag(wider @ wider.T, m=64, algorithm=algorithm)
        np.testing.assert_array_equal(beside.marks[:9, :9], alone.marks)
        assert not beside.marks[9].any()


def test_every_missing_edge_has_its_test():
    attention = noisy_attention(np.random.default_rng(8), 10)
    found = discover(PartialCorrelationTest(attention @ attention.T, 64), 10)
    rows = {(i, j, s): decision for i, j, s, _, _, decision in found.tests.rows()}
    missing = {(i, j) for i in range(10) for j in range(i + 1, 10) if not found.pag.marks[i, j]}
    assert set(found.sepsets) == missing
    assert all(rows[i, j, s] for (i, j), s in found.sepsets.items())
    # exactly the deciding tests found independence
    assert sum(rows.values()) == len(missing)
    assert len(rows) == len(found.tests.rho) == found.num_tests
    assert found.tests.given.shape[1] <= 3


def test_icd_conditions_on_near_possible_causes_only():
    """Every set obeys the conditions, by the tree of the graph of the round before."""
    rng = np.random.default_rng(9)
    attention = noisy_attention(rng, 9)
    test = PartialCorrelationTest(attention @ attention.T, 200)
    tables = [discover(test, 9, max_cond=r) for r in range(4)]
    for size in (1, 2, 3):
        # the arrowheads of the round before; its tails come from rules that end a search
        before = tables[size - 1].pag
        ancestors = before.possible_ancestors()
        rows = [(i, j, s) for i, j, s, *_ in tables[size].tests.rows() if len(s) == size]
        assert rows
        for i, j, given in rows:
            assert all(ancestors[v, i] or ancestors[v, j] for v in given)
            assert any(is_connected(before.tree(root, size, "all"), given) for root in (i, j))


def test_sets_follow_long_paths():
    # 0 ↔ 1 ↔ 2 ↔ 3 ↔ 4, and 5 as the other end: 3 is reached over 1 and 2
    marks = np.zeros((6, 6), dtype=np.int8)
    for k in range(4):
        marks[k, k + 1] = marks[k + 1, k] = 2
    reach = influence_reach(marks)
    assert reach[0, :5].tolist() == [False, True, True, True, True]
    assert not reach[:, 5].any()
    allowed = np.array([False, True, True, True, True, False])
    found = InfluenceCandidates(marks)._around(0, allowed, 3)
    assert found.sets.tolist() == [[1, 2, 3]]
    assert found.distance.tolist() == [1 + 2 + 3]


def test_budget_keeps_the_last_finished_round():
    attention = noisy_attention(np.random.default_rng(10), 12)
    test = PartialCorrelationTest(attention @ attention.T, 128)
    rounds = [discover(test, 12, max_cond=r) for r in range(3)]
    assert rounds[0].num_tests == 66
    stopped = discover(test, 12, max_cond=2, max_tests=rounds[1].num_tests + 1)
    assert not stopped.is_complete
    assert stopped.pag == rounds[1].pag
    assert len(stopped.tests.rho) == rounds[1].num_tests
    assert "budget of" in stopped.warnings[-1]
    assert stopped.pag.warnings == stopped.warnings
    for algorithm in ALGORITHMS:
        nothing = discover(test, 12, algorithm=algorithm, max_tests=5)
        assert nothing.pag.adjacency().sum() == 132


def test_more_sets_than_memory_end_the_search():
    found = discover(lambda i, j, given: False, 60, max_cond=5, max_tests=10, algorithm="pc")
    assert not found.is_complete
    with pytest.raises(TooManySetsError):
        subsets(np.arange(60), 6)


def test_default_size_of_sets_follows_the_number_of_nodes():
    for n, limit in ((20, 3), (21, 2)):
        found = discover(PartialCorrelationTest(np.eye(n), 64), n)
        assert found.settings["max_cond"] == limit
    assert found.settings["algorithm"] == "icd"
    assert found.settings["order"] is None


def test_degenerate_numbers_of_nodes():
    for n in (0, 1):
        assert learn_pag(np.eye(n), m=10).edges() == []
    names = learn_pag([[1, 0.9], [0.9, 1]], m=50, names=["a", "b"])
    assert names.edges() == ["a o-o b"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learn_pag(np.eye(3), m=9, algorithm="ges"), "'icd', 'ordered-icd', 'fci' or 'pc'"),
        (lambda: learn_pag(np.eye(3), m=9, order=[0, 1, 2]), "take 'ordered-icd' or 'fci'"),
        (lambda: learn_pag(np.eye(3), m=9, algorithm="fci", order=[0, 1]), "3 whole numbers"),
        (lambda: discover(PartialCorrelationTest(np.eye(3), 9), 4), "has 3 nodes, but n is 4"),
        (lambda: learn_pag(np.eye(3), m=9, max_cond=-1), "max_cond must not be negative, got -1"),
        (lambda: learn_pag(np.eye(3), m=9, names=["a"]), "1 names for 3 nodes"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def f1(found, true):
    return 2 * (found & true).sum() / max(found.sum() + true.sum(), 1)


@pytest.mark.slow
def test_finite_thresholds_recover_the_published_share_of_edges():  # §6.3
    rng = np.random.default_rng(11)
    sems = [random_sem(rng, 8) for _ in range(100)]
    for m, exact, sampled in (
        (50, 0.64, 0.63),
        (64, 0.73, 0.71),
        (128, 0.80, 0.79),
        (384, 0.92, 0.90),
        (768, 0.96, 0.95),
        (2048, 0.95, 0.94),
    ):
        scores = []
        for edges, attention in sems:
            output = attention @ rng.normal(size=(8, m))
            for corr in (attention @ attention.T, np.cov(output)):
                found = discover(PartialCorrelationTest(corr, m), 8, max_cond=6).pag
                scores.append(f1(found.adjacency(), skeleton(edges, 8)))
        assert np.mean(scores[::2]) == pytest.approx(exact, abs=0.09)
        assert np.mean(scores[1::2]) == pytest.approx(sampled, abs=0.09)


@pytest.mark.slow
def test_numbers_of_tests_are_near_the_published_ones():  # §6.3
    rng = np.random.default_rng(12)
    sems = [random_sem(rng, 8) for _ in range(100)]
    for algorithm, wanted in (("pc", 140), ("icd", 122), ("fci", 235)):
        counts = [
            discover(
                PartialCorrelationTest(a @ a.T, tau=1e-6), 8, algorithm=algorithm, max_cond=6
            ).num_tests
            for _, a in sems
        ]
        assert np.mean(counts) == pytest.approx(wanted, rel=0.15)
