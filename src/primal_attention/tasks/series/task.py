"""The task of classifying whole series, and what it shares with that of predicting numbers."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, needs, user_errors
from primal_attention.support.files.tables import TABLE_SUFFIXES, list_some
from primal_attention.tasks.series.header import arrays_hold_numbers, ts_holds_numbers
from primal_attention.tasks.series.settings import SeriesOptions, SeriesSettings
from primal_attention.tasks.sources import Recognition, Source, check_target, is_series_table
from primal_attention.tasks.task import ClassificationTask, Parts, Task

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from primal_attention.models import PretrainedModel
    from primal_attention.report import Report
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.series.data import SeriesCollection, SeriesDataset
    from primal_attention.tasks.series.model import SeriesNetwork
    from primal_attention.tasks.trained import TrainedModel
    from primal_attention.training.data import Item

__all__ = ["SeriesTask", "WholeSeriesTask"]

TRAINING: Mapping[str, Mapping[str, object]] = {
    "training": {"epochs": 20, "min_steps": 400, "lr": 2e-3}
}
"""Settings for series of which nothing is known; those of the estimator, trained longer."""
_FARTHEST = 1e15
"""Largest standardised value; the squares of much larger ones overflow in a model."""


@dataclass(frozen=True, kw_only=True)
class WholeSeriesTask(Task):
    """A task with one target for each series; a subclass says what the targets are."""

    Settings: ClassVar[type[SeriesSettings]] = SeriesSettings
    Model: ClassVar[type[SeriesOptions]] = SeriesOptions
    endings: ClassVar[tuple[str, ...]] = (".ts", ".npz", *TABLE_SUFFIXES)
    has_numbers: ClassVar[bool]
    """Whether the targets are numbers, not classes."""

    mean: tuple[float, ...]
    """Mean of every channel of the training part."""
    std: tuple[float, ...]
    """Standard deviation of every channel of the training part."""
    longest: int
    """Time steps of the longest training series; it decides the patch."""
    length: int | None = None
    """Longest sequence to read; what is longer is cut off."""
    target: str = "label"
    """Tables: column of the targets."""
    case: str = "case"
    """Tables with one row a time step: column with the name of the series."""

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(
                f"mean and std must hold one number a channel, got {len(self.mean)} and "
                f"{len(self.std)}."
            )
        if not all(map(isfinite, self.mean)) or not all(0 < s < inf for s in self.std):
            raise ValueError("mean must hold finite numbers, and std positive ones.")

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a ``.ts`` file, arrays ``X``, a table of numbers, or a UEA folder."""
        parts = {}
        words: str | None
        has_numbers = cls.has_numbers
        if source.suffix == ".ts":
            words = "time series in the UEA format"
            has_numbers = ts_holds_numbers(source.path)
        elif source.suffix == ".npz":
            shape = source.arrays.get("X", source.arrays.get("X_train"))
            if shape is None or len(shape) not in (2, 3):
                return None
            words = f"arrays of {shape[0]} series"
            has_numbers = arrays_hold_numbers(source.path)
            if source.arrays.get("X_test", (0,))[0]:
                parts = {"test": str(source.path)}
        elif source.suffix in TABLE_SUFFIXES:
            words = cls._recognize_table(source, given)
            if words is None:
                return None
        else:
            files = {p.stem.rpartition("_")[2]: p for p in source.path.glob("*_T*.ts")}
            if not source.is_folder or "TRAIN" not in files or len(files) > 2:
                return None
            words = "a set of the UEA archive"
            has_numbers = ts_holds_numbers(files["TRAIN"])
            parts = {part.lower(): str(file) for part, file in files.items()}
        if has_numbers != cls.has_numbers and "task" not in given:
            return None
        return Recognition(cls._describe(words), {"data": parts, **TRAINING})

    @classmethod
    def _describe(cls, words: str) -> str:
        """Return what a source is taken for, from words about its series."""
        return words

    @classmethod
    @abstractmethod
    def _recognize_table(cls, source: Source, given: Mapping[str, str]) -> str | None:
        """Return in words how the rows of a table become series; ``None`` for named features."""

    @classmethod
    def fit(cls, series: "SeriesCollection", settings: SeriesSettings | None = None) -> Self:
        """Return the task of some training series."""
        from primal_attention.tasks.series.data import Standardizer

        settings = settings or cls.Settings()
        fitted = Standardizer.fit(series)
        longest = int(series.length.max())
        return cls(
            **cls._fit_targets(series),
            mean=tuple(fitted.mean.tolist()),
            std=tuple(fitted.std.tolist()),
            longest=min(longest, settings.length or longest),
            length=settings.length,
            target=settings.target,
            case=settings.case,
        )

    @classmethod
    @abstractmethod
    def _fit_targets(cls, series: "SeriesCollection") -> dict[str, object]:
        """Return the fields that the targets of the training series decide."""

    @classmethod
    @abstractmethod
    def _check_targets(cls, series: "SeriesCollection", *, parts: int) -> None:
        """Raise if series cannot be learned from; they are split into so many parts."""

    @classmethod
    @abstractmethod
    def strata(cls, series: "SeriesCollection") -> "np.ndarray":
        """Return the group of every series; every part gets the same share of each group."""

    @classmethod
    def load(cls, settings: SeriesSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts of a set or of files."""
        import numpy as np

        from primal_attention.tasks.series.data import SeriesDataset
        from primal_attention.tasks.splits import choose, hold_out

        with needs("series", "A model of series"):
            import aeon  # noqa: F401  two of its parts need it, after the training
        with user_errors(str(settings.train or "")):
            official, test = _read_parts(settings, numbers=cls.has_numbers)
        pool = np.arange(len(official))
        held = pool[:0]
        with user_errors(str(settings.train or ""), UserError):
            if official.y is None or (test is not None and test.y is None):
                raise UserError("the files to train on and to score need labels.")
            cls._check_targets(official, parts=3 if test is None else 2)
            strata = cls.strata(official)
            if test is None:
                pool, held = hold_out(strata, settings.test_share, settings.seed + 1)
            chosen = pool[choose(strata[pool], settings.train_size)]
            split = hold_out(strata[chosen], settings.valid, settings.seed)
        train, valid = chosen[split.train], chosen[split.valid]
        task = cls.fit(official.take(train), settings)
        with user_errors(str(settings.train or "")):
            whole = task.prepare(official).series  # all of a file: a broken case keeps its number
        with user_errors(str(settings.test or "the test part")):
            scored = whole.take(held) if test is None else task.prepare(test).series
        scored = scored.take(choose(cls.strata(scored), settings.test_size))
        return task, Parts(
            SeriesDataset(whole.take(train), settings.jitter),
            SeriesDataset(whole.take(valid)),
            SeriesDataset(scored),
            train.tolist(),
            settings.note,
        )

    def build(self, options: SeriesOptions) -> "SeriesNetwork":
        """Return an untrained model."""
        from primal_attention.tasks.series.model import (
            SeriesConfig,
            SeriesNetwork,
            patch_for,
        )

        patch = patch_for(self.longest, options.max_tokens)
        return SeriesNetwork(SeriesConfig(**asdict(options), **self.sizes, patch=patch))

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "SeriesDataset":
        """Return the series of a file, standardised as the training part was."""
        from primal_attention.tasks.series.files import read_series

        with user_errors(str(path)):
            series = read_series(
                path,
                part,  # type: ignore[arg-type]
                classes=self._names if labelled else None,
                target=self.target,
                case=self.case,
                channels=None if labelled else len(self.mean),
                numbers=self.has_numbers,
            )
            if not labelled:
                return self.prepare(self.without_labels(series))
            if series.y is None:
                raise UserError(f"{path} has no labels; primal predict needs none.")
            return self.prepare(series)

    @property
    @abstractmethod
    def _names(self) -> tuple[str, ...] | None:
        """Names of the classes; ``None`` if there are none."""

    def from_arrays(self, data: Any) -> "SeriesDataset":
        """Return arrays ``[cases, channels, time]``, or a list of series, ready for the model."""
        from primal_attention.tasks.series.data import series_from_arrays

        return self.prepare(self.without_labels(series_from_arrays(data)))

    @abstractmethod
    def without_labels(self, series: "SeriesCollection") -> "SeriesCollection":
        """Return series with a stand-in for labels, to be predicted."""

    def prepare(self, series: "SeriesCollection") -> "SeriesDataset":
        """Return series standardised as the training part was, and cut to length."""
        import numpy as np

        from primal_attention.tasks.series.data import SeriesDataset, Standardizer

        if not len(series):
            raise ValueError("it holds no series.")
        standardize = Standardizer(np.asarray(self.mean), np.asarray(self.std))
        series = standardize(series).cut(self.length)
        check_near(np.abs(series.x).max((1, 2)), "holds a value")
        return SeriesDataset(series)

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a padded batch, always with a mask."""
        from primal_attention.tasks.series.data import collate_series

        return collate_series(items)

    def finish(self, model: "PretrainedModel", data: Parts) -> "TrainedModel":
        """Return the blend of the trained attention part and the closed-form parts.

        Parts that are no :class:`SeriesDataset`, such as a ``Subset``, leave the model as it is.
        """
        import numpy as np

        from primal_attention.tasks.series.blend.fitting import (
            add_attention,
            fit_closed,
            score_series,
        )
        from primal_attention.tasks.series.data import SeriesDataset
        from primal_attention.tasks.series.settings import PARTS
        from primal_attention.tasks.trained import TrainedModel

        if not (isinstance(data.train, SeriesDataset) and isinstance(data.valid, SeriesDataset)):
            return super().finish(model, data)
        train, valid = data.train.series, data.valid.series
        closed = fit_closed(train.append(valid), model.config, parts=PARTS, seed=0)
        held = len(train) + np.arange(len(valid))
        attention: Any = deepcopy(model).cpu()  # the other parts know the processor only
        scores = score_series(attention, valid)
        return TrainedModel(self, add_attention(closed, [attention], scores, held))

    def explain(self, report: "Report", results: "Sequence[Result]", data: Parts) -> None:
        """Add the parts of every blend, with their shares and their own scores."""
        from primal_attention.tasks.series.blend.showing import show_parts

        show_parts(report, results, data.test, self)


@dataclass(frozen=True, kw_only=True)
class SeriesTask(WholeSeriesTask, ClassificationTask):
    """Classify whole series: what a model must know of its training data."""

    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "BasicMotions"}, **TRAINING}
    has_numbers: ClassVar[bool] = False

    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""

    @classmethod
    def _recognize_table(cls, source: Source, given: Mapping[str, str]) -> str | None:
        target, case = given.get("target", "label"), given.get("case", "case")
        if not {"task", "case"} & given.keys() and not is_series_table(source, target, case):
            return None
        check_target(source, target)
        return describe_table(source, target, case)

    @classmethod
    def _fit_targets(cls, series: "SeriesCollection") -> dict[str, object]:
        return {"classes": series.classes}

    @classmethod
    def _check_targets(cls, series: "SeriesCollection", *, parts: int) -> None:
        from primal_attention.tasks.splits import check_classes

        check_classes(series.classes)

    @classmethod
    def strata(cls, series: "SeriesCollection") -> "np.ndarray":
        """Return the classes."""
        import numpy as np

        return np.asarray(series.y)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Classes and channels."""
        return {"num_classes": len(self.classes), "num_channels": len(self.mean)}

    @property
    def _names(self) -> tuple[str, ...]:
        return self.classes

    def without_labels(self, series: "SeriesCollection") -> "SeriesCollection":
        """Return series with the first class as a stand-in for labels, to be predicted."""
        import numpy as np

        return replace(series, y=np.zeros(len(series), np.int64), classes=self.classes)


def describe_table(source: Source, target: str, case: str) -> str:
    """Return in words how the rows of a table become series.

    Raises:
        UserError: If a column of values holds words.
    """
    values = [name for name in source.columns if name not in (target, case)]
    words = [name for name in values if source.columns[name].kind == "text"]
    if words:
        raise UserError(
            f"series need numbers, but the columns {list_some(words)} hold words; --target names "
            "the labels and --case the series."
        )
    if case in source.columns:
        return f"one row a time step, {len(values)} channels"
    return f"one row a series, {len(values)} time steps of one channel"


def check_near(distance: "np.ndarray", what: str) -> None:
    """Raise if a case is so far from the training part that a model would overflow.

    Args:
        distance: Distance of every case from the mean, in standard deviations.
        what: What lies there, such as ``"holds a value"``.
    """
    far = (distance > _FARTHEST).nonzero()[0]
    if len(far):
        raise ValueError(
            f"Case {far[0]}, counted from 0, {what} more than {_FARTHEST:g} standard deviations "
            "from the mean of the training part."
        )


def _read_parts(
    settings: SeriesSettings, *, numbers: bool
) -> "tuple[SeriesCollection, SeriesCollection | None]":
    """Return the training and the test part, of files or of a set; no test part without a file."""
    from primal_attention.tasks.series.files import load_series, packaged_root, read_series

    if settings.train is not None:
        columns: dict[str, Any] = {"target": settings.target, "case": settings.case}
        columns["numbers"] = numbers
        train = read_series(settings.train, "train", **columns)
        if settings.test is None:
            return train, None
        with user_errors(str(settings.test)):
            classes = train.classes or None
            return train, read_series(settings.test, "test", classes=classes, **columns)
    if settings.name is None:
        raise UserError("data.name, a UEA set, or the files data.train and data.test are missing.")
    root = packaged_root(settings.name)
    train, test = (
        load_series(settings.name, part, root=root, numbers=numbers) for part in ("train", "test")
    )
    return train, test
