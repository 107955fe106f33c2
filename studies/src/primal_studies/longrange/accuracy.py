"""Study of long sequences: accuracy at equal cost.

The paper's two-layer models of width 64 on ListOps, Text and Image, made small enough for one core.
Every model trains for the same number of processor seconds, or of steps. The learning rate rises
and falls within that time. Curves show the validation data; the test data is scored once, with the
weights of the best validation epoch.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, percent
from primal_attention.support.settings import fingerprint
from primal_attention.tasks.study import Cell, Row, Study

if TYPE_CHECKING:
    from primal_attention.datasets.longrange.sequences import TokenSequences

__all__ = ["Accuracy", "AccuracyOptions", "load_splits", "plot_accuracy"]

_TASKS = ("listops", "text", "image")
_VARIANTS = ("softmax", "primal", "primal+", "dual")
_TITLES = {"listops": "ListOps", "text": "Text (IMDb bytes)", "image": "Image (CIFAR-10 grey)"}
_LABELS: dict[str, str] = {
    "softmax": "Transformer",
    "primal": "PrimalFormer",
    "primal+": "Primal.+",
}


@dataclass(frozen=True)
class AccuracyOptions:
    """Accuracy on long sequences at equal processor time or equal steps."""

    tasks: tuple[str, ...] = _TASKS
    """Tasks: listops, text, image."""
    variants: tuple[str, ...] = _VARIANTS
    """Models: primal, primal+, dual, or the name of any other attention."""
    seconds: float = 300.0
    """Processor seconds of training for each model on each task."""
    steps: int | None = None
    """Steps of training, whatever time they take, instead of seconds."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of parameters and of the order of the data."""
    batch_size: int = 8
    """Sequences per step."""
    lr: float = 1e-3
    """Peak learning rate."""
    epoch_steps: int = 100
    """Steps between two evaluations."""
    num_train: int = 20_000
    """Training sequences."""
    num_valid: int = 500
    """Validation sequences, taken from the training part."""
    num_test: int = 2_000
    """Test sequences."""
    max_length: int = 1024
    """Tokens to keep of a text."""
    listops_lengths: tuple[int, int] = (128, 512)
    """Tokens of the shortest and the longest expression."""
    data: Path | None = None
    """Folder with text/imdb and vision/cifar-10; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in _TASKS]
        if unknown:
            raise ValueError(f"Unknown tasks {unknown}; choose from {', '.join(_TASKS)}.")
        for name in ("tasks", "variants", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty.")
        counts = ("batch_size", "epoch_steps", "num_train", "num_valid", "num_test", "max_length")
        asked = ("steps",) if self.steps is not None else ()
        for name in ("seconds", "lr", *counts, *asked):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.steps is not None and self.steps % self.epoch_steps:
            raise ValueError(
                f"steps must be a multiple of epoch_steps, got {self.steps} and {self.epoch_steps}."
            )

    @property
    def mark(self) -> str:
        """Fingerprint of everything that decides a run besides task, variant and seed."""
        values = asdict(self)
        chosen = ("tasks", "variants", "seeds", "data")
        return fingerprint({k: v for k, v in values.items() if k not in chosen})


class Accuracy(Study[AccuracyOptions]):
    """Train every model on every task at the same cost."""

    name = "longrange-accuracy"
    Options = AccuracyOptions

    def cells(self, options: AccuracyOptions) -> list[Cell]:
        """Return every model on a task before the next task."""
        from primal_attention.attention import attention_entry

        for variant in set(options.variants) - set(_VARIANTS):
            attention_entry(variant)  # an unknown name raises
        return [
            {"task": task, "variant": variant, "seed": seed, "settings": options.mark}
            for task in options.tasks
            for seed in options.seeds
            for variant in options.variants
        ]

    def run(self, cell: Cell, options: AccuracyOptions, scratch: Path) -> Row:
        """Train one model for its time, and score the test data with its best weights."""
        import torch

        from primal_attention.tasks.longrange.published import published_model, training_config
        from primal_attention.training import evaluate, fit

        task, variant, seed = cell["task"], cell["variant"], cell["seed"]
        splits = load_splits(task, options)
        torch.manual_seed(seed)
        longest = max(int(part.lengths.max()) for part in splits)
        model = published_model(task, variant, max_length=longest)
        config = training_config(
            task,
            variant,
            epochs=options.steps // options.epoch_steps if options.steps else 1_000_000,
            epoch_steps=options.epoch_steps,
            batch_size=options.batch_size,
            lr=options.lr,
            warmup=0.1,
            clip=1.0,
            max_seconds=None if options.steps else options.seconds,
            seed=seed,
        )
        history = fit(
            model, splits.train, config=config, valid=splits.valid, out=scratch, resume=True
        )
        last = history.records[-1]
        return {
            "seconds": round(last.seconds, 1),
            "steps": last.step,
            "parameters": sum(p.numel() for p in model.parameters()),
            "best_step": history.best.step,
            "valid_accuracy": history.best.valid["accuracy"],
            "test_accuracy": evaluate(model, splits.test)["accuracy"],
            "test_sequences": len(splits.test),
            "curve": [
                [r.step, round(r.seconds, 2), r.loss, r.valid["loss"], r.valid["accuracy"]]
                for r in history.records
            ],
        }

    def tables(self, rows: Sequence[Row], options: AccuracyOptions) -> Mapping[str, str | bytes]:
        """Return means over seeds, and the curves on the validation data."""
        kept = [row for row in rows if row["settings"] == options.mark]
        kept.sort(key=lambda row: (_TASKS.index(row["task"]), row["seed"]))
        if not kept:
            return {}
        return {"table.md": summarize(kept), "curves.png": plot_accuracy(kept)}


class Splits(NamedTuple):
    """The three parts of a task."""

    train: "TokenSequences"
    valid: "TokenSequences"
    test: "TokenSequences"


@functools.lru_cache(maxsize=len(_TASKS))
def load_splits(task: str, options: AccuracyOptions) -> Splits:
    """Return the data of a task; the validation part is never part of the training data."""
    import numpy as np

    from primal_attention.datasets.longrange.listops import ListOpsConfig, generate_listops
    from primal_attention.datasets.public import data_folder
    from primal_attention.tasks.longrange.readers import read_cifar10, read_imdb

    counts = (options.num_train, options.num_valid, options.num_test)
    if task == "listops":
        config = ListOpsConfig(*options.listops_lengths)
        names = ("train", "valid", "test")
        parts = (
            generate_listops(count, split=name, config=config)
            for count, name in zip(counts, names, strict=True)
        )
        return Splits(*parts)
    root = data_folder(options.data)
    if task == "text":
        train, test = (
            read_imdb(root / f"text/imdb/{part}.jsonl.xz", length=options.max_length)
            for part in ("train", "test")
        )
    else:
        train, test = (
            read_cifar10(root / f"vision/cifar-10/{part}_jpeg.npz", limit=limit)
            for part, limit in (("train", sum(counts[:2])), ("test", counts[2]))
        )
    order = np.random.default_rng(0).permutation(len(train))
    chosen = np.random.default_rng(1).permutation(len(test))[: counts[2]]
    if len(order) <= counts[1]:
        raise ValueError(
            f"num_valid={counts[1]} leaves nothing of the {len(order)} sequences to train on."
        )
    valid, rest = order[: counts[1]], order[counts[1] :][: counts[0]]
    return Splits(train.select(rest), train.select(valid), test.select(chosen))


def summarize(rows: Sequence[Row]) -> str:
    """Return a table with a line for each model on each task, means over seeds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["variant"]), []).append(row)
    lines = [
        [
            _TITLES[task],
            _label(variant),
            *(percent([r[f"{part}_accuracy"] for r in group]) for part in ("valid", "test")),
            *(f"{fmean(r[key] for r in group):,.0f}" for key in ("steps", "seconds")),
        ]
        for (task, variant), group in groups.items()
    ]
    header = ["task", "model", "validation, %", "test, %", "steps", "processor seconds"]
    return markdown_table(header, lines) + "\n"


