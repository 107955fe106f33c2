import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal_attention.support.files import write_sealed
from primal_attention.tasks.tables import TableClassifier, TableImputer, TableRegressor
from primal_attention.tasks.trained import load

SMALL = {
    "dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "max_epochs": 10,
    "random_state": 0,
    "options": {"epoch_steps": 1},
}
CHECKED = {**SMALL, "max_epochs": 15, "options": {"epoch_steps": 2}, "learning_rate": 0.01}
SPARSE = {"primal_layers": "last:1", "other_attention": "primal-dual"}
ROWS = {
    "softmax": {},
    "primal": {"attention": "primal-dual"},
    "sparse": {"attention": "primal-sparse", "options": {"epoch_steps": 1, **SPARSE}},
    "none": {"options": {"epoch_steps": 1, "has_rows": False}},
}
"""Row attentions, as arguments."""


def longer(steps, rate=0.01):
    """Return the arguments of a small estimator that trains for 20 epochs."""
    epochs = {"max_epochs": 20, "options": {"epoch_steps": steps}}
    return {**SMALL, **epochs, "learning_rate": rate}


def options(**given):
    """Return the arguments of a small estimator with some options."""
    return {**SMALL, "max_epochs": 5, "options": {"epoch_steps": 1, **given}}


@parametrize_with_checks(
    [TableClassifier(**CHECKED), TableRegressor(**CHECKED), TableImputer(**SMALL)]
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def houses(rows=60, seed=0):
    """Return a mixed table with holes, and prices."""
    rng = np.random.default_rng(seed)
    size, town = rng.uniform(30, 200, rows), rng.choice(["Ghent", "Bruges", "Lier"], rows)
    frame = pd.DataFrame(
        {
            "size": size,
            "rooms": pd.array(rng.integers(1, 6, rows), "Int64"),
            "town": pd.Categorical(town),
            "has_garden": rng.random(rows) < 0.4,
            "sold": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), "D"),
        }
    )
    frame.loc[::7, "size"] = np.nan
    frame.loc[3::9, "rooms"] = pd.NA
    frame.loc[5::8, "town"] = None
    price = 2000 * size + 50_000 * (town == "Ghent") + rng.normal(0, 5000, rows)
    return frame, pd.Series(price, name="price")


@pytest.fixture(scope="module")
def regressor():
    X, y = houses()
    return TableRegressor(**longer(5)).fit(X, y)


@pytest.fixture(scope="module")
def classifier():
    X, y = houses()
    return TableClassifier(**longer(3)).fit(X, np.where(y > y.median(), "dear", "cheap"))


def test_a_mixed_frame_with_holes_is_learned(regressor, classifier):
    X, y = houses(40, seed=1)
    assert regressor.score(X, y) > 0.4
    assert classifier.score(X, np.where(y > houses()[1].median(), "dear", "cheap")) > 0.7
    assert list(regressor.feature_names_in_) == list(X.columns)


def test_unseen_categories_and_holes_everywhere_are_predicted(regressor):
    X, _ = houses(4, seed=1)
    X["town"] = "Atlantis"
    X["size"] = np.nan
    assert np.isfinite(regressor.predict(X)).all()
    empty = X.copy().astype(object)
    empty.loc[:] = None
    assert np.isfinite(regressor.predict(empty)).all()


def test_a_prediction_does_not_depend_on_the_rows_beside_it(regressor):
    # N5
    X, _ = houses(40, seed=1)
    alone = np.concatenate([regressor.predict(X.iloc[[i]]) for i in range(5)])
    np.testing.assert_allclose(alone, regressor.predict(X)[:5], rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_every_row_attention_fits_predicts_and_saves(rows, tmp_path):
    # N20
    X, y = houses()
    model = TableRegressor(**{**SMALL, "max_epochs": 5, **ROWS[rows]}).fit(X, y)
    keeps = {"softmax": 60, "sparse": 60, "primal": 0, "none": 0}[rows]
    assert model.model_.config.context_rows == keeps
    model.save(tmp_path / "model")
    again = TableRegressor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    assert again._model_options() == model._model_options()
    np.testing.assert_allclose(load(tmp_path / "model").predict(X), model.predict(X), rtol=1e-4)


def test_a_saved_classifier_has_its_classes(classifier, tmp_path):
    X, _ = houses(10, seed=1)
    classifier.save(tmp_path)
    again = TableClassifier.load(tmp_path)
    assert list(again.classes_) == ["cheap", "dear"]
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))
    assert set(load(tmp_path).predict(X)) <= {"cheap", "dear"}
    with pytest.raises(ValueError, match="load it with TableClassifier"):
        TableRegressor.load(tmp_path)


def test_a_damaged_folder_says_so(classifier, tmp_path):
    classifier.save(tmp_path)
    write_sealed(tmp_path, {"estimator.json": '{"parameters": {"colour": 3}}'})
    with pytest.raises(ValueError, match=r"estimator.json is damaged"):
        TableClassifier.load(tmp_path)


