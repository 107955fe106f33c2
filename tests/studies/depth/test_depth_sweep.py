"""The study ``depth-sweep`` on a small text."""

import json
import math

import pytest
import torch

from primal_attention.support.command import UserError
from primal_attention.tasks.study import find_study, run_study
from primal_studies.depth.models import SweepText
from primal_studies.depth.sweep import (
    DepthSweepOptions,
    DepthSweepStudy,
    load_text,
    pair_loss,
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question.\n" * 80)
    return path


def test_study_writes_losses_and_best_depths(text, tmp_path):
    options = DepthSweepOptions(
        budgets=(0.02,), depths=(1, 2, 3), seeds=2, steps=4, text=text, context=16, batch=2
    )
    study = find_study("depth-sweep", "bench")
    assert isinstance(study, DepthSweepStudy)
    rows = run_study(study, options, out=tmp_path / "out", report=lambda _: None)
    assert [row["layers"] for row in rows] == [1, 2, 3, 1, 2, 3]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "0.02 M" in table
    assert "mean over 2 seeds" in table
    assert "L*(N)" in (tmp_path / "out" / "optimum.md").read_text()
    assert (tmp_path / "out" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_cell_continues(text, tmp_path):
    options = DepthSweepOptions(
        budgets=(0.02,), depths=(1, 2, 3), seeds=1, steps=4, text=text, context=16, batch=2
    )
    study = DepthSweepStudy()
    (cell,) = study.cells(options)
    whole = study.run(cell, options, tmp_path / "whole")
    part = tmp_path / "part"
    part.mkdir()
    done = [{k: v for k, v in row.items() if k != "pairs"} for row in whole[:2]]
    (part / "done.json").write_text(json.dumps(done))
    assert study.run(cell, options, part) == whole


def test_characters_and_subwords(text):
    found = load_text(text, 0, None)
    assert len(found.train) == 9 * len(found.valid) == 9 * 80 * 42 // 10
    assert int(found.train.max()) == found.vocab - 1 == len(set(text.read_text()))
    pytest.importorskip("tokenizers")
    pieces = load_text(text, 300, None)
    assert len(pieces.train) < len(found.train)
    assert int(pieces.train.max()) < pieces.vocab <= 300


def test_pairs_know_the_last_token_only():
    ids = torch.arange(4000) % 4
    assert pair_loss(SweepText(ids, ids, 4), 16) < 1e-3
    draws = torch.randint(4, (4000,))
    assert pair_loss(SweepText(draws, draws, 4), 16) == pytest.approx(math.log(4), abs=0.02)


def test_mistakes_are_told(tmp_path):
    with pytest.raises(UserError, match="three depths or more"):
        DepthSweepStudy().cells(DepthSweepOptions(depths=(1, 2)))
    with pytest.raises(ValueError, match="pieces must be 0 or at least 64"):
        DepthSweepOptions(pieces=3)
    with pytest.raises(UserError, match=r"missing\.txt"):
        load_text(tmp_path / "missing.txt", 0, None)


def test_presets():
    smoke, small = (
        DepthSweepStudy().cells(DepthSweepOptions(preset=p)) for p in ("smoke", "small")
    )
    assert (len(smoke), len(small)) == (2, 12)
    assert smoke[0]["depths"] == [1, 2, 6]
