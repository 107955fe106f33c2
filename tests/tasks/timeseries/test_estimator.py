import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from aeon.testing.estimator_checking import parametrize_with_checks

from primal_attention.cli.main import main
from primal_attention.files import write_sealed
from primal_attention.tasks.timeseries import PrimalTimeSeriesClassifier
from primal_attention.tasks.timeseries.table1 import MODELS, Settings
from primal_attention.tasks.trained import load_trained

SMALL = {"dim": 16, "num_heads": 2, "n_steps": 40, "random_state": 0}


@parametrize_with_checks([PrimalTimeSeriesClassifier])
def test_checks_of_aeon(check):
    check()


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


def test_learns_series_of_unequal_length_with_gaps_and_survives_saving(tmp_path):
    clf = PrimalTimeSeriesClassifier(**SMALL).fit(*waves(24, 0))
    X, y = waves(20, 1)
    assert clf.score(X, y) >= 0.9
    clf.save(tmp_path / "clf")
    back = PrimalTimeSeriesClassifier.load(tmp_path / "clf")
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    np.testing.assert_array_equal(back.predict(X), clf.predict(X))
    assert back.get_params() == clf.get_params()
    assert sorted(f.name for f in (tmp_path / "clf").iterdir()) == [
        "SHA256SUMS",
        "estimator.json",
        "model",
        "task.json",
    ]


def test_the_command_line_reads_what_the_classifier_saved(tmp_path):
    clf = PrimalTimeSeriesClassifier(**SMALL).fit(*waves(12, 0))
    clf.save(tmp_path / "clf")
    X, _ = waves(5, 1, uneven=False, gaps=False)
    np.savez(tmp_path / "new.npz", X=np.stack(X))
    out = tmp_path / "answers.csv"
    assert (
        main(["predict", str(tmp_path / "clf"), str(tmp_path / "new.npz"), "--out", str(out)]) == 0
    )
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["class"] for row in rows] == clf.predict(X).tolist()
    found = np.array([[float(row[f"p({name})"]) for name in clf.classes_] for row in rows])
    np.testing.assert_allclose(found, clf.predict_proba(X), atol=1e-6)


def test_the_classifier_reads_what_the_command_line_trained(tmp_path):
    X, y = waves(16, 0, uneven=False, gaps=False)
    x = np.stack(X)
    np.savez(tmp_path / "train.npz", X=x, y=y)
    np.savez(tmp_path / "test.npz", X=x[:6], y=y[:6])
    out = tmp_path / "run"
    files = ["--data.train", str(tmp_path / "train.npz"), "--data.test", str(tmp_path / "test.npz")]
    sizes = ["--model.dim", "16", "--model.num-heads", "2", "--training.epochs", "1"]
    assert main(["train", "basic-motions", *files, *sizes, "--out", str(out)]) == 0
    clf = PrimalTimeSeriesClassifier.load(out / "primal")
    assert clf.attention == "primal"
    task, model = load_trained(out / "primal")
    answers = task.measure(model, task.read(tmp_path / "test.npz", labelled=True)).answers
    np.testing.assert_allclose(
        clf.predict_proba(X[:6]), answers["logits"].double().softmax(-1).numpy(), atol=1e-7
    )


@pytest.mark.parametrize("labels", [[3, 7], [1.0, 2.0], ["a", "b"]])
def test_labels_of_any_type_come_back(tmp_path, labels):
    y = np.array(labels)[np.arange(12) % 2]
    clf = PrimalTimeSeriesClassifier(dim=8, num_heads=2, n_steps=2).fit(waves(12, 0)[0], y)
    clf.save(tmp_path)
    back = PrimalTimeSeriesClassifier.load(tmp_path)
    assert back.predict(waves(4, 1)[0]).dtype == y.dtype
    np.testing.assert_array_equal(back.classes_, np.unique(y))


def test_prediction_does_not_depend_on_the_company():
    clf = PrimalTimeSeriesClassifier(dim=8, num_heads=2, n_steps=4).fit(*waves(12, 0))
    X, _ = waves(6, 1)
    together = clf.predict_proba(X)
    alone = np.concatenate([clf.predict_proba([x]) for x in X])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_jitter_is_for_training_only_and_drawn_from_the_random_state():
    small = {"dim": 8, "num_heads": 2, "n_steps": 4, "random_state": 0}
    X, y = waves(12, 0)
    clf = PrimalTimeSeriesClassifier(**small).fit(X, y)
    first = clf.predict_proba(X)
    np.testing.assert_array_equal(clf.predict_proba(X), first)
    again = PrimalTimeSeriesClassifier(**small).fit(X, y)
    np.testing.assert_array_equal(again.predict_proba(X), first)
    without = PrimalTimeSeriesClassifier(**small, jitter=0.0).fit(X, y)
    assert not np.array_equal(without.predict_proba(X), first)


def test_the_defaults_are_those_of_the_study():
    default, ours, shared = PrimalTimeSeriesClassifier().get_params(), MODELS["ours"], Settings()
    own = ("attention", "primal_layers", "stem", "dropout", "eta", "jitter")
    assert {k: default[k] for k in own} == {k: getattr(ours, k) for k in own}
    both = ("dim", "num_heads", "num_layers", "max_tokens", "batch_size", "lr")
    assert {k: default[k] for k in both} == {k: getattr(shared, k) for k in both}
    assert default["n_steps"] == shared.steps


def test_the_callers_random_streams_are_left_alone():
    import torch

    before = torch.get_rng_state()
    PrimalTimeSeriesClassifier(dim=8, num_heads=2, n_steps=2).fit(*waves(8, 0))
    assert torch.equal(before, torch.get_rng_state())


def test_broken_folders_get_one_clear_sentence(tmp_path):
    load = PrimalTimeSeriesClassifier.load
    with pytest.raises(ValueError, match="is not the folder of a model that primal trained"):
        load(tmp_path)
    clf = PrimalTimeSeriesClassifier(dim=8, num_heads=2, n_steps=2).fit(*waves(8, 0))
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
        "dim must be a whole number, got '8'": {"parameters": {"dim": "8"}},
        "has 3 classes, the model 2": {"classes": ["a", "b", "c"]},
        "which is not theirs": {"classes_dtype": "<U100000000"},
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
    known["values"]["mean"] = known["values"]["mean"][:1]
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
        "import primal_attention.tasks.timeseries as t\n"
        "t.SeriesConfig(num_classes=2, num_channels=1)\n"
        "try: t.PrimalTimeSeriesClassifier\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install -e '.[timeseries]'" in done.stdout