def test_a_fit_is_the_same_twice_and_for_rows_in_any_order():
    X, y = houses()
    order = np.random.default_rng(0).permutation(len(X))
    first = TableRegressor(**SMALL).fit(X, y)
    second = clone(first).fit(X.iloc[order], y.iloc[order])
    np.testing.assert_array_equal(first.predict(X), second.predict(X))


def test_weights_of_whole_numbers_equal_repeated_rows():
    X, y = houses()
    weight = np.random.default_rng(0).integers(0, 3, len(X))
    weighted = TableRegressor(**SMALL).fit(X, y, sample_weight=weight)
    repeated = TableRegressor(**SMALL).fit(
        X.loc[X.index.repeat(weight)], y.loc[y.index.repeat(weight)]
    )
    np.testing.assert_array_equal(weighted.predict(X), repeated.predict(X))


def test_intervals_are_around_the_mean_and_grow_with_their_coverage(regressor):
    X, y = houses(200, seed=2)
    mean, std = regressor.predict(X, return_std=True)
    half, wide = regressor.predict_interval(X, 0.5), regressor.predict_interval(X, 0.9)
    np.testing.assert_allclose(wide.mean(1), mean)
    np.testing.assert_allclose(wide[:, 1] - mean, 1.6448536 * std, rtol=1e-6)
    assert (wide[:, 0] < half[:, 0]).all()
    inside = ((wide[:, 0] < y) & (y < wide[:, 1])).mean()
    assert inside > 0.6
    with pytest.raises(ValueError, match=r"coverage must lie between 0 and 1, got 1\.5"):
        regressor.predict_interval(X, 1.5)


def test_the_context_is_a_stratified_sample_of_a_large_table():
    X, y = houses(80)
    model = TableClassifier(**options(max_context=20)).fit(X, y > y.median())
    assert model.model_.config.context_rows == 20
    targets = model.model_.context_values[:, -1]
    assert targets.mean() == pytest.approx(0.5, abs=0.06)


def test_held_out_rows_join_the_context(regressor):
    assert regressor.model_.config.context_rows == 60
    assert regressor.history_.records[-1].valid


def test_given_rows_choose_the_epoch():
    X, y = houses()
    more = houses(20, seed=3)
    model = TableRegressor(**{**SMALL, "max_epochs": 5}).fit(X, y, eval_set=more)
    assert model.model_.config.context_rows == 80
    assert "loss" in model.history_.records[-1].valid


def test_rows_without_a_target_are_opt_in():
    X, y = houses()
    more, _ = houses(15, seed=3)
    with pytest.raises(ValueError, match="semi_supervised is False; set it to True"):
        TableRegressor(**SMALL).fit(X, y, X_unlabeled=more)
    model = TableRegressor(**options(semi_supervised=True))
    model.fit(X, y, X_unlabeled=more)
    assert model.model_.config.context_rows == 75
    assert int(model.model_.context_missing[:, -1].sum()) == 15


def test_the_most_influential_rows_come_in_their_own_units(regressor):
    X, y = houses(3, seed=1)
    found = regressor.row_influence(X, k=4)
    assert len(found) == 3
    assert list(found[0].features.columns) == list(X.columns)
    assert (np.diff(np.abs(found[0].influence)) <= 0).all()
    assert houses()[1].round().isin(found[0].target.round()).sum() == 4
    del y


def test_influence_is_the_derivative_with_respect_to_a_row(regressor):
    import torch

    X, _ = houses(1, seed=1)
    model, rows = regressor.model_, regressor._rows(X)
    (found,) = regressor.row_influence(X, k=60)
    hidden = rows.missing.clone()
    hidden[:, -1] = True
    memories = model.stream(model.context_values, model.context_missing, keeps_rows=True)
    gates = [torch.ones(60) for _ in memories]

    def predict(row, gate):
        changed = [g.clone() for g in gates]
        for g in changed:
            g[row] = gate
        x = model.embedding(rows.values, hidden)
        with torch.no_grad():
            return float(model.predict_from(x, memories=memories, gates=changed).logits[0, 0])

    row = int(found.rows[0])
    slope = (predict(row, 1.01) - predict(row, 0.99)) / 0.02 * regressor.task_.target.scale
    assert found.influence[0] == pytest.approx(slope, rel=0.05)


def test_influence_of_primal_rows_needs_the_rows():
    X, y = houses()
    model = TableRegressor(**{**SMALL, "max_epochs": 5}, attention="primal-dual").fit(X, y)
    with pytest.raises(ValueError, match=r"keeps no training rows.*pass rows=\(X, y\)"):
        model.row_influence(X[:2])
    found = model.row_influence(X[:2], k=3, rows=(X, y))
    assert found[1].rows.shape == (3,)


def test_a_corrupted_context_keeps_rows_to_predict_and_columns():
    # N7
    from primal_attention.tasks.tables.influence import corrupt

    X, y = houses()
    model = TableRegressor(**{**SMALL, "max_epochs": 5}).fit(X, y).model_
    other = corrupt(model, seed=0)
    assert (other.context_values != model.context_values).any()
    for j in range(6):
        for name in ("context_values", "context_missing"):
            was, now = (getattr(m, name)[:, j].sort().values for m in (model, other))
            assert (was == now).all()


