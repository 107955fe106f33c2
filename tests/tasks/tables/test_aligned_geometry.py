"""Centres of classes, dummy clouds, and which point goes where."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from primal_attention.tasks.tables.aligned_geometry import (
    class_means,
    match_classes,
    num_outputs,
    pair_up,
    place_centres,
)


def squared(a, b):
    return ((a[:, None] - b[None]) ** 2).sum(-1)


def three_clouds(n: int = 600, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = 3 / (1 + 2**0.5)
    labels = np.arange(n) % 3
    points = np.array([[-x, 0], [x, 0], [0, x]])[labels] + 2**0.5 * rng.normal(size=(n, 2))
    return ((points - points.mean(0)) / points.std(0))[:, None], labels


# O12: the regression test for scrambled pairs of instances and tokens
@pytest.mark.parametrize("tokens", [1, 20])
def test_matching_permutes_the_dummies_of_each_class_at_the_optimal_cost(tokens):
    rng = np.random.default_rng(0)
    labels = np.arange(44) % 2
    points = rng.normal(size=(44, tokens, 2)) + 2 * labels[:, None, None]
    centres = np.array([[0.0, 6.0], [6.0, 0.0]])
    found = match_classes(points, labels, centres, ot_batch=500)
    total = 0.0
    for c in (0, 1):
        targets = found.targets[labels == c].reshape(-1, 2)
        np.testing.assert_array_equal(
            targets[np.lexsort(targets.T)], found.dummies[c][np.lexsort(found.dummies[c].T)]
        )
        costs = squared(points[labels == c].reshape(-1, 2), found.dummies[c])
        total += costs[linear_sum_assignment(costs)].sum()
    pairs = ((points - found.targets) ** 2).sum()
    assert pairs == pytest.approx(total, rel=1e-12)
    assert found.cost == pytest.approx(total / (44 * tokens), rel=1e-12)
    scrambled = match_classes(points, labels, centres, match="random")
    assert scrambled.cost > found.cost + 0.8


def test_aligned_simplex_moves_points_least():
    points, labels = three_clouds()
    means = class_means(points, labels, 3, np.ones(len(points)))
    costs, optimality = {}, {}
    for geometry in ("aligned-simplex", "simplex", "circle"):
        found = match_classes(points, labels, place_centres(means, geometry), ot_batch=600)
        pooled = squared(points[:, 0], found.targets[:, 0])
        costs[geometry] = found.cost
        best = pooled[linear_sum_assignment(pooled)].mean()
        optimality[geometry] = (best / found.cost) ** 0.5
    # spec 08, section 6.2
    assert costs["aligned-simplex"] == pytest.approx(28.4, abs=1)
    assert costs["circle"] == pytest.approx(79.9, abs=1.5)
    assert costs["aligned-simplex"] < costs["simplex"] - 3
    assert optimality["aligned-simplex"] == pytest.approx(0.94, abs=0.02)
    assert optimality["circle"] == pytest.approx(0.89, abs=0.02)


@pytest.mark.parametrize("geometry", ["simplex", "aligned-simplex", "learned"])
@pytest.mark.parametrize(("k", "r"), [(2, 1), (3, 2), (5, 9), (10, 2)])
def test_simplex_has_equal_distances_in_any_number_of_coordinates(geometry, k, r):
    q = num_outputs(r, k, geometry)
    assert q == max(r, k - 1)
    means = np.random.default_rng(0).normal(size=(k, q))
    centres = place_centres(means, geometry)
    distances = np.linalg.norm(centres[:, None] - centres, axis=-1)[np.triu_indices(k, 1)]
    np.testing.assert_allclose(distances, 6 * (2 * k / (k - 1)) ** 0.5)
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 6)
    np.testing.assert_allclose(centres.sum(0), 0, atol=1e-9)


def test_no_exchange_of_vertices_and_no_turn_improves_the_aligned_simplex():
    rng = np.random.default_rng(0)
    means = rng.normal(size=(4, 5))
    centres = place_centres(means, "aligned-simplex")
    best = (means * centres).sum()
    for order in itertools.permutations(range(4)):
        assert (means * centres[list(order)]).sum() <= best + 1e-9
    for _ in range(50):
        turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
        assert (means * (centres @ turn)).sum() <= best + 1e-9


def test_circle_is_the_published_one():
    centres = place_centres(np.zeros((4, 3)), "circle")
    np.testing.assert_allclose(
        centres, [[0, 12, 0], [12, 0, 0], [0, -12, 0], [-12, 0, 0]], atol=1e-12
    )


def test_class_means_are_pushed_apart_and_keep_their_directions():
    means = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    centres = place_centres(means, "class-means")
    assert np.linalg.norm(centres[0] - centres[1]) == pytest.approx(6 * 3**0.5)
    np.testing.assert_allclose(centres.mean(0), means.mean(0))
    with pytest.raises(ValueError, match="same mean"):
        place_centres(np.zeros((2, 2)), "class-means")


def test_large_classes_are_matched_in_batches():
    points = np.random.default_rng(0).normal(size=(300, 1, 2))
    labels, centres = np.zeros(300, np.int64), np.zeros((1, 2))
    exact = match_classes(points, labels, centres, ot_batch=300)
    batched = match_classes(points, labels, centres, ot_batch=50)
    for found in (exact, batched):
        np.testing.assert_array_equal(
            np.sort(found.targets[:, 0, 0]), np.sort(found.dummies[0][:, 0])
        )
    random = match_classes(points, labels, centres, match="random")
    assert exact.cost < batched.cost < random.cost


def test_matching_on_a_line_sorts():
    rng = np.random.default_rng(0)
    points, cloud = rng.normal(size=(40, 1)), rng.normal(size=(40, 1))
    order = pair_up(points, cloud, 5, rng)
    costs = squared(points, cloud)
    assert costs[np.arange(40), order].sum() == pytest.approx(
        costs[linear_sum_assignment(costs)].sum()
    )


def test_whole_weights_are_copies_and_other_weights_are_nearly_so():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40, 1, 2))
    copies = np.tile([1.0, 2.0], 20)
    labels, centres = np.zeros(40, np.int64), np.zeros((1, 2))
    whole = match_classes(points, labels, centres, weights=copies)
    assert len(whole.dummies[0]) == 60
    # every dummy is used once, so the weighted mean of the targets is that of the dummies
    np.testing.assert_allclose(
        np.average(whole.targets[:, 0], 0, copies), whole.dummies[0].mean(0), atol=1e-12
    )
    other = match_classes(points, labels, centres, weights=copies + 0.5)
    np.testing.assert_allclose(
        np.average(other.targets[:, 0], 0, copies + 0.5), other.dummies[0].mean(0), atol=1e-3
    )
    assert other.cost < match_classes(points, labels, centres, match="random").cost / 2


def test_quasi_random_dummies_do_not_depend_on_the_seed_and_are_normal():
    points, labels = np.zeros((200, 1, 2)), np.zeros(200, np.int64)
    options = {"centres": np.zeros((1, 2)), "dummies": "quasi-random"}
    a, b = (match_classes(points, labels, seed=s, **options).dummies[0] for s in (0, 1))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(np.cov(a.T), np.eye(2), atol=0.1)
    np.testing.assert_allclose(a.mean(0), 0, atol=0.05)


def test_wrong_names_are_explained():
    points, labels, centres = np.zeros((2, 1, 1)), np.zeros(2, np.int64), np.zeros((1, 1))
    for options in ({"match": "best"}, {"dummies": "grid"}):
        with pytest.raises(ValueError, match="must be one of"):
            match_classes(points, labels, centres, **options)
    with pytest.raises(ValueError, match="geometry must be one of"):
        num_outputs(2, 2, "cube")
