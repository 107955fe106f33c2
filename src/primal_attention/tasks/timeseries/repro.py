"""Table 1 of Chen et al. (2023): accuracy on the UEA sets, by two protocols.

    python -m primal_attention.tasks.timeseries.repro --out outputs/uea

Every combination of set, model and seed is trained twice. Once on the whole training part, scoring
the test part along the way: the best of these scores is the published protocol (``best test
epoch``), which picks the epoch by the answer and is here for comparison only. And once with a fifth
of the training part held out, to choose an epoch without the test part: the score of the *first*
run at that epoch is ``validation-selected``, the figure to believe.

Each finished combination is one line in ``uea.jsonl``; a stopped study continues where it was.
Everything that decides a result is in :class:`Settings` and :data:`MODELS`.
"""

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.output import hardware, markdown_table, to_csv, write_atomically
from primal_attention.tasks.timeseries.data import (
    Series,
    SeriesDataset,
    Standardizer,
    collate_series,
    load_series,
    stratified_split,
)
from primal_attention.tasks.timeseries.model import (
    SeriesClassifier,
    SeriesConfig,
    Stem,
    patch_for,
)
from primal_attention.training import History, TrainingConfig, evaluate, fit

__all__ = [
    "ABLATION",
    "MODELS",
    "PUBLISHED",
    "SETS",
    "ModelChoice",
    "Settings",
    "ablate_uea",
    "reproduce_uea",
    "write_ablation",
    "write_tables",
]


