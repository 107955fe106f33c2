"""The tasks on the command line: training, report, prediction, messages."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import primal_attention as pa
from primal_attention.cli.main import main
from primal_attention.tasks.events import EventPredictor, load_stackoverflow
from primal_attention.tasks.sources import look_at
from primal_attention.tasks.task import TASKS

SMALL = ["--model.dim", "16", "--model.num-heads", "2", "--training.epochs", "2"]
QUICK = [*SMALL, "--training.min-steps", "4"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)


@pytest.fixture(scope="module")
def table(tmp_path_factory, frame):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    frame.assign(loyal=frame["user"].str[1:].astype(int) % 2).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    """A finished run with two models."""
    out = tmp_path_factory.mktemp("run") / "log"
    columns = ["--data.marks", "price", "--data.covariates", "region"]
    given = ["--task", "events", str(table), *columns, "--compare", "softmax"]
    assert main(["train", *given, "--out", str(out), *QUICK]) == 0
    return out


def test_a_run_writes_a_report_with_words_first(run):
    page = (run / "report.html").read_text()
    words = page.index("names the next type of")
    for heading in ("Next events", "Kernel of time", "Influence against elapsed time", "Sequences"):
        assert f">{heading}</h2>" in page
    assert words < page.index(">Kernel of time</h2>")
    assert "t_ref=last_event" in page
    assert "t_ref=target" in page
    assert "days" in page
    assert "held out" in page
    assert len(re.findall(r"data:image/png", page)) >= 6


def test_predictions_name_sequence_unit_and_t_ref(run, table):
    assert main(["predict", str(run / "linear"), str(table), "--out", "next.csv"]) == 0
    with open("next.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sequence"] for row in rows] == [f"u{i}" for i in range(20)]
    assert {row["t_ref"] for row in rows} == {"last_event"}
    assert {row["unit"] for row in rows} == {"days"}
    shares = [sum(float(v) for k, v in row.items() if k.startswith("p(")) for row in rows]
    np.testing.assert_allclose(shares, 1, atol=1e-5)


def test_a_run_is_scored_and_used_from_python(run, table, capsys):
    assert main(["eval", str(run / "linear"), "--data", str(table), "--out", "s.json"]) == 0
    found = json.loads(Path("s.json").read_text())
    name = "log-likelihood (nats per event, days)"
    model = EventPredictor.load(run / "linear")
    log = model.task_.scheme.read(table)
    assert model.score(log) == pytest.approx(found[name], abs=1e-6)
    trained = pa.load(run / "linear")
    np.testing.assert_array_equal(trained.predict(str(table)), model.predict_next(log).types)
    np.testing.assert_array_equal(trained.predict(log), trained.predict(pd.read_csv(table)))


def test_an_estimators_folder_is_read_by_the_command(predictor, tmp_path):
    predictor.save(tmp_path / "model")
    pd.DataFrame({"user": ["a", "a"], "time": [1.0, 2.5], "event": [0, 1]}).to_csv("new.csv")
    assert main(["predict", "model", "new.csv"]) == 0


def test_classes_of_sequences_from_a_table(table, tmp_path):
    out = tmp_path / "labels"
    given = ["--task", "event-labels", str(table), "--target", "loyal"]
    assert main(["train", *given, "--out", str(out), *QUICK]) == 0
    assert main(["predict", str(out / "linear"), str(table)]) == 0
    with open("predictions.csv", newline="") as file:
        assert {row["class"] for row in csv.DictReader(file)} <= {"0", "1"}
    assert main(["eval", str(out / "linear"), "--data", str(table)]) == 0


@pytest.mark.parametrize("task", ["events", "event-labels", "irregular-series"])
def test_the_starter_of_a_task_trains_without_a_file(task):
    assert main(["init", "start.yaml", "--task", task]) == 0
    quick = ["--data.train-size", "12", "--data.test-size", "6", *QUICK]
    assert main(["train", "start.yaml", *quick]) == 0


def test_a_log_is_recognised_and_other_tables_are_not(table):
    events, labels = (TASKS[name].kind for name in ("events", "event-labels"))
    source = look_at(table)
    assert events.recognize(source, {}).settings["data"] == {
        "time": "time",
        "event": "event",
        "sequence": "user",
    }
    assert labels.recognize(source, {}) is None
    assert events.recognize(source, {"target": "loyal"}) is None
    assert "loyal" in labels.recognize(source, {"target": "loyal"}).words
    pd.DataFrame({"a": [1], "label": ["x"]}).to_csv("other.csv")
    assert events.recognize(look_at(Path("other.csv")), {}) is None


def fails(capsys, *arguments):
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    return capsys.readouterr().err


def test_without_the_data_the_message_says_which_file_to_put_where(capsys, monkeypatch, tmp_path):
    words = fails(capsys, "train", "stackoverflow")
    assert "stackoverflow.npz at $PRIMAL_DATA/events/stackoverflow" in words
    assert "set PRIMAL_DATA" in words
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    assert str(tmp_path / "events") in fails(capsys, "train", "stackoverflow")


def test_the_file_of_badges_is_read(tmp_path):
    folder = tmp_path / "events" / "stackoverflow"
    folder.mkdir(parents=True)
    day = 86_400_000
    np.savez(
        folder / "stackoverflow.npz",
        time_ms=np.array([0, 3 * day, 5 * day, 6 * day]),
        event=np.array([1, 2, 2, 1], np.int8),
        offsets=np.array([0, 2, 4]),
        in_test=np.array([[True] * 5, [False] * 5]),
        badge_names=np.array(["", "Nice", "Good"]),
    )
    log, is_test = load_stackoverflow(root=tmp_path)
    assert log.names == ("Nice", "Good")
    assert log.types.tolist() == [0, 1, 1, 0]
    assert log.gaps[1] == 3
    assert is_test.tolist() == [True, False]


def test_mistakes_are_messages(capsys, table):
    words = fails(capsys, "train", table, "--task", "events", "--data.event", "evnt")
    assert "Did you mean 'event'?" in words
    assert "no file" in fails(capsys, "train", "nothing.csv", "--task", "events")
    few = pd.DataFrame({"user": ["a", "a"], "time": [1, 2], "event": ["x", "y"]})
    few.to_csv("few.csv", index=False)
    assert "too few" in fails(capsys, "train", "few.csv")
    assert "fold must be" in fails(capsys, "train", "stackoverflow", "--data.fold", "7")
