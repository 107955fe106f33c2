"""The task of predicting a number for each series."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, ClassVar

from primal_attention.support.command import UserError
from primal_attention.tasks.series.settings import SeriesValueSettings
from primal_attention.tasks.series.task import (
    TRAINING,
    WholeSeriesTask,
    check_near,
    describe_table,
)
from primal_attention.tasks.sources import Source, check_column
from primal_attention.tasks.task import RegressionTask

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from primal_attention.tasks.series.data import SeriesCollection, SeriesDataset
    from primal_attention.training.scores import Answers

__all__ = ["SeriesValueTask"]


@dataclass(frozen=True, kw_only=True)
class SeriesValueTask(WholeSeriesTask, RegressionTask):
    """Predict a number for each series: what a model must know of its training data.

    The model predicts standardised numbers. Answers and scores are in the unit of the targets.
    """

    Settings: ClassVar[type[SeriesValueSettings]] = SeriesValueSettings
    starter: ClassVar[Mapping[str, object]] = {"data": {"name": "Covid3Month"}, **TRAINING}
    has_numbers: ClassVar[bool] = True

    target_mean: float
    """Mean of the targets of the training part."""
    target_std: float
    """Standard deviation of the targets of the training part; one if they are all the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isfinite(self.target_mean) or not 0 < self.target_std < inf:
            raise ValueError(
                "target_mean must be a finite number and target_std a positive one, got "
                f"{self.target_mean} and {self.target_std}."
            )

    @classmethod
    def _describe(cls, words: str) -> str:
        return f"{words}, a number for each"

    @classmethod
    def _recognize_table(cls, source: Source, given: Mapping[str, str]) -> str | None:
        target, case = given.get("target", "label"), given.get("case", "case")
        column = source.columns.get(target)
        # the option names a column of series; a table of numbers alone may be of any kind
        is_named = "case" in given and column is not None and column.is_quantity
        if "task" not in given and not is_named:
            return None
        check_column(source, target)
        return describe_table(source, target, case)

    @classmethod
    def _fit_targets(cls, series: "SeriesCollection") -> dict[str, object]:
        import numpy as np

        y = np.asarray(series.y, np.float64)
        mean, std = float(y.mean()), float(y.std())
        # rounding leaves a little spread in equal targets
        is_flat = std <= 1e-12 * abs(mean)
        return {"target_mean": mean, "target_std": 1.0 if is_flat else std}

    @classmethod
    def _check_targets(cls, series: "SeriesCollection", *, parts: int) -> None:
        import numpy as np

        if len(series) < parts:
            raise UserError(
                f"there are {len(series)} series, too few for {parts} parts: to learn from, to "
                f"choose the epoch{' and to score' if parts > 2 else ''}; give at least {parts}."
            )
        y = np.asarray(series.y)
        if y.min() == y.max():
            raise UserError(
                f"all series have the target {y[0]:g}; a model needs at least two different ones."
            )

    @classmethod
    def strata(cls, series: "SeriesCollection") -> "np.ndarray":
        """Return one group for all."""
        import numpy as np

        return np.zeros(len(series), np.int64)

    @property
    def sizes(self) -> Mapping[str, int]:
        """One number, and channels."""
        return {"num_classes": 1, "num_channels": len(self.mean)}

    @property
    def summary(self) -> str:
        """Kind of answer."""
        return "one number a series"

    @property
    def _names(self) -> None:
        return None

    def without_labels(self, series: "SeriesCollection") -> "SeriesCollection":
        """Return series with the mean target as a stand-in for labels, to be predicted."""
        import numpy as np

        return replace(series, y=np.full(len(series), self.target_mean), classes=())

    def prepare(self, series: "SeriesCollection") -> "SeriesDataset":
        """Return series and targets standardised as the training part was, and cut to length."""
        import numpy as np

        if series.y is not None:
            y = (np.asarray(series.y, np.float64) - self.target_mean) / self.target_std
            check_near(np.abs(y), "has a target")
            series = replace(series, y=y)
        return super().prepare(series)

    def answer(self, output: object, labels: "Tensor") -> "Answers":
        """Return predicted and true numbers in the unit of the targets."""
        found = super().answer(output, labels)
        return {k: self.target_mean + self.target_std * v.double() for k, v in found.items()}
