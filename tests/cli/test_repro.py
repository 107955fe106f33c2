"""Studies run from the command line, and tell what they lack before they start."""

import csv

import pytest
import yaml

from primal_attention.cli.main import main

from .conftest import write_ts


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "uea" / "BasicMotions"
    folder.mkdir(parents=True)
    write_ts(folder / "BasicMotions_TRAIN.ts", 12, 0)
    write_ts(folder / "BasicMotions_TEST.ts", 6, 1)
    return tmp_path / "uea"


def test_studies_are_listed(capsys):
    assert main(["repro"]) == 0
    printed = capsys.readouterr().out
    assert "uea" in printed
    assert "longrange" in printed


def test_mistakes_are_told_before_anything_is_trained(fails, root, tmp_path):
    assert "Did you mean 'uea'?" in fails("repro", "uae")
    assert "Did you mean 'NATOPS'?" in fails("repro", "uea", "--sets", "NATOP")
    assert "Did you mean 'primal'?" in fails("repro", "uea", "--models", "primel")
    assert "PRIMAL_DATA" in fails("repro", "uea")
    assert "lacks" in fails("repro", "uea", "--root", root)
    assert "is not a folder" in fails("repro", "uea", "--root", tmp_path / "none")
    assert "--tasks listops" in fails("repro", "longrange")
    assert "choose from" in fails("repro", "longrange", "--tasks", "lists")
    assert "seconds must be positive" in fails("repro", "longrange", "--seconds", "0")
    assert "epoch_steps must be positive" in fails("repro", "longrange", "--epoch-steps", "0")
    assert "lr must be positive" in fails("repro", "longrange", "--lr", "-1")
    assert "tasks must not be empty" in fails("repro", "longrange", "--tasks")


def test_data_that_cannot_be_read_is_told_before_anything_is_trained(fails, root, tmp_path):
    nothing = ("repro", "longrange", "--tasks", "image", "--data", tmp_path)
    assert "No such file" in fails(*nothing, "--out", tmp_path / "o")
    file = root / "BasicMotions" / "BasicMotions_TEST.ts"
    file.write_text(file.read_text()[:-40])
    assert "the line is damaged" in fails("repro", "uea", "--sets", "BasicMotions", "--root", root)
    assert not (tmp_path / "o").exists()


def test_a_folder_of_other_settings_is_left_alone(fails, tmp_path):
    quick = ["--tasks", "listops", "--variants", "dual", "--seconds", "0.1", "--epoch-steps", "2"]
    quick += ["--num-train", "8", "--num-valid", "4", "--num-test", "4", "--batch-size", "2"]
    assert main(["repro", "longrange", *quick, "--out", str(tmp_path)]) == 0
    before = (tmp_path / "accuracy.csv").read_bytes()
    again = ("repro", "longrange", *quick, "--lr", "0.1", "--out", tmp_path)
    assert "other settings" in fails(*again)
    assert (tmp_path / "accuracy.csv").read_bytes() == before


def test_the_study_gets_what_was_asked_for(root, tmp_path, monkeypatch):
    from primal_attention.tasks.timeseries import repro

    asked = []
    for name in ("reproduce_uea", "ablate_uea"):
        monkeypatch.setattr(repro, name, lambda *a, **k: asked.append((a, k)) or ["row"])
    shared = ["--sets", "BasicMotions", "--root", str(root), "--out", str(tmp_path / "o")]
    assert main(["repro", "uea", *shared, "--models", "primal", "--seeds", "0", "4"]) == 0
    assert main(["repro", "uea", *shared, "--ablation", "--max-seconds", "9"]) == 0
    places = {"root": root, "out": tmp_path / "o"}
    assert asked == [
        ((("BasicMotions",), ("primal",)), {"seeds": (0, 4), **places, "max_seconds": None}),
        ((("BasicMotions",),), {"seeds": (0, 1, 2), **places, "max_seconds": 9.0}),
    ]


def test_settings_are_saved_and_nothing_is_told_that_is_not_so(root, tmp_path, fails, capsys):
    study = ["repro", "uea", "--sets", "BasicMotions", "--root", str(root), "--out", "o"]
    assert main([*study, "--models", "primal", "--max-seconds", "-1"]) == 0
    printed = capsys.readouterr().out
    assert "there is no table" in printed
    assert "Saved" not in printed
    assert {p.name for p in (tmp_path / "o").iterdir()} == {"uea.config.yaml"}
    saved = yaml.safe_load((tmp_path / "o" / "uea.config.yaml").read_text())
    selected = saved["validation_selected"]["BasicMotions"]
    assert selected["settings"]["dim"] == 128
    assert selected["models"]["primal"]["eta"] == 0.1
    assert selected["fingerprints"] == {"primal": "e8b0186332d0"}
    assert saved["best_test_epoch"]["BasicMotions"]["settings"]["recipe"] == "published"
    assert main([*study, "--ablation", "--max-seconds", "-1"]) == 0
    saved = yaml.safe_load((tmp_path / "o" / "uea_ablation.config.yaml").read_text())
    assert saved["ablation"]["BasicMotions"]["settings"]["epochs"] == 1
    assert len(saved["ablation"]["BasicMotions"]["models"]) == 11
    assert "at least one seed" in fails(*study, "--seeds")
    assert "rows of its own" in fails(*study, "--ablation", "--models", "primal")


def test_models_are_compared_at_equal_time(tmp_path):
    arguments = ["--tasks", "listops", "--variants", "dual", "--seconds", "0.2"]
    arguments += ["--num-train", "8", "--num-valid", "4", "--num-test", "4", "--epoch-steps", "2"]
    arguments += ["--batch-size", "2", "--out", str(tmp_path)]
    assert main(["repro", "longrange", *arguments]) == 0
    text = (tmp_path / "accuracy.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    assert [row["variant"] for row in rows] == ["dual"]
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["tasks"], saved["seconds"]) == (["listops"], 0.2)
