"""Data of one's own: a file is recognised, trained on, and its model is used again."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import primal_attention as pa
from primal_attention.cli.main import main
from primal_attention.tasks import TASKS, Recognition, RegressionTask, register_task

from .conftest import SMALL, write_ts

QUICK = [*SMALL[:4], "--training.epochs", "1", "--training.min-steps", "4"]


def slopes(cases: int = 20, channels: int = 2, steps: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Series whose class is the sign of their slope, ``[cases, channels, time]``."""
    rng = np.random.default_rng(0)
    y = np.array(["up" if i % 2 else "down" for i in range(cases)])
    sign = np.where(y == "up", 1.0, -1.0)[:, None, None]
    noise = 0.1 * rng.normal(size=(cases, channels, steps))
    return sign * np.linspace(-1, 1, steps) + noise, y


def write_wide(path: Path, target: str = "kind") -> None:
    x, y = slopes(channels=1)
    rows = [",".join([*map(str, row), label]) for row, label in zip(x[:, 0], y, strict=True)]
    head = ",".join([*(f"t{i}" for i in range(9)), target])
    path.write_text("\n".join([head, *rows]) + "\n")


def test_a_ts_file_needs_nothing_else(tmp_path, capsys, fails):
    write_ts(tmp_path / "my_train.ts", 20, 0)
    assert main(["train", "my_train.ts", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("my_train.ts: time series in the UEA format (task series).\n")
    assert "12 to train, 4 to choose the epoch, 4 to score" in printed
    assert "There is no test file: 20% of my_train.ts were held out" in printed
    assert "num_heads" not in printed
    report = Path("outputs/my_train/report.html").read_text("utf-8")
    assert "There is no test file: 20% of my_train.ts were held out" in report
    # the run has one model, so its folder will do
    write_ts(tmp_path / "new.ts", 5, 1, labels=False)
    assert main(["predict", "outputs/my_train", "new.ts"]) == 0
    assert main(["eval", "outputs/my_train", "--data", "my_train.ts"]) == 0
    assert "Did you mean 'my_train'?" in fails("predict", "outputs/my_trian", "new.ts")


def test_a_table_needs_the_name_of_its_target(tmp_path, capsys, fails):
    write_wide(tmp_path / "table.csv")
    told = fails("train", "table.csv")
    assert "There is no 'label'; give --target with one of kind, t0, t1" in told
    assert main(["train", "table.csv", "--target", "kind", "--show-settings", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "one row a series, 9 time steps of one channel" in printed
    assert "target: kind" in printed
    saved = yaml.safe_load(Path("outputs/table/config.yaml").read_text())
    assert saved["data"]["target"] == "kind"
    assert saved["training"]["min_steps"] == 4


def test_parquet_and_arrays_are_recognised(tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    write_wide(tmp_path / "table.csv", "label")
    pandas.read_csv(tmp_path / "table.csv").to_parquet(tmp_path / "tab.parquet")
    assert main(["train", "tab.parquet", *QUICK]) == 0
    x, y = slopes()
    np.savez(tmp_path / "arrays.npz", X_train=x, y_train=y, X_test=x[:4], y_test=y[:4])
    assert main(["train", "arrays.npz", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "arrays of 20 series" in printed
    assert "4 to score" in printed.rpartition("arrays of 20 series")[2]


@pytest.mark.filterwarnings("default")
def test_an_array_with_time_first_is_suspicious(tmp_path, capsys):
    x, y = slopes()
    np.savez(tmp_path / "late.npz", X=x.transpose(0, 2, 1), y=y)
    assert main(["train", "late.npz", *QUICK]) == 0
    told = capsys.readouterr().err
    assert "primal: warning: late.npz: X has the shape (20, 9, 2) and is read as 9 channels" in told
    assert "warnings.warn" not in told


def test_a_test_file_is_scored_instead_of_a_part(tmp_path, capsys):
    write_ts(tmp_path / "a.ts", 20, 0)
    write_ts(tmp_path / "b.ts", 7, 1)
    assert main(["train", "a.ts", "--test", "b.ts", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "7 to score" in printed
    assert "held out" not in printed


def test_numbers_of_series_are_trained_scored_and_predicted(tmp_path, capsys, fails):
    x, _ = slopes(40)
    y = (1000 + 30 * x[:, 0, 0]).round(2)
    fields = [[",".join(map(str, channel)) for channel in case] for case in x]
    rows = [":".join([*case, str(number)]) for case, number in zip(fields, y, strict=True)]
    (tmp_path / "numbers.ts").write_text("\n".join(["@targetlabel true", "@data", *rows]) + "\n")
    steps = [*SMALL[:4], "--training.epochs", "2", "--training.min-steps", "60"]
    assert main(["train", "numbers.ts", *steps]) == 0
    printed = capsys.readouterr().out
    first = "numbers.ts: time series in the UEA format, a number for each (task series-values).\n"
    assert printed.startswith(first)
    assert "20% of numbers.ts were held out at random" in printed
    scores = json.loads(Path("outputs/numbers/primal-dual/result.json").read_text())
    assert scores["test R2"] > 0.9
    assert "Predicted against true numbers" in Path("outputs/numbers/report.html").read_text()
    # as arrays, without numbers, the same series have the same answers
    assert main(["predict", "outputs/numbers", "numbers.ts", "--out", "p.jsonl"]) == 0
    found = [json.loads(line)["value"] for line in Path("p.jsonl").read_text().splitlines()]
    assert np.corrcoef(found, y)[0, 1] > 0.9
    assert abs(np.mean(found) - 1000) < 30
    assert np.allclose(pa.load("outputs/numbers").predict(x), found)
    np.savez(tmp_path / "scored.npz", X=x, y=y)
    for file in ("numbers.ts", "scored.npz"):
        assert main(["eval", "outputs/numbers", "--data", file, "--out", "s.json"]) == 0
        rmse = np.sqrt(np.mean((np.array(found) - y) ** 2))
        assert abs(json.loads(Path("s.json").read_text())["RMSE"] - rmse) < 1e-3 * rmse
    told = fails("train", "numbers.ts", "--task", "series", "--out", "o")
    assert "numbers to predict; this task predicts classes. Choose --task series-values" in told


def test_a_table_of_series_with_numbers_needs_its_task(tmp_path, capsys):
    x, _ = slopes(24, channels=1)
    head = ",".join([*(f"t{i}" for i in range(9)), "price"])
    rows = [",".join(map(str, [*case, 7.5 * case[0]])) for case in x[:, 0]]
    (tmp_path / "wide.csv").write_text("\n".join([head, *rows]) + "\n")
    given = ["wide.csv", "--target", "price", "--task", "series-values"]
    assert main(["train", *given, *QUICK]) == 0
    assert "one row a series, 9 time steps of one channel, a number" in capsys.readouterr().out
    assert pa.load("outputs/wide").predict("wide.csv").dtype == np.float64
    rows = [f"s{i},{v},{case[0] / 3}" for i, case in enumerate(x[:, 0]) for v in case]
    (tmp_path / "long.csv").write_text("\n".join(["who,level,price", *rows]) + "\n")
    assert main(["train", "long.csv", "--case", "who", "--target", "price", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "one row a time step, 1 channels, a number for each (task series-values)" in printed


def test_files_on_the_command_line_replace_the_set_of_a_recipe(tmp_path, capsys):
    write_ts(tmp_path / "a.ts", 20, 0)
    arguments = ["--data.train", "a.ts", "--compare", *QUICK]
    assert main(["train", "japanese-vowels", *arguments, "--model.hidden-dim", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The recipe japanese-vowels with other data.\n2 classes; 14 to train")
    saved = yaml.safe_load(Path("outputs/japanese-vowels/config.yaml").read_text())["data"]
    assert saved["name"] is None
    assert saved["train"] == str(tmp_path / "a.ts")


def test_paths_in_a_recipe_start_at_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write_ts(tmp_path / "recipes" / "a.ts", 20, 0)
    (tmp_path / "recipes" / "r.yaml").write_text("task: series\ndata: {train: a.ts}\n")
    assert main(["train", "recipes/r.yaml", *QUICK]) == 0


@pytest.mark.parametrize("data", [["a.ts"], ["table.csv", "--target", "kind"], []])
def test_a_new_recipe_is_commented_and_trains_as_it_is(tmp_path, monkeypatch, fails, data):
    write_ts(tmp_path / "a.ts", 20, 0)
    write_wide(tmp_path / "table.csv")
    (tmp_path / "r").mkdir()
    # only so that the test is short; epochs and steps are settings like others
    assert main(["init", "r/my.yaml", *data, *QUICK]) == 0
    text = Path("r/my.yaml").read_text("utf-8")
    assert text.count("#") > 40
    assert "# weight_decay: 0.01" in text
    assert "Weight decay of matrices" in text
    if data:
        assert yaml.safe_load(text)["data"]["train"] == f"../{data[0]}"
    monkeypatch.chdir(tmp_path / "r")
    assert main(["train", "my.yaml"]) == 0
    assert "already exists" in fails("init", "my.yaml")
    assert "ends in .yaml" in fails("init", "my.txt")


def test_every_task_has_a_recipe_to_start_from(tmp_path):
    for name in TASKS:
        assert main(["init", f"{name}.yaml", "--task", name]) == 0
        assert yaml.safe_load(Path(f"{name}.yaml").read_text())["task"] == name


def test_what_cannot_be_recognised_is_told(tmp_path, fails):
    write_ts(tmp_path / "my_train.ts", 4, 0)
    (tmp_path / "sound.mp3").write_text("")
    (tmp_path / "mixed").mkdir()
    for name in ("a.txt", "b.mp3"):
        (tmp_path / "mixed" / name).write_text("words")
    np.savez(tmp_path / "odd.npz", weights=np.zeros(3))
    assert "there is no file my_trian.ts. Did you mean 'my_train.ts'?" in fails(
        "train", "my_trian.ts"
    )
    told = fails("train", "sound.mp3")
    assert "the ending '.mp3'" in told
    for ending in (".ts", ".npz", ".csv", ".parquet", ".jsonl"):
        assert ending in told
    told = fails("train", "mixed")
    assert "1 .mp3" in told
    assert "weights" in fails("train", "odd.npz")
    assert "there is no task 'serie'. Did you mean 'series'" in fails(
        "train", "my_train.ts", "--task", "serie"
    )
    told = fails("train", "my_train.ts", "--tarhget", "x")
    assert "there is no option --tarhget. Did you mean '--target'?" in told
    (tmp_path / "empty").mkdir()
    assert "the folder holds no files" in fails("train", "empty")
    names = ",".join(f"c{i}" for i in range(1000))
    (tmp_path / "wide.csv").write_text(f"{names}\n{names}\n")
    for given in ((), ("--task", "pairs")):
        assert "c11 and 988 more" in fails("train", "wide.csv", *given)
    assert "--task is for data" in fails("train", "japanese-vowels", "--task", "longrange")


def test_a_target_with_many_numbers_is_a_quantity(tmp_path, fails):
    rows = [f"{i},{i % 3},{i / 7}" for i in range(60)]
    (tmp_path / "prices.csv").write_text("\n".join(["a,b,price", *rows]) + "\n")
    told = fails("train", "prices.csv", "--target", "price", "--task", "series")
    assert "'price' holds 60 different numbers, which is a quantity and not a class" in told


def test_two_tasks_that_read_a_file_are_named(tmp_path, fails):
    class Other(RegressionTask):
        @classmethod
        def recognize(cls, source, given):
            return Recognition("other series") if source.suffix == ".ts" else None

    register_task("other", Other, "for this test")
    try:
        write_ts(tmp_path / "a.ts", 20, 0)
        told = fails("train", "a.ts")
        assert "series (time series in the UEA format) and other (other series)" in told
        assert "choose with --task series or --task other" in told
        assert main(["train", "a.ts", "--task", "series", *QUICK]) == 0
        assert main(["train", "--task", "series", "a.ts", *QUICK, "--overwrite"]) == 0
    finally:
        del TASKS["other"]


def test_texts_are_recognised_in_folders_and_tables(tmp_path, capsys):
    words = {"ham": "see you at lunch", "spam": "win money now now"}
    for part in ("train", "test"):
        for label, text in words.items():
            (tmp_path / "mail" / part / label).mkdir(parents=True)
            for i in range(6):
                (tmp_path / "mail" / part / label / f"{i}.txt").write_text(f"{text} {i}")
    rows = [f"{label},{text} {i}" for i in range(8) for label, text in words.items()]
    (tmp_path / "mail.csv").write_text("\n".join(["kind,body", *rows]) + "\n")
    assert main(["train", "mail", *QUICK, "--out", "a"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mail: a folder of texts, read as bytes (task longrange).")
    assert "12 to score" in printed
    assert main(["train", "mail.csv", "--target", "kind", *QUICK, "--out", "b"]) == 0
    printed = capsys.readouterr().out
    assert "a table of texts in the column 'body'" in printed
    assert "held out" in printed
    for run in ("a", "b"):
        trained = pa.load(run)
        assert trained.task.classes == ("ham", "spam")
        assert len(trained.predict(["win money", "lunch"])) == 2
        assert len(trained.predict("mail/test")) == 12


def test_classes_may_have_strange_names(tmp_path):
    names = [r"$\frac$", "two\nlines", "long " * 1000]
    rows = [{"text": f"words of {n[:2]} {i}", "label": n} for i in range(6) for n in names]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["train", "a.jsonl", *QUICK]) == 0
    assert "Confusion" in Path("outputs/a/report.html").read_text("utf-8")
    assert set(pa.load("outputs/a").predict("a.jsonl")) <= set(names)


def test_pictures_are_recognised_in_folders(tmp_path, capsys, fails):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for label, level in (("dark", 30), ("light", 200)):
        (tmp_path / "shots" / label).mkdir(parents=True)
        for i in range(6):
            pixels = (level + 20 * rng.random((40, 30, 3))).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "shots" / label / f"{i}.png")
    assert main(["train", "shots", *QUICK]) == 0
    assert "a folder of pictures, read as grey values" in capsys.readouterr().out
    trained = pa.load("outputs/shots")
    assert len(trained.predict("shots")) == 12
    assert len(trained.predict(np.zeros((2, 32, 32)))) == 2
    assert main(["predict", "outputs/shots", "shots/dark/0.png"]) == 0
    (tmp_path / "shots" / "dark" / "7.png").write_text("no picture")
    assert "7.png is no image of a known format" in fails("train", "shots", "--overwrite")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.txt").write_text("words")
    assert "put those of each class into a folder of its own" in fails("train", "flat")


def test_a_model_of_the_command_line_is_used_in_python(tmp_path):
    x, y = slopes()
    np.savez(tmp_path / "arrays.npz", X=x, y=y)
    assert main(["train", "arrays.npz", "--model.attention", "primal", *QUICK]) == 0
    trained = pa.load("outputs/arrays/primal")
    from_file = trained.predict("arrays.npz")
    assert set(from_file) <= {"up", "down"}
    assert np.array_equal(from_file, trained.predict(x))
    assert np.array_equal(from_file, trained.predict(list(x)))
    assert main(["predict", "outputs/arrays/primal", "arrays.npz", "--out", "p.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert rows == trained.records(x)
    with pytest.raises(ValueError, match="1 channels, but the statistics were fitted on 2"):
        trained.predict(x[:, :1])


def test_an_estimator_and_the_command_line_read_each_others_folders(tmp_path):
    pytest.importorskip("aeon")
    from primal_attention.tasks.series import SeriesClassifier

    x, y = slopes()
    np.savez(tmp_path / "arrays.npz", X=x, y=y)
    assert main(["train", "arrays.npz", *QUICK]) == 0
    clf = SeriesClassifier.load("outputs/arrays/primal-dual")
    assert np.array_equal(clf.predict(x), pa.load("outputs/arrays").predict(x))
    clf = SeriesClassifier(random_state=0).fit(x, y)
    clf.save("saved")
    assert np.array_equal(clf.predict(x), pa.load("saved").predict("arrays.npz"))
    assert main(["predict", "saved", "arrays.npz"]) == 0
