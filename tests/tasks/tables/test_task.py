"""Tables read for training: which target is what, which rows go where, and what a report shows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from npt_cases import ROW_ATTENTIONS

from primal_attention.report import Report
from primal_attention.tasks.results import Result, baseline_table, verdict
from primal_attention.tasks.tables import TableSettings, TableTask
from primal_attention.tasks.tables.baselines import baseline_scores
from primal_attention.tasks.tables.fitting import calibrate, keep_rows
from primal_attention.tasks.tables.reading import is_class_target, parse_dates
from primal_attention.tasks.tables.settings import NPTOptions
from primal_attention.tasks.tables.showing import _cell, _coverage, _reliability, row_spectra
from primal_attention.tasks.trained import TrainedModel
from primal_attention.training import History, Score
from primal_attention.training.evaluation import Evaluation

pd = pytest.importorskip("pandas")


def small(row_attention: str = "softmax") -> NPTOptions:
    sizes: dict[str, Any] = {"dim": 8, "num_heads": 2, "num_layers": 2, "row_dim": 16}
    return NPTOptions(**sizes, dropout=0.0, **ROW_ATTENTIONS[row_attention])  # type: ignore[arg-type]


@pytest.fixture
def sums(tmp_path):
    """Settings of a table whose target is a sum of two columns; its third tells the row."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 120))
    frame = pd.DataFrame({"a": a, "b": b, "row": np.arange(120), "sum": 10 * (a + b) + 50})
    frame.to_csv(tmp_path / "sums.csv", index=False)
    return TableSettings(train=tmp_path / "sums.csv", target="sum")


# the target


@pytest.mark.parametrize(
    ("values", "is_class"),
    [
        (["a", "b"] * 9, True),
        ([True, False] * 9, True),
        ([0, 1] * 9, True),
        ([-1, 1] * 9, True),
        ([0.5, 1.5] * 9, True),
        ([1, 2, 3] * 9, True),
        ([0.0, 1.0, 2.0] * 9, True),
        ([3, 4, 5] * 9, False),  # counts nothing: a quality from 3 to 5
        ([0, 1, 3] * 9, False),
        (list(range(21)) * 9, False),
        ([0, 1, 2, 3, 4, 5], False),  # no value repeats
        ([0.1, 0.7, 3.2] * 9, False),
    ],
)
def test_numbers_are_classes_if_they_look_like_codes(values, is_class):
    assert is_class_target(pd.Series(values), "t") is is_class
    assert is_class_target(np.array(values), "t") is is_class


def test_the_user_may_say_what_the_target_is(tmp_path):
    frame = pd.DataFrame({"x": range(40), "stars": [1, 2, 3, 4] * 10})
    frame.to_csv(tmp_path / "t.csv", index=False)
    settings = TableSettings(train=tmp_path / "t.csv", target="stars")
    assert TableTask.load(settings)[0].classes == ("1", "2", "3", "4")
    task, parts = TableTask.load(replace(settings, kind="number"))
    assert not task.is_class
    assert parts.train.labels.is_floating_point()
    frame["stars"] *= 10
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert not TableTask.load(settings)[0].is_class
    assert TableTask.load(replace(settings, kind="classes"))[0].classes == ("10", "20", "30", "40")
    with pytest.raises(ValueError, match="kind must be one of auto, classes, number"):
        TableSettings(kind="colour")  # type: ignore[arg-type]


# the parts


def test_rows_go_to_one_part_and_the_same_share_of_every_range(sums):
    task, parts = TableTask.load(sums)
    assert [len(p) for p in parts[:3]] == [78, 18, 24]
    place = task.columns[2]
    rows = [place.decode(p.values[:, 2].double().numpy()) for p in parts[:3]]
    assert sorted(np.concatenate(rows).tolist()) == list(range(120))
    assert parts.rows == [*rows[0].tolist(), *rows[1].tolist()]  # for messages and reports
    # the target is standardised by the training part alone
    assert float(parts.train.labels.mean()) == pytest.approx(0, abs=1e-5)
    thirds = np.quantile(parts.train.labels, [1 / 3, 2 / 3])
    counts = np.bincount(np.digitize(parts.test.labels, thirds))
    assert counts.min() >= 6
    again = TableTask.load(sums)[1]
    assert torch.equal(again.test.values, parts.test.values)
    other = TableTask.load(replace(sums, seed=1))[1]
    assert not torch.equal(other.test.values, parts.test.values)


def test_sizes_and_a_test_file_choose_the_rows(sums, tmp_path):
    frame = pd.read_csv(sums.train)
    frame.iloc[:7].assign(extra="x").to_csv(tmp_path / "test.csv", index=False)
    settings = replace(sums, test=tmp_path / "test.csv", train_size=40)
    _, parts = TableTask.load(settings)
    assert (len(parts.train) + len(parts.valid), len(parts.test)) == (40, 7)
    assert parts.note == ""
    assert len(TableTask.load(replace(settings, test_size=3))[1].test) == 3


