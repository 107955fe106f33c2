"""Study of time codes: the next badge of StackOverflow users, with and without the waiting time.

One block reads a prefix of a sequence and names the type of the next event, as in functional time
representation (Xu et al. 2019). Rows differ in the features of time, in the reference time
``t_ref``, or in the attention. ``t_ref="target"`` tells the model how long the wait until the next
event is; ``"last_event"`` does not. The two must not be compared with each other.

All rows score the same test prefixes, so differences are paired. Their standard errors come from
groups of test users.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from primal_attention.support.settings import at_least_one, fingerprint
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, columns_table, mean_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from primal_attention.datasets.events.log import EventSequences

__all__ = [
    "Difference",
    "TimeCodeOptions",
    "TimeCodes",
    "UserParts",
    "group_sums",
    "load_user_parts",
    "paired",
]

_CODES = (
    ("none", "–"),
    ("position", "–"),
    ("bochner-normal", "target"),
    ("mercer", "target"),
    ("log-gap", "target"),
    ("bochner", "target"),
    ("bochner", "last_event"),
    ("log-gap", "last_event"),
)
"""Features of time and reference time, all with softmax attention."""
_ATTENTIONS = ("primal", "primal-dual", "linear")
_LABELS = {
    "none": "none",
    "position": "positions",
    "bochner-normal": "Bochner, normal",
    "mercer": "Mercer, tied, 4 periods",
    "log-gap": "log-gap MLP",
    "bochner": "Bochner, free, 16 frequencies",
}
_GROUPS = 100
"""Groups of test users for standard errors."""
_VALID_SHARE = 0.1
"""Share of the training users that choose the epoch."""


@dataclass(frozen=True)
class TimeCodeOptions:
    """Time codes and attentions on StackOverflow badges, at both reference times."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and of the order of the prefixes."""
    attention_code: str = "bochner"
    """Features of time in the rows that compare attentions: the best on the validation users."""
    steps: int = 500
    """Steps of training."""
    batch_size: int = 256
    """Prefixes of a step."""
    length: int = 48
    """Most events of a prefix, the most recent ones."""
    dim: int = 64
    """Width of the model."""
    lr: float = 2e-3
    """Peak learning rate."""
    num_valid: int = 3_000
    """Validation prefixes."""
    num_test: int = 20_000
    """Test prefixes, the same for all rows."""
    data: Path | None = None
    """Folder with events/stackoverflow; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "batch_size", "length", "dim", "num_valid", "num_test")
        if not self.seeds:
            raise ValueError("seeds must not be empty.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr}.")

    @property
    def mark(self) -> str:
        """Fingerprint of everything that decides a run besides row and seed."""
        chosen = ("seeds", "attention_code", "data")
        return fingerprint({k: v for k, v in asdict(self).items() if k not in chosen})

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of the table, in its order."""
        softmax = [{"time": t, "t_ref": r, "attention": "softmax"} for t, r in _CODES]
        code = self.attention_code
        return softmax + [{"time": code, "t_ref": "target", "attention": a} for a in _ATTENTIONS]