@dataclass(frozen=True)
class Settings:
    """What all models of the study share; the same for every set unless it says so.

    Fixed beforehand: width, learning rate, dropout and stem from runs on held-out parts of the
    training data of JapaneseVowels, UWaveGestureLibrary, Handwriting and SelfRegulationSCP1. What
    ``ours`` has of its own was chosen the same way on these, NATOPS and SelfRegulationSCP2.
    """

    dim: int = 64
    """Model width (published: 512)."""
    num_heads: int = 4
    """Heads (published: 8)."""
    num_layers: int = 2
    """Blocks, as published."""
    max_tokens: int = 48
    """Longer series are cut into this many patches (published: one token per step)."""
    segments: int = 8
    """Averages in the head (published: all outputs, flattened)."""
    batch_size: int = 32
    """Series per step (published: 16)."""
    steps: int = 240
    """Optimiser steps, and at least ``min_passes`` over the data (published: 100 passes)."""
    min_passes: int = 6
    """Fewest passes over the training data."""
    lr: float = 2e-3
    """Peak of a cosine with a tenth of warm-up (published: RAdam, constant 1e-3)."""
    epochs: int = 50
    """Equal parts of a run; the test part is scored after each (published: as often)."""
    valid_fraction: float = 0.2
    """Share of the training part held out to choose the epoch."""

    def epoch_steps(self, cases: int) -> int:
        """Return the optimiser steps of one part, for a training part of this size."""
        steps = max(self.steps, self.min_passes * -(-cases // self.batch_size))
        return -(-steps // self.epochs)


@dataclass(frozen=True)
class ModelChoice:
    """What one column of the table has of its own."""

    title: str
    """Head of its column."""
    attention: str
    """Name in the registry."""
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that attention."""
    primal_layers: str = "all"
    """Which blocks use it; the others use softmax."""
    stem: Stem = "patch"
    """How time steps become tokens."""
    dropout: float = 0.1
    """Dropout of every branch."""
    eta: float = 0.1
    """Weight of the KSVD term."""
    has_r: bool = True
    """Whether the key-side scores reach the output."""
    jitter: float = 0.0
    """Strength of the changes of a training series each time it is seen."""


MODELS = {
    "softmax": ModelChoice("Transformer", "softmax"),
    "primal": ModelChoice("PrimalFormer", "primal"),
    "primal-plus": ModelChoice("Primal.+", "primal", primal_layers="last:1"),
    "dual": ModelChoice("dual", "primal-dual"),
    "ours": ModelChoice("ours", "primal-dual", stem="both", dropout=0.2, jitter=0.1),
}
"""The columns. ``dual`` ties projections to the tokens; ``ours`` is the classifier's default."""

SETS = (
    "UWaveGestureLibrary",
    "JapaneseVowels",
    "Handwriting",
    "BasicMotions",
    "NATOPS",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "EthanolLevel",
    "SpokenArabicDigits",
)
"""Sets with a test part, cheap ones first."""

PUBLISHED = {
    "Handwriting": (32.0, 29.6, 28.7),
    "JapaneseVowels": (98.7, 98.4, 98.9),
    "SelfRegulationSCP1": (92.2, 92.5, 92.5),
    "SelfRegulationSCP2": (53.9, 57.2, 56.1),
    "SpokenArabicDigits": (98.4, 100.0, 100.0),
    "UWaveGestureLibrary": (85.6, 86.3, 88.4),
}
"""Best test epoch in %, as published: Transformer, PrimalFormer, Primal.+."""

_BASE = MODELS["primal"]
ABLATION = {
    "base": _BASE,
    "η = 0": replace(_BASE, eta=0.0),
    "η = 1": replace(_BASE, eta=1.0),
    "kkt": replace(_BASE, attention_options={"regularizer": "kkt"}),
    "kkt, η = 1": replace(_BASE, attention_options={"regularizer": "kkt"}, eta=1.0),
    "rank 4": replace(_BASE, attention_options={"rank": 4}),
    "rank 8": replace(_BASE, attention_options={"rank": 8}),
    "without r": replace(_BASE, has_r=False),
    "dual": MODELS["dual"],
    "dual, η = 0": replace(MODELS["dual"], eta=0.0),
    "dual, η = 1": replace(MODELS["dual"], eta=1.0),
}
"""One change at a time from PrimalFormer (``ksvd``, η = 0.1, ``data`` weights, rank 16)."""

ABLATION_SETS = ("BasicMotions", "UWaveGestureLibrary", "JapaneseVowels")


class _WithoutR(nn.Module):
    """Zeroes the half of an output map that reads the key-side scores."""

    def forward(self, weight: Tensor) -> Tensor:
        rank = weight.shape[1] // 2
        return torch.cat([weight[:, :rank], torch.zeros_like(weight[:, rank:])], dim=1)


def build_model(choice: ModelChoice, series: Series, settings: Settings, seed: int) -> Any:
    """Return the untrained model of a column for a set; the seed decides its parameters."""
    config = SeriesConfig(
        num_classes=len(series.classes),
        num_channels=series.num_channels,
        stem=choice.stem,
        patch=patch_for(int(series.length.max()), settings.max_tokens),
        segments=settings.segments,
        dim=settings.dim,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        attention=choice.attention,
        attention_options=choice.attention_options,
        primal_layers=choice.primal_layers,
        dropout=choice.dropout,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SeriesClassifier(config)
    if not choice.has_r:
        for block in model.blocks:
            layer: Any = block.attention
            nn.utils.parametrize.register_parametrization(layer.concat, "weight", _WithoutR())
    return model


class _Scored(NamedTuple):
    """A run on the whole training part, and its test scores, epoch by epoch."""

    model: Any
    history: History
    scores: list[float]


def _train(
    choice: ModelChoice, train: Series, epoch_steps: int, settings: Settings, seed: int, **also: Any
) -> tuple[Any, History]:
    model = build_model(choice, train, settings, seed)
    config = TrainingConfig(
        epochs=settings.epochs,
        epoch_steps=epoch_steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        eta=choice.eta,
        seed=seed,
    )
    data = SeriesDataset(train, choice.jitter)
    return model, fit(model, data, config=config, collate=collate_series, **also)


def _run_on_all(
    choice: ModelChoice, train: Series, test: Series, settings: Settings, seed: int
) -> _Scored:
    """Train on the whole training part and score the test part along the way."""
    scaler = Standardizer.fit(train)
    held = SeriesDataset(scaler(test))

    def score(model: nn.Module) -> dict[str, float]:
        found = evaluate(model, held, batch_size=128, collate=collate_series, keep_outputs=False)
        return {"test_accuracy": found.accuracy}

    steps = settings.epoch_steps(len(train))
    model, history = _train(choice, scaler(train), steps, settings, seed, evaluate=score)
    return _Scored(model, history, [r.metrics["test_accuracy"] for r in history.records])


def _select_epoch(
    choice: ModelChoice, train: Series, settings: Settings, seed: int
) -> tuple[int, float]:
    """Return the epoch that held-out training data prefers, and its accuracy there.

    Ties, frequent with few cases, go to the later epoch: its learning rate is lower.
    """
    if train.y is None:
        raise ValueError("The training series need labels.")
    split = stratified_split(train.y, settings.valid_fraction, seed=seed)
    part = train.take(split.train)
    scaler = Standardizer.fit(part)
    valid = SeriesDataset(scaler(train.take(split.valid)))
    # the steps of the whole part: an epoch then means the same in both runs
    steps = settings.epoch_steps(len(train))
    _, history = _train(choice, scaler(part), steps, settings, seed, valid=valid)
    best = max(history.records, key=lambda r: (r.valid_accuracy or 0.0, r.epoch))
    return best.epoch, best.valid_accuracy or 0.0


def run_combination(
    name: str, choice: ModelChoice, seed: int, settings: Settings, *, root: str | Path | None = None
) -> dict[str, Any]:
    """Return one row of the study: both protocols for a set, a model and a seed."""
    started = time.thread_time()
    train, test = load_series(name, "train", root=root), load_series(name, "test", root=root)
    epoch, valid = _select_epoch(choice, train, settings, seed)
    run = _run_on_all(choice, train, test, settings, seed)
    best = max(range(settings.epochs), key=lambda i: run.scores[i])
    return {
        "best_test": run.scores[best],
        "best_epoch": best + 1,
        "selected_test": run.scores[epoch - 1],
        "selected_epoch": epoch,
        "valid": valid,
        "last_test": run.scores[-1],
        "steps": run.history.records[-1].step,
        "passes": round(run.history.records[-1].step * settings.batch_size / len(train), 1),
        "patch": run.model.config.patch,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": round(time.thread_time() - started, 1),
    }


def run_ablation(
    name: str, choice: ModelChoice, seed: int, settings: Settings, *, root: str | Path | None = None
) -> dict[str, Any]:
    """Return the test accuracy after the last epoch: nothing is selected."""
    started = time.thread_time()
    train, test = load_series(name, "train", root=root), load_series(name, "test", root=root)
    run = _run_on_all(choice, train, test, settings, seed)
    return {
        "last_test": run.scores[-1],
        "ksvd": run.history.records[-1].ksvd,
        "seconds": round(time.thread_time() - started, 1),
    }


def fingerprint(choice: ModelChoice, settings: Settings) -> str:
    """Return a short name of everything that decides a row, so that old rows do not mix in."""
    values = asdict(choice), asdict(settings)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the finished rows of a study; a line cut off by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line in one write, and make sure it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    line = ("\n" if torn else "") + json.dumps(row) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())


def _study(
    path: Path,
    work: Iterable[tuple[str, str, ModelChoice, int]],
    run: Callable[..., dict[str, Any]],
    settings: Settings,
    root: str | Path | None,
    max_seconds: float | None,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run what is not in the file yet, and return all rows that belong to the work."""
    started, work = time.monotonic(), list(work)
    have = {(r["set"], r["model"], r["seed"], r["settings"]): r for r in read_rows(path)}
    found, left = [], 0
    for i, (name, model, choice, seed) in enumerate(work, 1):
        mark = fingerprint(choice, settings)
        key = (name, model, seed, mark)
        if key not in have:
            if max_seconds is not None and time.monotonic() - started > max_seconds:
                left += 1
                continue
            row: dict[str, Any] = {"set": name, "model": model, "seed": seed, "settings": mark}
            row |= run(name, choice, seed, settings, root=root)
            _append(path, row)
            have[key] = row
            score = row.get("best_test", row["last_test"])
            report(f"{i}/{len(work)} {name} {model} seed {seed}: {100 * score:.1f}")
        found.append(have[key])
    if left:
        report(f"out of time with {left} of {len(work)} left; the same command continues")
    return found


def _known(kind: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    unknown = sorted(set(wanted or ()) - set(known))
    if unknown:
        raise ValueError(f"No {kind} named {', '.join(unknown)}; there are: {', '.join(known)}.")
    return [name for name in known if wanted is None or name in wanted]


def reproduce_uea(
    sets: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    settings: Settings | None = None,
    root: str | Path | None = None,
    out: str | Path = "outputs/uea",
    max_seconds: float | None = None,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train what is missing of the table, write it, and return its rows.

    Args:
        sets: Names of sets; by default all of :data:`SETS`.
        models: Names of models; by default all of :data:`MODELS`.
        seeds: Seeds of parameters, batches and validation splits.
        settings: What all models share.
        root: Folder of the sets; by default ``uea`` in the folder of ``PRIMAL_DATA``.
        out: Folder of ``uea.jsonl`` (the rows), ``uea.csv`` and ``uea.md``.
        max_seconds: Start no further combination after this time; call again to continue.
        report: Told one line per finished combination.
    """
    settings = settings or Settings()
    chosen = _known("model", models, list(MODELS))
    work = [
        (name, model, MODELS[model], seed)
        # every set once before any set again: a table that is stopped early is wide, not deep
        for seed in seeds
        for name in _known("set", sets, SETS)
        for model in chosen
    ]
    out = Path(out)
    rows = _study(out / "uea.jsonl", work, run_combination, settings, root, max_seconds, report)
    if rows:
        write_tables(rows, settings, out)
    return rows


def ablate_uea(
    sets: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    settings: Settings | None = None,
    root: str | Path | None = None,
    out: str | Path = "outputs/uea",
    max_seconds: float | None = None,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train what is missing of the ablation, write it, and return its rows.

    Args:
        sets: Names of sets; by default three cheap ones.
        seeds: Seeds of parameters and batches.
        settings: What all variants share.
        root: Folder of the sets; by default ``uea`` in the folder of ``PRIMAL_DATA``.
        out: Folder of ``uea_ablation.jsonl``, ``.csv`` and ``.md``.
        max_seconds: Start no further run after this time; call again to continue.
        report: Told one line per finished run.
    """
    settings = replace(settings or Settings(), epochs=1)  # scored once, at the end
    names = _known("set", ABLATION_SETS if sets is None else sets, SETS)
    work = [
        (name, variant, choice, seed)
        for seed in seeds
        for name in names
        for variant, choice in ABLATION.items()
    ]
    out = Path(out)
    path = out / "uea_ablation.jsonl"
    rows = _study(path, work, run_ablation, settings, root, max_seconds, report)
    if rows:
        write_ablation(rows, settings, out)
    return rows


def _spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation in %, and how many seeds if not three."""
    mean = 100 * statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.1f} (1 seed)"
    text = f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"
    return text if len(values) == 3 else f"{text} ({len(values)} seeds)"


def _grid(
    rows: Sequence[Mapping[str, Any]], field_: str, sets: Sequence[str], models: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    return {
        (name, model): found
        for name in sets
        for model in models
        if (found := [r[field_] for r in rows if r["set"] == name and r["model"] == model])
    }


def _table(
    rows: Sequence[Mapping[str, Any]], field_: str, sets: Sequence[str], models: Sequence[str]
) -> str:
    """Return one protocol as markdown, the published figures beside, averages at the foot."""
    grid = _grid(rows, field_, sets, models)
    titles = [MODELS[m].title for m in models]
    published = ["Trans. (paper)", "Primal. (paper)", "Primal.+ (paper)"]
    lines = []
    for name in sets:
        cells = [_spread(grid[name, m]) if (name, m) in grid else "—" for m in models]
        theirs = [f"{v:.1f}" for v in PUBLISHED[name]] if name in PUBLISHED else ["—"] * 3
        lines.append([name, *cells, *theirs])
    for label, members in (
        ("average", [n for n in sets if all((n, m) in grid for m in models)]),
        (
            "average, sets of the paper",
            [n for n in sets if n in PUBLISHED and all((n, m) in grid for m in models)],
        ),
    ):
        if not members:
            continue
        means = [
            f"{100 * statistics.fmean(statistics.fmean(grid[n, m]) for n in members):.1f}"
            for m in models
        ]
        theirs = ["—"] * 3
        if all(n in PUBLISHED for n in members):
            theirs = [f"{statistics.fmean(PUBLISHED[n][i] for n in members):.1f}" for i in range(3)]
        lines.append([f"{label} ({len(members)})", *means, *theirs])
    return markdown_table(["set", *titles, *published], lines)


def write_tables(rows: Sequence[Mapping[str, Any]], settings: Settings, out: Path) -> None:
    """Write ``uea.csv``, one line a run, and ``uea.md``, both protocols."""
    sets = [n for n in SETS if any(r["set"] == n for r in rows)]
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    write_atomically(out / "uea.csv", to_csv([dict(r) for r in rows], _machine()))
    passes = {r["set"]: (r["passes"], r["patch"]) for r in rows}
    runs = ", ".join(f"{n} {e:.0f} ({p})" for n, (e, p) in passes.items())
    parts = [
        f"Test accuracy in %, mean ± standard deviation over seeds. {_describe(settings)} "
        f"Scored {settings.epochs} times in a run. Passes over the training part, and time steps per token in brackets: {runs}.",
        "**Validation-selected** (the epoch chosen without the test part):",
        _table(rows, "selected_test", sets, models),
        "**Best test epoch** (the protocol of the paper; optimistic, for comparison only):",
        _table(rows, "best_test", sets, models),
        "**Last epoch** (nothing chosen; what the classifier does):",
        _table(rows, "last_test", sets, models),
    ]
    write_atomically(out / "uea.md", "\n\n".join(parts) + "\n")


def write_ablation(rows: Sequence[Mapping[str, Any]], settings: Settings, out: Path) -> None:
    """Write ``uea_ablation.csv``, one line a run, and ``uea_ablation.md``."""
    sets = [n for n in SETS if any(r["set"] == n for r in rows)]
    variants = [v for v in ABLATION if any(r["model"] == v for r in rows)]
    write_atomically(out / "uea_ablation.csv", to_csv([dict(r) for r in rows], _machine()))
    grid = _grid(rows, "last_test", sets, variants)
    lines = []
    for variant in variants:
        cells = [_spread(grid[n, variant]) if (n, variant) in grid else "—" for n in sets]
        complete = all((n, variant) in grid for n in sets)
        means = [statistics.fmean(grid[n, variant]) for n in sets] if complete else []
        lines.append([variant, *cells, f"{100 * statistics.fmean(means):.1f}" if means else "—"])
    table = markdown_table(["variant", *sets, "average"], lines)
    text = "Test accuracy in % after the last epoch, mean ± standard deviation over seeds. "
    write_atomically(out / "uea_ablation.md", f"{text}{_describe(settings)}\n\n{table}\n")


def _describe(settings: Settings) -> str:
    s = settings
    return (
        f"All models: width {s.dim}, {s.num_heads} heads, {s.num_layers} blocks, at most "
        f"{s.max_tokens} tokens, {s.segments} segments in the head, AdamW with peak {s.lr:g} and "
        f"batches of {s.batch_size} for {s.steps} steps (at least {s.min_passes} passes); one "
        "thread of a CPU."
    )


def _machine() -> str:
    return ", ".join(f"{key}: {value}" for key, value in hardware().items())


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sets", nargs="+", help="names of sets; by default all")
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(MODELS)}; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--root", type=Path, help="folder of the sets; by default PRIMAL_DATA/uea")
    parser.add_argument("--out", type=Path, default=Path("outputs/uea"))
    parser.add_argument("--max-seconds", type=float, help="start nothing new after this time")
    parser.add_argument("--ablation", action="store_true", help="the ablation instead of the table")
    args = parser.parse_args()
    options = {"seeds": args.seeds, "root": args.root, "out": args.out}
    options["max_seconds"] = args.max_seconds
    torch.set_num_threads(1)  # batches this small only wait for a second thread
    if args.ablation:
        ablate_uea(args.sets, **options)
    else:
        reproduce_uea(args.sets, args.models, **options)


if __name__ == "__main__":
    main()
