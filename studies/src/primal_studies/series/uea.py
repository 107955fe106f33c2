"""Studies of time series: Table 1 of Chen et al. (2023), its ablation, and a choice of training.

Table 1 has three protocols. ``selected`` is the figure to believe: a run with a fifth of the
training part held out chooses an epoch, and a run on the whole training part is scored at that
epoch. ``best`` is the published protocol, with the published η and on all sets but one the
published training: the best of fifty test scores of one run. It picks the epoch by the test part
and serves for comparison only. The published Primal.+ is also the best of nine pairs of rank and η,
set by set; ``grid`` repeats that choice.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files
from primal_studies.series.uea_pages import (
    ablation_table,
    table_one,
    table_one_picture,
    trainings_table,
)
from primal_studies.series.uea_table import (
    ABLATION,
    ABLATION_SETS,
    ABLATION_SETTINGS,
    GRID,
    GRID_SETS,
    MODELS,
    PUBLISHED_SETTINGS,
    PUBLISHED_TRAINING,
    RECIPES,
    SETS,
    SETTINGS,
    ModelChoice,
    UeaSettings,
    published_choice,
    setting_mark,
)

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.tasks.series.data import SeriesCollection
    from primal_attention.tasks.series.model import SeriesNetwork
    from primal_attention.training import History

__all__ = ["Ablation", "TableOne", "Trainings", "build_model"]

_QUICK: dict[str, Any] = {"dim": 20, "num_heads": 2, "num_layers": 1, "max_tokens": 8}
_BRIEF: dict[str, Any] = {"steps": 4, "min_passes": 1, "epochs": 2}


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """Data sets and seeds of a study of time series."""

    sets: tuple[str, ...] = ()
    """Names of sets; by default all of the study."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters, batches and validation splits."""
    root: Path | None = None
    """Folder of the sets; by default uea in the folder of PRIMAL_DATA."""
    quick: bool = False
    """A small model for a few steps, to see that it runs."""

    def __post_init__(self) -> None:
        _check_known("set", self.sets, SETS)
        if not self.seeds:
            raise ValueError("seeds must not be empty.")

    def shorten(self, settings: UeaSettings) -> UeaSettings:
        """Return settings, those of a quick run if asked for."""
        return replace(settings, **_QUICK, **_BRIEF) if self.quick else settings

    def read(self, name: str) -> "tuple[SeriesCollection, SeriesCollection]":
        """Return the training and the test part of a set."""
        from primal_attention.tasks.series.files import load_series

        train, test = (load_series(name, part, root=self.root) for part in ("train", "test"))
        return train, test

    def check_data(self, names: Sequence[str]) -> None:
        """Raise if a set is not in the folder."""
        from primal_attention.tasks.series.files import list_series

        there = list_series(self.root)
        missing = [name for name in names if name not in there]
        if missing:
            raise ValueError(
                f"the folder of the sets lacks {', '.join(missing)}; name those to run with --sets."
            )


