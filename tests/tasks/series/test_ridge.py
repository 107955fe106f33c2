"""The closed-form ridge head against refits without each case."""

from itertools import pairwise

import numpy as np
import pytest

from primal_attention.tasks.series.blend import ridge
from primal_attention.tasks.series.blend.ridge import fit_ridge

STRENGTHS = np.logspace(-5, 2, 15)


def rng():
    return np.random.default_rng(0)


def scaled(block):
    """Features whose rows have a mean square norm of one."""
    x = (block - block.mean(0, dtype=np.float64)) / block.std(0, dtype=np.float64)
    return (x / np.sqrt(block.shape[1])).astype(np.float32).astype(np.float64)


def solve(x, y, strength):
    """Weights and bias by the normal equations."""
    centre = x - x.mean(0)
    weight = np.linalg.solve(
        centre.T @ centre + strength * np.eye(x.shape[1]), centre.T @ (y - y.mean(0))
    )
    return weight, y.mean(0) - x.mean(0) @ weight


def leave_one_out(x, y, strength):
    """Answers to every case from a fit to the others."""
    found = np.empty_like(y)
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        weight, bias = solve(x[rest], y[rest], strength)
        found[i] = x[i] @ weight + bias
    return found


def best(x, y):
    """Error, answers and strength with the least leave-one-out error."""
    runs = [(leave_one_out(x, y, s), s) for s in STRENGTHS]
    return min(((np.mean((a - y) ** 2), a, s) for a, s in runs), key=lambda run: run[0])


def cases(n, p, noise=0.3, seed=0):
    draw = np.random.default_rng(seed)
    block = (3 + draw.normal(size=(n, p)) * draw.uniform(0.1, 9, p)).astype(np.float32)
    y = scaled(block) @ draw.normal(size=(p, 2)) + noise * draw.normal(size=(n, 2))
    return block, y + np.array([0, 50])


@pytest.mark.parametrize(("n", "p"), [(12, 4), (9, 9), (8, 30), (2, 5), (2, 1)])
def test_answers_and_weights_are_those_of_naive_refits(n, p):
    block, y = cases(n, p)
    found = fit_ridge([block], y, rng())
    error, answers, strength = best(scaled(block), y)
    assert found.error == pytest.approx(error, rel=1e-4)
    np.testing.assert_allclose(found.held_out, answers, rtol=1e-4, atol=1e-4)
    weight, bias = solve(scaled(block), y, strength)
    (own,) = found.weights
    np.testing.assert_allclose(
        block @ own + found.bias, scaled(block) @ weight + bias, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("n", [12, 40])
@pytest.mark.parametrize("p", [3, 30])
def test_the_mixture_of_two_blocks_is_the_naive_best(n, p):
    (first, y), (second, z) = cases(n, 3, seed=1), cases(n, p, seed=2)
    y = 2 * y + z
    shares = (0, 0.25, 0.5, 0.75, 1)
    errors = [
        best(np.hstack([(1 - s) ** 0.5 * scaled(first), s**0.5 * scaled(second)]), y)[0]
        for s in shares
    ]
    assert min(errors) < 0.95 * min(errors[0], errors[-1])  # both blocks are needed
    found = fit_ridge([first, second], y, rng())
    # of nearly equal mixtures the first is taken
    assert found.error <= 1.0011 * min(errors)
    assert found.error == pytest.approx(np.mean((found.held_out - y) ** 2))
    answers = first @ found.weights[0] + second @ found.weights[1] + found.bias
    assert np.mean((answers - y) ** 2) < found.error


@pytest.mark.parametrize("known", [0, 1])
def test_a_block_without_a_share_has_no_weights(known):
    blocks = [cases(30, 3, seed=s)[0] for s in (1, 2)]
    y = scaled(blocks[known]) @ np.array([[1.0], [2.0], [-1.0]])
    found = fit_ridge(blocks, y, rng())
    assert found.weights[1 - known] is None
    np.testing.assert_allclose(blocks[known] @ found.weights[known] + found.bias, y, atol=1e-3)


@pytest.mark.parametrize("n", [20, 5])
def test_constant_features_have_no_weight(n):
    block, y = cases(n, 6)
    runs = []
    for value in (0.0, 7.5, -3e4):
        full = np.hstack([block, np.full((n, 1), value, np.float32)])
        runs.append(fit_ridge([full], y, rng()))
        assert not runs[-1].weights[0][-1].any()
    for a, b in pairwise(runs):
        np.testing.assert_allclose(a.weights[0], b.weights[0])
        np.testing.assert_allclose(a.bias, b.bias)


@pytest.mark.parametrize("p", [3, 30])
def test_without_any_feature_the_answer_is_the_mean_of_the_others(p):
    y = np.arange(10.0)[:, None] ** 2
    found = fit_ridge([np.ones((10, p), np.float32)], y, rng())
    np.testing.assert_allclose(found.held_out, (y.sum() - y) / 9)
    np.testing.assert_allclose(found.bias, y.mean(0))


def test_many_cases_are_solved_with_all_features_or_with_some(monkeypatch):
    (block, y), (other, z) = cases(40, 12), cases(40, 3, seed=1)
    whole = fit_ridge([block, other], y + z, rng())
    monkeypatch.setattr(ridge, "_MOST_CASES", 39)
    same = fit_ridge([block, other], y + z, rng())
    assert same.error == pytest.approx(whole.error)
    for a, b in zip(same.weights, whole.weights, strict=True):
        np.testing.assert_allclose(a, b)
    monkeypatch.setattr(ridge, "_MOST_FEATURES", 5)
    few = fit_ridge([block], y, rng())
    used = few.weights[0].any(1)
    assert used.sum() == 5
    monkeypatch.undo()
    alone = fit_ridge([block[:, used]], y, rng())
    np.testing.assert_allclose(few.weights[0][used], alone.weights[0])
    np.testing.assert_allclose(few.held_out, alone.held_out)


def test_a_sample_of_the_cases_chooses_the_mixture(monkeypatch):
    blocks = [cases(60, 3, seed=s)[0] for s in (1, 2)]
    y = scaled(blocks[1]) @ np.ones((3, 1))
    monkeypatch.setattr(ridge, "_PROBED", 15)
    found = fit_ridge(blocks, y, rng())
    assert found.weights[0] is None
    assert len(found.held_out) == 60


def test_the_shortest_time_still_gives_a_fit():
    block, y = cases(300, 400)
    hurried = fit_ridge([block, block**2], y, rng(), seconds=1e-9)
    assert sum(w.any(1).sum() for w in hurried.weights if w is not None) <= 100
    assert fit_ridge([block, block**2], y, rng()).error < hurried.error < y.var(0).mean() * 1.1
