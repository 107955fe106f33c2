"""The classifier and the regressor of series: checks of aeon and scikit-learn, folders, limits."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from aeon.testing.estimator_checking import parametrize_with_checks
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import primal_attention as pa
from primal_attention.cli.main import main
from primal_attention.support.files import write_sealed
from primal_attention.tasks.series import (
    SeriesClassifier,
    SeriesFitOptions,
    SeriesRegressor,
)
from primal_attention.tasks.series import estimator as module
from primal_attention.tasks.series.settings import PARTS
from primal_attention.tasks.trained import load_trained

FAST = {"options": {"parts": ("convolutions",)}, "random_state": 0}


@parametrize_with_checks([SeriesClassifier, SeriesRegressor])
def test_checks_of_aeon(check):
    check()


AEON = {
    # aeon's base classes set these, and is_fitted without an underscore
    "check_no_attributes_set_in_init": "AssertionError",
    "check_dont_overwrite_parameters": "AssertionError",
    # a series has steps, not features, and may have any number of them
    "check_n_features_in": "AssertionError",
    "check_n_features_in_after_fitting": "AssertionError",
    # aeon takes arrays and lists of arrays, and raises TypeError for the rest
    "check_complex_data": "TypeError",
    "check_dtype_object": "TypeError",
    "check_classifier_data_not_an_array": "TypeError",
    "check_regressor_data_not_an_array": "TypeError",
    "check_classifiers_train": "TypeError",
    "check_regressors_train": "TypeError",
    "check_supervised_y_2d": "TypeError",
    "check_fit1d": "TypeError",
    "check_fit2d_predict1d": "TypeError",
    "check_requires_y_none": "TypeError",
    # aeon says in other words what is wrong with one class, one case or no case
    "check_classifiers_one_label": "AssertionError",
    "check_fit2d_1sample": "AssertionError",
    "check_estimators_empty_data_messages": "AssertionError",
}
"""Checks that aeon's base classes fail by design."""
WHOLE = dict.fromkeys(
    ("check_estimators_dtypes", "check_pipeline_consistency", "check_estimators_pickle"),
    "ValueError",
) | {"check_fit2d_1feature": "AssertionError"}
"""Checks of regressors with whole numbers as targets, which aeon refuses."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_checks_of_scikit_learn_that_aeon_allows(kind):
    results = check_estimator(kind(**FAST), on_fail=None, on_skip=None)
    failed = {
        r["check_name"]: type(r["exception"]).__name__ for r in results if r["status"] == "failed"
    }
    allowed = AEON | (WHOLE if kind is SeriesRegressor else {})
    assert not set(failed.items()) - set(allowed.items())
    assert sum(r["status"] == "passed" for r in results) >= 27


@pytest.fixture
def short(monkeypatch):
    """Attention trains a few steps, for few series."""
    sizes = {"_STEPS": 4, "_LONG_STEPS": 4, "_FEWEST": 10, "_FOLDS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)


def waves(count, seed, *, uneven=True, gaps=True):
    """Slow and fast sines in two channels, with noise, unequal lengths and gaps."""
    rng = np.random.default_rng(seed)
    labels = np.array(["slow", "fast"])[np.arange(count) % 2]
    cases = []
    for label in labels:
        t = np.arange(rng.integers(30, 60) if uneven else 40)
        rate = 0.2 if label == "slow" else 0.6
        case = np.sin(rate * t + rng.uniform(0, 6, size=(2, 1))) + 0.1 * rng.normal(
            size=(2, len(t))
        )
        if gaps:
            case[rng.random(case.shape) < 0.1] = np.nan
        cases.append(case)
    return cases, labels


def plain(count, seed):
    X, y = waves(count, seed, uneven=False, gaps=False)
    return np.stack(X), y


FILES = ["SHA256SUMS", "estimator.json", "model", "task.json"]


def test_learns_series_of_unequal_length_with_gaps_and_survives_saving(tmp_path, short):
    clf = SeriesClassifier(random_state=0).fit(*waves(24, 0))
    X, y = waves(20, 1)
    assert clf.score(X, y) >= 0.9
    clf.save(tmp_path / "clf")
    back = SeriesClassifier.load(tmp_path / "clf")
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    np.testing.assert_array_equal(back.predict(X), clf.predict(X))
    assert back.get_params() == clf.get_params()
    assert back.shares_ == clf.shares_
    assert sorted(f.name for f in (tmp_path / "clf").iterdir()) == FILES


@pytest.mark.parametrize("part", ["convolutions", "quantiles", "attention"])
def test_every_part_alone_learns_and_survives_saving(tmp_path, monkeypatch, part):
    for name, value in {"_LONG_STEPS": 40, "_FOLDS": 2}.items():
        monkeypatch.setattr(module, name, value)
    clf = SeriesClassifier(
        attention="softmax", options=SeriesFitOptions(parts=(part,)), random_state=0
    )
    X, y = waves(30, 1)
    assert clf.fit(*waves(40, 0)).score(X, y) >= 0.8
    assert clf.shares_ == {part: 1.0}
    assert (clf.history_ is None) == (part != "attention")
    clf.save(tmp_path)
    back = SeriesClassifier.load(tmp_path)
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    assert back.get_params() == clf.get_params()


def test_a_regressor_answers_in_the_unit_of_its_targets(tmp_path, short):
    rng = np.random.default_rng(0)
    y = 1000 + 50 * rng.uniform(-1, 1, size=90)
    X = np.sin(y[:, None, None] / 20 + np.linspace(0, 6, 40)) + 0.05 * rng.normal(size=(90, 1, 40))
    reg = SeriesRegressor(random_state=0).fit(X[:60], y[:60])
    found = reg.predict(X[60:])
    assert np.sqrt(np.mean((found - y[60:]) ** 2)) < 0.3 * y.std()
    assert reg.score(X[60:], y[60:]) > 0.9
    reg.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == FILES
    np.testing.assert_array_equal(SeriesRegressor.load(tmp_path).predict(X), reg.predict(X))
    # the answer moves with the unit
    other = SeriesRegressor(random_state=0).fit(X[:60], 3 * y[:60] - 7)
    np.testing.assert_allclose(other.predict(X[60:]), 3 * found - 7, rtol=1e-3)
    with pytest.raises(ValueError, match="not what SeriesClassifier saves"):
        SeriesClassifier.load(tmp_path)


def coupled(count, seed):
    """Noise in two channels, of equal or of opposite sign; each channel alone says nothing."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    first = rng.normal(size=(count, 12))
    second = (2 * y - 1)[:, None] * first + 0.2 * rng.normal(size=(count, 12))
    return np.stack([first, second], axis=1), y


