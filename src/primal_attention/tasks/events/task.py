"""The tasks of predicting the next event, and of classifying whole sequences."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS, TABLE_SUFFIXES
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.settings import EventOptions, EventSettings
from primal_attention.tasks.sources import Recognition, Source
from primal_attention.tasks.task import Parts, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from primal_attention.datasets.events.log import EventSequences
    from primal_attention.report import Report
    from primal_attention.tasks.events.model import NextEventModel
    from primal_attention.tasks.events.windows import EventWindows
    from primal_attention.tasks.results import Result
    from primal_attention.training.data import Item
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Scores

__all__ = ["NextEventTask", "load_stackoverflow"]

STACKOVERFLOW = Path("events") / "stackoverflow" / "stackoverflow.npz"
"""The file of the StackOverflow badges, below the folder of ``PRIMAL_DATA``."""

_BADGES = {
    "time_ms": ("finite numbers", 1),
    "event": ("whole numbers", 1),
    "offsets": ("whole numbers", 1),
    "badge_names": ("words", 1),
    "in_test": ("truth values", 2),
}
"""Arrays of this file."""

TRAINING: Mapping[str, Mapping[str, object]] = {
    "training": {"epochs": 20, "min_steps": 600, "batch_size": 32, "lr": 4e-3, "patience": 5}
}
"""Settings for logs of which nothing is known; those of the estimator."""


def event_columns(source: Source, given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the columns of time, event and sequence of a table; ``None`` if one is missing."""
    from primal_attention.datasets.events.tables import USUAL, find_columns

    if source.suffix not in TABLE_SUFFIXES:
        return None
    roles = find_columns(list(source.columns)) | {k: given[k] for k in USUAL if k in given}
    is_there = USUAL.keys() <= roles.keys() and set(roles.values()) <= source.columns.keys()
    return roles if is_there else None


