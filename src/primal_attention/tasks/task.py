"""The seam between domains and everything else.

A domain is a folder with a :class:`Task`: how to read its data, build a model for it, score and
show it. Training, reports, predictions and commands use this interface only. To add a task, write
the class and add a line to :data:`TASKS`; ``docs/guides/adding_a_task.md`` does so in 60 lines.

Modules of tasks import torch inside their methods, so that ``--help`` answers at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from primal_attention.support.command import UserError, did_you_mean, named, user_errors
from primal_attention.support.files import SUMS, SealedFolder, finish_save, parse_json, write_sealed
from primal_attention.support.output import to_json
from primal_attention.support.settings import build
from primal_attention.tasks.sources import Recognition, Source

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from primal_attention.analysis import LayerSpectrum
    from primal_attention.models import PretrainedModel
    from primal_attention.report import Report
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.trained import TrainedModel
    from primal_attention.training.data import Item
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Scores

__all__ = [
    "TASKS",
    "ClassificationTask",
    "DataSettings",
    "Parts",
    "RegressionTask",
    "Task",
    "TaskCommand",
    "TaskEntry",
    "find_task",
    "load_task",
    "offered",
    "register_task",
    "save_task",
    "task_commands",
]

FORMAT = 1
FILE = "task.json"
ESTIMATOR = "estimator.json"
"""Parameters of an estimator; beside ``model/`` and ``task.json``."""
_ITEMS, _TOKENS, _MATRIX = 128, 256, 4096
"""Spectra: most items, tokens of an item, and tokens of all items together. The time of a singular
value decomposition grows with the cube of the length."""


class Parts(NamedTuple):
    """The data of an experiment."""

    train: "Dataset[Item]"
    """Items to learn from."""
    valid: "Dataset[Item]"
    """Items that choose the epoch."""
    test: "Dataset[Item]"
    """Items that are scored once, at the end."""
    rows: Sequence[int] = ()
    """Where the training items stood in their file, for error messages."""
    note: str = ""
    """What a reader of the report must know of the parts."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to learn from: a known set, generated examples, or files."""

    name: str | None = None
    """Name of a known data set."""
    train: Path | None = None
    """File to train on, instead of a known set."""
    test: Path | None = None
    """File to score at the end; without one a part of the training file is held out."""
    test_share: float = 0.2
    """Share of the training file that is scored at the end, if there is no test file."""
    valid: float = 0.2
    """Share of the training part that chooses the epoch, the same of every class."""
    length: int | None = None
    """Longest sequence; what is longer is cut off."""
    train_size: int | None = None
    """Training items, those for validation included; by default all, 10,000 if generated."""
    test_size: int | None = None
    """Test items; by default all, 1,000 if generated."""
    seed: int = 0
    """Seed of the split, and of generated examples."""

    def __post_init__(self) -> None:
        for key in ("valid", "test_share"):
            if not 0 < getattr(self, key) < 1:
                raise ValueError(
                    f"{key} must be a share between 0 and 1, got {getattr(self, key)}."
                )
        for key in ("length", "train_size", "test_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}.")
        if self.test is not None and self.train is None:
            raise ValueError("test needs train: a file to learn from.")
        if self.name is not None and self.train is not None:
            raise ValueError("give a name or the files train and test, not both.")

    @property
    def note(self) -> str:
        """What a report says of a test part that was held out; empty with a test file."""
        if self.train is None or self.test is not None:
            return ""
        return (
            f"There is no test file: {self.test_share:.0%} of {self.train.name} were held out, the "
            "same share of every class, and scored once."
        )


