"""The quantile part against aeon's transform and a plain loop over trees."""

import warnings

import numpy as np
import pytest
from aeon.transformations.collection.interval_based import QUANTTransformer
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

from primal_attention.tasks.series.blend import quantiles
from primal_attention.tasks.series.blend.quantiles import Quantiles, quantile_features


def series(*shape):
    return np.random.default_rng(0).normal(size=shape).cumsum(-1).astype(np.float32)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # aeon's
@pytest.mark.parametrize("shape", [(3, 1, 16), (5, 1, 63), (2, 1, 300), (3, 2, 37), (2, 5, 100)])
@pytest.mark.parametrize("divisor", [4, 1, 9, 1000])
def test_features_are_those_of_aeon(shape, divisor):
    x = series(*shape)
    expected = QUANTTransformer(quantile_divisor=divisor).fit_transform(x)
    found = quantile_features(x, divisor)
    assert found.shape == expected.shape
    # in another order, which is the same for every case: so a sum over cases has it too
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-5, atol=1e-5)
    weight = np.random.default_rng(1).normal(size=len(x))
    np.testing.assert_allclose(
        np.sort(weight @ found), np.sort(weight @ expected), rtol=1e-4, atol=1e-4
    )


def test_long_series_and_many_channels_have_fewer_quantiles(monkeypatch):
    def count(*shape):
        return quantiles._features(np.zeros((1, *shape), np.float32)).shape[1]

    assert count(1, 20_000) < 10_000
    assert count(20, 200) < 15_000
    # with very many channels about one a channel and interval is left
    fewest = quantile_features(np.zeros((1, 200, 100), np.float32), 1000).shape[1]
    assert fewest <= count(200, 100) < 1.05 * fewest
    whole = quantiles._features(series(7, 2, 50))
    monkeypatch.setattr(quantiles, "_AT_ONCE", 200)  # two series at once
    np.testing.assert_array_equal(quantiles._features(series(7, 2, 50)), whole)


@pytest.mark.parametrize("kind", [ExtraTreesClassifier, ExtraTreesRegressor])
@pytest.mark.parametrize("trees", [2, 30])
def test_answers_out_of_bag_are_those_of_trees_without_the_case(kind, trees):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 3
    forest = kind(trees, bootstrap=True, random_state=0).fit(x, y)
    answer = "predict_proba" if kind is ExtraTreesClassifier else "predict"
    pairs = list(zip(forest.estimators_, forest.estimators_samples_, strict=True))
    held = [
        [np.atleast_1d(getattr(t, answer)(x[[i]])[0]) for t, sample in pairs if i not in sample]
        for i in range(12)
    ]
    overall = np.mean([answer for each in held for answer in each], axis=0)
    expected = [np.mean(each, axis=0) if each else overall for each in held]
    assert all(held) == (trees == 30)  # with two trees, some cases are in every sample
    np.testing.assert_allclose(quantiles._out_of_bag(forest, x), expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_cases_have_finite_answers(n):
    # most samples of two cases hold both; then no case is left to answer for
    part, held_out = Quantiles.fit(series(n, 1, 20), np.arange(n) * 1.0, 1, seed=0)
    assert held_out.shape == (n, 1)
    assert np.isfinite(held_out).all()
    np.testing.assert_allclose(part(series(n, 1, 20))[:, 0], np.arange(n), atol=1e-6)


def test_the_part_learns_and_says_so_only_of_what_it_can_learn():
    x = series(60, 1, 30)
    y = (np.abs(np.diff(x[:, 0])).mean(1) > 0.8).astype(int)
    x[y == 1] *= 3
    part, held_out = Quantiles.fit(x[:40], y[:40], 2, seed=0)
    np.testing.assert_allclose(held_out.sum(1), 1)
    assert np.mean(held_out.argmax(1) == y[:40]) > 0.8
    assert np.mean(part(x[40:]).argmax(1) == y[40:]) > 0.8
    # on labels without a reason, the trees are sure of what they saw and of nothing else
    lots = np.random.default_rng(1).integers(0, 2, 40)
    part, held_out = Quantiles.fit(x[:40], lots, 2, seed=0)
    assert np.mean(part(x[:40]).argmax(1) == lots) == 1
    assert np.mean(held_out.argmax(1) == lots) < 0.75


def test_a_user_sees_no_warning_of_aeon():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantile_features(series(1, 1, 16))