def test_attention_joins_where_channels_must_be_compared(monkeypatch):
    for name, value in {"_LONG_STEPS": 50, "_STEPS": 50, "_FOLDS": 2}.items():
        monkeypatch.setattr(module, name, value)
    X, y = coupled(120, 0)
    clf = SeriesClassifier(options={"parts": ("quantiles", "attention")}, random_state=0)
    clf.fit(X, y)
    alone = SeriesClassifier(options={"parts": ("quantiles",)}, random_state=0).fit(X, y)
    assert clf.shares_["attention"] > 0.5
    assert sum(clf.shares_.values()) == pytest.approx(1)
    X, y = coupled(200, 1)
    assert clf.score(X, y) > alone.score(X, y) + 0.05


def test_attention_is_left_out_for_few_series():
    X, y = plain(20, 0)
    clf = SeriesClassifier(random_state=0).fit(X, y)
    assert sorted(clf.shares_) == ["convolutions", "quantiles"]
    assert clf.history_ is None


def test_probabilities_are_calibrated():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 900)
    shown = np.where(rng.random(900) < 0.25, 1 - y, y)  # a quarter of the labels are wrong
    X = np.sin((0.2 + 0.4 * shown)[:, None, None] * np.arange(24)) + rng.normal(size=(900, 1, 24))
    clf = SeriesClassifier(options={"parts": ("convolutions", "quantiles")}, random_state=0)
    p = clf.fit(X[:200], y[:200]).predict_proba(X[200:])
    accuracy = np.mean(p.argmax(1) == y[200:])
    assert accuracy > 0.65
    assert p.max(1).mean() == pytest.approx(accuracy, abs=0.05)


