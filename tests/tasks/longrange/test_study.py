"""Models are compared at equal time, on data they have not seen, and runs are not repeated."""

import json
import lzma

import numpy as np
import pytest
from primal_attention.tasks.longrange.compare import (
    Comparison,
    load_splits,
    plot_accuracy,
    reproduce_longrange,
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


def test_runs_are_made_once_and_told_in_full(tmp_path):
    comparison = Comparison(tasks=("listops",), variants=("softmax", "primal+"), **QUICK)
    records = reproduce_longrange(tmp_path, comparison)
    assert [r["variant"] for r in records] == ["softmax", "primal+"]
    assert all(r["steps"] > 0 and 0 <= r["test_accuracy"] <= 1 for r in records)
    result = tmp_path / "runs/listops-softmax-0/result.json"
    curve = json.loads(result.read_text())["curve"]
    assert curve[-1]["step"] == records[0]["steps"]
    assert curve[-1]["cpu_seconds"] >= 0.3
    assert records[0]["seconds"] >= 0.3
    before = result.stat().st_mtime_ns
    assert reproduce_longrange(tmp_path, comparison) == records
    assert result.stat().st_mtime_ns == before
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    header = (tmp_path / "accuracy.csv").read_text().splitlines()[1]
    assert header.startswith("task,variant,seed")

    other = Comparison(tasks=("listops",), variants=("softmax",), **{**QUICK, "lr": 0.1})
    with pytest.raises(ValueError, match="made with other settings"):
        reproduce_longrange(tmp_path, other)


def test_runs_of_several_calls_make_one_table(tmp_path):
    for variant, seed in (("dual", 1), ("dual", 0), ("softmax", 0)):
        comparison = Comparison(("listops",), (variant,), seeds=(seed,), steps=2, **QUICK)
        (record,) = reproduce_longrange(tmp_path, comparison)
        assert (record["variant"], record["seed"]) == (variant, seed)
    rows = [line.split(",") for line in (tmp_path / "accuracy.csv").read_text().splitlines()[2:]]
    assert [row[1:3] for row in rows] == [["softmax", "0"], ["dual", "0"], ["dual", "1"]]
    shares = [100 * float(row[8]) for row in rows]
    both = f"{np.mean(shares[1:]):.1f} ± {np.std(shares[1:], ddof=1):.1f} (2 seeds)"
    summary = (tmp_path / "accuracy.md").read_text().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary]
    assert [row[1] for row in cells] == ["Transformer", "dual"]
    assert [row[3] for row in cells] == [f"{shares[0]:.1f} (1 seed)", both]
    curves = (tmp_path / "curves.csv").read_text().splitlines()[2:]
    assert len({tuple(line.split(",")[:3]) for line in curves}) == 3


def test_any_attention_can_be_trained_for_a_number_of_steps(tmp_path):
    comparison = Comparison(("listops",), ("skyformer", "gaussian"), steps=6, **QUICK)
    records = reproduce_longrange(tmp_path, comparison)
    assert [(r["variant"], r["steps"]) for r in records] == [("skyformer", 6), ("gaussian", 6)]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_validation_sequences_are_not_trained_on(tmp_path):
    folder = tmp_path / "text/imdb"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        with lzma.open(folder / f"{part}.jsonl.xz", "wt") as file:
            for i in range(20):
                file.write(json.dumps({"text": f"{part} {i} " + "x" * 50, "label": i % 2}) + "\n")
    comparison = Comparison(tasks=("text",), max_length=30, **QUICK)
    splits = load_splits("text", comparison, tmp_path)
    assert [len(part) for part in splits] == [12, 4, 4]
    texts = [{bytes((part.row(i) - 1).tolist()) for i in range(len(part))} for part in splits]
    assert not texts[0] & texts[1]
    assert all(len(text) == 30 for text in texts[0])
    with pytest.raises(ValueError, match="leaves nothing"):
        load_splits("text", Comparison(**{**QUICK, "num_valid": 20}), tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tasks": ("images",)}, "Unknown tasks"),
        ({"variants": ("x",)}, "no attention named 'x'"),
        ({"seconds": 0}, "must be positive"),
        ({"steps": 0}, "must be positive"),
        ({"steps": 150}, "multiple of epoch_steps"),
    ],
)
def test_impossible_comparisons_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Comparison(**options)


def test_curves_of_several_seeds_make_one_picture():
    rows = [
        {"task": "text", "variant": v, "seed": s, "cpu_seconds": t, "valid_accuracy": 0.5 + t / 9}
        for v in ("softmax", "dual")
        for s in (0, 1)
        for t in np.arange(3)
    ]
    assert plot_accuracy(rows)[:4] == b"\x89PNG"
