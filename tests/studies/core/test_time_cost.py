"""The study of times in attention measures every way, and its errors are those of the theory."""

import json
from pathlib import Path

from primal_attention.attention.base import JOINED_TIME
from primal_attention.tasks.study import run_study
from primal_studies.core.time_cost import LINEAR_FROM, TimeCostOptions, TimeCostStudy
from primal_studies.kit.tables import exponent

DOCS = Path(__file__).parents[3] / "docs"
PAGE, ROWS = DOCS / "evidence" / "time.md", DOCS / "results" / "time" / "rows.jsonl"


def test_every_allowed_way_is_measured_beside_none(tmp_path):
    options = TimeCostOptions(
        parts=("cost",),
        names=("linear", "softmax"),
        lengths=(16, 32),
        repeats=1,
        quadratic_up_to=16,
    )
    rows = run_study(TimeCostStudy(), options, out=tmp_path)
    ways = {(row["name"], row["time"]) for row in rows}
    own = {"linear": {"product", "rotary"}, "softmax": {"rotary", "stationary-bias"}}
    for name, others in own.items():
        assert {t for n, t in ways if n == name} == {"none", *JOINED_TIME, *others}
    assert {row["n"] for row in rows if row["name"] == "softmax"} == {16}
    table = (tmp_path / "cost.md").read_text("utf-8")
    assert "(1.00)" in table
    assert (tmp_path / "cost.png").read_bytes()[1:4] == b"PNG"


def test_mid_quantiles_beat_random_frequencies(tmp_path):
    options = TimeCostOptions(parts=("kernel",), sizes=(16, 64), draws=4)
    rows = run_study(TimeCostStudy(), options, out=tmp_path)
    assert len(rows) == 8
    assert all(row["mid-quantiles"] < row["random"] for row in rows)
    assert "mid-quantiles" in (tmp_path / "kernel.md").read_text("utf-8")
    assert (tmp_path / "kernel.png").exists()


def test_the_page_states_the_ranges_of_the_table():
    costs = {}
    for line in map(json.loads, ROWS.read_text("utf-8").splitlines()):
        if line["cell"]["part"] == "cost":
            n = line["cell"]["n"]
            costs |= {(row["name"], row["time"], n): row["step_ms"] for row in line["rows"]}
    ratios: dict[str, list[float]] = {}
    for (name, time, n), cost in costs.items():
        ratios.setdefault(time, []).append(cost / costs[name, "none", n])
    ratios.pop("none")
    text = " ".join(PAGE.read_text("utf-8").split())
    for time, found in ratios.items():
        assert f"`{time}` takes {min(found):.1f} to {max(found):.1f} times" in text
    linear = {key[:2] for key in costs if key[2] > LINEAR_FROM}
    slopes = [
        exponent(
            [(n, c) for (*own, n), c in costs.items() if tuple(own) == key and n >= LINEAR_FROM]
        )
        for key in linear
    ]
    assert f"the exponents of time are {min(slopes):.2f} to {max(slopes):.2f}," in text