@dataclass(frozen=True, kw_only=True)
class TableOptions(SetOptions):
    """Table 1: accuracy on the UEA sets, by held-out data and as published."""

    models: tuple[str, ...] = ()
    """Columns: softmax, primal, primal-plus, dual, ours; by default all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_known("model", self.models, list(MODELS))


class TableOne(Study[TableOptions]):
    """Table 1 of the paper by three protocols."""

    name = "uea"
    Options = TableOptions

    def cells(self, options: TableOptions) -> list[Cell]:
        """Return every set once before any set again: an early table is wide, not deep."""
        sets = options.sets or SETS
        models = options.models or tuple(MODELS)
        options.check_data(sets)
        found: list[Cell] = []
        for protocol in ("selected", "best", "grid"):
            for seed in options.seeds:
                for name in sets:
                    found += [
                        _cell(name, model, seed, *self._choice(protocol, name, model, options))
                        | {"protocol": protocol}
                        for model in self._models(protocol, name, models)
                    ]
        return found

    def _models(self, protocol: str, name: str, models: Sequence[str]) -> Sequence[str]:
        if protocol != "grid":
            return models
        return tuple(GRID) if name in GRID_SETS and "primal-plus" in models else ()

    def _choice(
        self, protocol: str, name: str, model: str, options: TableOptions
    ) -> tuple[ModelChoice, UeaSettings]:
        if protocol == "selected":
            return MODELS[model], options.shorten(SETTINGS[name])
        settings = options.shorten(PUBLISHED_SETTINGS[name])
        return (GRID[model] if protocol == "grid" else published_choice(model, name)), settings

    def run(self, cell: Cell, options: TableOptions, scratch: Path) -> Row:
        """Return the test scores of one run, and in the selected protocol the chosen epoch."""
        started = time.thread_time()
        name, seed, protocol = cell["set"], cell["seed"], cell["protocol"]
        choice, settings = self._choice(protocol, name, cell["model"], options)
        train, test = options.read(name)
        chosen: dict[str, Any] = {}
        if protocol == "selected":
            epoch, valid = select_epoch(choice, train, settings, seed)
            run = run_on_all(choice, train, test, settings, seed)
            chosen = {"selected_test": run.scores[epoch - 1], "selected_epoch": epoch}
            chosen["valid"] = valid
        else:
            run = run_on_all(choice, train, test, settings, seed)
        best = max(range(len(run.scores)), key=lambda i: run.scores[i])
        steps = run.history.records[-1].step
        return {
            "best_test": run.scores[best],
            "best_epoch": best + 1,
            **chosen,
            "last_test": run.scores[-1],
            "steps": steps,
            "passes": round(steps * settings.batch_size / len(train), 1),
            "patch": run.model.config.patch,
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "seconds": round(time.thread_time() - started, 1),
        }

    def tables(self, rows: Sequence[Row], options: TableOptions) -> Mapping[str, str | bytes]:
        """Return the tables of all protocols."""
        ours, theirs = (
            {name: options.shorten(found[name]) for name in SETS}
            for found in (SETTINGS, PUBLISHED_SETTINGS)
        )
        kept = _current(rows, self._choice, options)
        files: Files = {"table.md": table_one(kept, ours, theirs)}
        if any(row["protocol"] == "selected" for row in kept):
            files["picture.png"] = table_one_picture(kept)
        return files


def _current(rows: Sequence[Row], choice: Any, options: Any) -> list[Row]:
    """Return the rows that were made with the present settings."""
    return [
        row
        for row in rows
        if row["settings"]
        == setting_mark(*choice(row["protocol"], row["set"], row["model"], options))
    ]


class Ablation(Study[SetOptions]):
    """One change at a time from PrimalFormer; nothing is selected."""

    name = "uea-ablation"
    Options = SetOptions

    def cells(self, options: SetOptions) -> list[Cell]:
        """Return every variant on every set."""
        sets = options.sets or ABLATION_SETS
        options.check_data(sets)
        settings = self._settings(options)
        return [
            _cell(name, variant, seed, choice, settings)
            for seed in options.seeds
            for name in sets
            for variant, choice in ABLATION.items()
        ]

    def _settings(self, options: SetOptions) -> UeaSettings:
        return replace(options.shorten(ABLATION_SETTINGS), epochs=1)

    def run(self, cell: Cell, options: SetOptions, scratch: Path) -> Row:
        """Return the test accuracy after the last epoch."""
        started = time.thread_time()
        train, test = options.read(cell["set"])
        choice = ABLATION[cell["model"]]
        run = run_on_all(choice, train, test, self._settings(options), cell["seed"])
        return {
            "last_test": run.scores[-1],
            "ksvd": run.history.records[-1].ksvd,
            "seconds": round(time.thread_time() - started, 1),
        }

    def tables(self, rows: Sequence[Row], options: SetOptions) -> Mapping[str, str]:
        """Return one line a variant."""
        settings = self._settings(options)
        kept = [r for r in rows if r["settings"] == setting_mark(ABLATION[r["model"]], settings)]
        return {"table.md": ablation_table(kept, settings)} if kept else {}


class Trainings(Study[SetOptions]):
    """Held-out thirds of training parts choose between the published training and ours.

    Each trains Primal.+ with the published η on two thirds and is scored fifty times on the third.
    The training with the higher mean of the best scores is used in the published protocol of
    Table 1; the published one where they are equal. The test part is not read.
    """

    name = "uea-trainings"
    Options = SetOptions
    trainings: ClassVar[Mapping[str, Mapping[str, UeaSettings]]] = {
        "published": PUBLISHED_TRAINING,
        "ours": SETTINGS,
    }

    def cells(self, options: SetOptions) -> list[Cell]:
        """Return both trainings on every third of every set."""
        sets = options.sets or GRID_SETS
        options.check_data(sets)
        return [
            {
                "set": name,
                "training": training,
                "third": third,
                "settings": setting_mark(
                    published_choice("primal-plus", name), options.shorten(settings[name])
                ),
            }
            for name in sets
            for third in range(3)
            for training, settings in self.trainings.items()
        ]

    def run(self, cell: Cell, options: SetOptions, scratch: Path) -> Row:
        """Return the best and the last score on the held-out third."""
        from sklearn.model_selection import StratifiedKFold

        name, third = cell["set"], cell["third"]
        train, _ = options.read(name)
        thirds = StratifiedKFold(3, shuffle=True, random_state=0).split(train.y, train.y)
        kept, held = list(thirds)[third]
        settings = options.shorten(self.trainings[cell["training"]][name])
        choice = published_choice("primal-plus", name)
        scores = run_on_all(choice, train.take(kept), train.take(held), settings, seed=third).scores
        return {"best": round(max(scores), 4), "last": round(scores[-1], 4)}

    def tables(self, rows: Sequence[Row], options: SetOptions) -> Mapping[str, str]:
        """Return one line a set."""
        return {"table.md": trainings_table(rows)}


def _cell(
    name: str, model: str, seed: int, choice: ModelChoice, settings: UeaSettings
) -> dict[str, Any]:
    return {"set": name, "model": model, "seed": seed, "settings": setting_mark(choice, settings)}


def _check_known(kind: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"No {kind} named {', '.join(unknown)}; there are: {', '.join(known)}.")


# one run


def build_model(
    choice: ModelChoice, series: "SeriesCollection", settings: UeaSettings, seed: int
) -> "SeriesNetwork":
    """Return the untrained model of a column for a set; the seed decides its parameters."""
    import torch
    from torch.nn.utils import parametrize

    from primal_attention.tasks.series.settings import SeriesOptions
    from primal_attention.tasks.series.task import SeriesTask

    options = SeriesOptions(
        stem=choice.stem,
        max_tokens=settings.max_tokens,
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
        model = SeriesTask.fit(series).build(options)
    if not choice.has_r:
        for block in model.blocks:
            layer: Any = block.attention
            parametrize.register_parametrization(layer.concat, "weight", _without_r())
    return model


def _without_r() -> Any:
    """Return a parametrization that zeroes the half of an output map for the key-side scores."""
    import torch
    from torch import Tensor, nn

    class WithoutR(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            rank = weight.shape[1] // 2
            return torch.cat([weight[:, :rank], torch.zeros_like(weight[:, rank:])], dim=1)

    return WithoutR()


class ScoredRun(NamedTuple):
    """A run on the whole training part, and its test scores, epoch by epoch."""

    model: "SeriesNetwork"
    history: "History"
    scores: list[float]


def _train(
    choice: ModelChoice,
    train: "SeriesCollection",
    epoch_steps: int,
    settings: UeaSettings,
    seed: int,
    **also: Any,
) -> "tuple[SeriesNetwork, History]":
    from primal_attention.tasks.series.data import SeriesDataset, collate_series
    from primal_attention.training import TrainingConfig, fit

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
    choice: ModelChoice,
    train: "SeriesCollection",
    test: "SeriesCollection",
    settings: UeaSettings,
    seed: int,
) -> ScoredRun:
    """Train on the whole training part and score the test part after every epoch."""
    from primal_attention.tasks.series.data import SeriesDataset, Standardizer, collate_series
    from primal_attention.training import evaluate

    scaler = Standardizer.fit(train)
    held = SeriesDataset(scaler(test))

    def score(model: "nn.Module") -> dict[str, float]:
        found = evaluate(model, held, batch_size=128, collate=collate_series)
        return {"test_accuracy": found["accuracy"]}

    steps = settings.epoch_steps(len(train))
    model, history = _train(choice, scaler(train), steps, settings, seed, evaluate=score)
    return ScoredRun(model, history, [r.metrics["test_accuracy"] for r in history.records])


def select_epoch(
    choice: ModelChoice, train: "SeriesCollection", settings: UeaSettings, seed: int
) -> tuple[int, float]:
    """Return the epoch that held-out training data prefers, and its accuracy there.

    Ties, frequent with few cases, go to the later epoch: its learning rate is lower.
    """
    from primal_attention.tasks.series.data import SeriesDataset, Standardizer
    from primal_attention.tasks.splits import stratified_split

    if train.y is None:
        raise ValueError("The training series need labels.")
    split = stratified_split(train.y, settings.valid_fraction, seed=seed)
    part = train.take(split.train)
    scaler = Standardizer.fit(part)
    valid = SeriesDataset(scaler(train.take(split.valid)))
    # the steps of the whole part: an epoch then means the same in both runs
    steps = settings.epoch_steps(len(train))
    _, history = _train(choice, scaler(part), steps, settings, seed, valid=valid)
    best = max(history.records, key=lambda r: (r.valid["accuracy"], r.epoch))
    return best.epoch, best.valid["accuracy"]
