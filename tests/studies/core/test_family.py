"""The measurement of the family: verdicts follow numbers, and the page shows them."""

import re
from pathlib import Path

import pytest

from primal_attention.attention import list_attentions
from primal_studies.core import family_table
from primal_studies.core.family import FamilyOptions, FamilyStudy
from primal_studies.core.family_table import crossing, growth, growth_name

DOCS = Path(__file__).parents[3] / "docs"


def _row(name, n, ms, option="", **others):
    numbers = {"kept_mb": 1.0, "error": 0.0, "average": 0.0, "machine": "somewhere", **others}
    shape = {"name": name, "option": option, "n": n, "dim": 8, "num_heads": 2}
    return {**shape, "forward_ms": ms, "step_ms": ms, **numbers}


def test_every_registered_attention_takes_part():
    table = {cell["n"]: cell["rivals"] for cell in FamilyStudy().cells(FamilyOptions())}
    assert {name for name, _ in table[128]} == {"floor", *list_attentions()}
    assert ["favor", "num_features=512"] in table[4096]
    assert ["softmax-explicit", ""] not in table[8192]
    assert ["softmax", ""] not in table[65536]
    with pytest.raises(ValueError, match="no attention named"):
        FamilyStudy().cells(FamilyOptions(names=("sotfmax",)))


def test_growth_and_crossing_are_read_from_the_numbers():
    lengths = (1024, 4096, 16384, 65536)
    rows = [_row("floor", n, n / 100) for n in lengths]
    rows += [_row("softmax", n, n * n / 1e5) for n in lengths[:3]]
    rows += [_row("linear", n, 50 + n / 50) for n in lengths]
    assert growth(rows, "floor") == pytest.approx(1.0)
    assert growth(rows, "softmax") == pytest.approx(2.0)
    assert growth(rows, "favor") is None
    assert growth_name(1.0, 1.0) == "linear"
    assert growth_name(1.15, 1.0) == "n log n"
    assert growth_name(1.3, 1.25) == "linear"
    assert growth_name(2.0, 1.0) == "more than n log n"
    assert growth_name(None, 1.0) == "not measured"
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
    text = family_table.family_page(rows)
    assert "| `favor`" in text
    assert "num_features=512" in text
    table = family_table.choice_table(rows)
    favor = next(line for line in table.splitlines() if "favor.md" in line)
    assert "| 0.25 | 3.00   | 4,096       | 0.12 of softmax |" in re.sub(r" +\|$", " |", favor)


def test_the_page_for_choosing_is_the_registry_and_the_measurement():
    file = DOCS / "guides" / "choosing.md"
    page = file.read_text("utf-8")
    advice = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(set(advice)) == list_attentions()


@pytest.mark.parametrize("name", list_attentions())
def test_every_mechanism_has_a_page_that_says_when_to_use_it(name):
    page = (DOCS / "reference" / "attention" / family_table.page_of(name)).read_text("utf-8")
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
