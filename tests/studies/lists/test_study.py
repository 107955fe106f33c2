"""The study of all re-rankers runs on small pictures, and its words fit what was measured."""

import re

import numpy as np
import pytest

from primal_attention.datasets import lists as sets
from primal_attention.tasks.study import run_study
from primal_studies.lists.study import RerankOptions, RerankStudy


@pytest.fixture
def pictures(monkeypatch):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(8), 6)
    images = rng.random((8, 5, 5))[groups] + 0.3 * rng.random((48, 5, 5))
    monkeypatch.setattr(
        sets, "load_pictures", lambda name, data: sets.Pictures(images.astype("f4"), groups)
    )


def test_every_method_on_both_sets(pictures, tmp_path):
    options = RerankOptions(seeds=(0,), steps=1)
    rows = run_study(RerankStudy(), options, out=tmp_path, report=lambda _: None)
    assert len(rows) == 2 * 2 * 7 + 2 * 4 * 2 * 2
    assert all(0 < row["map"] <= 100 for row in rows)
    # trained methods are tested at home and away
    assert {(r["source"], r["set"]) for r in rows if r["trained"]} == {
        (a, b) for a in ("coil20", "palm") for b in ("coil20", "palm")
    }
    table = (tmp_path / "table.md").read_text("utf-8")
    assert "one split" in table
    assert "±" not in table
    assert len(table.split("\n|")) == 2 + 12 + 1
    assert "in one split" in (tmp_path / "verdict.md").read_text("utf-8")


def row(method, seed, value, source=""):
    return {"method": method, "seed": seed, "map": value, "set": "coil20", "candidates": 150,
            "ceiling": 90.0, "source": source}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((78.0, 80.0), r"ahead of list diffusion \(\+2.0 ± 0.0\)"),
        ((74.0, 76.0), r"behind list diffusion \(-2.0"),
        ((75.0, 79.0), r"level with list diffusion \(\+0.0 ± 2.0\)"),
    ],
)
def test_words_of_the_verdict(values, words):
    rows = [row("first search", s, 70.0) for s in (0, 1)]
    rows += [row("diffusion, list", s, 76.0 + 2 * s) for s in (0, 1)]
    rows += [row("context, dual-tied", s, v, "coil20") for s, v in enumerate(values)]
    found = RerankStudy().tables(rows, RerankOptions())
    assert re.search(words, found["verdict.md"])
    assert "76.0 ± 1.4" not in found["table.md"]
    assert "77.0 ± 1.4" in found["table.md"]
