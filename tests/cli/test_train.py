"""Training from the command line: what it writes, how it continues, what it refuses."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from primal_attention.cli.main import main
from primal_attention.support.files import locked, read_yaml
from primal_attention.support.settings import build
from primal_attention.tasks.experiment import recipe_type
from primal_attention.tasks.series import SeriesTask, read_ts
from primal_attention.training.checkpoint import checkpoints_in
from primal_attention.training.data import Order


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_run_leaves_models_settings_table_spectra_and_report(series_run):
    names = {p.name for p in series_run.iterdir()}
    expected = {"config.yaml", "report.html", "result.csv", "result.json", "spectra.png"}
    assert names == expected | {"primal", "softmax"}
    rows = list(csv.DictReader((series_run / "result.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["primal", "softmax"]
    assert float(rows[0]["squared KKT residual"]) > 0
    assert rows[1]["squared KKT residual"] == ""
    for name in ("primal", "softmax"):
        folder = series_run / name
        assert (folder / "model" / "model.safetensors").exists()
        recipe = build(recipe_type("series"), read_yaml(folder / "config.yaml"))
        assert recipe.compare == ("softmax",)
        task = json.loads((folder / "task.json").read_text())
        assert task["task"] == "series"
        assert task["values"]["classes"] == ["down", "up"]
        assert (folder / "config.yaml").read_text().startswith("# A small series recipe.\n")
    assert "The recipe says: A small series recipe." in (series_run / "report.html").read_text()
    history = json.loads((series_run / "result.json").read_text())["histories"]["primal"]
    assert "squared KKT residual" in history["records"][0]["metrics"]


def test_the_demo_learns_which_speaker_it_is(tmp_path, capsys):
    arguments = ["--training.epochs", "4", "--data.train-size", "90", "--data.test-size", "60"]
    assert main(["train", "japanese-vowels", *arguments]) == 0
    printed = capsys.readouterr().out
    for words in (
        "4 epochs, batches of 16",
        "primal",
        "softmax",
        "test accuracy",
        "peak memory",
        "against",
    ):
        assert words in printed
    out = tmp_path / "outputs" / "japanese-vowels"
    result = json.loads((out / "result.json").read_text())["results"]
    assert all(row["test accuracy"] > 0.3 for row in result)
    assert (out / "spectra.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_stopped_run_continues_to_the_same_weights(
    series_recipe, series_run, tmp_path, monkeypatch, capsys
):
    from primal_attention import analysis

    two = tmp_path / "two"
    real, seen = analysis.spectrum_summary, []

    def interrupt(spectra):
        seen.append(spectra)
        if len(seen) == 2:  # in the second epoch
            raise KeyboardInterrupt
        return real(spectra)

    monkeypatch.setattr(analysis, "spectrum_summary", interrupt)
    capsys.readouterr()
    assert main(["train", str(series_recipe), "--out", str(two)]) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"primal: interrupted: primal train {two} --resume continues it"
    monkeypatch.undo()
    assert not (two / "report.html").exists()
    # the folder of a run is a recipe: nothing needs to be said twice
    assert main(["train", str(two), "--resume"]) == 0
    a, b = (load_file(f / "primal" / "model" / "model.safetensors") for f in (series_run, two))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert (two / "report.html").exists()


def test_a_folder_with_a_run_is_neither_replaced_nor_continued_unasked(
    series_run, series_recipe, fails, tmp_path
):
    told = fails("train", series_recipe, "--out", series_run)
    assert "already holds a run (primal)" in told
    assert "--resume" in told
    assert "exclude each other" in fails("train", series_recipe, "--resume", "--overwrite")
    (tmp_path / "file").write_text("")
    assert "is a file" in fails("train", series_recipe, "--out", tmp_path / "file")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "value", "was"),
    [
        ("training.lr", "0.5", "0.01"),
        ("data.valid", "0.3", "0.2"),
        ("data.seed", "5", "0"),
        ("model.dropout", "0.5", "0.2"),
    ],
)
def test_other_settings_are_not_resumed_and_leave_the_run_alone(
    series_run, series_recipe, fails, name, value, was
):
    before = contents(series_run)
    told = fails("train", series_recipe, "--out", series_run, "--resume", f"--{name}", value)
    assert f"primal belongs to another run: {name} was {was} and is {value}." in told
    assert contents(series_run) == before


def test_a_checkpoint_that_is_refused_leaves_the_run_alone(series_run, fails, tmp_path):
    run = shutil.copytree(series_run, tmp_path / "run")
    (run / "primal" / "config.yaml").unlink()
    before = contents(run)
    told = fails("train", run, "--resume", "--compare", "--data.valid", "0.3")
    assert "the training data had 20 items and have 16" in told
    assert contents(run) == before
    for file in run.glob("primal/checkpoints/*/best.safetensors"):
        file.unlink()
    before = contents(run)
    told = fails("train", run, "--resume", "--compare")
    assert "is not a complete checkpoint: best.safetensors: No such file" in told
    assert contents(run) == before


@pytest.mark.filterwarnings("default:.*is not a complete checkpoint")
def test_a_damaged_checkpoint_is_told_and_the_one_before_continues(series_run, tmp_path, capsys):
    run = shutil.copytree(series_run, tmp_path / "run")
    new, old = checkpoints_in(run / "primal" / "checkpoints")
    weights = bytearray((new / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (new / "model.safetensors").write_bytes(weights)
    assert main(["train", str(run), "--resume", "--compare"]) == 0
    told = capsys.readouterr().err
    assert f"primal: warning: {new} is not a complete checkpoint: model.safetensors was" in told
    assert f"The run continues from {old.name}" in told
    a, b = (load_file(f / "primal" / "model" / "model.safetensors") for f in (series_run, run))
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("how", [["--resume"], ["--overwrite"]])
def test_a_folder_in_use_is_refused_and_left_alone(series_run, fails, tmp_path, how):
    run = shutil.copytree(series_run, tmp_path / "run")
    before = contents(run)
    with locked(run):
        told = fails("train", run, *how)
    assert f"{run} is in use by process {os.getpid()} on" in told
    assert contents(run) == before


def test_killed_while_it_overwrites_a_run_can_start_anew(series_run, tmp_path, monkeypatch):
    run = shutil.copytree(series_run, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("primal_attention.tasks.experiment._cost", stop)
        assert main(["train", str(run), "--overwrite", "--compare"]) == 130
    assert not (run / "primal" / "checkpoints").exists()
    assert main(["train", str(run), "--compare"]) == 0


def stop(*_):
    raise KeyboardInterrupt


def test_what_changes_no_result_may_change_on_resume(series_run, tmp_path):
    run = shutil.copytree(series_run, tmp_path / "run")
    arguments = ["--resume", "--compare", "--training.save-steps", "1"]
    assert main(["train", str(run), *arguments]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["save_steps"] == 1


def test_overwrite_removes_nothing_before_all_is_accepted(series_run, fails, tmp_path):
    run = shutil.copytree(series_run, tmp_path / "run")
    before = contents(run)
    for mistake in (
        ["--data.test", "none.ts"],
        ["--model.num-heads", "5"],
        ["--model.stem", "middle"],
    ):
        fails("train", run, "--overwrite", *mistake)
        assert contents(run) == before


def test_a_file_is_a_run_only_in_the_folder_of_one(series_run, series_recipe, fails, tmp_path):
    own = tmp_path / "config.yaml"
    shutil.copy(series_recipe, own)
    assert main(["train", "config.yaml", "--training.epochs", "1"]) == 0
    assert own.read_bytes() == series_recipe.read_bytes()
    assert (tmp_path / "outputs" / "config" / "primal" / "model").is_dir()
    assert "holds no run" in fails("train", tmp_path)
    told = fails("train", series_recipe, "--out", tmp_path)
    assert "config.yaml does not belong to a run" in told
    before = contents(series_run)
    for path in (series_run / "primal", series_run / "primal" / "config.yaml"):
        told = fails("train", path, "--resume")
        assert f"is the folder of one model; its run is {series_run}." in told
    assert contents(series_run) == before


def test_saved_settings_hold_in_other_folders(series_recipe, tmp_path, monkeypatch):
    for part in ("train", "test"):
        shutil.copy(series_recipe.parent / f"{part}.ts", tmp_path)
    arguments = ["--data.train", "train.ts", "--data.test", "test.ts", "--training.epochs", "1"]
    assert main(["train", str(series_recipe), *arguments]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["eval", "../outputs/slopes/primal"]) == 0
    assert main(["train", "../outputs/slopes", "--resume"]) == 0


def test_sequences_beyond_learned_positions_are_told_before_training(text_run, fails, tmp_path):
    recipe = text_run.parent / "words.yaml"
    arguments = ["train", recipe, "--model.positions", "learned", "--model.max-length"]
    told = fails(*arguments, "14")
    assert "train part of the data: the longest sequence has 15 tokens" in told
    assert "max_length=14" in told
    assert not (tmp_path / "outputs").exists()
    assert main([str(word) for word in (*arguments, "15", "--training.epochs", "1")]) == 0
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "x" * 16, "label": 1}) + "\n")
    model = tmp_path / "outputs" / "words" / "primal"
    for command in (["predict", model, "long.jsonl"], ["eval", model, "--data", "long.jsonl"]):
        assert "long.jsonl: the longest sequence has 16 tokens" in fails(*command)


def test_overwrite_starts_anew(series_run, tmp_path):
    shutil.copytree(series_run, tmp_path / "run")
    arguments = ["--training.epochs", "1", "--overwrite", "--compare"]
    assert main(["train", str(tmp_path / "run"), *arguments]) == 0
    lines = (tmp_path / "run" / "primal" / "history.csv").read_text().splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which recipe? One of"),
        (["--resume"], "which recipe? One of"),
        (["japanese-vowel"], "Did you mean 'japanese-vowels'?"),
        (["none.yaml"], "there is no file none.yaml"),
        (["japanese-vowels", "--training.epoch", "3"], "Did you mean --training.epochs?"),
        (["japanese-vowels", "--training.epochs", "0"], "epochs must be at least 1"),
        (["japanese-vowels", "--training.epochs", "x"], "training.epochs"),
        (["japanese-vowels", "--threads", "1000000"], "threads must be from 1 to"),
        (["japanese-vowels", "--threads", "0"], "threads must be from 1 to"),
        (
            ["japanese-vowels", "--training.seed", "1763467200000000000"],
            "seed must be from 0 to 4294967295 (2³² - 1), got 1763467200000000000.",
        ),
        (["japanese-vowels", "--data.seed", "-1"], "seed must be from 0 to"),
        (["japanese-vowels", "--model.attention", "primel"], "Did you mean 'primal'?"),
        (["japanese-vowels", "--model.num-heads", "5"], "num_heads"),
        (
            ["japanese-vowels", "--model.attention-options.rank", "0"],
            "primal: the model primal: rank",
        ),
        (
            ["japanese-vowels", "--model.attention", "softmax"],
            "the attention softmax has no option 'rank'. Its options: value, bias",
        ),
        (["japanese-vowels", "--compare", "sofmax"], "Did you mean 'softmax'?"),
        (["japanese-vowels", "--data.name", "JapaneseVowel"], "PRIMAL_DATA"),
        (["lra-text"], "PRIMAL_DATA"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_sentence(fails, arguments, message):
    assert message in fails("train", *arguments)


def test_wrong_data_files_are_told(series_recipe, fails, tmp_path):
    (tmp_path / "broken.ts").write_text("@data\n1,2,x:3,4,5:up\n")
    told = fails("train", series_recipe, "--data.train", tmp_path / "broken.ts")
    assert "line 2: 'x' is not a finite number" in told
    assert "none.ts" in fails("train", series_recipe, "--data.test", tmp_path / "none.ts")
    (tmp_path / "broken.mp3").write_text("")
    told = fails("train", series_recipe, "--data.train", tmp_path / "broken.mp3")
    assert "ends in .ts, .npz, .csv" in told


def test_broken_items_are_told_by_their_place_in_the_file(series_recipe, fails):
    told = fails("train", series_recipe, "--training.lr", "1e30", "--data.train-size", "16")
    step = int(told.partition("Step ")[2].split()[0])
    items = told.partition("the items ")[2].partition(" of")[0]
    recipe = build(recipe_type("series"), read_yaml(series_recipe))
    settings = replace(recipe.data, train_size=16)
    _, parts = SeriesTask.load(settings)
    rows = parts.rows
    order = Order(len(rows), recipe.training.batch_size, recipe.training.seed)
    assert json.loads(items) == [rows[i] for i in order.batch(step - 1)]
    assert rows != list(range(len(rows)))
    lengths = parts.train.series.length
    assert lengths.tolist() == read_ts(settings.train).length[rows].tolist()


def test_every_setting_is_shown_with_its_meaning(capsys):
    assert main(["train", "japanese-vowels", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("--training.lr", "Peak learning rate", "--model.attention-options.rank", "--out"):
        assert words in printed
    assert "num-classes" not in printed


def test_listops_are_drawn_and_learned(tmp_path):
    recipe = tmp_path / "lists.yaml"
    recipe.write_text(
        "# ListOps, short.\ntask: longrange\n"
        "data: {kind: listops, length: 30, train_size: 24, test_size: 8}\n"
        "model: {dim: 16, num_heads: 2, num_layers: 1}\ntraining: {epochs: 1}\n"
    )
    assert main(["train", str(recipe)]) == 0
    assert main(["eval", "outputs/lists/primal"]) == 0


@pytest.mark.slow  # three interpreters, each importing torch
def test_two_processes_train_what_one_does(series_recipe, tmp_path):
    command = [str(series_recipe), "--model.dropout", "0", "--out"]
    assert main(["train", *command, str(tmp_path / "one")]) == 0
    start = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2"]
    start += ["--master-port", free_port(), "-m", "primal_attention.cli"]
    words = [str(w) for w in (*start, "train", *command, tmp_path / "two")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training primal") == 1
    assert done.stdout.count("Saved report.html") == 1
    one, two = (load_file(tmp_path / n / "primal/model/model.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    assert (tmp_path / "two" / "report.html").exists()


def test_a_named_set_needs_no_file_and_the_last_line_says_what_to_do(tmp_path, capsys):
    quick = ["--training.epochs", "1", "--training.max-seconds", "1"]
    words = ["--task", "lists", "--data.name", "curves", *quick, "--out", str(tmp_path / "r")]
    assert main(["train", *words]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("Use it: primal rerank")
    assert "primal predict" not in last
    assert main(["train", "--task", "lists", "--out", str(tmp_path / "s")]) == 2
    assert "which recipe?" in capsys.readouterr().err
