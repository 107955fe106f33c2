"""A file in, a file out; broken and foreign files get one sentence."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from primal_attention.cli.main import main
from primal_attention.support.files import SUMS, write_sealed
from primal_attention.tasks.series import read_ts

from .conftest import write_ts


def test_predictions_follow_the_file_and_agree_with_the_score(series_run, series_recipe, capsys):
    test = series_recipe.parent / "test.ts"
    assert main(["predict", str(series_run / "primal"), str(test), "--out", "p.csv"]) == 0
    rows = list(csv.DictReader(Path("p.csv").read_text("utf-8").splitlines()))
    assert [row["index"] for row in rows] == [str(i) for i in range(10)]
    for row in rows:
        assert float(row["p(down)"]) + float(row["p(up)"]) == pytest.approx(1, abs=1e-5)
        assert row["class"] == ("up" if float(row["p(up)"]) > 0.5 else "down")
    capsys.readouterr()
    arguments = ["eval", str(series_run / "primal"), "--data", str(test), "--out", "e.json"]
    assert main(arguments) == 0
    assert "accuracy" in capsys.readouterr().out
    found = json.loads(Path("e.json").read_text("utf-8"))
    truth = read_ts(test)
    hits = [row["class"] == truth.classes[y] for row, y in zip(rows, truth.y, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(hits))
    assert main(["eval", str(series_run / "primal"), "--out", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text("utf-8"))
    assert again["details"] == found["details"]


def test_batches_labels_and_formats_change_no_prediction(series_run, tmp_path):
    model = str(series_run / "primal")
    write_ts(tmp_path / "labelled.ts", 7, 3)
    write_ts(tmp_path / "bare.ts", 7, 3, labels=False)
    series = read_ts(tmp_path / "labelled.ts")
    np.savez(tmp_path / "plain.npz", X=series.x, length=series.length)
    first = np.where(series.keep[:, :, None], series.x, np.nan).transpose(0, 2, 1)
    np.savez(tmp_path / "channels.npz", X=first, axes="cases,channels,time")
    strange = (tmp_path / "labelled.ts").read_text().replace(":up", ":unknown")
    (tmp_path / "strange.ts").write_text(strange)
    long = [
        f"{i},{','.join(map(str, step))}" for i in range(7) for step in series.x[i][series.keep[i]]
    ]
    (tmp_path / "table.csv").write_text("case,a,b\n" + "\n".join(long) + "\n")
    np.savez(
        tmp_path / "parts.npz",
        X_test=series.x, len_test=series.length, y_test=series.y, classes=np.array(["a", "b"]),
    )  # fmt: skip
    found = []
    files = ["labelled.ts", "bare.ts", "strange.ts", "plain.npz", "channels.npz", "parts.npz"]
    for file in (*files, "table.csv"):
        assert main(["predict", model, file, "--out", "p.jsonl", "--batch-size", "3"]) == 0
        found.append([json.loads(line) for line in Path("p.jsonl").read_text("utf-8").splitlines()])
    assert len(found[0]) == 7
    assert found[1:] == found[:1] * 6


def test_every_line_is_one_text_whatever_characters_it_has(text_run, tmp_path):
    (tmp_path / "new.txt").write_text("good\u2028good\r\nbad\fbad é\x85\n \n", encoding="utf-8")
    assert main(["predict", str(text_run / "primal"), "new.txt", "--out", "p.csv"]) == 0
    rows = list(csv.DictReader(Path("p.csv").read_text("utf-8").split("\n")))
    assert [row["index"] for row in rows] == ["0", "1", "2"]


def test_an_empty_text_is_refused_with_its_place(text_run, fails, tmp_path):
    files = {
        "a.txt": ("good\n\nbad\n", "a.txt, line 2: the text is empty"),
        "b.txt": ("good\nbad\n\n", "b.txt, line 3: the text is empty"),
        "a.jsonl": ('{"text": "good"}\n\n{"text": "bad"}\n', "a.jsonl, line 2 is blank"),
        "b.jsonl": ('{"text": "good"}\n{"text": ""}\n', "b.jsonl, line 2: the text is empty"),
        "a.csv": ("text\ngood\n\nbad\n", "a.csv, line 3 is blank"),
        "b.csv": ('text\ngood\n""\nbad\n', "b.csv, row 2: the text is empty"),
        "c.csv": ("text,x\ngood,1\n,2\n", "c.csv, row 2: the text is empty"),
        "c.txt": ("", "c.txt: there are no sequences"),
    }
    for name, (content, words) in files.items():
        (tmp_path / name).write_text(content)
        assert words in fails("predict", text_run / "primal", tmp_path / name)
    # words that pandas takes for missing values are texts
    (tmp_path / "nan.csv").write_text("text\nnan\nNA\nnull\n")
    assert main(["predict", str(text_run / "primal"), "nan.csv", "--out", "p.csv"]) == 0
    assert len(Path("p.csv").read_text().splitlines()) == 4


def test_texts_to_predict_need_no_labels(text_run, tmp_path):
    (tmp_path / "new.txt").write_text("good good\nbad\n")
    (tmp_path / "new.jsonl").write_text('{"text": "good good"}\n{"text": "bad"}\n')
    (tmp_path / "new.csv").write_text("text\ngood good\nbad\n")
    (tmp_path / "new").mkdir()
    for number, text in enumerate(["good good", "bad"]):
        (tmp_path / "new" / f"{number}.txt").write_text(text)
    found = []
    for file in ("new.txt", "new.jsonl", "new.csv", "new"):
        assert main(["predict", str(text_run / "primal"), file, "--out", "p.csv"]) == 0
        found.append(Path("p.csv").read_text())
    assert found[1:] == found[:1] * 3


def test_pairs_are_learned_scored_and_predicted_by_two_towers(pairs_run, fails, tmp_path):
    model = pairs_run / "primal"
    config = json.loads((model / "model" / "config.json").read_text())
    assert config["class"] == "DualTowerClassifier"
    assert main(["eval", str(model), "--out", "e.json"]) == 0
    test = pairs_run.parent / "test.tsv"
    assert main(["eval", str(model), "--data", str(test), "--out", "again.json"]) == 0
    found, again = (json.loads(Path(f).read_text()) for f in ("e.json", "again.json"))
    assert found["details"] == again["details"]
    assert [row["class"] for row in found["details"]] == ["unrelated", "citing"]
    assert main(["predict", str(model), str(test), "--out", "a.csv"]) == 0
    # the same pairs without labels
    fields = [line.split("\t") for line in test.read_text().splitlines()]
    (tmp_path / "new.txt").write_text("".join(f"{f[3][2:-1]}\t{f[4]}\n" for f in fields))
    assert main(["predict", str(model), "new.txt", "--out", "b.csv"]) == 0
    assert Path("a.csv").read_text() == Path("b.csv").read_text()
    assert len(Path("a.csv").read_text().splitlines()) == 13
    (tmp_path / "one.txt").write_text("only one\n")
    assert "one.txt, line 1: expected two texts" in fails("predict", model, tmp_path / "one.txt")
    assert "expected label" in fails("eval", model, "--data", tmp_path / "new.txt")


def test_infinite_values_are_told_with_file_and_case(series_run, series_recipe, fails, tmp_path):
    model, train = series_run / "primal", series_recipe.parent / "train.ts"
    file = tmp_path / "inf.ts"
    file.write_text("@classLabel true down up\n@data\n1,2:3,4:up\n1,inf:3,4:down\n")
    np.savez(tmp_path / "inf.npz", X=np.array([[[1.0, 1e300]]]))
    assert "inf.ts, line 4: 'inf' is not a finite number" in fails("predict", model, file)
    assert "inf.npz: Case 0, counted from 0," in fails("predict", model, tmp_path / "inf.npz")
    assert "inf.ts, line 4" in fails("eval", model, "--data", file)
    files = ["--data.train", train, "--data.test", file, "--out", tmp_path / "run"]
    assert "inf.ts, line 4" in fails("train", series_recipe, *files)
    # finite, but beyond what a model can square
    file.write_text(file.read_text().replace("inf", "1e25"))
    assert "inf.ts: Case 1, counted from 0, holds a value more" in fails("predict", model, file)
    assert "inf.ts: Case 1" in fails("train", series_recipe, *files)


def reseal(folder):
    """Write the checksums of a model's folder anew, as somebody who edits it may."""

    def files(part):
        return {p.name: p.read_bytes() for p in part.iterdir() if p.is_file() and p.name != SUMS}

    inner = {"model": files(folder / "model")} if (folder / "model").is_dir() else {}
    write_sealed(folder, {**files(folder), **inner})


