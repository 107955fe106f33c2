import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from primal_attention.support.command import UserError
from primal_attention.tasks import study
from primal_attention.tasks.study import Study, command_line, read_about, read_rows, run_study


@dataclass(frozen=True)
class Options:
    """Squares of some numbers."""

    numbers: tuple[int, ...] = (1, 2, 3)
    """What to square."""
    power: int = 2
    """Exponent."""
    data: Path | None = None
    """A folder."""


class Squares(Study[Options]):
    name = "squares"
    Options = Options

    def __init__(self):
        self.ran = []

    def cells(self, options):
        return [{"number": n, "power": options.power} for n in options.numbers]

    def run(self, cell, options, scratch):
        scratch.mkdir(parents=True)
        (scratch / "checkpoint").write_text("half")
        self.ran.append(cell["number"])
        return {"value": cell["number"] ** cell["power"]}

    def tables(self, rows, options):
        return {"table.md": "\n".join(str(row["value"]) for row in rows) + "\n"}


def test_a_study_writes_rows_tables_and_what_made_them(tmp_path):
    rows = run_study(Squares(), out=tmp_path, report=lambda _: None)
    assert [row["value"] for row in rows] == [1, 4, 9]
    assert (tmp_path / "table.md").read_text() == "1\n4\n9\n"
    assert json.loads((tmp_path / "about.json").read_text())["command"] == "primal repro squares"
    assert not list((tmp_path / "runs").iterdir())


def test_the_record_keeps_the_commits_of_all_rows_and_the_code_they_agree_on(tmp_path, monkeypatch):
    hashes = {"a": "1", "b": "2"}
    monkeypatch.setattr(study, "module_hashes", lambda module: dict(hashes))
    monkeypatch.setattr(study, "code_commit", lambda: "first")
    run_study(Squares(), Options((1,)), out=tmp_path, report=lambda _: None)
    assert read_about(tmp_path)["code"] == {"commits": ["first"], "modules": hashes}
    hashes["b"] = "3"
    monkeypatch.setattr(study, "code_commit", lambda: "second")
    run_study(Squares(), Options((1, 2)), out=tmp_path, report=lambda _: None)
    code = {"commits": ["first", "second"], "modules": {"a": "1"}}
    assert read_about(tmp_path)["code"] == code
    run_study(Squares(), Options((1, 2)), out=tmp_path, report=lambda _: None)
    assert read_about(tmp_path)["code"] == code  # nothing was measured


def test_finished_cells_are_not_run_again_and_tables_hold_every_row(tmp_path):
    run_study(Squares(), Options((3,)), out=tmp_path, report=lambda _: None)
    second = Squares()
    rows = run_study(second, Options((1, 3)), out=tmp_path, report=lambda _: None)
    assert second.ran == [1]
    assert [row["number"] for row in rows] == [1, 3]
    third = Squares()
    run_study(third, Options((2,)), out=tmp_path, report=lambda _: None)
    assert (tmp_path / "table.md").read_text() == "4\n9\n1\n"


def test_a_cell_with_other_settings_is_another_cell(tmp_path):
    run_study(Squares(), Options((3,)), out=tmp_path, report=lambda _: None)
    rows = run_study(Squares(), Options((3,), power=3), out=tmp_path, report=lambda _: None)
    assert [row["value"] for row in rows] == [27]


def test_an_interrupted_study_keeps_its_rows_and_the_scratch_of_the_broken_cell(tmp_path):
    class Broken(Squares):
        def run(self, cell, options, scratch):
            found = super().run(cell, options, scratch)
            if cell["number"] == 2:
                raise KeyboardInterrupt
            return found

    with pytest.raises(KeyboardInterrupt):
        run_study(Broken(), out=tmp_path, report=lambda _: None)
    assert [p.read_text() for p in tmp_path.glob("runs/*/checkpoint")] == ["half"]
    # a crash may also cut the last line
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"cell": {"number": 2')

    class Continued(Squares):
        def run(self, cell, options, scratch):
            if cell["number"] == 2:
                assert (scratch / "checkpoint").exists()
                return {"value": 4}
            return super().run(cell, options, scratch)

    study = Continued()
    rows = run_study(study, out=tmp_path, report=lambda _: None)
    assert study.ran == [3]
    assert [row["value"] for row in rows] == [1, 4, 9]


def test_no_cell_starts_after_the_time_is_up(tmp_path):
    said = []
    study = Squares()
    assert run_study(study, out=tmp_path, max_seconds=0, report=said.append) == []
    assert study.ran == []
    assert said == ["out of time with 3 of 3 cells left; the same command continues"]


def test_a_cell_may_measure_several_rivals(tmp_path):
    class Pairs(Squares):
        def run(self, cell, options, scratch):
            return [{"rival": "a", "value": 1}, {"rival": "b", "value": 2}]

    rows = run_study(Pairs(), Options((5,)), out=tmp_path, report=lambda _: None)
    assert [(row["number"], row["rival"]) for row in rows] == [(5, "a"), (5, "b")]


def test_a_foreign_line_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"set": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1: not a row of a study"):
        run_study(Squares(), out=tmp_path, report=lambda _: None)


@pytest.mark.parametrize(
    "line", ['{"cell": 1, "rows": []}', '{"cell": {}, "rows": [1]}', '{"cell": {}, "rows": {}}']
)
def test_rows_of_a_wrong_type_are_refused(line, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=r"line 2: not a row of a study"):
        read_rows(tmp_path)


def test_two_studies_do_not_share_a_folder(tmp_path):
    class Nosy(Squares):
        def run(self, cell, options, scratch):
            with pytest.raises(UserError, match="in use by process"):
                run_study(Squares(), Options((7,)), out=tmp_path)
            return super().run(cell, options, scratch)

    run_study(Nosy(), out=tmp_path, report=lambda _: None)
    assert [row["number"] for row in read_rows(tmp_path)] == [1, 2, 3]
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_whole_rows_only(tmp_path, monkeypatch):
    write, seen = os.write, []

    def full(handle, data):
        if b'"rows"' not in data:  # the lock writes its holder
            return write(handle, data)
        seen.append(data)
        if len(seen) == 3:  # a full disk takes a part first
            return write(handle, data[:5])
        if len(seen) > 3:
            raise OSError(28, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*rows\.jsonl"):
        run_study(Squares(), out=tmp_path, report=lambda _: None)
    monkeypatch.undo()
    assert [row["value"] for row in read_rows(tmp_path)] == [1, 4]
    assert (tmp_path / "rows.jsonl").read_bytes().endswith(b"}\n")


def test_the_command_names_what_differs_from_the_defaults():
    options = Options((1, 2), data=Path("/somewhere"))
    assert command_line(Squares(), options) == "primal repro squares --numbers 1 2"


def test_what_is_told_about_a_measurement_stays_until_the_next_one(tmp_path):
    run_study(Squares(), Options((1,)), out=tmp_path, report=lambda _: None)
    about = tmp_path / "about.json"
    about.write_text('{"machine": "another"}')
    run_study(Squares(), Options((1,)), out=tmp_path, report=lambda _: None)
    assert json.loads(about.read_text()) == {"machine": "another"}
    run_study(Squares(), Options((2,)), out=tmp_path, report=lambda _: None)
    assert json.loads(about.read_text())["command"] == "primal repro squares --numbers 2"


def test_rows_are_read_with_their_cells(tmp_path):
    assert read_rows(tmp_path) == []
    rows = run_study(Squares(), out=tmp_path, report=lambda _: None)
    assert read_rows(tmp_path) == rows
