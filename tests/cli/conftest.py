"""Small files in the real formats, and models trained on them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.cli.main import main

SMALL = ["--model.dim", "16", "--model.num-heads", "2", "--training.epochs", "2"]


def write_ts(path: Path, cases: int, seed: int, channels: int = 2, labels: bool = True) -> None:
    """Write series of unequal length whose class is the sign of their slope."""
    rng = np.random.default_rng(seed)
    lines = ["@problemName Slopes", f"@dimensions {channels}", "@equalLength false"]
    lines += ["@classLabel true down up" if labels else "@classLabel false", "@data"]
    for case in range(cases):
        length, up = int(rng.integers(5, 9)), case % 2
        slope = (2 * up - 1) * np.linspace(-1, 1, length)
        rows = slope + 0.1 * rng.standard_normal((channels, length))
        fields = [",".join(f"{v:.4f}" for v in row) for row in rows]
        lines.append(":".join(fields + (["up" if up else "down"] if labels else [])))
    path.write_text("\n".join(lines) + "\n")


def write_recipe(path: Path, kind: str, train: Path, test: Path) -> Path:
    is_series = kind == "series"
    path.write_text(
        f"# A small {kind} recipe.\n"
        f"task: {'series' if is_series else 'longrange'}\n"
        f"data:\n  train: {train}\n  test: {test}\n"
        + ("" if is_series else f"  kind: {kind}\n")
        + "model:\n  dim: 16\n  num_heads: 2\n  num_layers: 2\n  attention: primal\n"
        "  attention_options: {rank: 4}\n"
        "training:\n  epochs: 2\n  batch_size: 8\n  lr: 1e-2\n"
    )
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in an empty folder without data: nothing may be found by chance, or left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)


@pytest.fixture(scope="session")
def series_recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    write_ts(folder / "train.ts", 24, 0)
    write_ts(folder / "test.ts", 10, 1)
    return write_recipe(folder / "slopes.yaml", "series", folder / "train.ts", folder / "test.ts")


@pytest.fixture(scope="session")
def series_run(series_recipe, tmp_path_factory) -> Path:
    """A finished run with two models."""
    out = tmp_path_factory.mktemp("run") / "slopes"
    code = main(["train", str(series_recipe), "--out", str(out), "--compare", "softmax"])
    assert code == 0
    torch.set_num_threads(1)
    return out


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> Path:
    """A finished run on texts, with one model."""
    folder = tmp_path_factory.mktemp("texts")
    for part in ("train", "test"):
        rows = [{"text": ("good " if i % 2 else "bad ") * 3, "label": i % 2} for i in range(12)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text)
    recipe = write_recipe(
        folder / "words.yaml", "text", folder / "train.jsonl", folder / "test.jsonl"
    )
    assert main(["train", str(recipe), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def pairs_run(tmp_path_factory) -> Path:
    """A finished run on pairs of texts in the format of Long Range Arena, with one model."""
    folder = tmp_path_factory.mktemp("pairs")
    for part in ("train", "test"):
        rows = []
        for i in range(12):
            a, b = ("cat " * (2 + i % 3), ("cat " if i % 2 else "dog ") * 3)
            rows.append(f"{i % 2}.0\t{i}\t{i + 1}\tb'{a}'\t{b}\n")
        (folder / f"{part}.tsv").write_text("".join(rows))
    recipe = write_recipe(
        folder / "pairs.yaml", "retrieval", folder / "train.tsv", folder / "test.tsv"
    )
    assert main(["train", str(recipe), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def fails(capsys):
    """Run a command that must end with code 2 and one sentence; return the sentence."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("primal: ")
        assert printed.count("\n") == 1
        assert "Traceback" not in printed
        return printed

    return run
