"""Numbers as targets of series: read from every format, standardised, answered in their unit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.models import ModelOutput
from primal_attention.support.command import UserError
from primal_attention.support.files import UnsealedWarning
from primal_attention.tasks.series import (
    SeriesCollection,
    SeriesOptions,
    SeriesTask,
    SeriesValueSettings,
    SeriesValueTask,
    read_npz,
    read_series,
    read_ts,
)
from primal_attention.tasks.sources import look_at
from primal_attention.tasks.task import load_task, save_task


def levels(cases: int = 30, steps: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Series ``[cases, channels, time]`` and ten times their level plus 200."""
    rng = np.random.default_rng(0)
    level = rng.normal(size=cases)
    x = level[:, None, None] + 0.05 * rng.normal(size=(cases, 2, steps))
    return x, (200 + 10 * level).round(3)


def write_values(path: Path, header: str = "@targetLabel true") -> Path:
    x, y = levels()
    fields = [[",".join(map(str, channel)) for channel in case] for case in x]
    lines = [":".join([*case, str(number)]) for case, number in zip(fields, y, strict=True)]
    path.write_text("\n".join(["@dimensions 2", header, "@data", *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    "header",
    ["@targetLabel true", "@targetlabel TRUE\n@classLabel false", "@classLabel false", "# none"],
)
def test_a_ts_file_holds_a_number_behind_the_last_colon(tmp_path, header):
    x, y = levels()
    path = write_values(tmp_path / "a.ts", header)
    series = read_ts(path, numbers=True)
    assert series.y.dtype == np.float64
    assert series.y.tolist() == y.tolist()
    assert series.classes == ()
    np.testing.assert_array_equal(series.x, x.transpose(0, 2, 1).astype(np.float32))
    # to be predicted, numbers are left out, and are no channel
    assert read_ts(path, channels=2, numbers=True).x.shape == series.x.shape
    assert read_ts(path, channels=2, numbers=True).y is None


@pytest.mark.parametrize("name", ["Covid3Month", "CardanoSentiment"])
def test_public_files_are_read_as_aeon_reads_them(name):
    datasets = pytest.importorskip("aeon.datasets")
    path = Path(datasets.__file__).parent / "data" / name / f"{name}_TRAIN.ts"
    x, y = datasets.load_from_ts_file(str(path))
    assert SeriesValueTask.recognize(look_at(path), {}) is not None
    assert SeriesTask.recognize(look_at(path), {}) is None
    series = read_ts(path, numbers=True)
    np.testing.assert_array_equal(series.x, x.transpose(0, 2, 1).astype(np.float32))
    np.testing.assert_array_equal(series.y, y)


def test_what_aeon_writes_is_read(tmp_path):
    datasets = pytest.importorskip("aeon.datasets")
    x, y = levels()
    options = {"label_type": "regression", "path": str(tmp_path), "problem_name": "w"}
    datasets.save_to_ts_file(x, y, **options)
    assert read_ts(tmp_path / "w.ts", numbers=True).y.tolist() == y.tolist()


def test_arrays_and_tables_hold_numbers(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y = levels()
    expected = x.transpose(0, 2, 1).astype(np.float32)
    for values in (y, y.astype(str), y.astype(np.float32)):
        np.savez(tmp_path / "a.npz", X=x, y=values)
        series = read_npz(tmp_path / "a.npz", numbers=True)
        assert series.y.tolist() == values.astype(np.float64).tolist()
        np.testing.assert_array_equal(series.x, expected)
    rows = [(f"s{i}", a, b, t) for i, (s, t) in enumerate(zip(x, y, strict=True)) for a, b in s.T]
    frame = pandas.DataFrame(rows, columns=["case", "a", "b", "price"])
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        series = read_series(tmp_path / name, target="price", numbers=True)
        assert series.y.tolist() == y.tolist()
        np.testing.assert_array_equal(series.x, expected)
    wide = pandas.DataFrame(x[:, 0]).assign(label=y)
    wide.to_csv(tmp_path / "wide.csv", index=False)
    assert read_series(tmp_path / "wide.csv", numbers=True).y.tolist() == y.tolist()


@pytest.mark.raw
def test_a_collection_holds_finite_numbers_or_classes():
    x, length = np.zeros((2, 3, 1), np.float32), np.array([3, 3])
    for broken in (np.nan, np.inf, -1e39):
        with pytest.raises(ValueError, match=r"Case 1, counted from 0, has the target"):
            SeriesCollection(x, length, np.array([0.5, broken]))
    with pytest.raises(ValueError, match="leave classes out if the targets are numbers"):
        SeriesCollection(x, length, np.array([0.0, 1.0]), ("a", "b"))
    with pytest.raises(ValueError, match="must index the 0 classes"):
        SeriesCollection(x, length, np.array([0, 1]))
    series = SeriesCollection(x, length, np.array([0.5, 2.5]))
    assert series.take(np.array([1])).y.tolist() == [2.5]


def test_targets_are_standardised_by_the_training_part_and_answered_in_their_unit(tmp_path):
    settings = SeriesValueSettings(train=write_values(tmp_path / "a.ts"), seed=3)
    task, parts = SeriesValueTask.load(settings)
    assert [len(part) for part in parts[:3]] == [19, 5, 6]
    y = levels()[1]
    rows = list(parts.rows)
    assert task.target_mean == pytest.approx(y[rows].mean())
    assert task.target_std == pytest.approx(y[rows].std())
    np.testing.assert_allclose(
        parts.train.series.y, (y[rows] - y[rows].mean()) / y[rows].std(), rtol=1e-12
    )
    assert parts.note.endswith("20% of a.ts were held out at random, and scored once.")
    batch = task.collate([parts.test[i] for i in range(6)])
    assert batch["labels"].dtype == torch.float32
    logits = torch.tensor([[0.0], [1.0], [-2.0], [0.5], [0.0], [3.0]])
    answers = task.answer(ModelOutput(logits, None), batch["labels"])
    expected = y[rows].mean() + y[rows].std() * logits.flatten().numpy()
    np.testing.assert_allclose(answers["values"], expected, rtol=1e-12)
    # every number of the file is in one part
    held = set(y.tolist()) - set(y[rows].tolist())
    assert set(answers["labels"].numpy().round(3).tolist()) <= held
    records = task.records(answers)
    assert [row["value"] for row in records] == answers["values"].tolist()
    loss = task.objective(ModelOutput(logits, None), batch["labels"])
    assert float(loss) == pytest.approx(float((logits.flatten() - batch["labels"]).pow(2).mean()))


def test_a_model_learns_the_level_and_survives_saving(tmp_path):
    from primal_attention.training import TrainingConfig, fit

    task, parts = SeriesValueTask.load(SeriesValueSettings(train=write_values(tmp_path / "a.ts")))
    torch.manual_seed(0)
    model = task.build(SeriesOptions(dim=16, num_heads=2, num_layers=1, dropout=0.0))
    assert model.config.num_classes == 1
    config = TrainingConfig(epochs=15, epoch_steps=10, batch_size=16, lr=5e-3)
    fit(model, parts.train, config=config, objective=task.objective, collate=task.collate)
    found = task.measure(model, parts.test)
    assert found.scores["R2"].value > 0.9
    assert found.scores["RMSE"].value < 5
    save_task(task, tmp_path / "t")
    assert load_task(tmp_path / "t") == task
    # without labels the same numbers come out
    x = levels()[0]
    by_file = task.measure(model, task.read(tmp_path / "a.ts", labelled=False))
    by_array = task.measure(model, task.from_arrays(x))
    torch.testing.assert_close(by_file.answers["values"], by_array.answers["values"])
    whole = task.measure(model, task.read(tmp_path / "a.ts", labelled=True))
    torch.testing.assert_close(whole.answers["values"], by_array.answers["values"])
    np.testing.assert_allclose(whole.answers["labels"], levels()[1], rtol=1e-6)


def test_a_large_mean_costs_no_digits(tmp_path):
    x, y = levels()
    np.savez(tmp_path / "a.npz", X=x, y=y + 1e9)
    task, parts = SeriesValueTask.load(SeriesValueSettings(train=tmp_path / "a.npz"))
    batch = task.collate([parts.test[i] for i in range(len(parts.test))])
    labels = task.answer(batch["labels"][:, None], batch["labels"])["labels"].numpy() - 1e9
    assert set(labels.round(3).tolist()) <= set(y.tolist())


@pytest.mark.raw
def test_targets_that_cannot_be_learned_or_scored_are_told(tmp_path):
    path = tmp_path / "a.npz"
    settings = SeriesValueSettings(train=path)
    np.savez(path, X=np.zeros((4, 1, 5)), y=np.full(4, 2.5))
    with pytest.raises(UserError, match=r"a\.npz: all series have the target 2\.5; a model needs"):
        SeriesValueTask.load(settings)
    np.savez(path, X=np.zeros((2, 1, 5)), y=np.array([0.5, 1]))
    with pytest.raises(UserError, match=r"a\.npz: there are 2 series, too few for 3 parts"):
        SeriesValueTask.load(settings)
    assert len(SeriesValueTask.load(replace(settings, test=path))[1].test) == 2
    np.savez(path, X=np.zeros((4, 1, 5)))
    with pytest.raises(UserError, match=r"a\.npz: the files to train on and to score need labels"):
        SeriesValueTask.load(settings)
    np.savez(path, X=np.ones((3, 1, 5)), y=np.array([0, 1e-20, 2e-20]))
    task, _ = SeriesValueTask.load(settings)
    np.savez(path, X=np.ones((2, 1, 5)), y=np.array([0, 1e20]))
    with pytest.raises(UserError, match=r"a\.npz: Case 1, counted from 0, has a target more than"):
        task.read(path, labelled=True)
    assert len(task.read(path, labelled=False)) == 2
    np.savez(path, X=np.ones((2, 1, 5)))
    with pytest.raises(UserError, match=r"a\.npz has no labels; primal predict needs none"):
        task.read(path, labelled=True)


def test_series_to_predict_are_read_however_far_zero_is_from_the_targets():
    known = {"mean": (0.0,), "std": (1.0,), "longest": 5}
    task = SeriesValueTask(**known, target_mean=1e20, target_std=1.0)
    assert len(task.from_arrays(np.ones((2, 1, 5)))) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"std": [1.0, 2.0, 3.0]}, "one number a channel, got 2 and 3"),
        ({"std": [1.0, 0.0]}, "std positive ones"),
        ({"target_std": 0.0}, "target_std a positive one, got 1.0 and 0.0"),
    ],
)
def test_a_damaged_task_is_told_when_it_is_loaded(tmp_path, changes, words):
    known = {"mean": (0.0, 1.0), "std": (1.0, 2.0), "longest": 5}
    task = SeriesValueTask(**known, target_mean=1.0, target_std=2.0)
    save_task(task, tmp_path)
    content = json.loads((tmp_path / "task.json").read_text())
    content["values"] |= changes
    (tmp_path / "task.json").write_text(json.dumps(content))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.warns(UnsealedWarning), pytest.raises(UserError, match="json is damaged") as caught:
        load_task(tmp_path)
    assert words in str(caught.value)


