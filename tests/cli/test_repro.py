"""Studies run from the command line, and name what they lack before they start."""

import json
import os

import pytest

from primal_attention.cli.main import main
from primal_attention.support.files import locked
from primal_attention.tasks import study

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
    assert "longrange-accuracy" in printed


@pytest.mark.parametrize("command", ["bench", "repro", "demo"])
def test_without_the_second_package_one_sentence_says_how_to_get_it(fails, command, monkeypatch):
    monkeypatch.setattr(study, "entry_points", lambda group: [])  # as if it was not installed
    study.known_studies.cache_clear()
    try:
        for words in ([command], [command, "--help"], [command, "layers"]):
            assert "pip install -e ./studies" in fails(*words)
    finally:
        study.known_studies.cache_clear()


def test_mistakes_are_told_before_anything_is_trained(fails, root, tmp_path):
    assert "Did you mean 'uea'?" in fails("repro", "uae")
    assert "name a study" in fails("repro", "--seeds", "0")
    assert "No set named NATOP" in fails("repro", "uea", "--sets", "NATOP")
    assert "No model named primel" in fails("repro", "uea", "--models", "primel")
    assert "PRIMAL_DATA" in fails("repro", "uea")
    assert "lacks NATOPS" in fails("repro", "uea", "--sets", "NATOPS", "--root", root)
    assert "seeds must not be empty" in fails("repro", "uea", "--seeds")
    assert "seeds must be from 0 to" in fails("repro", "uea", "--seeds", "0", str(2**32))
    assert "threads must be from 1 to" in fails("bench", "layers", "--threads", "1000000")
    assert not (tmp_path / "outputs").exists()


def test_a_study_writes_its_tables_and_can_be_continued(root, tmp_path, capsys):
    study = ["repro", "uea", "--sets", "BasicMotions", "--models", "primal", "--root", str(root)]
    study += ["--quick", "--out", str(tmp_path / "o")]
    assert main([*study, "--seeds", "0", "--max-seconds", "0"]) == 0
    assert "0 rows" in capsys.readouterr().out
    assert main([*study, "--seeds", "0"]) == 0
    assert "| BasicMotions" in capsys.readouterr().out
    assert main([*study, "--seeds", "0", "1"]) == 0
    about = json.loads((tmp_path / "o" / "about.json").read_text())
    assert about["command"] == (
        "primal repro uea --sets BasicMotions --seeds 0 1 --quick --models primal"
    )
    assert (tmp_path / "o" / "rows.jsonl").read_text().count("\n") == 4


def test_a_second_study_in_one_folder_is_refused(root, fails, tmp_path):
    study = ["repro", "uea", "--sets", "BasicMotions", "--root", root, "--quick"]
    with locked(tmp_path / "o"):
        told = fails(*study, "--out", tmp_path / "o")
        assert f"o is in use by process {os.getpid()} on" in told
        assert not (tmp_path / "o" / "rows.jsonl").exists()


def test_models_are_compared_at_equal_time(tmp_path):
    arguments = ["--tasks", "listops", "--variants", "dual", "--seconds", "0.2"]
    arguments += ["--num-train", "8", "--num-valid", "4", "--num-test", "4", "--epoch-steps", "2"]
    arguments += ["--batch-size", "2", "--out", str(tmp_path)]
    assert main(["repro", "longrange-accuracy", *arguments]) == 0
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(line)["cell"]["variant"] == "dual"
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
