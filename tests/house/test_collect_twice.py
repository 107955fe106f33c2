"""Test names that come from data are found before two workers disagree about them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "collect_twice.py"


@pytest.fixture
def collect_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")

    def run(*values):
        rows = ", ".join(values)
        text = (
            "import datetime, gzip, pytest, time\n"
            f"@pytest.mark.parametrize('value', [{rows}])\n"
            "def test_one(value): pass\n"
        )
        (tmp_path / "test_names.py").write_text(text, "utf-8")
        return subprocess.run(
            [sys.executable, SCRIPT, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
        )

    return run


def test_plain_names_pass(collect_twice):
    done = collect_twice("1", "'a'", "pytest.param(gzip.compress(b'a'), id='gzip')")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("3 tests have the same names")


def test_names_from_clocks_addresses_and_hashes_are_told_one_by_one(collect_twice):
    done = collect_twice(
        "1",
        "gzip.compress(b'a')",
        "int(time.time()) // 86_400",
        "str(datetime.date.today())",
        "repr(object())",
        "hash('a')",
    )
    assert done.returncode == 1
    rows = done.stdout.splitlines()
    assert [row.partition(":")[0] for row in rows[:10]] == (
        ["only in the first run"] * 5 + ["only in the second run"] * 5
    )
    assert "ids=" in rows[10]


def test_another_order_is_told(collect_twice):
    done = collect_twice("*{'one', 'two', 'three', 'four', 'five', 'six'}")
    assert done.returncode == 1
    assert done.stdout.startswith("another order from test ")


def test_a_suite_that_does_not_load_is_an_error_with_its_reason(collect_twice):
    done = collect_twice("no_such_name")
    assert done.returncode == 1
    assert "NameError" in done.stderr
