"""The task of predicting irregular series at any time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS, TABLE_SUFFIXES
from primal_attention.tasks.events.scheme import LogScheme
from primal_attention.tasks.events.settings import (
    WINDOW,
    EventSettings,
    InterpolationOptions,
    IrregularSettings,
)
from primal_attention.tasks.task import Parts, RegressionTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from primal_attention.datasets.events.series import IrregularSeries, SeriesQueries
    from primal_attention.tasks.events.interpolation import InterpolationModel, QueriedValues
    from primal_attention.training.data import Item
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Scores

__all__ = ["IrregularTask"]


@dataclass(frozen=True)
class IrregularTask(RegressionTask):
    """Predict hidden values of irregular series: what a model must know of its training data."""

    Settings: ClassVar[type[IrregularSettings]] = IrregularSettings
    Model: ClassVar[type[InterpolationOptions]] = InterpolationOptions
    endings: ClassVar[tuple[str, ...]] = TABLE_SUFFIXES
    starter: ClassVar[Mapping[str, object]] = {
        "data": {"name": "sinusoids"},
        "training": {"epochs": 40, "min_steps": 1200, "lr": 2e-3, "patience": 15},
    }

    scheme: LogScheme
    """Unit, scale, and mean and deviation of every channel."""

    @classmethod
    def fit(cls, series: "IrregularSeries", length: int | None = WINDOW) -> Self:
        """Return the task of some training series."""
        return cls(LogScheme.fit(series.log, EventSettings(length=length)))

    @classmethod
    def load(cls, settings: IrregularSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts of a file; whole series go to one part."""
        import numpy as np

        from primal_attention.datasets.events.examples import sinusoid_series
        from primal_attention.datasets.events.series import IrregularSeries

        is_example = settings.name == "sinusoids"
        if not is_example and (settings.train is None or not settings.values):
            raise UserError(
                "data.train, a file of series, and data.values, its columns of values, are "
                "missing; or give data.name: sinusoids."
            )
        columns: dict[str, object] = {
            name: getattr(settings, name) for name in ("values", "time", "sequence", "unit")
        }
        with user_errors(str(settings.train), *FILE_ERRORS):
            if settings.train is None:
                series = sinusoid_series(settings.seed)
            else:
                series = IrregularSeries.from_csv(settings.train, **columns)
            order = np.random.default_rng(settings.seed).permutation(len(series))
            held = 0 if settings.test else max(1, round(settings.test_share * len(series)))
            chosen = order[held:][: settings.train_size]
            count = max(1, round(settings.valid * len(chosen)))
            if len(chosen) - count < 1:
                raise ValueError(
                    f"The file has {len(series)} series, too few for a training, a validation and "
                    "a test part; give at least three."
                )
            task = cls.fit(series.take(chosen[count:]), settings.length)
            scheme = replace(task.scheme, columns=(settings.time, None, settings.sequence))
            task = replace(task, scheme=scheme)
            if settings.test is None:
                test = series.take(order[:held][: settings.test_size])
            else:
                test = IrregularSeries.from_csv(settings.test, **columns)
            return task, Parts(
                task.items(series.take(chosen[count:]), is_fixed=False),
                task.items(series.take(chosen[:count])),
                task.items(test),
                note="A part of every series is hidden and predicted: places at random, or its end."
                " Scores are in standard deviations of the channels.",
            )

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Channels."""
        return {"num_channels": len(self.scheme.marks)}

    @property
    def summary(self) -> str:
        """The number of channels and the unit."""
        return f"{len(self.scheme.marks)} channels, times in {self.scheme.unit}"

    def build(self, options: InterpolationOptions) -> "InterpolationModel":
        """Return an untrained model, its frequencies set from the training series."""
        from primal_attention.tasks.events.interpolation import (
            InterpolationConfig,
            InterpolationModel,
        )

        model = InterpolationModel(InterpolationConfig(**asdict(options), **self.sizes))
        self.scheme.start(model)
        return model

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "SeriesQueries":
        """Return the series of a file: to score hidden values, or to fill rows without any value.

        Without labels, a row whose channels are all empty is a query.
        """
        from primal_attention.datasets.events.series import IrregularSeries

        time, _, sequence = self.scheme.columns
        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            series = IrregularSeries.from_csv(
                path,
                values=[c.name for c in self.scheme.marks],
                time=time,
                sequence=sequence,
                unit=self.scheme.unit,
            )
            return self.items(series) if labelled else self.from_arrays(series)

    def from_arrays(self, data: Any) -> "SeriesQueries":
        """Return series, in which a time without any value is a query."""
        import numpy as np

        empty = np.isnan(data.values).all(1)
        queries = [data.log.times[part][empty[part]] for part in data]
        if not sum(map(len, queries)):
            raise ValueError("There is nothing to predict: leave all channels of a row empty.")
        seen = data.log._filter(~empty)
        if len(seen) != len(data):
            lost = sorted(set(data.log.keys) - set(seen.keys))
            raise ValueError(f"Series {lost[0]!r} has no observed value.")
        return self.items(replace(data, log=seen), queries)

    def items(
        self,
        series: "IrregularSeries",
        queries: "Sequence[NDArray[np.float64]] | None" = None,
        *,
        is_fixed: bool = True,
    ) -> "SeriesQueries":
        """Return series standardised as the training part was.

        Args:
            series: The series.
            queries: Times to predict for each; without them observations are hidden.
            is_fixed: Hide the same observations each time.
        """
        from primal_attention.datasets.events.series import SeriesQueries

        if queries is None:
            if (series.log.lengths < 2).all():
                raise ValueError("No series has two observations: nothing can be hidden.")
            series = series.take(series.log.lengths > 1)
        prepared = replace(series, log=self.scheme.prepare(series.log))
        length = self.scheme.length or int(series.log.lengths.max())
        return SeriesQueries(
            prepared, self.scheme.scale, length, queries=queries, is_fixed=is_fixed
        )

    def collate(self, items: "Sequence[Item]") -> "Mapping[str, Tensor]":
        """Return a padded batch with masks."""
        from primal_attention.datasets.events.series import collate_queries

        return collate_queries(items)

    def objective(self, output: "QueriedValues", labels: "Tensor") -> "Tensor":
        """Return the negative log-likelihood of the observed values, without its constant."""
        import torch

        there = ~labels.isnan()
        z = (torch.where(there, labels, 0.0) - output.mean) * (-output.log_std).exp()
        losses = torch.where(there, 0.5 * z.square() + output.log_std, 0.0)
        return losses.sum() / there.sum().clamp_min(1)

    def answer(self, output: "QueriedValues", labels: "Tensor") -> "Answers":
        """Return observed and predicted values, and ``query_`` rows for every padded query."""
        there = ~labels.isnan()
        return {
            "values": output.mean[there].float(),
            "labels": labels[there].float(),
            "query_mean": output.mean.flatten(0, 1),
            "query_std": output.log_std.exp().flatten(0, 1),
        }

    def measure(
        self, model: "nn.Module", data: "Dataset[Item]", *, batch_size: int = 64
    ) -> "Evaluation":
        """Return the scores of hidden values, and the predictions of all queries in their order."""
        import torch

        found = super().measure(model, data, batch_size=batch_size)
        sizes = [len(data[i]["queries"]) for i in range(len(data))]  # type: ignore[arg-type]
        keep = []
        for start in range(0, len(sizes), batch_size):
            part = sizes[start : start + batch_size]
            keep += [i < size for size in part for i in range(max(part))]
        chosen = torch.tensor(keep)
        answers = {k: v[chosen] if k.startswith("query_") else v for k, v in found.answers.items()}
        return replace(found, answers={k: v for k, v in answers.items() if len(v)})

    def score(self, answers: "Answers") -> "Scores":
        """Return errors in standard deviations; none without observed values."""
        return super().score(answers) if len(answers["labels"]) else {}

    def records(self, answers: "Answers") -> list[dict[str, object]]:
        """Return mean and deviation of every channel at every query."""
        marks = self.scheme.marks
        rows = []
        pairs = zip(answers["query_mean"].tolist(), answers["query_std"].tolist(), strict=True)
        for i, (means, stds) in enumerate(pairs):
            row: dict[str, object] = {"index": i}
            for c, mean, std in zip(marks, means, stds, strict=True):
                row[c.name] = float(f"{c.mean + c.std * mean:.6g}")
                row[f"sd({c.name})"] = float(f"{c.std * std:.6g}")
            rows.append(row)
        return rows