def test_parts_of_scikit_learn_accept_the_estimators(short):
    X, y = plain(24, 0)
    clf = SeriesClassifier(**FAST)
    assert clone(clf).get_params() == clf.get_params()
    assert clone(clf).set_params(max_epochs=3).max_epochs == 3
    assert cross_val_score(clf, X, y, cv=3).mean() > 0.8
    line = make_pipeline(FunctionTransformer(lambda x: x[:, :1]), clf).fit(X, y)
    assert line.score(X, y) > 0.9
    line.set_params(seriesclassifier__options={"parts": ("quantiles",)}).fit(X, y)
    assert line[-1].shares_ == {"quantiles": 1.0}
    grid = {"attention": ["primal", "softmax"]}
    search = GridSearchCV(clf.set_params(options={"parts": ("attention",)}), grid, cv=2).fit(X, y)
    assert search.best_estimator_.model_.config.attention == search.best_params_["attention"]


@pytest.mark.parametrize("labels", [[3, 7], [1.0, 2.0], ["a", "b"], [False, True]])
def test_labels_of_any_type_come_back(tmp_path, labels):
    y = np.array(labels)[np.arange(12) % 2]
    clf = SeriesClassifier(**FAST).fit(waves(12, 0)[0], y)
    clf.save(tmp_path)
    back = SeriesClassifier.load(tmp_path)
    found = back.predict(waves(4, 1)[0])
    assert found.dtype == y.dtype
    np.testing.assert_array_equal(found, clf.predict(waves(4, 1)[0]))
    np.testing.assert_array_equal(back.classes_, np.unique(y))


def test_prediction_does_not_depend_on_the_company(short):
    clf = SeriesClassifier(random_state=0).fit(*waves(12, 0))
    X, _ = waves(6, 1)
    together = clf.predict_proba(X)
    alone = np.concatenate([clf.predict_proba([x]) for x in X])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_random_state_decides_the_fit(short):
    def answers(random_state):
        clf = SeriesClassifier(random_state=random_state)
        return clf.fit(*waves(12, 0)).predict_proba(waves(6, 1)[0])

    np.testing.assert_array_equal(answers(0), answers(0))
    np.testing.assert_array_equal(
        answers(np.random.RandomState(3)), answers(np.random.RandomState(3))
    )
    assert not np.array_equal(answers(0), answers(1))


def test_the_callers_random_streams_are_left_alone(short):
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    clf = SeriesClassifier(options={"parts": PARTS})
    clf.set_params(random_state=4).fit(*waves(12, 0)).predict(waves(4, 1)[0])
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(np.random.get_state()[1], numbers)


def test_a_tiny_time_limit_leaves_the_convolutions():
    X, y = plain(120, 0)
    clf = SeriesClassifier(random_state=0).fit(X, y, time_limit=1e-9)
    assert clf.shares_ == {"convolutions": 1.0}
    # without them, another part is fitted all the same
    clf = SeriesClassifier(options={"parts": ("quantiles", "attention")})
    assert clf.fit(X, y, time_limit=1e-9).shares_ == {"quantiles": 1.0}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"options": {"parts": ()}}, ValueError, r"parts must be a tuple with some of .* got \(\)"),
        ({"options": {"parts": "quantiles"}}, ValueError, "got 'quantiles'"),
        ({"options": {"parts": ("quantile",)}}, ValueError, "Did you mean 'quantiles'"),
        ({"options": {"parts": None}}, ValueError, "got None"),
        ({"options": {"parts": (3,)}}, ValueError, "parts must be a list of a word"),
        ({"options": {"part": ("quantiles",)}}, ValueError, "Did you mean 'parts'"),
        ({"options": 3}, TypeError, "options must be SeriesFitOptions, a dictionary"),
        ({"max_epochs": 0}, ValueError, "max_epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 8.0}, ValueError, "batch_size must be a whole number"),
        ({"learning_rate": -1}, ValueError, "learning_rate must be a positive number, got -1"),
        ({"num_heads": 3}, ValueError, "num_heads"),
        ({"attention": "sofmax"}, ValueError, "Did you mean 'softmax'"),
        ({"attention": None}, TypeError, "attention must be a name"),
    ],
)
@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_wrong_parameters_are_told(kind, given, error, message):
    y = np.linspace(0, 1, 12) if kind is SeriesRegressor else np.arange(12) % 2
    with pytest.raises(error, match=message):
        kind(**given).fit(waves(12, 0)[0], y)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "5"])
