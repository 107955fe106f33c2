"""Accuracy on long sequences at equal cost; the study behind ``primal repro longrange``.

The paper's two-layer models of width 64 on ListOps, Text and Image, made small enough for one core:
every model trains for the same number of processor seconds, or of steps. The rate rises and falls
within that time. Curves show the validation data; the test data is looked at once, with the weights
of the best validation epoch. A second start continues where the first one stopped.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from primal_attention.tasks.longrange.sequences import TokenSequences

__all__ = ["Comparison", "check_longrange", "load_splits", "plot_accuracy", "reproduce_longrange"]

_TASKS = ("listops", "text", "image")
_VARIANTS = ("softmax", "primal", "primal+", "dual")
_TITLES = {"listops": "ListOps", "text": "Text (IMDb bytes)", "image": "Image (CIFAR-10 grey)"}
_LABELS = {"softmax": "Transformer", "primal": "PrimalFormer", "primal+": "Primal.+"}


@dataclass(frozen=True)
class Comparison:
    """What to compare, and for how long."""

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

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in _TASKS]
        if unknown:
            raise ValueError(f"Unknown tasks {unknown}; choose from {', '.join(_TASKS)}.")
        for variant in set(self.variants) - set(_VARIANTS):
            from primal_attention.attention import attention_entry

            attention_entry(variant)
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


class Splits(NamedTuple):
    """The three parts of a task."""

    train: "TokenSequences"
    valid: "TokenSequences"
    test: "TokenSequences"


def reproduce_longrange(
    out: str | Path,
    comparison: Comparison | None = None,
    *,
    data: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train every model on every task at the same cost; return one record a run.

    Writes ``accuracy.csv`` (one row a run), ``accuracy.md`` (means over seeds), ``curves.csv`` (one
    row an evaluation) and ``curves.png`` in ``out``, each time a run ends. They hold every finished
    run of the folder with these settings, so that several processes may share the tasks, variants
    and seeds.

    Args:
        out: Folder of the results and the runs; what is there already is not done again.
        comparison: What to compare.
        data: Folder with ``text/imdb`` and ``vision/cifar-10``; by default the environment variable
            ``PRIMAL_DATA``. ListOps needs none.
        progress: Told before every run.

    Example:
        >>> import tempfile
        >>> quick = Comparison(("listops",), ("dual",), 0.2, num_train=8, num_valid=4, num_test=4,
        ...                    epoch_steps=2, batch_size=2)
        >>> reproduce_longrange(tempfile.mkdtemp(), quick)[0]["variant"]
        'dual'
    """
    comparison, out = comparison or Comparison(), Path(out)
    records: list[dict[str, Any]] = []
    for task, seed, variant, folder in _runs(out, comparison):
        progress(f"{task}, {variant}, seed {seed}")
        found = _read(folder, comparison)
        if found is None:
            splits = load_splits(task, comparison, data)
            found = _run(folder, task, variant, seed, splits, comparison)
        records.append(found["record"])
        _write_tables(out, comparison)
    return records


def _write_tables(out: Path, comparison: Comparison) -> None:
    """Write what all finished runs of the folder with these settings have found."""
    import json

    from primal_attention.output import hardware, to_csv, write_atomically

    def place(found: dict[str, Any]) -> tuple[int, int, int, str]:
        task, variant, seed = (found["record"][key] for key in ("task", "variant", "seed"))
        order = [*comparison.variants, variant]  # those of other calls after ours
        return _TASKS.index(task), seed, order.index(variant), variant

    every = (json.loads(path.read_text()) for path in out.glob("runs/*/result.json"))
    runs = sorted((f for f in every if f["comparison"] == _settings(comparison)), key=place)
    curves = [row for found in runs for row in found["curve"]]
    facts = ", ".join(f"{k}: {v}" for k, v in hardware().items())
    records = [found["record"] for found in runs]
    write_atomically(out / "accuracy.csv", to_csv(records, facts))
    write_atomically(out / "accuracy.md", _summary(records) + "\n")
    write_atomically(out / "curves.csv", to_csv(curves, facts))
    write_atomically(out / "curves.png", plot_accuracy(curves))


