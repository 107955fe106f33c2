"""The fuzz test sees what it looks for: otherwise it would always pass."""

import os
import signal
import time
from random import Random

import pytest

from primal_attention.support.command import UserError

from . import harness
from .harness import Case, problems
from .mutations import mutate


def told(words):
    def fail():
        raise UserError(words)

    return fail


FAILS = {
    "KeyError": lambda: {}["x"],
    "does not name the file": told("something is wrong."),
    "foreign words": told("a.json: 'list' object has no attribute 'keys'"),
    "more than one line": told("a.json is damaged:\nlook"),
    "characters": told(f"a.json: {'x' * 20_000}"),
    "died with status": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "MemoryError": lambda: bytearray(4_000_000_000),
    "hangs": lambda: time.sleep(30),
    "is no number": lambda: "x",
}


@pytest.mark.parametrize("problem", FAILS)
def test_what_is_not_handled_is_seen(problem, tmp_path, monkeypatch):
    if problem == "hangs":
        monkeypatch.setattr(harness, "SECONDS", 1)
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "a.json").write_text('{"x": 1}')

    def read(folder):
        if (folder / "a.json").read_text("utf-8", "replace") == '{"x": 1}':
            return 1
        return FAILS[problem]()

    case = Case("a", clean, (read,), check=lambda x, _: None if x == 1 else "is no number")
    first, second = problems(case, [0, 1], 0, tmp_path / "kept")
    assert problem in first
    # the damages after a crash or a hang are tried, too
    assert problem in second


def test_other_results_of_a_sealed_folder_are_seen(tmp_path):
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "a.json").write_text('{"x": 1}')
    (clean / "SHA256SUMS").write_text("")
    case = Case(
        "a",
        clean,
        (lambda folder: (folder / "a.json").is_file() and (folder / "a.json").read_bytes(),),
        ("a.json",),
        is_sealed=True,
    )
    found = list(problems(case, range(30), 0, tmp_path / "kept"))
    # checksums that are renewed or lost cannot tell
    assert 3 <= len(found) < 30
    assert all("checksums kept" in line and "silently" in line for line in found)


@pytest.mark.parametrize("ending", [".json", ".yaml", ".jsonl", ".txt"])
def test_a_damage_is_repeated_by_its_seed(ending):
    data = b'{"x": [1, 2.5, "y"]}\n'
    found = [mutate(data, ending, Random(n)) for n in range(200)]
    assert found == [mutate(data, ending, Random(n)) for n in range(200)]
    assert all(mutation.data != data for mutation in found)
    assert len({mutation.name for mutation in found}) > 10