def test_a_wrong_time_limit_is_told(limit):
    message = "time_limit must be a positive number of seconds or None, got"
    with pytest.raises(ValueError, match=message):
        SeriesClassifier().fit(*waves(12, 0), time_limit=limit)


def test_progress_is_shown_when_asked(capsys, short):
    X, y = plain(12, 0)
    SeriesClassifier(random_state=0).fit(X, y)
    assert capsys.readouterr().err == ""
    SeriesClassifier(random_state=0, verbose=True).fit(X, y)
    told = capsys.readouterr().err
    for words in (
        "convolutions of 12 series",
        "quantiles of 12 series",
        "attention, 1 of 2 models",
        "100 %  epoch",
        "shares convolutions 0.",
    ):
        assert words in told


ODD = {
    "two cases": (np.random.default_rng(0).normal(size=(2, 1, 20)), [0, 1]),
    "a class of one case": (np.random.default_rng(0).normal(size=(9, 1, 20)), [0] * 8 + [1]),
    "constant series": (np.ones((10, 2, 20)), [0, 1] * 5),
    "series of one step": (np.arange(12.0)[:, None, None], [0] * 6 + [1] * 6),
    "series of two steps": (np.random.default_rng(0).normal(size=(8, 3, 2)), [0, 1] * 4),
    "a channel without values": (
        np.where(np.arange(2)[:, None], np.nan, np.random.default_rng(0).normal(size=(8, 2, 20))),
        [0, 1] * 4,
    ),
}


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:Degrees of freedom")  # aeon's
@pytest.mark.parametrize("name", ODD)
def test_odd_series_are_learned(name):
    X, y = ODD[name]
    y = np.array(y)
    p = SeriesClassifier(random_state=0).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1)
    if name == "constant series":
        np.testing.assert_allclose(p, 0.5, atol=1e-6)
    if name == "series of one step":
        assert np.mean(p.argmax(1) == y) == 1
    numbers = y + np.linspace(0, 0.5, len(y))
    found = SeriesRegressor(random_state=0).fit(X, numbers).predict(X)
    assert (found > -1).all()
    assert (found < 2.5).all()
    if name == "constant series":
        np.testing.assert_allclose(found, numbers.mean(), rtol=1e-5)


def test_series_of_any_length_are_predicted():
    clf = SeriesClassifier(random_state=0).fit(*waves(24, 0))
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(2, n)) for n in (1, 2, 9, 400)]
    assert np.isfinite(clf.predict_proba(X)).all()


# folders


def test_the_command_line_reads_what_the_estimators_saved(tmp_path):
    clf = SeriesClassifier(random_state=0).fit(*waves(12, 0))
    clf.save(tmp_path / "clf")
    X, _ = plain(5, 1)
    np.savez(tmp_path / "new.npz", X=X)
    out = tmp_path / "answers.csv"
    assert (
        main(["predict", str(tmp_path / "clf"), str(tmp_path / "new.npz"), "--out", str(out)]) == 0
    )
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["class"] for row in rows] == clf.predict(X).tolist()
    found = np.array([[float(row[f"p({name})"]) for name in clf.classes_] for row in rows])
    np.testing.assert_allclose(found, clf.predict_proba(X), atol=1e-6)
    reg = SeriesRegressor(random_state=0).fit(waves(12, 0)[0], np.linspace(0, 9, 12))
    reg.save(tmp_path / "reg")
    np.testing.assert_allclose(pa.load(tmp_path / "reg").predict(X), reg.predict(X), rtol=1e-6)