def test_known_sets_come_with_their_splits():
    task, parts = TableTask.load(TableSettings(name="wine"))
    assert task.classes == ("0", "1", "2")
    assert [len(p) for p in parts[:3]] == [114, 28, 36]
    assert parts.note == "Split 1 of 5: 5 stratified folds, seed 0."
    other = TableTask.load(TableSettings(name="wine", seed=1))[1]
    assert not torch.equal(other.test.values, parts.test.values)


def test_dates_are_read_from_text():
    frame = pd.DataFrame(
        {
            "day": ["2024-01-01", None, "2024-01-03"],
            "moment": ["2024-01-01T02:00+02:00", "2024-01-01 00:00:00", "2024-01-01T00:00Z"],
            "never": ["2024-02-31", "2024-01-01", "2024-01-01"],
            "word": ["1.2.2024", "soon", "late"],
        }
    )
    found = parse_dates(frame)
    assert [kind.kind for kind in found.dtypes[:2]] == ["M", "M"]
    assert found["moment"].nunique() == 1
    assert found[["never", "word"]].equals(frame[["never", "word"]])
    with pytest.raises(ValueError, match="column 'word' held dates in training; write them as"):
        parse_dates(frame, ["word"])


def test_an_index_without_a_name_is_no_feature(sums):
    frame = pd.read_csv(sums.train)
    frame.to_csv(sums.train)
    assert [c.name for c in TableTask.load(sums)[0].columns] == ["a", "b", "row"]


# after the training


def test_primal_rows_have_the_regulariser_of_the_estimators(sums):
    task, _ = TableTask.load(sums)
    by_name = task.build(replace(small(), attention="primal-dual"))
    assert by_name.config == task.build(small("primal")).config
    assert by_name.config.attention_options == {"regularizer": "kkt"}
    other = replace(small(), attention="primal-dual", attention_options={"regularizer": "ksvd"})
    assert task.build(other).config.attention_options == {"regularizer": "ksvd"}


@pytest.mark.parametrize("row_attention", ROW_ATTENTIONS)
def test_a_finished_model_keeps_the_rows_that_it_may(sums, row_attention):
    task, parts = TableTask.load(replace(sums, max_context=80))
    assert task.context_rows == 78
    model = task.build(small(row_attention)).eval()
    model.keep_items(parts.train)
    finished = task.finish(model, parts)
    kept = {"softmax": 80, "sparse": 80, "primal": 0, "none": 0}[row_attention]
    assert finished.task.context_rows == finished.model.config.context_rows == kept
    assert finished.model.config.is_condensed == (row_attention == "primal")
    # a primal model uses all 96 rows nevertheless
    every = parts.train.append(parts.valid)
    whole = model.with_context(every.values, every.missing).eval()
    with torch.no_grad():
        mine, theirs = (
            m(parts.test.values, parts.test.missing).logits for m in (finished.model, whole)
        )
    agrees = bool(torch.allclose(mine, theirs, atol=1e-5))
    assert agrees == (row_attention in ("primal", "none"))


def test_calibration_makes_held_out_errors_standard(sums):
    task, parts = TableTask.load(sums)
    model = task.build(small()).eval()
    model.keep_items(parts.train)
    calibrate(model, task, parts.valid)
    with torch.no_grad():
        mean, log_std = model(parts.valid.values, parts.valid.missing).logits.unbind(1)
    squares = ((mean - parts.valid.labels) / log_std.exp()).square()
    # one pseudo-row of one deviation
    assert float(squares.sum() + 1 / model.temperature**2) == pytest.approx(
        len(squares) + 1, rel=1e-3
    )
    before = float(model.temperature)
    calibrate(model, task, parts.valid)
    assert float(model.temperature) == pytest.approx(before)


# what a report shows


def test_row_spectra_are_those_of_attention_to_the_context(sums):
    task, parts = TableTask.load(sums)
    model = task.build(small()).train()
    model.keep_items(parts.train)
    spectra = row_spectra(model, parts.test)
    assert model.training  # as it was
    assert [layer.name for layer in spectra] == ["row_blocks.0", "row_blocks.1"]
    # rows of softmax weights sum to one, so the largest singular value is about the root of n / m
    first = spectra[0].singular_values
    assert first.shape == (1, 2, 24)
    assert float(first[0, 0, 0]) == pytest.approx((24 / 78) ** 0.5, rel=0.1)
    primal = task.build(small("primal"))
    primal.keep_items(parts.train)
    found = row_spectra(primal.eval(), parts.test)
    assert all(layer.diagnostics is not None for layer in found)
    assert row_spectra(task.build(small("none")), parts.test) == []


