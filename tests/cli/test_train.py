"""Training from the command line: what it writes, how it continues, what it refuses."""

import csv
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from primal_attention.cli.main import main
from primal_attention.cli.recipes import build
from primal_attention.cli.settings import Recipe


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
        recipe = build(Recipe, yaml.safe_load((folder / "config.yaml").read_text()))
        assert recipe.compare == ("softmax",)
        assert json.loads((folder / "reader.json").read_text())["classes"] == ["down", "up"]
        assert (folder / "config.yaml").read_text().startswith("# A small timeseries recipe.\n")
    assert "The recipe says: A small timeseries recipe." in (series_run / "report.html").read_text()
    history = json.loads((series_run / "result.json").read_text())["histories"]["primal"]
    assert "squared KKT residual" in history["records"][0]["metrics"]


def test_the_demo_learns_which_speaker_it_is(tmp_path, capsys):
    arguments = ["--training.epochs", "4", "--data.train-size", "90", "--data.test-size", "60"]
    assert main(["train", "japanese-vowels", *arguments]) == 0
    printed = capsys.readouterr().out
    for words in ("epochs: 4", "primal", "softmax", "test accuracy", "peak memory", "KKT residual"):
        assert words in printed
    out = tmp_path / "outputs" / "japanese-vowels"
    result = json.loads((out / "result.json").read_text())["results"]
    assert all(row["test accuracy"] > 0.3 for row in result)
    assert (out / "spectra.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_stopped_run_continues_to_the_same_weights(
    series_recipe, series_run, tmp_path, monkeypatch
):
    from primal_attention.cli import experiment

    two = tmp_path / "two"
    real, seen = experiment.spectrum_summary, []

    def interrupt(spectra):
        seen.append(spectra)
        if len(seen) == 2:  # in the second epoch
            raise KeyboardInterrupt
        return real(spectra)

    monkeypatch.setattr(experiment, "spectrum_summary", interrupt)
    assert main(["train", str(series_recipe), "--out", str(two)]) == 130
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
    told = fails("train", series_recipe, "--out", series_run, "--resume", "--training.lr", "0.5")
    assert "belongs to another run: lr was 0.01 and is 0.5" in told
    (tmp_path / "file").write_text("")
    assert "is a file" in fails("train", series_recipe, "--out", tmp_path / "file")


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
        (["japanese-vowels", "--model.attention", "primel"], "Did you mean 'primal'?"),
        (["japanese-vowels", "--model.num-heads", "5"], "num_heads"),
        (["japanese-vowels", "--model.attention-options.rank", "0"], "rank"),
        (["japanese-vowels", "--compare", "sofmax"], "Did you mean 'softmax'?"),
        (["japanese-vowels", "--data.name", "JapaneseVowel"], "PRIMAL_DATA"),
        (["japanese-vowels", "--data.task", "text"], "has no sets to name"),
        (["lra-text"], "PRIMAL_DATA"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_sentence(fails, arguments, message):
    assert message in fails("train", *arguments)


def test_wrong_data_files_are_told(series_recipe, fails, tmp_path):
    (tmp_path / "broken.ts").write_text("@data\n1,2,x:3,4,5:up\n")
    told = fails("train", series_recipe, "--data.train", tmp_path / "broken.ts")
    assert "'x' is not a number" in told
    assert "none.ts" in fails("train", series_recipe, "--data.test", tmp_path / "none.ts")
    told = fails("train", series_recipe, "--data.train", tmp_path / "broken.mp3")
    assert "ends in .ts or .npz" in told


def test_every_setting_is_shown_with_its_meaning(capsys):
    assert main(["train", "japanese-vowels", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in ("--training.lr", "Peak learning rate", "--model.attention-options.rank", "--out"):
        assert words in printed
    assert "num-classes" not in printed


def test_listops_are_drawn_and_learned(tmp_path):
    recipe = tmp_path / "lists.yaml"
    recipe.write_text(
        "# ListOps, short.\ndata: {task: listops, length: 30, train_size: 24, test_size: 8}\n"
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