@dataclass(frozen=True)
class NextEventTask(Task):
    """Predict type and time of the next event: what a model must know of its training log."""

    Settings: ClassVar[type[EventSettings]] = EventSettings
    Model: ClassVar[type[EventOptions]] = EventOptions
    endings: ClassVar[tuple[str, ...]] = TABLE_SUFFIXES
    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "hawkes"}, **TRAINING}

    scheme: LogScheme
    """Types, unit, scale and columns of the training log."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a table with columns of sequences, times and events."""
        roles = event_columns(source, given)
        if roles is None or "target" in given:
            return None  # with a target, sequences are classified
        return Recognition(
            f"a log of events: {roles['event']!r} of every {roles['sequence']!r} at "
            f"{roles['time']!r}",
            {"data": dict(roles), **TRAINING},
        )

    @classmethod
    def load(cls, settings: EventSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts of a log; whole sequences go to one part."""
        from primal_attention.tasks.events.windows import EventWindows, tile_windows

        with user_errors(str(settings.train or ""), *FILE_ERRORS):
            log, test, rows = _read_parts(settings)
            task = cls(LogScheme.fit(log.take(rows["train"]), settings))
            # types that only other parts have cannot be learned, but must be named
            whole = task.scheme.prepare(log)
        with user_errors(str(settings.test or "the test part"), *FILE_ERRORS):
            scored = whole.take(rows["test"]) if test is None else task.scheme.prepare(test)
        parts = {"train": whole.take(rows["train"]), "valid": whole.take(rows["valid"])}
        windows = {
            name: EventWindows(
                part,
                tile_windows(part, settings.length, context=name != "train"),
                task.scheme.scale,
            )
            for name, part in (parts | {"test": scored}).items()
        }
        for name, part in windows.items():
            if not len(part):
                raise UserError(f"the {name} part has no sequence with two events.")
        note = "Items are windows of sequences; a sequence is in one part only."
        if settings.train is not None and settings.test is None:
            note += (
                f" There is no test file: {settings.test_share:.0%} of the sequences of "
                f"{settings.train.name} were held out and scored once."
            )
        return task, Parts(windows["train"], windows["valid"], windows["test"], note=note)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Types, marks, covariates and the smallest gap."""
        smallest = self.scheme.smallest_gap / self.scheme.scale
        return {**self.scheme.sizes, "smallest_gap": smallest}

    @property
    def summary(self) -> str:
        """The number of types and the unit."""
        return f"{len(self.scheme.names)} types of events, times in {self.scheme.unit}"

    def build(self, options: EventOptions) -> "NextEventModel":
        """Return an untrained model, its frequencies set from the training log."""
        from primal_attention.tasks.events.model import NextEventConfig, NextEventModel

        model = NextEventModel(NextEventConfig(**asdict(options), **self.sizes))
        self.scheme.start(model)
        return model

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "EventWindows":
        """Return the windows of a log: to score every event, or to predict after the last one."""
        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            return self.windows(self.scheme.read(path), labelled=labelled)

    def from_arrays(self, data: Any) -> "EventWindows":
        """Return a log, or a frame with the columns of the training file, to predict after it."""
        from primal_attention.datasets.events.log import EventSequences

        is_log = isinstance(data, EventSequences)
        return self.windows(data if is_log else self.scheme.read_frame(data), labelled=False)

    def windows(self, log: "EventSequences", *, labelled: bool) -> "EventWindows":
        """Return the windows of a log: to score every event, or to predict after the last one.

        Args:
            log: A log with the types of the training log.
            labelled: Score every event but the first of a sequence; otherwise only the most
                recent window of every sequence is read.
        """
        from primal_attention.tasks.events.windows import (
            EventWindows,
            last_windows,
            tile_windows,
        )

        log, length = self.scheme.prepare(log), self.scheme.length
        windows = tile_windows(log, length, context=True) if labelled else last_windows(log, length)
        if not windows:
            raise ValueError("No sequence has two events, so there is nothing to score.")
        return EventWindows(log, windows, self.scheme.scale)

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a padded batch, always with a mask."""
        from primal_attention.tasks.events.windows import collate_events

        return collate_events(items)

    def objective(self, output: object, labels: "Tensor") -> "Tensor":
        """Return the negative log-likelihood per event in scaled time."""
        from primal_attention.tasks.events.scoring import event_loss

        return event_loss(output, labels)

    def measure(
        self, model: "nn.Module", data: "Dataset[Item]", *, batch_size: int = 64
    ) -> "Evaluation":
        """Return the scores of all events, and the prediction after the last one of each window."""
        from primal_attention.tasks.events.scoring import Reader, encode_names
        from primal_attention.tasks.events.showing import inspect_model

        found = super().measure(Reader(model), data, batch_size=batch_size)
        seen = {name: t for name, t in found.answers.items() if len(t)}
        keys = [data.log.keys[w.sequence] for w in data.windows]  # type: ignore[attr-defined]
        more = inspect_model(model, data, self.scheme)
        return replace(found, answers={**seen, "next_key": encode_names(keys), **more})

    def answer(self, output: Any, labels: "Tensor") -> "Answers":
        """Return one row for every event, and ``next_`` rows for every window."""
        from primal_attention.tasks.events.scoring import answer_events, next_event

        scale = self.scheme.scale
        last = output.output.keep.sum(1) - 1
        found = next_event(
            output.model, output.output, last, longest=self.scheme.longest_gap / scale
        )
        ahead = {f"next_{k}": v if k == "probabilities" else v * scale for k, v in found.items()}
        return {**answer_events(output, labels, scale), **ahead}

    def score(self, answers: "Answers") -> "Scores":
        """Return log-likelihood, accuracy with either reference time, and calibration."""
        from primal_attention.tasks.events.scoring import score_events

        return score_events(answers, self.scheme.unit, self.scheme.scale)

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return the next event of every sequence: type, probabilities and waiting time."""
        from primal_attention.tasks.events.scoring import decode_names

        names, unit = self.scheme.names, self.scheme.unit
        keys = decode_names(answers["next_key"])
        rows = []
        for i, shares in enumerate(answers["next_probabilities"].tolist()):
            wait = {k: float(answers[f"next_{k}"][i]) for k in ("mean", "median", "lower", "upper")}
            rows.append(
                {
                    "index": i,
                    "type": names[max(range(len(shares)), key=shares.__getitem__)],
                    "sequence": keys[i],
                    "t_ref": "last_event",
                    "unit": unit,
                    **{f"wait_{k}": float(f"{v:.6g}") for k, v in wait.items()},
                    **{f"p({n})": round(p, 6) for n, p in zip(names, shares, strict=True)},
                }
            )
        return rows

    def details(self, answers: "Answers") -> tuple[list[str], list[list[object]]]:
        """Return how often every type occurs and is predicted right."""
        rows = []
        for i, name in enumerate(self.scheme.names):
            at = answers["type"] == i
            cases = int(at.sum())
            shares = [
                f"{100 * float((answers[k][at] == i).double().mean()):.1f}" if cases else "–"
                for k in ("guess_blind", "guess")
            ]
            rows.append([name, *shares, cases])
        return ["type", "recall, t_ref=last_event (%)", "recall, t_ref=target (%)", "events"], rows

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add kernel, calibration, influence of the past, and drawn sequences."""
        from primal_attention.tasks.events.showing import show_events

        show_events(report, results, self.scheme)


def _read_parts(
    settings: EventSettings,
) -> "tuple[EventSequences, EventSequences | None, dict[str, NDArray[np.int64]]]":
    """Return the log, the test log of a file, and the sequences of every part of the first."""
    import numpy as np

    from primal_attention.datasets.events.examples import hawkes_log
    from primal_attention.datasets.events.log import EventSequences

    rng = np.random.default_rng(settings.seed)
    if settings.train is not None:
        columns = settings.columns()
        log = EventSequences.from_csv(settings.train, **columns)
        test = None if settings.test is None else EventSequences.from_csv(settings.test, **columns)
        order = rng.permutation(len(log))
        held = 0 if test is not None else max(1, round(settings.test_share * len(log)))
    elif settings.name == "hawkes":
        log, test = hawkes_log(settings.seed), None
        order = rng.permutation(len(log))
        held = max(1, round(settings.test_share * len(log)))
    elif settings.name == "stackoverflow":
        log, is_test = load_stackoverflow(settings.fold)
        test = None
        pool = np.flatnonzero(~is_test)
        order = np.concatenate([np.flatnonzero(is_test), rng.permutation(pool)])
        held = int(is_test.sum())
    else:
        raise UserError(
            f"there is no log named {settings.name!r}; give data.name: stackoverflow or hawkes "
            "(generated), or a file as data.train."
        )
    chosen = order[held:][: settings.train_size]
    count = max(1, round(settings.valid * len(chosen)))
    if len(chosen) - count < 1:
        raise ValueError(
            f"The log has {len(log)} sequences, too few for a training, a validation and a test "
            "part; give at least three, or split long ones."
        )
    return (
        log,
        test,
        {
            "train": np.sort(chosen[count:]),
            "valid": np.sort(chosen[:count]),
            "test": np.sort(order[:held][: settings.test_size]),
        },
    )


def load_stackoverflow(
    fold: int = 0, *, root: str | Path | None = None
) -> "tuple[EventSequences, NDArray[np.bool_]]":
    """Return the badges of StackOverflow users in days, and which sequences test a fold.

    Args:
        fold: Which of the five test parts.
        root: Folder of the data sets; by default that of ``PRIMAL_DATA``.

    Raises:
        UserError: If the file is not there; the message says where it belongs.
    """
    import numpy as np

    from primal_attention.datasets.events.log import EventSequences
    from primal_attention.support.files import take_arrays

    folder = root if root is not None else os.environ.get("PRIMAL_DATA")
    path = Path(folder or "$PRIMAL_DATA") / STACKOVERFLOW
    if folder is None or not path.is_file():
        raise UserError(
            f"the StackOverflow badges are not there: put stackoverflow.npz at {path}"
            + ("." if folder else ", and set PRIMAL_DATA to that folder.")
            + " It holds time_ms, event, offsets, badge_names and in_test, made from the files"
            " data/real/so of github.com/dunan/NeuralPointProcess."
        )
    found = take_arrays(path, _BADGES)
    owners, folds = found["in_test"].shape
    if not 0 <= fold < folds:
        raise UserError(f"{path} has the folds 0 to {folds - 1}, got fold {fold}.")
    if owners != len(found["offsets"]) - 1:
        raise UserError(
            f"{path}: in_test must have a row for each of {len(found['offsets']) - 1} sequences, "
            f"got {owners}."
        )
    with user_errors(str(path), ValueError):
        names = tuple(str(n) for n in found["badge_names"])
        types = found["event"].astype(np.int64)
        if len(types) and types.min() >= 1:
            types, names = types - 1, names[1:] if len(names) > types.max() else names
        log = EventSequences(
            found["offsets"].astype(np.int64),
            found["time_ms"] / 86_400_000.0,
            types,
            names,
            tuple(str(i) for i in range(len(found["offsets"]) - 1)),
            "days",
            True,
        )
        return log, found["in_test"][:, fold]
