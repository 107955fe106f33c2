"""The task of classifying whole sequences of events."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS, TABLE_SUFFIXES
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.settings import EventLabelSettings, EventOptions
from primal_attention.tasks.events.task import TRAINING, event_columns
from primal_attention.tasks.sources import Recognition, Source
from primal_attention.tasks.task import ClassificationTask, Parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from primal_attention.datasets.events.log import EventSequences
    from primal_attention.tasks.events.model import EventSequenceNetwork
    from primal_attention.tasks.events.windows import EventWindows
    from primal_attention.training.data import Item
    from primal_attention.training.scores import Answers

__all__ = ["EventLabelTask"]


@dataclass(frozen=True)
class EventLabelTask(ClassificationTask):
    """Classify sequences of events, read at a reference time: what a model must know."""

    Settings: ClassVar[type[EventLabelSettings]] = EventLabelSettings
    Model: ClassVar[type[EventOptions]] = EventOptions
    endings: ClassVar[tuple[str, ...]] = TABLE_SUFFIXES
    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "bursts"}, **TRAINING}

    scheme: LogScheme
    """Types, unit, scale and columns of the training log."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""
    target: str = "label"
    """Files: column of the classes."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a log of events, if a column of classes is named."""
        roles = event_columns(source, given)
        if roles is None or given.get("target") not in source.columns:
            return None
        target = given["target"]
        words = f"a log of events with the class {target!r} of every {roles['sequence']!r}"
        return Recognition(words, {"data": {**roles, "target": target}, **TRAINING})

    @classmethod
    def load(cls, settings: EventLabelSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts of a log with classes."""
        import numpy as np

        from primal_attention.datasets.events.examples import bursts_log
        from primal_attention.tasks.splits import choose, class_indices, hold_out

        if settings.train is None and settings.name != "bursts":
            raise UserError(
                "data.train, a file of events with a class, is missing; or give data.name: bursts."
            )
        with user_errors(str(settings.train), *FILE_ERRORS):
            if settings.train is None:
                log, words = bursts_log(settings.seed)
            else:
                log, words = _read_labelled(settings.train, settings.target, settings.columns())
            classes = tuple(sorted(set(words)))
            labels = class_indices(words, classes)
        pool = np.arange(len(log))
        held = pool[:0]
        if settings.test is None or settings.train is None:
            pool, held = hold_out(labels, settings.test_share, settings.seed + 1)
        chosen = pool[choose(labels[pool], settings.train_size)]
        split = hold_out(labels[chosen], settings.valid, settings.seed)
        train, valid = chosen[split.train], chosen[split.valid]
        with user_errors(str(settings.train), *FILE_ERRORS):
            task = cls(LogScheme.fit(log.take(train), settings), classes, settings.target)
            parts = [task.windows(log.take(p), labels[p]) for p in (train, valid)]
        if settings.test is None:
            test = task.windows(log.take(held), labels[held])
        else:
            test = task.read(settings.test, labelled=True)
        return task, Parts(parts[0], parts[1], test, note=settings.note)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Classes, types, marks and covariates."""
        return {**self.scheme.sizes, "num_classes": len(self.classes)}

    def build(self, options: EventOptions) -> "EventSequenceNetwork":
        """Return an untrained classifier, its frequencies set from the training log."""
        from primal_attention.tasks.events.model import EventSequenceConfig, EventSequenceNetwork

        model = EventSequenceNetwork(EventSequenceConfig(**asdict(options), **self.sizes))
        self.scheme.start(model)
        return model

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "EventWindows":
        """Return the sequences of a file, at their last event."""
        from primal_attention.tasks.splits import class_indices

        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            if not labelled:
                return self.windows(self.scheme.read(path))
            log, words = _read_labelled(path, self.target, self.scheme.given)
            return self.windows(log, class_indices(words, self.classes))

    def from_arrays(self, data: Any) -> "EventWindows":
        """Return a log, or a frame with the columns of the training file, to classify."""
        from primal_attention.datasets.events.log import EventSequences

        is_log = isinstance(data, EventSequences)
        return self.windows(data if is_log else self.scheme.read_frame(data))

    def windows(
        self,
        log: "EventSequences",
        labels: "NDArray[np.int64] | None" = None,
        references: "NDArray[np.float64] | None" = None,
    ) -> "EventWindows":
        """Return the most recent window of every sequence.

        Args:
            log: A log with the types of the training log.
            labels: Class of every sequence; without them the first class stands in.
            references: Reference time of every sequence; by default its last event.
        """
        import numpy as np

        from primal_attention.tasks.events.windows import EventWindows, last_windows

        return EventWindows(
            self.scheme.prepare(log),
            last_windows(log, self.scheme.length),
            self.scheme.scale,
            labels=np.zeros(len(log), np.int64) if labels is None else labels,
            references=log.last_times if references is None else references,
        )

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return index, class, probabilities, and the reference time."""
        return [{**row, "t_ref": "last_event"} for row in super().records(answers)]

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a padded batch, always with a mask."""
        from primal_attention.tasks.events.windows import collate_events

        return collate_events(items)


def _read_labelled(
    path: Path, target: str, columns: Mapping[str, Any]
) -> "tuple[EventSequences, list[str]]":
    """Return the log in a file, and the class of every sequence."""
    from primal_attention.datasets.events.log import EventSequences

    covariates = [*columns["covariates"], target]
    log = EventSequences.from_csv(path, **{**columns, "covariates": covariates})
    column = log.covariates[target]
    if column.levels is None:
        words = [f"{v:g}" for v in column.values.tolist()]
    else:
        words = [column.levels[i] if i >= 0 else "nan" for i in column.values.tolist()]
    if "nan" in words:
        raise ValueError(f"Sequence {log.keys[words.index('nan')]!r} has no class in {target!r}.")
    own = {k: v for k, v in log.covariates.items() if k != target}
    return replace(log, covariates=own), words