def test_a_model_without_finite_answers_is_told(series_run, series_recipe, fails, tmp_path):
    model = shutil.copytree(series_run / "primal", tmp_path / "model")
    path = model / "model" / "model.safetensors"
    weights = load_file(path)
    weights["convolutions.bias"].fill_(float("nan"))
    save_file(weights, path)
    assert "model.safetensors was changed or damaged" in fails("predict", model, path)
    reseal(model)
    test = series_recipe.parent / "test.ts"
    for command in (["predict", model, test], ["eval", model, "--data", test]):
        assert f"{test}: the model has no finite answer to item 0" in fails(*command)


def test_parts_that_do_not_exist_are_told(series_run, series_recipe, fails, tmp_path):
    model, test = series_run / "primal", series_recipe.parent / "test.ts"
    assert "tset" in fails("eval", model, "--data", test, "--part", "tset")
    assert "tset" in fails("predict", model, test, "--part", "tset")
    assert "--part chooses" in fails("eval", model, "--part", "train")


def test_settings_are_saved_beside_what_is_written(series_run, series_recipe, capsys):
    model, test = series_run / "primal", series_recipe.parent / "test.ts"
    assert main(["predict", str(model), str(test), "--out", "p.csv", "--batch-size", "3"]) == 0
    assert capsys.readouterr().out == "Wrote 10 predictions to p.csv\n"
    assert main(["eval", str(model), "--out", "e.json"]) == 0
    saved = {f: yaml.safe_load(Path(f"{f}.config.yaml").read_text()) for f in ("p.csv", "e.json")}
    assert saved["p.csv"]["batch_size"] == 3
    assert saved["p.csv"]["file"] == str(test)
    assert saved["e.json"]["model"] == str(model)