def _summary(records: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each model on each task, seeds together."""
    from statistics import fmean

    from primal_attention.output import markdown_table, percent

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["task"], record["variant"]), []).append(record)
    lines = [
        [
            _TITLES[task],
            _LABELS.get(variant, variant),
            *(percent([r[f"{part}_accuracy"] for r in group]) for part in ("valid", "test")),
            *(f"{fmean(r[key] for r in group):,.0f}" for key in ("steps", "seconds")),
        ]
        for (task, variant), group in groups.items()
    ]
    header = ["task", "model", "validation, %", "test, %", "steps", "processor seconds"]
    return markdown_table(header, lines)


def check_longrange(
    out: str | Path, comparison: Comparison, *, data: str | Path | None = None
) -> None:
    """Raise what would stop the study later: data that cannot be read, runs of other settings."""
    for task, _, _, folder in _runs(Path(out), comparison):
        if _read(folder, comparison) is None:
            load_splits(task, comparison, data)


def _runs(out: Path, comparison: Comparison) -> Iterator[tuple[str, int, str, Path]]:
    """Yield task, seed, variant and folder of every run, in order."""
    for task in comparison.tasks:
        for seed in comparison.seeds:
            for variant in comparison.variants:
                name = f"{task}-{variant.replace('+', '-plus')}-{seed}"
                yield task, seed, variant, out / "runs" / name


@functools.lru_cache(maxsize=len(_TASKS))
def load_splits(task: str, comparison: Comparison, data: str | Path | None = None) -> Splits:
    """Return the data of a task; the validation part is never part of the training data."""
    import numpy as np

    from primal_attention.tasks.longrange.listops import ListOpsConfig, generate_listops
    from primal_attention.tasks.longrange.readers import read_cifar10, read_imdb

    counts = (comparison.num_train, comparison.num_valid, comparison.num_test)
    if task == "listops":
        config = ListOpsConfig(*comparison.listops_lengths)
        names = ("train", "valid", "test")
        parts = (
            generate_listops(count, split=name, config=config)
            for count, name in zip(counts, names, strict=True)
        )
        return Splits(*parts)
    root = _root(data)
    if task == "text":
        length = comparison.max_length
        train, test = (
            read_imdb(root / f"text/imdb/{part}.jsonl.xz", length=length)
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


def _root(data: str | Path | None) -> Path:
    given = data or os.environ.get("PRIMAL_DATA")
    if given is None:
        raise ValueError(
            "Text and Image need their files: pass data, or set PRIMAL_DATA to the folder that "
            "holds text/imdb and vision/cifar-10."
        )
    return Path(given)


def _run(
    folder: Path, task: str, variant: str, seed: int, splits: Splits, comparison: Comparison
) -> dict[str, Any]:
    """Train one model for its time, measure it on the test data, and save what was found."""
    import torch

    from primal_attention.output import to_json, write_atomically
    from primal_attention.tasks.longrange.settings import build_model, training_config
    from primal_attention.training import evaluate, fit

    torch.manual_seed(seed)
    lengths = [int(part.lengths.max()) for part in splits]
    model = build_model(task, variant, max_length=max(lengths))
    config = training_config(
        task,
        variant,
        epochs=comparison.steps // comparison.epoch_steps if comparison.steps else 1_000_000,
        epoch_steps=comparison.epoch_steps,
        batch_size=comparison.batch_size,
        lr=comparison.lr,
        warmup=0.1,
        clip=1.0,
        max_seconds=None if comparison.steps else comparison.seconds,
        seed=seed,
    )
    history = fit(
        model, splits.train, config=config, valid=splits.valid, out=folder / "fit", resume=True
    )
    tested = evaluate(model, splits.test, keep_outputs=False)
    key = {"task": task, "variant": variant, "seed": seed}
    record = {
        **key,
        "seconds": round(history.records[-1].seconds, 1),
        "steps": history.records[-1].step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "best_step": history.best.step,
        "valid_accuracy": history.best.valid_accuracy,
        "test_accuracy": tested.accuracy,
        "test_sequences": len(splits.test),
    }
    curve = [
        {
            **key,
            "step": row.step,
            "cpu_seconds": round(row.seconds, 2),
            "train_loss": row.loss,
            "ksvd": row.ksvd,
            "valid_loss": row.valid_loss,
            "valid_accuracy": row.valid_accuracy,
        }
        for row in history.records
    ]
    found = {"comparison": _settings(comparison), "record": record, "curve": curve}
    write_atomically(folder / "result.json", to_json(found))
    return found


def _settings(comparison: Comparison) -> dict[str, Any]:
    """Return what decides a single run, as JSON has it."""
    values = asdict(comparison)
    kept = {k: v for k, v in values.items() if k not in ("tasks", "variants", "seeds")}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}


def _read(folder: Path, comparison: Comparison) -> dict[str, Any] | None:
    """Return a finished run, if it was made with the same settings."""
    import json

    path = folder / "result.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found["comparison"] != _settings(comparison):
        raise ValueError(
            f"{folder} was made with other settings: {found['comparison']}; choose another folder."
        )
    return found


def plot_accuracy(curves: Sequence[dict[str, Any]]) -> bytes:
    """Return a PNG: accuracy on the validation data against processor time, one panel a task.

    Of several seeds, the mean is drawn over the faint curve of each.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib; install it with: pip install 'primal-attention[analysis]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from primal_attention.analysis.report import to_png
    from primal_attention.analysis.spectrum import model_colors, name_models, spaced

    tasks = list(dict.fromkeys(row["task"] for row in curves))
    color = model_colors(_LABELS.get(row["variant"], row["variant"]) for row in curves)
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 4), squeeze=False, layout=spaced()
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        rows = [r for r in curves if r["task"] == task]
        for variant in dict.fromkeys(r["variant"] for r in rows):
            seeds: dict[int, list[tuple[float, float]]] = {}
            for r in rows:
                if r["variant"] == variant:
                    point = r["cpu_seconds"], 100 * r["valid_accuracy"]
                    seeds.setdefault(r["seed"], []).append(point)
            shade = color[_LABELS.get(variant, variant)]
            if len(seeds) > 1:
                for points in seeds.values():
                    axis.plot(*zip(*points, strict=True), color=shade, alpha=0.25, linewidth=1)
            # as far as every seed goes
            means = [np.mean(points, axis=0) for points in zip(*seeds.values(), strict=False)]
            axis.plot(*zip(*means, strict=True), color=shade, marker=".")
        axis.set(title=_TITLES[task], xlabel="processor seconds of training")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("validation accuracy, %")
    name_models(figure, color)
    return to_png(figure)