def test_the_corruption_test_sees_whether_rows_matter(regressor):
    X, y = houses(40, seed=1)
    found = regressor.corruption_test(X, y)
    assert found.score == pytest.approx(np.sqrt(np.mean((regressor.predict(X) - y) ** 2)))
    assert abs(found.change) > 1e-3 * found.score
    alone = clone(regressor).set_params(**options(has_rows=False)).fit(X, y)
    assert alone.corruption_test(X, y).change == pytest.approx(0, abs=1e-6)


def test_attention_maps_are_weights_over_the_context(regressor):
    X, _ = houses(5, seed=1)
    (weights,) = regressor.attention_maps(X).values()
    assert weights.shape == (2, 5, 60)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_the_cost_of_a_fit_is_known_before(capsys):
    X, y = houses()
    cost = TableRegressor(**SMALL).estimate_cost(X, y)
    assert cost.parameters == sum(
        p.numel() for p in TableRegressor(**SMALL).fit(X, y).model_.parameters()
    )
    assert 0 < cost.seconds < 600
    assert 4 * cost.parameters < cost.bytes < 1e9
    TableRegressor(**{**SMALL, "max_epochs": 2, "verbose": True}).fit(X, y)
    assert "s of one core" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["adamw", "lamb-lookahead"])
@pytest.mark.parametrize("context", ["train", "transductive"])
def test_the_published_training_runs_too(optimizer, context):
    X, y = houses()
    model = TableRegressor(**options(optimizer=optimizer, context=context)).fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    alone = model.predict(X[:1])[0]
    assert (abs(alone / model.predict(X)[0] - 1) > 1e-6) == (context == "transductive")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"attention": "primal-daul"}, "Did you mean 'primal-dual'"),
        ({"attention": "primal"}, "'primal' cannot attend from rows to a set of other rows"),
        ({"max_epochs": 0}, "max_epochs must be a whole number of at least 1"),
        (options(optimizer="sgd"), "optimizer must be one of adamw, lamb-lookahead"),
        (options(validation=1.5), "validation must be a share"),
        (options(max_context=0), "max_context must be at least 1"),
        (options(numbers="log"), "numbers must be one of linear, piecewise, periodic"),
        (options(p_target=0.0), "no target is ever predicted"),
        (
            options(categorical_features="town"),
            "categorical_features must be one of auto or",
        ),
    ],
)
def test_wrong_parameters_are_a_sentence(change, message):
    X, y = houses()
    with pytest.raises(ValueError, match=message):
        TableRegressor(**{**SMALL, **change}).fit(X, y)


def test_one_class_and_one_row_are_a_sentence():
    X, y = houses()
    with pytest.raises(ValueError, match="only one class"):
        TableClassifier(**SMALL).fit(X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="at least 2"):
        TableRegressor(**SMALL).fit(X[:1], y[:1])


def test_it_is_part_of_scikit_learn():
    X, y = houses()
    labels = (y > y.median()).to_numpy()
    pipeline = make_pipeline(FunctionTransformer(), TableClassifier(**{**SMALL, "max_epochs": 3}))
    assert pipeline.fit(X, labels).predict(X).shape == (60,)
    assert len(cross_val_score(pipeline, X, labels, cv=2)) == 2
    grid = {"attention": ["softmax", "primal-dual"]}
    search = GridSearchCV(TableClassifier(**{**SMALL, "max_epochs": 3}), grid, cv=2).fit(X, labels)
    assert search.best_params_["attention"] in grid["attention"]


def test_holes_are_filled_in_the_form_of_the_table():
    X, _ = houses()
    filled = TableImputer(**SMALL).set_output(transform="pandas").fit_transform(X)
    assert not filled.isna().any().any()
    assert (filled.dtypes == X.dtypes).all()
    known = ~X["size"].isna()
    np.testing.assert_allclose(filled["size"][known], X["size"][known], rtol=1e-6)
    assert set(filled["town"]) <= {"Ghent", "Bruges", "Lier"}


def test_filled_numbers_follow_the_other_columns():
    x = np.random.default_rng(0).normal(size=(120, 1))
    whole = np.hstack([x, -x, 2 * x])
    table = whole.copy()
    table[::5, 1] = np.nan
    filled = TableImputer(**longer(3, 0.02)).fit_transform(table)
    error = np.sqrt(np.mean((filled[::5, 1] - whole[::5, 1]) ** 2))
    assert error < 0.6
    known = ~np.isnan(table)
    np.testing.assert_array_equal(filled[known], table[known])


def test_a_regressor_fills_holes_too(regressor):
    X, _ = houses(10, seed=1)
    assert not regressor.impute(X).isna().any().any()


def test_an_imputer_survives_its_folder(tmp_path):
    X, _ = houses()
    imputer = TableImputer(**{**SMALL, "max_epochs": 3}).fit(X)
    imputer.save(tmp_path)
    pd.testing.assert_frame_equal(TableImputer.load(tmp_path).transform(X), imputer.transform(X))