def plot_accuracy(runs: Sequence[Row]) -> bytes:
    """Return a PNG: accuracy on the validation data against processor time, one panel a task.

    Of several seeds, the mean is drawn over the faint curve of each.
    """
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from primal_attention.report.page import to_png
    from primal_attention.report.plots import add_legend, model_colors, panel_layout

    tasks = list(dict.fromkeys(run["task"] for run in runs))
    color = model_colors(_label(run["variant"]) for run in runs)
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 4), squeeze=False, layout=panel_layout()
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        here = [run for run in runs if run["task"] == task]
        for variant in dict.fromkeys(run["variant"] for run in here):
            seeds = [
                [(seconds, 100 * accuracy) for _, seconds, _, _, accuracy in run["curve"]]
                for run in here
                if run["variant"] == variant
            ]
            shade = color[_label(variant)]
            if len(seeds) > 1:
                for points in seeds:
                    axis.plot(*zip(*points, strict=True), color=shade, alpha=0.25, linewidth=1)
            # as far as every seed goes
            means = [np.mean(points, axis=0) for points in zip(*seeds, strict=False)]
            axis.plot(*zip(*means, strict=True), color=shade, marker=".")
        axis.set(title=_TITLES[task], xlabel="processor seconds of training")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("validation accuracy, %")
    add_legend(figure, color)
    return to_png(figure)


def _label(variant: str) -> str:
    return _LABELS.get(variant, variant)
