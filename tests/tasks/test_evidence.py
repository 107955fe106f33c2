"""What a study stands on, and whether it has changed since the study was measured."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from primal_attention.cli.main import main
from primal_attention.tasks import evidence, known_studies
from primal_attention.tasks.evidence import changed_modules, code_commit, module_hashes
from primal_attention.tasks.study import find_study, measured_cells, read_rows

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules, one of them lazy, which no test imports."""
    root = tmp_path / "primal_toy"
    (root / "lazy").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "study.py").write_text(
        "from primal_toy.lazy import value\n\ndef run():\n    import primal_toy.late\n"
    )
    (root / "late.py").write_text("x = 1\n")
    (root / "lazy" / "__init__.py").write_text("")
    (root / "lazy" / "__init__.pyi").write_text("from .inner import value as value\n")
    (root / "lazy" / "inner.py").write_text('"""Doc."""\n\nvalue = 1\n')
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (evidence._read, evidence._root, evidence._lazy_names):
        cached.cache_clear()
    return root


def changed(recorded) -> list[str]:
    evidence._read.cache_clear()
    return changed_modules(recorded, "primal_toy.study")


def test_a_study_stands_on_what_it_imports_inside_functions_and_through_lazy_packages(package):
    found = module_hashes("primal_toy.study")
    assert set(found) == {"primal_toy.study", "primal_toy.late", "primal_toy.lazy.inner"}


def test_statements_make_a_result_old_comments_and_new_places_do_not(package):
    recorded = module_hashes("primal_toy.study")
    inner = package / "lazy" / "inner.py"
    inner.write_text('"""Other words."""\n\nimport math\n\nvalue = 1  # why\n')
    assert changed(recorded) == []
    (package / "moved.py").write_text((package / "late.py").read_text())
    study = package / "study.py"
    study.write_text(study.read_text().replace("late", "moved"))
    assert changed(recorded) == []
    inner.write_text("value = 2\n")
    assert changed(recorded) == ["primal_toy.lazy.inner"]


def test_the_commit_tells_that_files_were_changed(tmp_path):
    assert code_commit(tmp_path) is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text("a = 1\n")
    subprocess.run(["git", "add", "a.py"], cwd=tmp_path, check=True)
    subprocess.run(["git", *identity, "commit", "-q", "-m", "a"], cwd=tmp_path, check=True)
    commit = code_commit(tmp_path)
    assert commit is not None
    assert not commit.endswith("+")
    (tmp_path / "a.py").write_text("a = 2\n")
    assert code_commit(tmp_path) == commit + "+"


def test_every_result_names_a_commit_and_a_study_that_exists():
    for path in RESULTS.glob("*/about.json"):
        about = json.loads(path.read_text("utf-8"))
        assert about["code"]["commits"], path
        assert any(f" {name}" in about["command"] for name in known_studies()), path


def test_a_cell_to_which_a_rival_was_added_is_measured_without_it(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes((RESULTS / "longrange-cost" / "rows.jsonl").read_bytes())
    study = find_study("longrange-cost")
    names = read_rows(tmp_path)[0]["names"]
    progress = measured_cells(study, study.Options(names=(*names, "transport")), tmp_path)
    assert progress == (5, 5, ("transport",))
    progress = measured_cells(study, study.Options(names=tuple(names), seed=1), tmp_path)
    assert progress == (5, 0, ())


def test_status_lists_old_results_and_missing_cells(tmp_path, capsys):
    for name in ("depth-teacher", "nystrom"):
        (tmp_path / "r" / name).mkdir(parents=True)
        rows = (RESULTS / name / "rows.jsonl").read_text("utf-8").splitlines()
        (tmp_path / "r" / name / "rows.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    about = json.loads((RESULTS / "depth-teacher" / "about.json").read_text("utf-8"))
    about["code"]["modules"] = module_hashes(known_studies()["depth-teacher"].module)
    (tmp_path / "r" / "depth-teacher" / "about.json").write_text(json.dumps(about))
    about = json.loads((RESULTS / "nystrom" / "about.json").read_text("utf-8"))
    about["code"]["modules"] = {}
    (tmp_path / "r" / "nystrom" / "about.json").write_text(json.dumps(about))
    assert main(["repro", "status", "--results", str(tmp_path / "r")]) == 0
    teacher, nystrom, _, summary, _ = capsys.readouterr().out.splitlines()[2:]
    assert re.search(r"6 of 7 .* 0 of \d+ ", teacher)
    assert re.search(r"21 of 22 .* (\d+) of \1 ", nystrom)
    assert summary == "2 results: 1 older than their code, 2 with missing cells."
    assert main(["repro", "status", "--results", str(tmp_path / "r" / "nystrom")]) == 0
    assert "\nprimal_attention.functional.engine\n" in capsys.readouterr().out
    assert main(["repro", "status", "--results", str(tmp_path / "none")]) == 2
