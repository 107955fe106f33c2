"""Table 1 of Chen et al. (2023): accuracy on the UEA sets, by held-out data and as published.

Every combination of set, model and seed is trained by two protocols. ``Validation-selected`` is the
figure to believe: a run with a fifth of the training part held out chooses an epoch, and a run on
the whole training part is scored at that epoch. ``Best test epoch`` is the published protocol, with
the published η and on all sets but one the published training: the best of fifty test scores of one
run. It picks the epoch by the answer, and is here for comparison only. The published Primal.+ is,
besides, the best of nine pairs of rank and η, set by set; a third table makes that choice too.

Each finished combination is one line in ``uea.jsonl``, ``uea_published.jsonl`` or
``uea_grid.jsonl``; a stopped study continues where it was.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.tasks.timeseries.data import (
    Series,
    SeriesDataset,
    Standardizer,
    collate_series,
    load_series,
    stratified_split,
)
from primal_attention.tasks.timeseries.model import SeriesClassifier, SeriesConfig, patch_for
from primal_attention.tasks.timeseries.settings import (
    ABLATION,
    ABLATION_SETS,
    ABLATION_SETTINGS,
    GRID,
    GRID_SETS,
    MODELS,
    PUBLISHED_SETTINGS,
    RECIPES,
    SETS,
    SETTINGS,
    ModelChoice,
    Settings,
    fingerprint,
    published_choice,
)
from primal_attention.tasks.timeseries.tables import write_ablation, write_tables
from primal_attention.training import History, TrainingConfig, evaluate, fit

__all__ = ["ablate_uea", "build_model", "reproduce_uea"]


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
        **RECIPES[settings.recipe],
    )
    data = SeriesDataset(train, choice.jitter)
    return model, fit(model, data, config=config, collate=collate_series, **also)


def run_on_all(
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
    """Return one row of the table: a set, a model and a seed, the epoch chosen by held-out data."""
    started = time.thread_time()
    train, test = load_series(name, "train", root=root), load_series(name, "test", root=root)
    epoch, valid = _select_epoch(choice, train, settings, seed)
    run = run_on_all(choice, train, test, settings, seed)
    chosen = {"selected_test": run.scores[epoch - 1], "selected_epoch": epoch, "valid": valid}
    return _best_epoch(run) | chosen | _facts(run, len(train), settings, started)


def run_published(
    name: str, choice: ModelChoice, seed: int, settings: Settings, *, root: str | Path | None = None
) -> dict[str, Any]:
    """Return one row of the table by the published protocol: the best test epoch of one run."""
    started = time.thread_time()
    train, test = load_series(name, "train", root=root), load_series(name, "test", root=root)
    run = run_on_all(choice, train, test, settings, seed)
    return _best_epoch(run) | _facts(run, len(train), settings, started)


def _best_epoch(run: _Scored) -> dict[str, Any]:
    best = max(range(len(run.scores)), key=lambda i: run.scores[i])
    return {"best_test": run.scores[best], "best_epoch": best + 1}


def _facts(run: _Scored, cases: int, settings: Settings, started: float) -> dict[str, Any]:
    """Return what every row tells of a run, whatever was chosen in it."""
    steps = run.history.records[-1].step
    return {
        "last_test": run.scores[-1],
        "steps": steps,
        "passes": round(steps * settings.batch_size / cases, 1),
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
    run = run_on_all(choice, train, test, settings, seed)
    return {
        "last_test": run.scores[-1],
        "ksvd": run.history.records[-1].ksvd,
        "seconds": round(time.thread_time() - started, 1),
    }


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


class _Work(NamedTuple):
    """One row to be."""

    name: str
    model: str
    choice: ModelChoice
    seed: int
    settings: Settings


def _study(
    path: Path,
    work: Iterable[_Work],
    run: Callable[..., dict[str, Any]],
    root: str | Path | None,
    ends: float,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run what is not in the file yet before time ends, and return all rows of the work."""
    work = list(work)
    have = {(r["set"], r["model"], r["seed"], r["settings"]): r for r in read_rows(path)}
    found, left = [], 0
    for i, (name, model, choice, seed, settings) in enumerate(work, 1):
        mark = fingerprint(choice, settings)
        key = (name, model, seed, mark)
        if key not in have:
            if time.monotonic() > ends:
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
    """Train what is missing of the protocols, write the tables, and return all rows.

    Args:
        sets: Names of sets; by default all of :data:`SETS`.
        models: Names of models; by default all of :data:`MODELS`.
        seeds: Seeds of parameters, batches and validation splits.
        settings: What all runs share; by default :data:`SETTINGS` and :data:`PUBLISHED_SETTINGS`.
        root: Folder of the sets; by default ``uea`` in the folder of ``PRIMAL_DATA``.
        out: Folder of the rows (``uea.jsonl``, ``uea_published.jsonl``, ``uea_grid.jsonl``), of the
            same as CSV, and of ``uea.md``.
        max_seconds: Start no further combination after this time; call again to continue.
        report: Told one line per finished combination.
    """
    names, chosen, out = _known("set", sets, SETS), _known("model", models, list(MODELS)), Path(out)
    ours, theirs = SETTINGS, PUBLISHED_SETTINGS
    if settings is not None:
        ours = dict.fromkeys(SETS, settings)
        theirs = dict.fromkeys(SETS, replace(settings, recipe="published"))
    # every set once before any set again: a table that is stopped early is wide, not deep
    cells = [(name, model, seed) for seed in seeds for name in names for model in chosen]
    pairs = [
        (name, pair, seed)
        for seed in seeds
        for name in names
        if name in GRID_SETS and "primal-plus" in chosen
        for pair in GRID
    ]
    ends = math.inf if max_seconds is None else time.monotonic() + max_seconds
    also = root, ends, report
    selected = _study(
        out / "uea.jsonl",
        [_Work(n, m, MODELS[m], seed, ours[n]) for n, m, seed in cells],
        run_combination,
        *also,
    )
    best = _study(
        out / "uea_published.jsonl",
        [_Work(n, m, published_choice(m, n), seed, theirs[n]) for n, m, seed in cells],
        run_published,
        *also,
    )
    grid = _study(
        out / "uea_grid.jsonl",
        [_Work(n, pair, GRID[pair], seed, theirs[n]) for n, pair, seed in pairs],
        run_published,
        *also,
    )
    if selected or best or grid:
        write_tables(selected, best, grid, ours, theirs, out)
    return selected + best + grid


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
    settings = ABLATION_SETTINGS if settings is None else replace(settings, epochs=1)
    names = _known("set", ABLATION_SETS if sets is None else sets, SETS)
    work = [
        _Work(name, variant, choice, seed, settings)
        for seed in seeds
        for name in names
        for variant, choice in ABLATION.items()
    ]
    out = Path(out)
    path = out / "uea_ablation.jsonl"
    ends = math.inf if max_seconds is None else time.monotonic() + max_seconds
    rows = _study(path, work, run_ablation, root, ends, report)
    if rows:
        write_ablation(rows, settings, out)
    return rows