def test_files_that_cannot_be_read_are_told(series_run, text_run, fails, tmp_path):
    model = series_run / "primal"
    write_ts(tmp_path / "three.ts", 3, 0, channels=3)
    np.savez(tmp_path / "whole.npz", X=np.zeros((2, 2, 5)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:60])
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    np.savez(tmp_path / "objects.npz", X=np.array([{}], dtype=object))
    np.savez(tmp_path / "flat.npz", X=np.zeros((2, 5)))
    np.savez(tmp_path / "empty.npz", X=np.zeros((0, 5, 2)))
    (tmp_path / "noise.ts").write_bytes(bytes(range(256)))
    (tmp_path / "empty.ts").write_text("")
    cases = {
        "none.ts": "there is no file",
        "three.ts": "3 channels",
        "cut.npz": "cut.npz",
        "other.npz": "lacks the array X_test; it has weights",
        "objects.npz": "objects.npz",
        "flat.npz": "1 channels, but the statistics were fitted on 2",
        "empty.npz": "empty.npz has no series",
        "noise.ts": "noise.ts",
        "empty.ts": "holds no series",
        ".": "ends in .ts, .npz, .csv",
    }
    for name, message in cases.items():
        told = fails("predict", model, tmp_path / name, "--out", tmp_path / "p.csv")
        assert message in told, name
    assert not (tmp_path / "p.csv").exists()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "blank.txt").write_text("\n\n")
    for name in ("latin.txt", "blank.txt"):
        assert name in fails("predict", text_run / "primal", tmp_path / name)


