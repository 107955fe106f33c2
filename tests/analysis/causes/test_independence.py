"""Partial correlations agree in all forms, never fail, and vanish where a graph separates."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from tests.analysis.causes.graphs import powerset, random_dag, random_sem, recursive_correlation
from tests.analysis.causes.oracle import GraphOracleTest

from primal_attention.analysis.causes import (
    PAG,
    BootstrapTest,
    CallableTest,
    IndependenceTest,
    PartialCorrelationTest,
    discover,
    inverse_correlations,
    learn_pag,
    tau,
)
from primal_attention.analysis.causes.independence import p_values


def correlation(rng, n, width=40):
    return np.corrcoef(rng.normal(size=(n, n)) @ rng.normal(size=(n, width)))


def test_partial_correlations_vanish_exactly_where_the_graph_separates():  # T3
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(0)
    largest, smallest = 0.0, 1.0
    for _ in range(20):
        edges, attention = random_sem(rng, 7)
        dag = networkx.DiGraph(edges)
        dag.add_nodes_from(range(7))
        test = PartialCorrelationTest(attention @ attention.T, tau=1e-8)
        oracle = GraphOracleTest(edges, range(7))
        for i, j in combinations(range(7), 2):
            for given in powerset(set(range(7)) - {i, j}):
                if len(given) > 3:
                    continue
                separated = networkx.is_d_separator(dag, {i}, {j}, set(given))
                assert oracle.is_independent(i, j, given) == separated
                sets = np.array([given], dtype=int).reshape(1, -1)
                rho = abs(float(test.evaluate(i, j, sets).rho[0]))
                if separated:
                    largest = max(largest, rho)
                else:
                    smallest = min(smallest, rho)
    assert largest < 1e-10
    assert smallest > 1e-6


def test_three_formulas_agree_with_the_fast_one():  # T4
    corr = correlation(np.random.default_rng(1), 7)
    test = PartialCorrelationTest(corr, tau=0.1)
    for size in range(6):
        sets = np.array([list(s) for s in combinations(range(2, 7), size)], dtype=int)
        fast = test.evaluate(0, 1, sets)
        inverse, ridged = inverse_correlations(corr, 0, 1, sets)
        slow = [recursive_correlation(corr, 0, 1, given) for given in sets.tolist()]
        np.testing.assert_allclose(fast.rho, slow, atol=1e-10)
        np.testing.assert_allclose(inverse, slow, atol=1e-10)
        assert not ridged.any()
        assert not fast.ridged.any()
    precision = np.linalg.inv(corr)
    full = -precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1])
    np.testing.assert_allclose(full, slow[0], atol=1e-10)
    # an independent definition: residuals of a regression
    rows = np.linalg.cholesky(corr)
    residual = rows[:2] - rows[:2] @ np.linalg.pinv(rows[2:]) @ rows[2:]
    direct = residual[0] @ residual[1] / np.linalg.norm(residual[0]) / np.linalg.norm(residual[1])
    np.testing.assert_allclose(direct, slow[0], atol=1e-10)


@pytest.mark.parametrize(
    ("m", "alpha", "threshold"),
    [
        (768, 0.01, 0.093),
        (384, 0.01, 0.131),
        (64, 0.01, 0.318),
        (128, 1e-5, 0.376),
        (50, 0.01, 0.359),
    ],
)
def test_thresholds_of_published_settings(m, alpha, threshold):  # T5
    assert tau(alpha, m) == pytest.approx(threshold, abs=5e-4)
    for size in range(4):
        z = math.atanh(tau(alpha, m, size)) * math.sqrt(m - size - 3)
        assert math.erfc(z / math.sqrt(2)) == pytest.approx(alpha, rel=1e-9)
    assert tau(alpha, m, 3) == pytest.approx(tau(alpha, m - 3), rel=1e-12)


def test_p_values_decide_like_the_threshold():
    stats = pytest.importorskip("scipy.stats")
    corr = correlation(np.random.default_rng(2), 8, width=30)
    found = discover(PartialCorrelationTest(corr, 30, 0.05), 8)
    table = found.tests
    z = np.arctanh(table.rho) * np.sqrt(30 - (table.given >= 0).sum(1) - 3)
    np.testing.assert_allclose(table.p, 2 * stats.norm.sf(np.abs(z)), rtol=1e-9)
    np.testing.assert_array_equal(table.p > 0.05, table.independent)
    assert table.independent.any()
    assert not table.independent.all()
    assert p_values(np.array([0.5]), np.array([0.0]), 0.05)[0] == 0


def test_copies_of_a_token_give_a_warning_and_finite_numbers():  # T13
    rng = np.random.default_rng(3)
    rows = rng.random((6, 6))
    rows[4] = 2 * rows[1]
    for dtype in (np.float32, np.float64):
        found = discover(PartialCorrelationTest((rows @ rows.T).astype(dtype), 64), 6)
        assert np.isfinite(found.tests.rho).all()
        assert np.isfinite(found.tests.p).all()
        assert "1 and 4" in found.warnings[0]
        assert "ridge" in found.warnings[1]
    single = PartialCorrelationTest(torch.tensor(rows[:4] @ rows[:4].T, dtype=torch.float32), 64)
    assert single.corr.dtype == np.float64
    assert single.warnings == ()
    assert learn_pag(rows @ rows.T, m=64).warnings == found.warnings


def test_ridge_where_and_only_where_the_part_is_singular():
    # node 3 is a sum of 0, 1 and 2; no smaller part is singular
    mixing = np.vstack([np.eye(4)[:3], [1, 1, 1, 0], [0, 0.5, 0, 1]])
    test = PartialCorrelationTest(mixing @ mixing.T, tau=0.1)
    sets = np.array([[2, 4], [2, 3]])
    outcomes = test.evaluate(0, 1, sets)
    assert outcomes.ridged.tolist() == [False, True]
    # the ridge on the correlation matrix, inverted in extended precision by hand
    part = [2, 3, 0, 1]
    matrix = test.corr[np.ix_(part, part)] + 1e-8 * np.eye(4)
    precision = np.linalg.inv(matrix)
    wanted = -precision[2, 3] / math.sqrt(precision[2, 2] * precision[3, 3])
    assert outcomes.rho[1] == pytest.approx(wanted, abs=1e-6)


def test_copies_within_the_set_count_once():
    rng = np.random.default_rng(8)
    rows = rng.normal(size=(4, 5))
    rows[3] = rows[2]
    test = PartialCorrelationTest(rows @ rows.T, tau=0.1)
    twice, once = (test.evaluate(0, 1, np.array([given])) for given in ([2, 3], [2]))
    assert twice.ridged.tolist() == [True]
    assert once.ridged.tolist() == [False]
    np.testing.assert_allclose(twice.rho, once.rho, atol=1e-6)


def test_matrices_that_no_data_have_give_finite_numbers():
    matrix = np.array([[1, 0.9, -0.9], [0.9, 1, 0.9], [-0.9, 0.9, 1]])
    for corr in (matrix, np.ones((5, 5)), -np.ones((3, 3)) + 2 * np.eye(3)):
        n = len(corr)
        found = discover(PartialCorrelationTest(corr, 100), n, max_cond=n)
        assert np.isfinite(found.tests.rho).all()
        assert (np.abs(found.tests.rho) <= 1).all()
        assert found.warnings


def test_nearly_parallel_rows_are_computed_without_a_ridge():
    # condition number about 1e9, far from 1e12: the digits must survive
    rng = np.random.default_rng(4)
    rows = 1 + 3e-5 * rng.normal(size=(12, 12))
    corr = rows @ rows.T
    test = PartialCorrelationTest(corr, tau=0.1)
    sets = np.array(list(combinations(range(2, 12), 2)))
    outcomes = test.evaluate(0, 1, sets)
    assert not outcomes.ridged.any()
    slow = [recursive_correlation(test.corr, 0, 1, given) for given in sets.tolist()]
    np.testing.assert_allclose(outcomes.rho, slow, atol=1e-5)


def test_too_few_samples_end_the_search():
    corr = correlation(np.random.default_rng(5), 5)
    found = discover(PartialCorrelationTest(corr, 5, 0.999), 5, max_cond=3)
    assert found.tests.given.shape[1] <= 1
    nothing = discover(PartialCorrelationTest(corr, 3), 5)
    assert nothing.num_tests == 0
    assert nothing.pag.adjacency().sum() == 20
    assert tau(0.01, 3) == 0.0


def test_resampled_columns_give_thresholds():
    rng = np.random.default_rng(6)
    attention = np.array([[1, 0, 0, 0], [0.7, 0.3, 0, 0], [0.4, 0.2, 0.4, 0], [0, 0, 0, 1.0]])
    values = rng.normal(size=(4, 1000))
    test = BootstrapTest(values, attention, seed=1)
    for given, pair in (((), (0, 1)), ((1,), (0, 2)), ((), (2, 3))):
        sets = np.array([given], dtype=int).reshape(1, -1)
        threshold = float(test.evaluate(*pair, sets).tau[0])
        # a Gaussian sample of this size has the spread that theory says
        assert threshold == pytest.approx(tau(0.01, 1000, len(given)), rel=0.25)
    found = discover(test, 4)
    assert found.pag.edges() == ["0 o-o 1", "1 o-o 2"]
    assert (found.tests.p < 0.01).sum() == (~found.tests.independent).sum()
    again = BootstrapTest(torch.tensor(values), torch.tensor(attention), seed=1)
    np.testing.assert_array_equal(discover(again, 4).tests.tau, found.tests.tau)


def test_functions_serve_as_tests():
    calls = []

    def decide(i, j, given):
        calls.append((i, j, given))
        return False

    assert discover(decide, 3).pag.edges() == ["0 o-o 1", "0 o-o 2", "1 o-o 2"]
    assert (0, 1, ()) in calls
    assert (0, 1, (2,)) in calls
    for test in (CallableTest(decide, 3), GraphOracleTest([], [0]), BootstrapTest(np.eye(4))):
        assert isinstance(test, IndependenceTest)


def test_oracle_knows_hidden_and_selected_nodes():
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(7)
    for _ in range(20):
        edges, observed = random_dag(rng, 7, density=0.4, hidden=2)
        dag = networkx.DiGraph(edges)
        dag.add_nodes_from(range(7))
        hidden, selected = GraphOracleTest(edges, range(observed)), [6]
        chosen = GraphOracleTest(edges, range(observed), selected=selected)
        for i, j in combinations(range(observed), 2):
            for s in powerset(set(range(observed)) - {i, j}):
                wanted = networkx.is_d_separator(dag, {i}, {j}, set(s))
                assert hidden.is_independent(i, j, s) == wanted
                wanted = networkx.is_d_separator(dag, {i}, {j}, {*s, *selected})
                assert chosen.is_independent(i, j, s) == wanted


def test_oracle_of_a_graph_without_circles():
    test = GraphOracleTest.from_mag(PAG([[0, 2, 0, 0], [3, 0, 2, 0], [0, 2, 0, 3], [0, 0, 3, 0]]))
    assert not test.is_independent(0, 1)  # 0 → 1
    assert test.is_independent(0, 2)  # 0 → 1 ↔ 2
    assert not test.is_independent(0, 2, [1])
    assert not test.is_independent(2, 3)  # 2 - 3
    assert test.is_independent(1, 3, [2])
    with pytest.raises(ValueError, match="circles"):
        GraphOracleTest.from_mag(PAG([[0, 1], [1, 0]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PartialCorrelationTest(np.eye(3)), "needs m and alpha, or tau"),
        (lambda: PartialCorrelationTest(np.eye(3), 10, 0.1, tau=0.1), "alpha or tau, not both"),
        (
            lambda: PartialCorrelationTest(np.eye(3), tau=1.5),
            "tau must be between 0 and 1, got 1.5",
        ),
        (lambda: PartialCorrelationTest(np.eye(3), 10, 1.5), "alpha must be between 0 and 1"),
        (lambda: PartialCorrelationTest(np.ones((2, 3)), 10), "square"),
        (lambda: PartialCorrelationTest(np.full((2, 2), np.nan), 10), "NaN"),
        (lambda: PartialCorrelationTest(np.diag([1.0, 0.0]), 10), "node 1 has 0.0"),
        (lambda: BootstrapTest(np.ones((3, 2))), "at least 4 columns"),
        (lambda: BootstrapTest(np.eye(5), replicates=1), "at least 2"),
        (lambda: GraphOracleTest([(0, 1), (1, 0)], [0, 1]), "cycle"),
        (lambda: GraphOracleTest([], [0, 0]), "distinct"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