@pytest.mark.parametrize("has_words", [False, True])
def test_baselines_learn_what_is_there(sums, has_words):
    if has_words:
        frame = pd.read_csv(sums.train)
        frame["side"] = np.where(frame["sum"] > 50, "high", "low")
        frame.loc[::9, "side"] = np.nan
        frame["nothing"] = np.nan
        frame.to_csv(sums.train, index=False)
    task, parts = TableTask.load(sums)
    found = baseline_scores(task, parts)
    assert list(found) == [
        *("a constant", "k-NN", "ridge regression", "random forest", "histogram boosting")
    ]
    assert found["ridge regression"]["R2"].value > 0.95  # the target is linear
    assert found["a constant"]["R2"].value < 0.05
    target = task.target
    assert target is not None
    spread = target.scale * float(parts.test.labels.std())
    assert found["a constant"]["RMSE"].value == pytest.approx(spread, rel=0.1)


def test_baselines_of_classes_are_scored_by_accuracy():
    task, parts = TableTask.load(TableSettings(name="iris"))
    found = baseline_scores(task, parts)
    assert found["a constant"]["accuracy"].value == pytest.approx(1 / 3, abs=0.02)
    assert found["logistic regression"]["accuracy"].value > 0.9


def result(name: str, value: float, error: float, baselines: dict[str, float]) -> Result:
    scores = {"loss": Score(0.5), "accuracy": Score(value, error, is_share=True)}
    peers = {n: {"accuracy": Score(v, error, is_share=True)} for n, v in baselines.items()}
    return Result(name, History(), Evaluation(scores), {}, baselines=peers)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.95, "softmax does better than the best baseline (k-NN): test accuracy 95.0 ± 1.0 %"),
        (0.91, "softmax and the best baseline (k-NN) do equally well within the error"),
        (0.80, "A baseline wins: k-NN does better than softmax: test accuracy 90.0 ± 1.0 %"),
    ],
)
def test_the_verdict_says_whether_a_baseline_wins(value, words):
    one = result("softmax", value, 0.01, {"a constant": 0.3, "k-NN": 0.9})
    assert words in verdict([one])
    rows = baseline_table([one])
    assert rows[0] == ["", "test accuracy"]
    assert [row[0] for row in rows[1:]][-1] == "a constant"
    assert (rows[1][0] == "softmax") == (value > 0.9)


def test_reliability_and_coverage_follow_from_their_definition():
    # half of the answers with p = 0.8 are right
    logits = torch.tensor([[0.8, 0.2]] * 40).log()
    curve = _reliability({"logits": logits, "labels": torch.arange(40) % 2})
    np.testing.assert_allclose(curve.stated, 0.8, rtol=1e-6)
    assert curve.found.mean() == pytest.approx(0.5, abs=0.02)
    z = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    uniform = {"labels": z, "values": torch.zeros_like(z), "std": torch.ones_like(z)}
    # the central interval of 0.95 reaches to 1.96, which is 0.49 of a uniform draw from -4 to 4
    assert _coverage(uniform).found[-1] == pytest.approx(1.96 / 4, abs=1e-3)


def test_cells_are_shown_in_the_units_of_the_file(tmp_path):
    when = pd.date_range("1990-01-01", periods=40, freq="250D")
    frame = pd.DataFrame({"when": when, "word": ["a" * 30, "b"] * 20, "x": np.arange(40) / 3})
    frame.assign(t=[0, 1] * 20).to_parquet(tmp_path / "t.parquet")
    task, parts = TableTask.load(TableSettings(train=tmp_path / "t.parquet", target="t"))
    rows = parts.test
    shown = task.encoder.decode(rows.values[:, :3].double().numpy(), rows.missing[:, :3].numpy())
    cells = [_cell(shown["when"].iloc[i], task.columns[0]) for i in range(len(rows))]
    assert set(cells) <= {str(day.date()) for day in when}
    assert _cell("a" * 30, task.columns[1]) == "a" * 19 + "…"
    assert _cell(1 / 3, task.columns[2]) == "0.3333"
    assert _cell(-1e-7, task.columns[2]) == "0"  # a zero after rounding
    assert _cell(np.nan, task.columns[2]) == _cell(None, task.columns[1]) == "–"


def test_a_model_without_rows_explains_nothing(sums):
    task, parts = TableTask.load(sums)
    trained = TrainedModel(task, task.build(small("none")).eval())
    one = Result("softmax", History(), Evaluation({}), {}, trained=trained)
    report = Report("page")
    task.explain(report, [one], parts)
    assert "The model attends to no other rows." in report.html()


def test_the_context_of_a_finished_model_is_independent_of_its_test_rows(sums):
    task, parts = TableTask.load(sums)
    model = task.build(small()).eval()
    model.keep_items(parts.train)
    found = keep_rows(task, model, parts.train.append(parts.valid)).model
    seen = {tuple(row) for row in found.context_values[:, :3].tolist()}
    assert not seen & {tuple(row) for row in parts.test.values[:, :3].tolist()}