def test_labels_of_another_problem_are_told(series_run, text_run, fails, tmp_path):
    model = series_run / "primal"
    write_ts(tmp_path / "bare.ts", 4, 0, labels=False)
    assert "has no labels" in fails("eval", model, "--data", tmp_path / "bare.ts")
    text = tmp_path / "left.ts"
    write_ts(text, 4, 0)
    text.write_text(text.read_text().replace("up", "left"))
    assert "left" in fails("eval", model, "--data", text)
    (tmp_path / "new.txt").write_text("good\n")
    told = fails("eval", text_run / "primal", "--data", tmp_path / "new.txt")
    assert "read from a .jsonl, a table or a folder of texts, got 'new.txt'" in told
    (tmp_path / "bad.jsonl").write_text('{"text": "x", "label": 7}\n')
    told = fails("eval", text_run / "primal", "--data", tmp_path / "bad.jsonl")
    assert "Labels 7 are not among the classes 0, 1" in told


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model/model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-50]), "is damaged"),
        ("model/model.safetensors", lambda p: p.write_bytes(b"not weights"), "safetensors"),
        ("model/model.safetensors", lambda p: p.unlink(), "has no model.safetensors"),
        ("model/config.json", lambda p: p.write_text("{"), "as JSON"),
        ("model/config.json", lambda p: p.write_text('{"model_type": "bert"}'), "save_pretrained"),
        ("model/config.json", lambda p: p.write_text(p.read_text().replace("16", "8")), "belong"),
        ("task.json", lambda p: p.write_text("[1"), "task.json is not readable"),
        ("task.json", lambda p: p.write_text('{"format": 1, "task": "music"}'), "music"),
        ("task.json", lambda p: p.write_text('{"colour": 1}'), "damaged"),
        ("task.json", lambda p: p.write_text(p.read_text().replace('"up"', '"a","b"')), "belong"),
        ("task.json", lambda p: p.unlink(), "not the folder of a model"),
        ("model", lambda p: shutil.rmtree(p), "no finished model"),
    ],
)  # fmt: skip
def test_broken_and_foreign_models_are_told(
    series_run, series_recipe, fails, tmp_path, name, change, message
):
    model = shutil.copytree(series_run / "primal", tmp_path / "model")
    change(model / name)
    reseal(model)
    assert message in fails("predict", model, series_recipe.parent / "test.ts")


def test_wrong_folders_and_outputs_are_told(series_run, series_recipe, fails, tmp_path):
    test = series_recipe.parent / "test.ts"
    assert "there is no folder" in fails("predict", tmp_path / "none", test)
    assert f"Did you mean {series_run / 'primal'}?" in fails("predict", series_run, test)
    assert "there is no folder" in fails("eval", tmp_path / "none")
    model = series_run / "primal"
    assert ".csv or .jsonl" in fails("predict", model, test, "--out", "p.xlsx")
    assert "would replace" in fails("predict", model, "a.csv", "--out", "a.csv")
    assert "at least 1" in fails("predict", model, test, "--batch-size", "0")
    assert ".json" in fails("eval", model, "--out", "e.csv")
    (tmp_path / "file").write_text("")
    assert "file" in fails("predict", model, test, "--out", tmp_path / "file" / "p.csv")
    assert "Missing" in fails("predict", model)
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    assert "is a link that leads to no file" in fails("predict", model, loop)
    assert "would replace" in fails("predict", model, loop, "--out", loop)
    for command in ("analyze", "convert"):
        assert "cannot be used" in fails(command, model, "--out", loop)