class TimeCodes(Study[TimeCodeOptions]):
    """Train one block for every row and seed."""

    name = "events"
    Options = TimeCodeOptions

    def cells(self, options: TimeCodeOptions) -> list[Cell]:
        """Return all rows of a seed before the next seed."""
        return [
            {**row, "seed": seed, "settings": options.mark}
            for seed in options.seeds
            for row in options.rows
        ]

    def run(self, cell: Cell, options: TimeCodeOptions, scratch: Path) -> Row:
        """Train one model and score the test prefixes with its best weights."""
        import torch

        from primal_attention.tasks.events.model import EventSequenceConfig, EventSequenceNetwork
        from primal_attention.tasks.events.scheme import LogScheme
        from primal_attention.tasks.events.windows import collate_events
        from primal_attention.training import TrainingConfig, evaluate, fit
        from primal_studies.events.prefixes import Prefixes, Reference

        parts = load_user_parts(options.data)
        scheme = LogScheme.fit(parts.train)
        t_ref: Reference = "target" if cell["t_ref"] == "target" else "last_event"
        train, valid, test = (
            Prefixes(log, _targets(log, count), scheme.scale, length=options.length, t_ref=t_ref)
            for log, count in zip(parts, (None, options.num_valid, options.num_test), strict=True)
        )
        torch.manual_seed(cell["seed"])
        config = EventSequenceConfig(
            **scheme.sizes,
            num_classes=len(scheme.names),
            dim=options.dim,
            num_heads=2,
            num_layers=1,
            time=cell["time"],
            log_time=False,
            attention=cell["attention"],
        )
        model = EventSequenceNetwork(config)
        scheme.start(model)
        epochs = min(2, options.steps)
        training = TrainingConfig(
            batch_size=options.batch_size,
            lr=options.lr,
            epochs=epochs,
            epoch_steps=options.steps // epochs,
            seed=cell["seed"],
        )
        history = fit(
            model,
            train,
            config=training,
            valid=valid,
            collate=collate_events,
            out=scratch,
            resume=True,
        )
        found = evaluate(model, test, batch_size=512, collate=collate_events)
        logits, labels = found.answers["logits"].double(), found.answers["labels"]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        hits = (logits.argmax(-1) == labels).double()
        columns = torch.stack([torch.ones_like(hits), hits, losses], -1).numpy()
        return {
            "accuracy": float(hits.mean()),
            "nll": float(losses.mean()),
            "valid_accuracy": history.best.valid["accuracy"],
            "valid_nll": history.best.valid["loss"],
            "seconds": round(history.records[-1].seconds, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "prefixes": len(test),
            "majority": float(labels.bincount().max() / len(labels)),
            "groups": group_sums(columns, test.sequence),
        }

    def tables(self, rows: Sequence[Row], options: TimeCodeOptions) -> Mapping[str, str | bytes]:
        """Return the table with paired differences, and the same as a picture."""
        kept = [row for row in rows if row["settings"] == options.mark]
        groups = _by_row(kept)
        if not groups:
            return {}
        from primal_studies.events.pictures import codes_picture

        names = {
            key: _LABELS.get(key[0], key[0]) + ("" if key[2] == "softmax" else f", {key[2]}")
            for key in groups
        }
        points = [(names[key], key[1], group) for key, group in groups.items()]
        return {"table.md": _table(groups), "picture.png": codes_picture(points)}


class UserParts(NamedTuple):
    """Training, validation and test users."""

    train: "EventSequences"
    valid: "EventSequences"
    test: "EventSequences"


@lru_cache(maxsize=1)
def load_user_parts(data: Path | None) -> UserParts:
    """Return the users of the first test fold, and the others in training and validation."""
    import numpy as np

    from primal_attention.tasks.events.task import load_stackoverflow

    log, in_test = load_stackoverflow(0, root=data)
    others = np.random.default_rng(0).permutation(np.flatnonzero(~in_test))
    count = round(_VALID_SHARE * len(others))
    return UserParts(
        log.take(np.sort(others[count:])), log.take(np.sort(others[:count])), log.take(in_test)
    )


def _targets(log: "EventSequences", count: int | None) -> "NDArray[np.int64]":
    """Return all events with a prefix, or a fixed random part of them, short prefixes first."""
    import numpy as np

    from primal_studies.events.prefixes import Prefixes

    targets = Prefixes.all_targets(log)
    if count is None or count >= len(targets):
        return targets
    chosen = np.random.default_rng(1).choice(targets, count, replace=False)
    start = log.offsets[np.searchsorted(log.offsets, chosen, side="right") - 1]
    return chosen[np.argsort(chosen - start, kind="stable")]


_Group = Mapping[tuple[str, str, str], list[Row]]


def _by_row(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the seeds of every row of the table, in its order."""
    order = [(t, r, "softmax") for t, r in _CODES]
    found: dict[tuple[str, str, str], list[Row]] = {key: [] for key in order}
    for row in rows:
        found.setdefault((row["time"], row["t_ref"], row["attention"]), []).append(row)
    others = sorted(key for key in found if key not in order)
    return {key: found[key] for key in [*order, *others] if found[key]}


def group_sums(columns: "NDArray[np.float64]", sequence: "ArrayLike") -> list[list[float]]:
    """Return sums over groups of sequences, the first column being the number of items.

    Args:
        columns: One row for every item.
        sequence: The sequence that an item belongs to.
    """
    import numpy as np

    sums = np.zeros((_GROUPS, columns.shape[1]))
    np.add.at(sums, np.asarray(sequence) % _GROUPS, columns)
    return [[round(x, 4) for x in row] for row in sums.tolist()]


class Difference(NamedTuple):
    """A paired difference of two means."""

    mean: float
    error: float
    """Standard error over groups of test users."""

    def show(self, digits: int = 3, factor: float = 1.0) -> str:
        """Return the difference with its error."""
        return f"{factor * self.mean:+.{digits}f} ± {factor * self.error:.{digits}f}"

    def __str__(self) -> str:
        return self.show()


def paired(group: Sequence[Row], base: Sequence[Row], column: int) -> Difference:
    """Return the difference of two models in a mean over the same items.

    The error is that of a ratio of sums over groups of users. Seeds are averaged within groups.

    Args:
        group: Seeds of a model, each with its ``groups``.
        base: Seeds of the model to compare with.
        column: Which column of the sums.
    """
    import numpy as np

    mine, other = (np.mean([row["groups"] for row in rows], axis=0) for rows in (group, base))
    counts, change = mine[:, 0], mine[:, column] - other[:, column]
    mean = change.sum() / counts.sum()
    rest = (change - mean * counts)[counts > 0]
    error = math.sqrt((rest**2).sum() * len(rest) / max(len(rest) - 1, 1)) / counts.sum()
    return Difference(float(mean), error)


def _table(groups: _Group) -> str:
    base = groups.get(("none", "–", "softmax"))

    def gain(column: int, factor: float, digits: int) -> Column:
        def cell(group: list[Row]) -> str:
            if base is None or group is base:
                return "–"
            return paired(group, base, column).show(digits, factor)

        return cell

    columns: dict[str, Column] = {
        "time code": lambda group: _LABELS.get(group[0]["time"], group[0]["time"]),
        "t_ref": "{t_ref}",
        "attention": "{attention}",
        "accuracy, %": mean_of("accuracy", 1, 100),
        "NLL": mean_of("nll", 3),
        "accuracy − none": gain(1, 100, 1),
        "NLL − none": gain(2, 1, 3),
        "validation NLL": lambda group: f"{fmean(r['valid_nll'] for r in group):.3f}",
        "seconds": lambda group: f"{fmean(r['seconds'] for r in group):.0f}",
        "seeds": len,
    }
    return columns_table(groups.values(), columns) + "\n"