def test_equal_targets_of_the_training_part_keep_their_unit():
    x, length = np.zeros((3, 4, 1), np.float32), np.full(3, 4)
    task = SeriesValueTask.fit(SeriesCollection(x, length, np.full(3, 0.1)))
    assert task.target_std == 1.0
    assert task.target_mean == pytest.approx(0.1)


def test_files_are_recognised_by_their_targets(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y = levels()

    def readers(path, **given):
        source = look_at(path)
        found = [cls.recognize(source, given) for cls in (SeriesTask, SeriesValueTask)]
        return [answer is not None for answer in found]

    path = tmp_path / "a.ts"
    for header in ("@targetLabel true", "@classLabel false"):
        assert readers(write_values(path, header)) == [False, True]
    # what is not said to be a number is a class
    for header in ("@classLabel true 1 2", "# none", "@targetLabel false"):
        assert readers(write_values(path, header)) == [True, False]
        # the user knows better
        assert readers(path, task="series-values")[1]
    path.write_text("@classLabel false\n@data\n1,2:3,4\n")
    assert readers(path) == [True, False]
    for values, expected in (
        (y, [False, True]),
        (np.arange(30) % 2, [True, False]),
        (np.arange(30) % 2 + 0.0, [True, False]),
        (np.array(["0.5", "1"] * 15), [True, False]),
    ):
        for names in (("X", "y"), ("X_train", "y_train")):
            np.savez(tmp_path / "a.npz", **dict(zip(names, (x, values), strict=True)))
            assert readers(tmp_path / "a.npz") == expected
    np.savez(tmp_path / "a.npz", X=x, y=np.arange(30) % 2 + 0.5, classes=["a", "b"])
    assert readers(tmp_path / "a.npz") == [True, False]
    (tmp_path / "Set").mkdir()
    write_values(tmp_path / "Set" / "Set_TRAIN.ts")
    assert readers(tmp_path / "Set") == [False, True]
    rows = pandas.DataFrame(x[:, 0]).add_prefix("t").assign(price=y)
    rows.to_csv(tmp_path / "a.csv", index=False)
    assert SeriesValueTask.recognize(look_at(tmp_path / "a.csv"), {"target": "price"}) is None
    given = {"target": "price", "task": "series-values"}
    words = SeriesValueTask.recognize(look_at(tmp_path / "a.csv"), given).words
    assert words == "one row a series, 8 time steps of one channel, a number for each"
    with pytest.raises(UserError, match="There is no 'label'; give --target with one of"):
        SeriesValueTask.recognize(look_at(tmp_path / "a.csv"), {"task": "series-values"})
