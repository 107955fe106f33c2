"""Models are compared at equal cost, on data they have not seen."""

import json
import lzma

import numpy as np
import pytest

from primal_attention.tasks.study import run_study
from primal_studies.longrange.accuracy import (
    Accuracy,
    AccuracyOptions,
    load_splits,
    plot_accuracy,
)

QUICK = {
    "seconds": 0.3,
    "batch_size": 2,
    "epoch_steps": 2,
    "num_train": 12,
    "num_valid": 4,
    "num_test": 4,
    "listops_lengths": (8, 20),
}


def quiet(_):
    pass


def test_a_run_trains_for_its_time(tmp_path):
    options = AccuracyOptions(tasks=("listops",), variants=("softmax", "primal+"), **QUICK)
    rows = run_study(Accuracy(), options, out=tmp_path, report=quiet)
    assert [r["variant"] for r in rows] == ["softmax", "primal+"]
    assert all(r["steps"] > 0 and 0 <= r["test_accuracy"] <= 1 for r in rows)
    assert rows[0]["curve"][-1][0] == rows[0]["steps"]
    assert rows[0]["seconds"] >= 0.3
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_of_several_calls_make_one_table(tmp_path):
    for variant, seed in (("dual", 1), ("dual", 0), ("softmax", 0)):
        options = AccuracyOptions(("listops",), (variant,), seeds=(seed,), steps=2, **QUICK)
        (row,) = run_study(Accuracy(), options, out=tmp_path, report=quiet)
        assert (row["variant"], row["seed"], row["steps"]) == (variant, seed, 2)
    summary = (tmp_path / "table.md").read_text().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary]
    assert [(row[1], row[3].partition("(")[2]) for row in cells] == [
        ("Transformer", "1 seed)"),
        ("dual", "2 seeds)"),
    ]
    # runs of other settings are in no table
    other = AccuracyOptions(("listops",), ("dual",), steps=4, **QUICK)
    run_study(Accuracy(), other, out=tmp_path, report=quiet)
    assert len((tmp_path / "table.md").read_text().splitlines()) == 3


def test_validation_sequences_are_not_trained_on(tmp_path):
    folder = tmp_path / "text/imdb"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        with lzma.open(folder / f"{part}.jsonl.xz", "wt") as file:
            for i in range(20):
                file.write(json.dumps({"text": f"{part} {i} " + "x" * 50, "label": i % 2}) + "\n")
    options = AccuracyOptions(tasks=("text",), max_length=30, data=tmp_path, **QUICK)
    splits = load_splits("text", options)
    assert [len(part) for part in splits] == [12, 4, 4]
    texts = [{bytes((part.row(i) - 1).tolist()) for i in range(len(part))} for part in splits]
    assert not texts[0] & texts[1]
    assert all(len(text) == 30 for text in texts[0])
    with pytest.raises(ValueError, match="leaves nothing"):
        load_splits("text", AccuracyOptions(data=tmp_path, **{**QUICK, "num_valid": 20}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("images",)}, "Unknown tasks"),
        ({"seconds": 0}, "must be positive"),
        ({"steps": 0}, "must be positive"),
        ({"steps": 150}, "multiple of epoch_steps"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AccuracyOptions(**options)


def test_unknown_attentions_are_refused():
    with pytest.raises(ValueError, match="no attention named 'x'"):
        Accuracy().cells(AccuracyOptions(variants=("x",)))


def test_curves_of_several_seeds_make_one_picture():
    runs = [
        {
            "task": "text",
            "variant": v,
            "seed": s,
            "curve": [[t, t, 1.0, 1.0, 0.5 + t / 9] for t in np.arange(3)],
        }
        for v in ("softmax", "dual")
        for s in (0, 1)
    ]
    assert plot_accuracy(runs)[:4] == b"\x89PNG"
