"""The classifier and the regressor of aligned classes: what a user meets."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal_attention.support.files import write_sealed
from primal_attention.tasks.tables import OTAlignedClassifier, OTAlignedRegressor
from primal_attention.training import TrainingConfig
from primal_studies.tables.pretraining import pretrain_head

QUICK = {"max_epochs": 8, "options": {"patience": 8}}
WHOLE = {"max_epochs": 8, "options": {"validation": 0}, "random_state": 0}
GEOMETRIES = ["aligned-simplex", "simplex", "circle", "class-means", "learned"]


@parametrize_with_checks([OTAlignedClassifier(**QUICK), OTAlignedRegressor(**QUICK)])
def test_scikit_learn_checks_pass(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    return train_test_split(X, y, random_state=0, stratify=y)


@pytest.fixture(scope="module")
def fitted(iris):
    return OTAlignedClassifier(max_epochs=30, random_state=0).fit(iris[0], iris[2])


def clouds(n: int, tokens: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return rng.normal(size=(n, tokens, 2)) + (2.0 * y - 1)[:, None, None] * [1.0, 0.0], y


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_learns_and_has_probabilities_with_sum_one(iris, geometry):
    model = OTAlignedClassifier(geometry, max_epochs=30, random_state=0).fit(iris[0], iris[2])
    assert model.score(iris[1], iris[3]) > 0.9
    # O14
    np.testing.assert_allclose(model.predict_proba(iris[1]).sum(1), 1, atol=1e-6)
    assert model.centres_.shape == (3, model.transform(iris[1]).shape[1])


# O13
def test_predictions_do_not_depend_on_the_rows_beside_them(fitted, iris):
    X = iris[1]
    whole = fitted.predict_proba(X)
    order = np.random.default_rng(0).permutation(len(X))
    np.testing.assert_array_equal(fitted.predict_proba(X[order]), whole[order])
    alone = np.concatenate([fitted.predict_proba(row[None]) for row in X])
    np.testing.assert_array_equal(alone, whole)
    # rows far away do not change what a row is standardised with
    far = np.concatenate([X, 1e3 * X])
    np.testing.assert_array_equal(fitted.transform(far)[: len(X)], fitted.transform(X))


# O14
def test_more_tokens_of_one_class_sharpen_its_probability():
    X, y = clouds(80, 4)
    model = OTAlignedClassifier(**QUICK, random_state=0).fit(X, y)
    token = np.array([0.6, 0.0])
    shares = [model.predict_proba(np.tile(token, (1, t, 1)))[0, 1] for t in (1, 2, 4, 8)]
    assert shares[0] > 0.5
    assert np.all(np.diff(shares) > 0)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1, atol=1e-6)
    # log-scores of tokens add up
    logits = np.log(shares) - np.log1p(-np.array(shares))
    np.testing.assert_allclose(logits, logits[0] * np.array([1, 2, 4, 8]), rtol=1e-6)


def test_several_tokens_tell_more_than_one():
    X, y = clouds(120, 9)
    model = OTAlignedClassifier(max_epochs=20, random_state=0).fit(X, y)
    new, truth = clouds(200, 9, seed=1)
    assert model.score(new, truth) > model.score(new[:, :1], truth) + 0.05
    assert model.transform(new).shape == (200, 9, 2)
    assert model.targets_.shape[1:] == (9, 2)


def test_targets_are_dummies_around_the_centre_of_the_class(iris):
    model = OTAlignedClassifier(**WHOLE).fit(iris[0], iris[2])
    labels = model.targets_ @ model.centres_.T
    nearest = labels[:, 0].argmax(1)
    counts = np.bincount(nearest, minlength=3)
    assert counts.tolist() == np.unique(iris[2], return_counts=True)[1].tolist()
    for c in range(3):
        offset = model.targets_[nearest == c, 0] - model.centres_[c]
        assert np.abs(offset.mean(0)).max() < 0.6
        assert 0.6 < offset.std() < 1.4


def test_same_seed_same_model_and_the_order_of_rows_has_no_effect(iris):
    X, y = iris[0], iris[2]
    order = np.random.default_rng(0).permutation(len(X))
    a, b, c = (
        OTAlignedClassifier(**QUICK, random_state=s).fit(X[o], y[o]).transform(iris[1])
        for s, o in ((0, slice(None)), (0, order), (1, slice(None)))
    )
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3


def test_more_classes_than_features_lift_the_space():
    rng = np.random.default_rng(0)
    y = np.arange(240) % 6
    X = 6 * y[:, None] + rng.normal(size=(240, 1))
    model = OTAlignedClassifier(random_state=0).fit(X, y)
    assert model.transform(X).shape == (240, 5)
    assert model.score(X, y) > 0.95


def test_fewer_coordinates_start_from_principal_components(iris):
    model = OTAlignedClassifier(n_components=2, max_epochs=30, random_state=0).fit(iris[0], iris[2])
    assert model.transform(iris[1]).shape == (len(iris[1]), 2)
    assert model.score(iris[1], iris[3]) > 0.85
    dense = model.encoder_.transform(iris[0])
    start = dense @ model.model_.projection.numpy()
    values = np.linalg.svd(dense - dense.mean(0), compute_uv=False)
    np.testing.assert_allclose(start.var(0) * len(start), values[:2] ** 2, rtol=1e-3)


def test_score_map_gives_gap_and_optimality(fitted, iris):
    pooled, within = fitted.score_map(iris[1]), fitted.score_map(iris[1], iris[3])
    assert pooled.gap == pytest.approx(pooled.cost - pooled.optimal)
    assert pooled.optimality == pytest.approx((pooled.optimal / pooled.cost) ** 0.5)
    # fewer exchanges are allowed within classes
    assert 0 <= within.gap <= pooled.gap
    assert 0.8 < pooled.optimality <= within.optimality <= 1
    with pytest.raises(ValueError, match="class 7"):
        fitted.score_map(iris[1], np.full(len(iris[1]), 7))


def test_the_map_is_drawn_as_arrows_beside_the_optimal_one(fitted, iris):
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot as plt

    figure = fitted.plot_map(iris[1], iris[3])
    assert [axis.get_title() for axis in figure.axes] == ["the map", "the optimal map"]
    plt.close(figure)


def test_transport_makes_the_map_more_optimal_than_random_matching():
    X, y = clouds(300, 1)
    scores = [
        OTAlignedClassifier("circle", max_epochs=30, options={"match": match}, random_state=0)
        .fit(X[:, 0], y)
        .score_map(X[:, 0], y)
        .optimality
        for match in ("ot", "random")
    ]
    assert scores[0] > scores[1] + 0.02


def test_temperature_is_calibrated_or_given(iris):
    X, y = load_breast_cancer(return_X_y=True)
    A, B, a, b = train_test_split(X, y, random_state=0)
    model = OTAlignedClassifier(random_state=0).fit(A, a)
    fixed = clone(model).set_params(options={"temperature": 0.2}).fit(A, a)
    assert fixed.temperature_ == 0.2
    np.testing.assert_array_equal(model.predict(B), fixed.predict(B))

    def entropy(m):
        return -np.log(m.predict_proba(B)[np.arange(len(b)), b]).mean()

    assert entropy(model) < entropy(fixed)
    with pytest.raises(ValueError, match="temperature must be positive"):
        OTAlignedClassifier(options={"temperature": 0.0}).fit(A, a)


def test_weights_balance_a_rare_class():
    rng = np.random.default_rng(0)
    y = (np.arange(600) % 10 == 0).astype(int)
    X = rng.normal(size=(600, 2)) + 1.2 * y[:, None]
    plain = OTAlignedClassifier(max_epochs=20, random_state=0).fit(X, y)
    balanced = clone(plain).fit(X, y, sample_weight=compute_sample_weight("balanced", y))
    recall = [m.predict(X)[y == 1].mean() for m in (plain, balanced)]
    assert recall[1] > recall[0] + 0.2


def test_frames_with_text_dates_and_holes_are_welcome():
    rng = np.random.default_rng(0)
    y = np.array(["no", "yes"])[rng.integers(0, 2, 120)]
    frame = pd.DataFrame(
        {
            "colour": np.where(rng.random(120) < 0.9, np.where(y == "yes", "red", "blue"), None),
            "size": np.where(rng.random(120) < 0.2, np.nan, rng.normal(size=120)),
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 99, 120), "D"),
        }
    )
    model = OTAlignedClassifier(**QUICK, random_state=0).fit(frame, y)
    assert model.score(frame, y) > 0.8
    assert set(model.predict(frame)) <= {"no", "yes"}
    assert list(model.feature_names_in_) == ["colour", "size", "day"]
    unseen = frame.assign(colour="green")
    assert np.isfinite(model.predict_proba(unseen)).all()


@pytest.mark.parametrize("kind", [OTAlignedClassifier, OTAlignedRegressor])
def test_saved_estimators_give_the_same_answers_without_pickle(tmp_path, kind):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "b": rng.choice(["u", "v"], 60)})
    y = np.where(frame["a"] > 0, "up", "down") if kind is OTAlignedClassifier else frame["a"] * 2
    model = kind(max_epochs=8, options={"categorical_features": ("b",)}, random_state=0).fit(
        frame, y
    )
    model.save(tmp_path)
    again = kind.load(tmp_path)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    np.testing.assert_array_equal(again.transform(frame), model.transform(frame))
    assert again._fit_options() == model._fit_options()
    assert again.max_epochs == 8
    assert list(again.feature_names_in_) == ["a", "b"]
    files = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    names = ["SHA256SUMS", "SHA256SUMS", "config.json", "estimator.json", "model.safetensors"]
    assert files == names
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict(frame), model.predict(frame))


def test_damaged_and_foreign_folders_are_explained(tmp_path, fitted):
    fitted.save(tmp_path)
    with pytest.raises(ValueError, match="holds a OTAlignedClassifier"):
        OTAlignedRegressor.load(tmp_path)
    content = json.loads((tmp_path / "estimator.json").read_text())
    del content["columns"]
    write_sealed(tmp_path, {"estimator.json": json.dumps(content)})
    with pytest.raises(ValueError, match="cannot be read"):
        OTAlignedClassifier.load(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        OTAlignedClassifier.load(tmp_path / "nothing")


def test_it_works_in_pipelines_searches_and_cross_validation(iris):
    X, y = iris[0], iris[2]
    model = OTAlignedClassifier(**QUICK, random_state=0)
    pipe = make_pipeline(StandardScaler(), model, LogisticRegression()).fit(X, y)
    assert pipe.score(iris[1], iris[3]) > 0.8
    search = GridSearchCV(model, {"geometry": ["simplex", "circle"]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.7
    assert cross_val_score(model, X, y, cv=2).min() > 0.7
    out = clone(model).set_output(transform="pandas").fit(X, y).transform(X)
    assert list(out.columns) == [f"otalignedclassifier{i}" for i in range(4)]


def test_regressor_follows_the_target_and_stays_in_its_range():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 3))
    y = np.exp(X[:, 0] + 0.5 * X[:, 1])
    model = OTAlignedRegressor(random_state=0).fit(X[:300], y[:300])
    found = model.predict(10 * X)
    assert found.min() >= y[:300].min()
    assert found.max() <= y[:300].max()
    rank = np.corrcoef(model.predict(X[300:]).argsort().argsort(), y[300:].argsort().argsort())
    assert rank[0, 1] > 0.95
    # the line points where the target grows
    assert model.direction_ @ [2, 1, 0] / 5**0.5 > 0.95
    assert np.linalg.norm(model.direction_) == pytest.approx(1)


def test_targets_of_the_regressor_lie_on_the_line_by_quantile():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 2))
    y = X[:, 0] ** 3
    model = OTAlignedRegressor(**WHOLE).fit(X, y)
    places = np.sort((model.targets_ @ model.direction_)[:, 0])
    np.testing.assert_allclose(places, 24 * ((np.arange(100) + 0.5) / 100 - 0.5), atol=1e-4)
    # across the line the cloud is normal
    across = model.targets_[:, 0] - (model.targets_[:, 0] @ model.direction_)[:, None] * (
        model.direction_
    )
    assert 0.5 < across.std() * 2**0.5 < 1.5


def test_one_feature_one_class_and_one_row_are_tables():
    X = np.random.default_rng(0).normal(size=(60, 1))
    model = OTAlignedRegressor(max_epochs=40, options={"patience": 40}, random_state=0).fit(
        X, 3 * X[:, 0]
    )
    assert model.score(X, 3 * X[:, 0]) > 0.95
    assert OTAlignedClassifier(**QUICK).fit(X, np.zeros(60)).predict_proba(X).min() == 1
    assert OTAlignedClassifier(**QUICK).fit([[1.0]], ["a"]).predict([[2.0]]).tolist() == ["a"]


def test_wrong_settings_are_explained():
    X, y = clouds(40, 1)
    for options, words in (
        ({"geometry": "cube"}, "geometry must be one of"),
        ({"options": {"match": "best"}}, "match must be one of"),
        ({"options": {"validation": 1.5}}, "validation must be a share"),
        ({"hidden": (0,)}, "hidden must hold widths"),
    ):
        with pytest.raises(ValueError, match=words):
            OTAlignedClassifier(**options).fit(X, y)
    with pytest.raises(ValueError, match="40 instances and y has 39"):
        OTAlignedClassifier().fit(X, y[:39])


def test_progress_tells_how_many_points_are_matched(capsys):
    X, y = clouds(60, 1)
    OTAlignedClassifier(max_epochs=1, options={"ot_batch": 10}, verbose=True).fit(X, y)
    assert "matching 48 points, at most 10 at once" in capsys.readouterr().err


def test_a_head_learns_gaussian_clouds_and_is_frozen():
    head = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    centres = 6.0 * torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    config = TrainingConfig(epochs=10, lr=1e-2, optimizer="adam")
    history = pretrain_head(head, centres, config=config, verbose=False)
    assert history.ended == "epochs"
    assert head(centres).argmax(-1).tolist() == [0, 1, 2]
    assert not any(p.requires_grad for p in head.parameters())
    pretrain_head(head.requires_grad_(True), centres, freeze=False, config=config, verbose=False)
    assert all(p.requires_grad for p in head.parameters())


# O17, the small version
def test_simplex_beats_the_circle_with_ten_classes():
    X, y = load_digits(return_X_y=True)
    A, B, a, b = train_test_split(X[:700], y[:700], random_state=0)
    simplex, circle = (
        OTAlignedClassifier(g, max_epochs=30, random_state=0).fit(A, a).score(B, b)
        for g in ("aligned-simplex", "circle")
    )
    assert simplex > circle + 0.04


# O17
@pytest.mark.slow
@pytest.mark.parametrize("load", [load_wine, load_breast_cancer])
def test_accuracy_is_within_two_points_of_a_perceptron(load):
    X, y = load(return_X_y=True)
    rivals = [
        OTAlignedClassifier(random_state=0),
        make_pipeline(
            StandardScaler(), MLPClassifier((32, 32), learning_rate_init=0.01, max_iter=1000)
        ),
    ]
    ours, theirs = (cross_val_score(m, X, y, cv=5).mean() for m in rivals)
    assert ours > theirs - 0.02


# O17
@pytest.mark.slow
def test_simplex_beats_the_circle_by_four_points_on_all_digits():
    X, y = load_digits(return_X_y=True)
    simplex, circle = (
        cross_val_score(OTAlignedClassifier(g, random_state=0), X, y, cv=5).mean()
        for g in ("simplex", "circle")
    )
    assert simplex > circle + 0.04