class Task(ABC):
    """How to read, learn, score and show one kind of data.

    A subclass is a frozen dataclass. Its fields are what a trained model must know of its data,
    such as names of classes and means of channels; they are saved beside the model.
    """

    Settings: ClassVar[type]
    """Dataclass of the recipe's ``data:``."""
    Model: ClassVar[type]
    """Dataclass of the recipe's ``model:``, a :class:`StackConfig`."""
    endings: ClassVar[tuple[str, ...]] = ()
    """Endings of the files that the task reads, for messages."""
    starter: ClassVar[Mapping[str, object]] = {}
    """Parts of a recipe that trains without a file of the user, for ``primal init``."""
    usage: ClassVar[str] = (
        'primal predict {model} FILE, or primal_attention.load("{model}") in Python'
    )
    """What to do with a trained ``{model}``, for the last line of a training."""
    spectra_of: ClassVar[str] = (
        f"mean over {{count}} test items (their first {_TOKENS} tokens) and all heads"
    )
    """What the spectra in a report are of; ``count`` is the number of matrices."""

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a user's file or folder; ``None`` if it is of another kind.

        ``primal train FILE`` and ``primal init`` ask every task. If two recognise a file, the user
        must choose one with ``--task``, unless one of them is general. This must not import torch.

        Args:
            source: What can be seen of the file: columns, shapes of arrays, files of a folder.
            given: Settings of ``data:`` that the command line gives, as words, such as
                ``{"target": "price"}``.

        Raises:
            UserError: If the file is of this kind, but cannot be learned from. The user sees the
                message unless another task recognises the file.

        Example of a task for tables with a column of prices::

            @classmethod
            def recognize(cls, source, given):
                if given.get("target", "price") not in source.columns:
                    return None
                return Recognition("a table of prices", {"training": {"epochs": 50}})
        """
        return None

    @classmethod
    @abstractmethod
    def load(cls, settings: Any) -> tuple[Self, Parts]:
        """Return the task and the data that settings describe."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, Any]:
        """Fields of the model's configuration that the data decide, such as ``num_classes``."""

    @abstractmethod
    def build(self, options: Any) -> "PretrainedModel":
        """Return an untrained model for this data; ``options`` is a ``Model``."""

    @abstractmethod
    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "Dataset[Item]":
        """Return the items of a file, ready for the model.

        Args:
            path: The file.
            labelled: Whether labels are needed; otherwise those in the file are ignored.
            part: Which part of a file that holds several.
        """

    def from_arrays(self, data: Any) -> "Dataset[Item]":
        """Return items that are in memory, without labels, ready for the model."""
        raise TypeError(f"{type(self).__name__} reads files only; give the path of a file.")

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a batch: keyword inputs of the model, and ``labels``."""
        from primal_attention.training import pad_collate

        return pad_collate(items)

    @abstractmethod
    def objective(self, output: Any, labels: "Tensor") -> "Tensor":
        """Return the mean loss of a batch."""

    @abstractmethod
    def answer(self, output: Any, labels: "Tensor") -> "Answers":
        """Return what is kept of every item to score and show it."""

    @abstractmethod
    def score(self, answers: "Answers") -> "Scores":
        """Return the named scores of all answers."""

    @abstractmethod
    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return one row an item for a file of predictions: ``index``, prediction, details."""

    def prediction(self, record: Mapping[str, object]) -> Any:
        """Return the prediction in a record; by default what stands after ``index``."""
        return list(record.values())[1]

    @abstractmethod
    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add the task's section to a report."""

    def finish(self, model: "PretrainedModel", data: Parts) -> "TrainedModel":
        """Return task and model as they are saved and scored; by default as they are.

        Called after the training of each model. A task may calibrate its probabilities here.

        Args:
            model: Trained, with the weights of the chosen epoch.
            data: The parts; the test part is not to be read.
        """
        from primal_attention.tasks.trained import TrainedModel

        return TrainedModel(self, model)

    def baselines(self, data: Parts) -> "Mapping[str, Scores]":
        """Return the test scores of simple methods on the same parts, by name; by default none.

        The verdict says whether one of them wins.
        """
        return {}

    def explain(self, report: "Report", results: "Sequence[Result]", data: Parts) -> None:
        """Add sections that need models (``result.trained``) and data; by default none."""
        return

    def details(self, answers: "Answers") -> tuple[list[str], list[list[object]]]:
        """Return header and rows of a table below the scores; by default no table."""
        return [], []

    @property
    @abstractmethod
    def summary(self) -> str:
        """The data in a few words, such as ``"9 classes"``."""

    def measure(
        self, model: "nn.Module", data: "Dataset[Item]", *, batch_size: int = 64
    ) -> "Evaluation":
        """Return the scores of a model on some data, and its answers to every item."""
        from primal_attention.training import evaluate

        return evaluate(
            model,
            data,
            batch_size=batch_size,
            objective=self.objective,
            answer=self.answer,
            score=self.score,
            collate=self.collate,
        )

    def spectra(self, model: "nn.Module", data: "Dataset[Item]") -> "list[LayerSpectrum]":
        """Return the spectra of the attention layers on some items, the beginnings of long ones."""
        from primal_attention.analysis import layer_spectra

        total = len(data)  # type: ignore[arg-type]
        chosen = range(0, total, -(-total // _ITEMS))
        batch = self.collate([data[i] for i in chosen])
        inputs = {key: value[:, :_TOKENS] for key, value in batch.items() if key != "labels"}
        tokens = max(value.shape[1] for value in inputs.values())
        step = max(-(-len(chosen) * tokens // _MATRIX), 1)
        return layer_spectra(model, **{key: value[::step] for key, value in inputs.items()})


class ClassificationTask(Task):
    """A task with one class an item; a subclass writes only how to read data and build a model."""

    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""

    @property
    def summary(self) -> str:
        """The number of classes."""
        return f"{len(self.classes)} classes"

    def objective(self, output: Any, labels: "Tensor") -> "Tensor":
        """Return the cross-entropy."""
        from primal_attention.training import cross_entropy

        return cross_entropy(output, labels)

    def answer(self, output: Any, labels: "Tensor") -> "Answers":
        """Return logits and labels."""
        from primal_attention.training.scores import class_answers

        return class_answers(output, labels)

    def score(self, answers: "Answers") -> "Scores":
        """Return the accuracy."""
        from primal_attention.training.scores import class_scores

        return class_scores(answers)

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return index, class, and the probability of every class."""
        shares = answers["logits"].double().softmax(-1).tolist()
        return [
            {
                "index": i,
                "class": self.classes[max(range(len(row)), key=row.__getitem__)],
                **{f"p({name})": round(p, 6) for name, p in zip(self.classes, row, strict=True)},
            }
            for i, row in enumerate(shares)
        ]

    def confusion(self, answers: "Answers") -> "Tensor":
        """Return how many items of each true class (row) got each class (column)."""
        import torch

        count = len(self.classes)
        pairs = answers["labels"] * count + answers["logits"].argmax(-1)
        return torch.bincount(pairs, minlength=count**2).view(count, count)

    def details(self, answers: "Answers") -> tuple[list[str], list[list[object]]]:
        """Return the recall of every class."""
        matrix = self.confusion(answers)
        totals = matrix.sum(1)
        recall = (matrix.diagonal() / totals.clamp_min(1)).tolist()
        rows = [
            [name, f"{100 * r:.1f}" if n else "–", n]
            for name, r, n in zip(self.classes, recall, totals.tolist(), strict=True)
        ]
        return ["class", "recall (%)", "cases"], rows

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add the confusion matrices."""
        from primal_attention.report import plot_confusion

        report.section("Confusion").figure(
            plot_confusion({r.name: self.confusion(r.test.answers) for r in results}, self.classes),
            "Test cases of each true class (row) by predicted class (column).",
        )


class RegressionTask(Task):
    """A task with one number an item; a subclass writes only how to read data and build a model."""

    @property
    def summary(self) -> str:
        """Kind of answer."""
        return "one number an item"

    def objective(self, output: Any, labels: "Tensor") -> "Tensor":
        """Return the mean squared error."""
        from primal_attention.training import squared_error

        return squared_error(output, labels)

    def answer(self, output: Any, labels: "Tensor") -> "Answers":
        """Return predicted and true numbers."""
        from primal_attention.training.scores import value_answers

        return value_answers(output, labels)

    def score(self, answers: "Answers") -> "Scores":
        """Return root mean squared error, mean absolute error and R²."""
        from primal_attention.training.scores import value_scores

        return value_scores(answers)

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return index and predicted number."""
        return [{"index": i, "value": v} for i, v in enumerate(answers["values"].tolist())]

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add a picture of predicted against true numbers."""
        from primal_attention.report import plot_values

        pairs = {
            r.name: (r.test.answers["labels"].tolist(), r.test.answers["values"].tolist())
            for r in results
        }
        report.section("Predictions").figure(
            plot_values(pairs), "Predicted against true numbers of the test part."
        )


class TaskCommand(NamedTuple):
    """A command of ``primal`` that a domain brings."""

    name: str
    """What users type after ``primal``."""
    summary: str
    """One line for ``primal --help``."""
    module: str
    """Module with a function ``main(argv)``, which returns the exit code."""


@dataclass(frozen=True)
class TaskEntry:
    """Where a task is, and what it is for."""

    where: str
    """Module and class, ``module:Class``."""
    summary: str
    """One line for the list of tasks."""
    commands: tuple[TaskCommand, ...] = ()
    """Commands of ``primal`` that belong to the domain of the task."""
    offers: Mapping[str, str] = field(default_factory=dict)
    """What other domains may use without importing this one: where it is, ``module:name``, by what
    it is; see :func:`offered`."""

    @property
    def kind(self) -> type[Task]:
        """The class, imported now."""
        found: type[Task] = _import(self.where)
        return found


@dataclass(frozen=True)
class _Registered(TaskEntry):
    """A task of the user's own, which may be defined in a script."""

    given: type[Task] | None = None

    @property
    def kind(self) -> type[Task]:
        return self.given or super().kind


def _import(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


TASKS: dict[str, TaskEntry] = {
    "series": TaskEntry(
        "primal_attention.tasks.series.task:SeriesTask", "classify whole time series"
    ),
    "series-values": TaskEntry(
        "primal_attention.tasks.series.regression:SeriesValueTask",
        "predict a number for each time series",
    ),
    "longrange": TaskEntry(
        "primal_attention.tasks.longrange.task:TokenTask",
        "classify long token sequences: text, pairs, pictures, ListOps, Pathfinder",
    ),
    "events": TaskEntry(
        "primal_attention.tasks.events.task:NextEventTask",
        "predict type and time of the next event of a log",
    ),
    "event-labels": TaskEntry(
        "primal_attention.tasks.events.labels:EventLabelTask",
        "classify whole sequences of a log of events",
    ),
    "irregular-series": TaskEntry(
        "primal_attention.tasks.events.irregular:IrregularTask",
        "values of irregular series with missing channels at any time",
    ),
    "tables": TaskEntry(
        "primal_attention.tasks.tables.task:TableTask",
        "predict a column of a table with attention between rows",
    ),
    "lists": TaskEntry(
        "primal_attention.tasks.lists.task:RerankTask",
        "order the results of a search anew, from vectors with groups",
        commands=(
            TaskCommand(
                "rerank",
                "the results of a search in a better order, from the vectors alone",
                "primal_attention.tasks.lists.command",
            ),
        ),
        offers={"reranker": "primal_attention.tasks.lists.methods:make_reranker"},
    ),
    "pairs": TaskEntry(
        "primal_attention.tasks.pairs.task:PairTask",
        "find images for texts and texts for images, from image-text pairs",
        commands=(
            TaskCommand(
                "search",
                "images for a text, with a model of image-text pairs; writes a page",
                "primal_attention.tasks.pairs.command",
            ),
        ),
    ),
}
"""All tasks by name. A module is imported when its task is used."""


def register_task(name: str, task: type[Task], summary: str) -> None:
    """Add a task of your own under a new name, for this process.

    Args:
        name: What recipes write after ``task:``.
        task: The class.
        summary: One line for the list of tasks.
    """
    where = _where(task)
    if name in TASKS and TASKS[name].where != where:
        raise ValueError(f"A task named {name!r} is already registered; choose another name.")
    TASKS[name] = _Registered(where, summary, given=task)


def _where(task: type[Task]) -> str:
    return f"{task.__module__}:{task.__qualname__}"


def find_task(name: str) -> type[Task]:
    """Return the class of a task by name.

    Raises:
        UserError: If there is no such task; the message lists those there are.
    """
    return named(name, TASKS, "task").kind


def task_commands() -> dict[str, TaskCommand]:
    """Return the commands that domains bring, by name.

    Example:
        >>> list(task_commands())
        ['rerank', 'search']
    """
    return {found.name: found for entry in TASKS.values() for found in entry.commands}


def offered(what: str) -> Any:
    """Return what a domain offers to others, such as the function that makes a ``reranker``.

    Example:
        >>> offered("reranker")("expansion")
        AlphaQE()
    """
    for entry in TASKS.values():
        if what in entry.offers:
            return _import(entry.offers[what])
    known = sorted({name for entry in TASKS.values() for name in entry.offers})
    raise ValueError(f"no task offers {what!r}; there are: {', '.join(known)}.")


def save_task(task: Task, folder: Path) -> None:
    """Write ``task.json`` into a folder: the task's name and what it knows of its data."""
    write_sealed(folder, {FILE: task_content(task)})


def task_content(task: Task) -> str:
    """Return the content of ``task.json``."""
    names = [name for name, entry in TASKS.items() if entry.where == _where(type(task))]
    if not names:
        raise ValueError(f"{type(task).__name__} is not registered; call register_task first.")
    return to_json({"format": FORMAT, "task": names[0], "values": asdict(task)})  # type: ignore[call-overload]


def load_task(folder: Path) -> Task:
    """Return the task in the folder of a trained model.

    Raises:
        UserError: If the folder holds no task, a damaged one, or one of another format.
    """
    return read_task(open_folder(folder))


def open_folder(folder: Path) -> SealedFolder:
    """Return the folder of a trained model to read from, or raise with what it may be instead."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a trained model.")
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.glob("*/")]
        hint = did_you_mean(folder.name, beside)
        raise UserError(f"there is no folder {folder}; give the folder of a trained model.{hint}")
    finish_save(folder)
    there = [name for name in (FILE, ESTIMATOR, SUMS) if (folder / name).is_file()]
    sealed = SealedFolder(folder) if there else None
    if sealed and (FILE in there or FILE in (sealed.sums or {})):
        return sealed
    inside = [p.parent.name for p in sorted(folder.glob(f"*/{FILE}"))]
    hint = f" Did you mean {folder / inside[0]}?" if inside else ""
    if sealed and ESTIMATOR in there:
        kind = parse_json(sealed.read(ESTIMATOR), folder / ESTIMATOR).get("class")
        hint = f" It holds an estimator; in Python, {kind}.load({str(folder)!r}) reads it."
    raise UserError(f"{folder} is not the folder of a model that primal trained.{hint}")


def read_task(folder: SealedFolder) -> Task:
    """Return the task in a folder that :func:`open_folder` found."""
    path = folder.path / FILE
    content = parse_json(folder.read(FILE), path)
    with user_errors(f"{path} is damaged", UserError, ValueError, TypeError, LookupError):
        if content.get("format") != FORMAT:
            raise ValueError(
                f"it has format {content.get('format')!r}, this version reads {FORMAT}."
            )
        kind = find_task(str(content.get("task")))
        values = content.get("values")
        if not isinstance(values, dict):
            raise ValueError("it has no values.")
        missing = [f.name for f in fields(kind) if f.name not in values]  # type: ignore[arg-type]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}.")
        return build(kind, values)
