"""The measurement of the family: verdicts follow numbers, runs resume."""

import re
import time
from pathlib import Path

import pytest

from primal_attention.attention import list_attentions
from primal_attention.bench import family_rows, family_table, peers
from primal_attention.bench.family import Plan
from primal_attention.bench.family_table import Row, crossing, growth, verdict
from primal_attention.cli.attentions import renewed
from primal_attention.cli.bench import main as bench

DOCS = Path(__file__).parents[2] / "docs"
SMALL = Plan(lengths=(8, 16), names=("floor", "linear", "softmax", "favor"), dim=16, num_heads=2)


def _row(name, n, ms, option="", **others):
    numbers = {"peak_mb": 1.0, "kept_mb": 1.0, "error": 0.0, "average": 0.0, **others}
    return Row(name, option, n, ms, ms, repeats=1, **numbers)


def test_every_registered_mechanism_is_in_the_plan():
    table = family_rows.plan_rows(Plan())
    assert {name for name, _ in table[128]} == {"floor", *list_attentions()}
    assert ("favor", "num_features=512") in table[4096]
    assert ("softmax-explicit", "") not in table[8192]
    with pytest.raises(ValueError, match="no attention named"):
        Plan(names=("sotfmax",))


def test_rows_are_saved_and_a_second_run_adds_only_what_is_missing(tmp_path):
    path, clock = tmp_path / "family.csv", time.perf_counter
    first = family_rows.run(Plan(**{**vars(SMALL), "lengths": (8,)}), path, clock=clock)
    assert family_table.read_rows(path) == first
    both = family_rows.run(SMALL, path, clock=clock)
    assert both[: len(first)] == first
    assert {row.n for row in both} == {8, 16}
    assert family_rows.run(SMALL, path, clock=clock) == both
    wider = family_rows.run(Plan(**{**vars(SMALL), "dim": 32}), path, clock=clock)
    assert len(wider) == len(both)
    assert wider != both
    late = Plan(**{**vars(SMALL), "minutes": -1})
    assert family_rows.run(late, tmp_path / "none.csv", clock=clock) == []


def test_what_would_take_too_long_is_left_out(tmp_path):
    plan = Plan(lengths=(8, 10**6), names=("softmax",), dim=16, num_heads=2, limit=1e-6)
    rows = family_rows.run(plan, tmp_path / "family.csv", clock=time.perf_counter)
    assert [row.n for row in rows] == [8]


def test_growth_and_crossing_are_read_from_the_numbers():
    lengths = (1024, 4096, 16384, 65536)
    rows = [_row("floor", n, n / 100) for n in lengths]
    rows += [_row("softmax", n, n * n / 1e5) for n in lengths[:3]]
    rows += [_row("linear", n, 50 + n / 50) for n in lengths]
    assert growth(rows, "floor") == pytest.approx(1.0)
    assert growth(rows, "softmax") == pytest.approx(2.0)
    assert growth(rows, "favor") is None
    assert verdict(1.0, 1.0) == "linear"
    assert verdict(1.15, 1.0) == "n log n"
    assert verdict(1.3, 1.25) == "linear"
    assert verdict(2.0, 1.0) == "more than n log n"
    assert verdict(None, 1.0) == "not measured"
    assert crossing(rows, "linear") == 4096
    assert crossing(rows, "favor") is None
    slow = [*rows, *(_row("favor", n, 1e9) for n in lengths)]
    assert crossing(slow, "favor") is None
    level = [*rows, *(_row("gaussian", n, 0.95 * n * n / 1e5) for n in lengths[:3])]
    assert crossing(level, "gaussian") is None


def test_the_report_and_the_page_show_what_was_measured():
    rows = [_row("floor", 4096, 1.0), _row("softmax", 4096, 100.0)]
    rows += [_row("favor", 4096, 25.0, kept_mb=3.0, error=0.123, average=0.5)]
    rows += [_row("favor", 4096, 50.0, "num_features=512", error=0.05)]
    text = family_table.report(rows, "somewhere")
    assert "| `favor`" in text
    assert "num_features=512" in text
    table = family_table.choice_table(rows)
    favor = next(line for line in table.splitlines() if "favor.md" in line)
    assert "| 0.25 | 3.00   | 4,096       | 0.12 of softmax |" in re.sub(r" +\|$", " |", favor)


def test_the_command_writes_table_and_plot(tmp_path, capsys):
    arguments = ["--lengths", "8", "16", "--names", "floor", "linear", "softmax", "favor"]
    arguments += [
        "--dim",
        "16",
        "--num-heads",
        "2",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert bench(["family", *arguments]) == 0
    assert "`favor`" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {
        "family.config.yaml",
        "family.csv",
        "family.md",
        "family.png",
    }


def test_our_layers_stand_beside_the_public_packages(tmp_path, capsys):
    arguments = [
        "--lengths",
        "16",
        "--dim",
        "16",
        "--num-heads",
        "2",
        "--size",
        "8",
        "--repeats",
        "1",
    ]
    assert bench(["peers", *arguments, "--threads", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"`{name}`" in printed for name in peers.PEERS)
    assert {p.name for p in tmp_path.iterdir()} == {"peers.config.yaml", "peers.csv", "peers.md"}


def test_the_page_for_choosing_is_the_registry_and_the_measurement():
    page = (DOCS / "choosing.md").read_text("utf-8")
    assert page == renewed(DOCS / "choosing.md"), "run primal info --update docs/choosing.md"
    advice = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(set(advice)) == list_attentions()


@pytest.mark.parametrize("name", list_attentions())
def test_every_mechanism_has_a_page_that_says_when_to_use_it(name):
    page = (DOCS / "attention" / family_table.page_of(name)).read_text("utf-8")
    assert f'"{name}"' in page
    for part in (
        "| time |",
        "padding",
        "**Use it**",
        "**Do not use it**",
        "```python",
        "arxiv.org",
    ):
        assert part in page, part
