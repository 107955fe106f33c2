"""Study of next-event models: ours beside RMTPP, THP and AttNHP on StackOverflow badges.

Every model trains on the same users for the same processor time, and an epoch is chosen on the same
validation users. All score the same events: the most recent 128 of every test user, the first of
them given. The log-likelihood is that of time and type together, in nats per event with densities
per day. A second part measures one training step on one long sequence.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from primal_attention.support.settings import at_least_one, fingerprint
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.events.study import group_sums, load_user_parts, paired
from primal_studies.kit.tables import Column, Files, columns_table, exponent, mean_of, pivot

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from primal_attention.datasets.events.log import EventSequences

__all__ = ["EventPeerOptions", "Peers"]

_SMALL: dict[str, Any] = {
    "dim": 32,
    "num_heads": 2,
    "num_layers": 1,
    "components": 8,
    "dropout": 0.0,
}
_OURS: dict[str, dict[str, Any]] = {
    "small": _SMALL,
    "default": {},
    "small, softmax": {**_SMALL, "attention": "softmax"},
    "small, primal": {**_SMALL, "attention": "primal"},
    "small, primal-dual": {**_SMALL, "attention": "primal-dual"},
}
"""Options of ours by name; linear attention is the default."""
_TRAINING: dict[str, Any] = {"batch_size": 64, "lr": 6e-3}
"""Training of ours; like that of the peers chosen on the validation users."""
_PEERS = ("RMTPP", "THP", "AttNHP")
_MODELS = ("small", "default", "THP", "RMTPP", *list(_OURS)[2:], "AttNHP")
"""All models in the order of the table."""
_MOST_EVENTS = {"AttNHP": 1024, "THP": 4096, "small, softmax": 16_384}
"""Longest sequence of a model whose step is quadratic in time or memory."""
_EVENTS = 128
_REPEATS = 3


@dataclass(frozen=True)
class EventPeerOptions:
    """Next-event models of ours and of easy-tpp at equal processor time; cost over length."""

    models: tuple[str, ...] = _MODELS
    """Names of models."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and of the order of the batches."""
    seconds: float = 40.0
    """Processor seconds of training."""
    slow_seconds: float = 160.0
    """Processor seconds of AttNHP, which has only the first seed."""
    batch_size: int = 16
    """Sequences of a step of the peers."""
    lr: float = 3e-3
    """Learning rate of the peers."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    """Events of one sequence in the part about cost."""
    data: Path | None = None
    """Folder with events/stackoverflow; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size", "lengths")
        unknown = [name for name in self.models if name not in (*_OURS, *_PEERS)]
        if unknown or not self.models:
            raise ValueError(
                f"Unknown models {unknown}; choose from {', '.join((*_OURS, *_PEERS))}."
            )
        if not self.seeds:
            raise ValueError("seeds must not be empty.")
        for name in ("seconds", "slow_seconds", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")

    def mark(self, model: str) -> str:
        """Return a fingerprint of everything that decides a run besides model and seed."""
        chosen = ("models", "seeds", "data", "lengths")
        values = {k: v for k, v in asdict(self).items() if k not in chosen}
        return fingerprint(values, *([_OURS[model], _TRAINING] if model in _OURS else ()))


class Peers(Study[EventPeerOptions]):
    """Train ours and the peers, then time a step of each over the length."""

    name = "events-peers"
    Options = EventPeerOptions

    def cells(self, options: EventPeerOptions) -> list[Cell]:
        """Return a seed after the other; after the first one the costs and AttNHP."""
        fast = [model for model in options.models if model != "AttNHP"]
        trained: list[Cell] = [
            {"part": "badges", "model": model, "seed": seed, "settings": options.mark(model)}
            for seed in options.seeds
            for model in fast
        ]
        slow: list[Cell] = [
            {"part": "badges", "model": "AttNHP", "seed": seed, "settings": options.mark("AttNHP")}
            for seed in options.seeds[:1]
            if "AttNHP" in options.models
        ]
        timed: list[Cell] = [
            {"part": "length", "model": model, "n": n}
            for n in sorted(options.lengths)
            for model in options.models
            if n <= _MOST_EVENTS.get(model, n)
        ]
        return [*trained[: len(fast)], *timed, *slow, *trained[len(fast) :]]

    def run(self, cell: Cell, options: EventPeerOptions, scratch: Path) -> Row:
        """Train and score one model, or time its step."""
        if cell["part"] == "length":
            return {"seconds": _step_seconds(cell["model"], cell["n"])}
        parts = [log.cut(_EVENTS) for log in load_user_parts(options.data)]
        train = _train_peer if cell["model"] in _PEERS else _train_ours
        return train(cell, options, *parts)

    def tables(self, rows: Sequence[Row], options: EventPeerOptions) -> Mapping[str, str | bytes]:
        """Return a table of scores and one of costs, and a picture of both."""
        trained: dict[str, list[Row]] = {}
        for row in rows:
            if row["part"] == "badges" and row["settings"] == options.mark(row["model"]):
                trained.setdefault(row["model"], []).append(row)
        trained = {model: trained[model] for model in _MODELS if model in trained}
        timed = [row for row in rows if row["part"] == "length"]
        timed.sort(key=lambda row: (_MODELS.index(row["model"]), row["n"]))
        if not trained:
            return {}
        from primal_studies.events.pictures import peers_picture

        files: Files = {"table.md": _score_table(trained)}
        if timed:
            files["length.md"] = _length_table(timed)
        return files | {"picture.png": peers_picture(trained, timed)}


def _train_ours(
    cell: Cell,
    options: EventPeerOptions,
    train: "EventSequences",
    valid: "EventSequences",
    test: "EventSequences",
) -> Row:
    """Return what one of our models reaches, trained as ``EventPredictor`` trains it."""
    import numpy as np
    import torch

    from primal_attention.tasks.events.scheme import LogScheme
    from primal_attention.tasks.events.settings import EventOptions, EventSettings
    from primal_attention.tasks.events.task import NextEventTask
    from primal_attention.training import TrainingConfig, fit

    task = NextEventTask(LogScheme.fit(train, EventSettings(length=_EVENTS)))
    torch.manual_seed(cell["seed"])
    model = task.build(EventOptions(**_OURS[cell["model"]]))
    data = [task.windows(log, labelled=True) for log in (train, valid, test)]
    history = fit(
        model,
        data[0],
        config=TrainingConfig(
            epochs=1_000_000,
            **_TRAINING,
            max_seconds=options.seconds,
            seed=cell["seed"],
        ),
        valid=data[1],
        objective=task.objective,
        collate=task.collate,
    )
    answers = task.measure(model, data[2]).answers
    counts = answers["events"].numpy()
    columns = torch.stack(
        [
            torch.ones_like(answers["log_time"]),
            answers["log_time"] + answers["log_type"],
            (answers["guess"] == answers["type"]).double(),
            (answers["guess_blind"] == answers["type"]).double(),
        ],
        -1,
    ).numpy()
    sums = np.add.reduceat(columns, np.concatenate([[0], counts.cumsum()[:-1]]))
    last = history.records[-1]
    passes = last.step * _TRAINING["batch_size"] / len(data[0])
    return _row(
        sums, model, last.seconds, passes, passes * (train.lengths - 1).sum(), history.best.epoch
    )


def _train_peer(
    cell: Cell,
    options: EventPeerOptions,
    train: "EventSequences",
    valid: "EventSequences",
    test: "EventSequences",
) -> Row:
    """Return what a model of easy-tpp reaches."""
    from primal_studies.peers.events import fit_peer

    name = cell["model"]
    peer = fit_peer(
        name,
        train,
        valid,
        seconds=options.slow_seconds if name == "AttNHP" else options.seconds,
        batch_size=options.batch_size,
        lr=options.lr,
        seed=cell["seed"],
    )
    passes = peer.events / (train.lengths - 1).sum()
    sums = peer.score(test).sums
    return _row(sums, peer.model, peer.seconds, passes, peer.events, peer.best_epoch)


def _row(
    sums: "NDArray[Any]",
    model: "nn.Module",
    seconds: float,
    passes: float,
    events: float,
    best: int | None,
) -> Row:
    means = sums.sum(0) / sums[:, 0].sum()
    return {
        "log_likelihood": float(means[1]),
        "accuracy_target": float(means[2]),
        "accuracy_last_event": float(means[3]),
        "events": int(sums[:, 0].sum()),
        "seconds": round(seconds, 1),
        "epochs": round(float(passes), 2),
        "best_epoch": best,
        "epoch_seconds": float(seconds / passes),
        "event_microseconds": float(1e6 * seconds / events),
        "parameters": sum(p.numel() for p in model.parameters()),
        "groups": group_sums(sums, range(len(sums))),
    }


def _step_seconds(name: str, n: int) -> float:
    """Return the processor seconds of a training step on one sequence, median of a few."""
    from primal_attention.datasets.events.generators import HawkesProcess

    log = HawkesProcess().sample(1, n).to_log()
    if name in _PEERS:
        from primal_studies.peers.events import peer_stepper

        step = peer_stepper(name, log)
    else:
        step = _our_stepper(name, log)
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return median(seconds[1:])  # the first one warms up


def _our_stepper(name: str, log: "EventSequences") -> Callable[[], None]:
    """Return a function that makes one training step on a whole log."""
    import torch

    from primal_attention.tasks.events.scheme import LogScheme
    from primal_attention.tasks.events.settings import EventOptions, EventSettings
    from primal_attention.tasks.events.task import NextEventTask

    task = NextEventTask(LogScheme.fit(log, EventSettings(length=None)))
    torch.manual_seed(0)
    model = task.build(EventOptions(**_OURS[name])).train()
    windows = task.windows(log, labelled=True)
    batch = dict(task.collate([windows[i] for i in range(len(windows))]))
    labels = batch.pop("labels")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        task.objective(model(**batch), labels).backward()
        optimizer.step()

    return step


def _name(model: str) -> str:
    return f"{model} (easy-tpp)" if model in _PEERS else f"ours, {model}"


def _score_table(trained: Mapping[str, list[Row]]) -> str:
    base = trained.get("THP")
    columns: dict[str, Column] = {
        "model": lambda group: _name(group[0]["model"]),
        "log-likelihood, nats per event": mean_of("log_likelihood", 3),
        "− THP": lambda group: (
            "–" if base is None or group is base else str(paired(group, base, 1))
        ),
        "accuracy, t_ref=last_event, %": mean_of("accuracy_last_event", 1, 100),
        "accuracy, t_ref=target, %": mean_of("accuracy_target", 1, 100),
        "epochs": lambda group: f"{fmean(r['epochs'] for r in group):.1f}",
        "seconds per epoch": lambda group: f"{fmean(r['epoch_seconds'] for r in group):.1f}",
        "µs per event": lambda group: f"{fmean(r['event_microseconds'] for r in group):.1f}",
        "parameters": "{parameters:,}",
        "seeds": len,
    }
    return columns_table(trained.values(), columns) + "\n"


def _length_table(timed: Sequence[Row]) -> str:
    def slope(group: list[Row]) -> str:
        # the fixed cost of a step hides the slope of short sequences
        points = [
            (row["n"], row["seconds"])
            for row in group
            if row["n"] >= 4096 or row["model"] == "AttNHP"
        ]
        return f"{exponent(points):.2f}" if len(points) > 1 else "–"

    table = pivot(
        [{**row, "name": _name(row["model"])} for row in timed],
        {"ms per step": "name"},
        "n",
        lambda row: f"{1e3 * row['seconds']:,.0f}",
        title="{:,} events",
        missing="–",
        last={"slope from 4,096 on": slope},
    )
    return table + "\n"