@pytest.mark.parametrize("kind", [SeriesClassifier, SeriesRegressor])
def test_the_estimators_read_what_the_command_line_trained(tmp_path, kind, capsys):
    X, y = plain(24, 0)
    if kind is SeriesRegressor:
        y = 100 + X.mean((1, 2)) * 30
    file = tmp_path / "train.npz"
    np.savez(file, X=X, y=y)
    out = tmp_path / "run"
    sizes = ["--model.dim", "16", "--model.num-heads", "2", "--training.epochs", "1"]
    sizes += ["--training.min-steps", "4"]
    assert main(["train", str(file), *sizes, "--out", str(out)]) == 0
    found = kind.load(out / "primal-dual")
    assert found.attention == "primal-dual"
    task, model = load_trained(out / "primal-dual")
    answers = task.measure(model, task.read(file, labelled=True)).answers
    if kind is SeriesClassifier:
        expected = answers["logits"].double().softmax(-1).numpy()
        np.testing.assert_allclose(found.predict_proba(X), expected, atol=1e-6)
    else:
        np.testing.assert_allclose(found.predict(X), answers["values"], rtol=1e-6)
    np.testing.assert_array_equal(found.predict(X), pa.load(out).predict(X))
    report = (out / "report.html").read_text("utf-8")
    for words in ("The answer is a blend of three parts", "share in primal-dual", "quantiles"):
        assert words in report
    assert main(["eval", str(out), "--data", str(file), "--out", str(tmp_path / "s.json")]) == 0
    score = json.loads((tmp_path / "s.json").read_text())
    if kind is SeriesClassifier:
        assert score["accuracy"] == pytest.approx(found.score(X, y), abs=1e-6)
    else:
        rmse = np.sqrt(np.mean((found.predict(X) - y) ** 2))
        assert score["RMSE"] == pytest.approx(rmse, rel=1e-3)


def test_broken_folders_get_one_clear_sentence(tmp_path):
    load = SeriesClassifier.load
    with pytest.raises(ValueError, match="is not the folder of a model that primal trained"):
        load(tmp_path)
    clf = SeriesClassifier(random_state=0).fit(*waves(8, 0))
    clf.save(tmp_path)
    weights, own = tmp_path / "model" / "model.safetensors", "estimator.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors was changed or damaged"):
        load(tmp_path)
    weights.write_bytes(whole)
    content = json.loads((tmp_path / own).read_text())
    for part in ("parameters", "classes", "metadata"):
        lost = {k: v for k, v in content.items() if k != part}
        write_sealed(tmp_path, {own: json.dumps(lost)})
        with pytest.raises(ValueError, match=f"is damaged: it has no {part}"):
            load(tmp_path)
    wrong = {
        "no parameter 'depth'": {"parameters": {"depth": 3}},
        "max_epochs must be": {"parameters": {"max_epochs": "8"}},
        "parts must be": {"parameters": {"options": {"parts": 3}}},
        "has 3 classes, the model 2": {"classes": ["a", "b", "c"]},
        "which is not theirs": {"classes_dtype": "<U100000000"},
        "its metadata are not": {"metadata": 5},
    }
    for message, change in wrong.items():
        write_sealed(tmp_path, {own: json.dumps(content | change)})
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    write_sealed(tmp_path, {own: "not JSON"})
    with pytest.raises(ValueError, match="is not readable as JSON"):
        load(tmp_path)
    write_sealed(tmp_path, {own: json.dumps(content)})
    known = json.loads((tmp_path / "task.json").read_text())
    for key in ("mean", "std"):
        known["values"][key] = known["values"][key][:1]
    write_sealed(tmp_path, {"task.json": json.dumps(known)})
    with pytest.raises(ValueError, match="do not belong together"):
        load(tmp_path)
    del known["values"]["mean"]
    write_sealed(tmp_path, {"task.json": json.dumps(known)})
    with pytest.raises(ValueError, match="is damaged: it lacks mean"):
        load(tmp_path)


def test_the_package_imports_without_aeon():
    code = (
        "import sys; sys.modules['aeon'] = None\n"
        "import primal_attention.tasks.series as t\n"
        "t.SeriesConfig(num_classes=2, num_channels=1)\n"
        "try: t.SeriesClassifier\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install -e '.[series]'" in done.stdout
