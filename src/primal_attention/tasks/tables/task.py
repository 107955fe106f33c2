"""The task of predicting a column of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS, TABLE_SUFFIXES, list_some, read_table
from primal_attention.tasks.sources import Recognition, Source, check_column
from primal_attention.tasks.tables.columns import TableColumn, TableLike, is_frame
from primal_attention.tasks.tables.settings import NPTOptions, TableSettings
from primal_attention.tasks.task import ClassificationTask, Parts, RegressionTask, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from primal_attention.analysis import LayerSpectrum
    from primal_attention.models import PretrainedModel
    from primal_attention.report import Report
    from primal_attention.tasks.results import Result
    from primal_attention.tasks.tables.data import TableRows
    from primal_attention.tasks.tables.encoding import TableEncoder
    from primal_attention.tasks.tables.model import NPTModel, NPTOutput
    from primal_attention.tasks.trained import TrainedModel
    from primal_attention.training.evaluation import Evaluation
    from primal_attention.training.scores import Answers, Scores

__all__ = ["TableTask"]

_DATA = {"valid": 0.15}
_REST: Mapping[str, Any] = {
    "training": {"epochs": 20, "epoch_steps": 50, "batch_size": 256, "lr": 2e-3, "warmup": 0.05}
}
"""Settings for tables of which nothing is known; those of the estimators."""


@dataclass(frozen=True)
class TableTask(Task):
    """Predict a column of a table: what a model must know of its training rows."""

    Settings: ClassVar[type[TableSettings]] = TableSettings
    Model: ClassVar[type[NPTOptions]] = NPTOptions
    endings: ClassVar[tuple[str, ...]] = TABLE_SUFFIXES
    starter: ClassVar[Mapping[str, Any]] = {"data": {"name": "wine", **_DATA}, **_REST}
    spectra_of: ClassVar[str] = "of attention from test rows to training rows, mean over all heads"

    columns: tuple[TableColumn, ...]
    """The features."""
    target: TableColumn | None
    """The column to predict; ``None`` for a model that only fills holes."""
    is_frame: bool = True
    """Whether the training rows had names of columns."""
    context_rows: int = 0
    """Training rows that the model keeps."""
    max_context: int = 4096
    """Most training rows that a model may keep."""

    @classmethod
    def fit(cls, encoder: "TableEncoder", target: TableColumn | None, context_rows: int) -> Self:
        """Return the task of a fitted encoder and a target."""
        return cls(encoder.columns_, target, encoder.is_frame_, context_rows)

    @property
    def is_class(self) -> bool:
        """Whether the target is a class."""
        return self.target is not None and self.target.is_categorical

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self.target.categories if self.target is not None else ()

    @property
    def categories(self) -> tuple[int, ...]:
        """Categories of every column, the target last; zero for numbers."""
        every = self.columns if self.target is None else (*self.columns, self.target)
        return tuple(c.width if c.is_categorical else 0 for c in every)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Columns, targets and rows of the context."""
        return {
            "categories": self.categories,
            "num_targets": int(self.target is not None),
            "context_rows": self.context_rows,
        }

    @property
    def summary(self) -> str:
        """What is predicted from how many columns."""
        name = "" if self.target is None else self.target.name
        what = f"{len(self.classes)} classes of" if self.is_class else "the number"
        return f"{what} {name!r} from {len(self.columns)} columns"

    @property
    def encoder(self) -> "TableEncoder":
        """The encoder of the features."""
        from primal_attention.tasks.tables.encoding import TableEncoder

        return TableEncoder.from_columns(self.columns, is_frame=self.is_frame)

    def build(self, options: NPTOptions) -> "NPTModel":
        """Return an untrained model whose bins are the quantiles of the training rows."""
        from primal_attention.tasks.tables.model import NPTConfig, NPTModel

        model = NPTModel(NPTConfig(**{**options.complete(), **self.sizes}))
        every = self.columns if self.target is None else (*self.columns, self.target)
        model.embedding.start_from([c.quantiles for c in every])
        return model

    # reading

    @classmethod
    def load(cls, settings: TableSettings) -> tuple[Self, Parts]:
        """Return the task and the three parts of a table."""
        from primal_attention.tasks.tables.reading import load_table_parts

        return load_table_parts(cls, settings)

    def read(self, path: Path, *, labelled: bool, part: str = "test") -> "TableRows":
        """Return the rows of a file."""
        with user_errors(str(path), *FILE_ERRORS):
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            frame = read_table(path)
            if not labelled:
                return self.rows(self._select(frame))
            from primal_attention.tasks.tables.reading import known_rows, split_target

            table = known_rows(self, split_target(frame, self._numeric_target.name, path))
            return self.rows(self._select(table.X), table.y)

    def from_arrays(self, data: TableLike) -> "TableRows":
        """Return a frame or an array of features, ready for the model."""
        return self.rows(self._select(data))

    def _select(self, frame: TableLike) -> TableLike:
        """Return the columns of the training rows; a frame may have others."""
        if not is_frame(frame):
            return frame
        names = [c.name for c in self.columns]
        if not self.is_frame:
            # the training rows had no names, so only the order counts
            target = [] if self.target is None else [self.target.name]
            return frame.drop(columns=target, errors="ignore").to_numpy()
        lost = [n for n in names if n not in frame.columns]
        if lost:
            raise ValueError(
                f"the table has no column {lost[0]!r}, which the model was trained with; its "
                f"columns are {list_some([str(c) for c in frame.columns])}."
            )
        return frame[names]

    def rows(
        self,
        X: TableLike,
        y: "ArrayLike | None" = None,
        weight: "NDArray[np.float64] | None" = None,
    ) -> "TableRows":
        """Return encoded rows; a target that is not given is missing.

        Args:
            X: Frame or array with the columns of the training rows.
            y: Values of the target.
            weight: Weight of every row.
        """
        import numpy as np

        from primal_attention.tasks.tables.columns import read_cells
        from primal_attention.tasks.tables.data import TableRows
        from primal_attention.tasks.tables.reading import parse_dates

        if is_frame(X):
            dates = [c.name for c in self.columns if c.form == "datetime"]
            X = parse_dates(X, [n for n in dates if n in X.columns])
        table = self.encoder.encode(X)
        target = None
        if self.target is not None:
            target = np.full(len(table.values), np.nan)
            if y is not None:
                target = self.target.encode(read_cells(y))
        return TableRows.join(table, target, is_class=self.is_class, weight=weight)

    def collate(self, items: Sequence[Any]) -> "Mapping[str, Tensor]":
        """Return a batch of rows."""
        from primal_attention.tasks.tables.data import collate_rows

        return collate_rows(items)

    # scoring

    def objective(self, output: "NPTOutput", labels: "Tensor") -> "Tensor":
        """Return the loss of what was hidden in training, or of the targets."""
        from primal_attention.tasks.tables.masking import target_losses

        if output.loss is not None:
            return output.loss
        return target_losses(output.logits, labels.float(), is_class=self.is_class).mean()

    def answer(self, output: "NPTOutput", labels: "Tensor") -> "Answers":
        """Return logits, or predicted numbers and deviations in units of the target."""
        from primal_attention.training.scores import class_answers

        if self.is_class:
            return class_answers(output.logits, labels)
        column = self._numeric_target
        mean, log_std = output.logits.double().unbind(1)
        return {
            "values": column.mean + column.scale * mean,
            "std": column.scale * log_std.exp(),
            "labels": column.mean + column.scale * labels.double(),
        }

    @property
    def _numeric_target(self) -> TableColumn:
        if self.target is None:
            raise UserError("this model has no target: it fills holes. Load it with TableImputer.")
        return self.target

    def measure(self, model: Any, data: Any, *, batch_size: int = 64) -> "Evaluation":
        """Return scores and answers; all rows at once if they see each other."""
        is_transductive = model.config.context == "transductive"
        return super().measure(model, data, batch_size=len(data) if is_transductive else batch_size)

    def score(self, answers: "Answers") -> "Scores":
        """Return the accuracy, or errors and the coverage of the 90 % intervals."""
        from primal_attention.tasks.tables.scoring import coverage
        from primal_attention.training.scores import class_scores, value_scores

        if self.is_class:
            return class_scores(answers)
        return {**value_scores(answers), "coverage of 90 %": coverage(answers)}

    def records(self, answers: "Answers") -> list[dict[str, Any]]:
        """Return the class with all probabilities, or the number with its deviation."""
        if self.is_class:
            return ClassificationTask.records(self, answers)  # type: ignore[arg-type]
        pairs = zip(answers["values"].tolist(), answers["std"].tolist(), strict=True)
        return [
            {"index": i, "value": float(f"{v:.6g}"), "sd": float(f"{s:.6g}")}
            for i, (v, s) in enumerate(pairs)
        ]

    def confusion(self, answers: "Answers") -> "Tensor":
        """Return how many rows of each true class got each class."""
        return ClassificationTask.confusion(self, answers)  # type: ignore[arg-type]

    def details(self, answers: "Answers") -> tuple[list[str], list[list[Any]]]:
        """Return the recall of every class; no table for numbers."""
        return ClassificationTask.details(self, answers) if self.is_class else ([], [])  # type: ignore[arg-type]

    # reports

    def finish(self, model: "PretrainedModel", data: Parts) -> "TrainedModel":
        """Return the calibrated model with all rows but those of the test part as its context."""
        from primal_attention.tasks.tables.fitting import calibrate, keep_rows

        rows: Any = data
        calibrate(model, self, rows.valid)  # type: ignore[arg-type]
        return keep_rows(self, model, rows.train.append(rows.valid))  # type: ignore[arg-type]

    def baselines(self, data: Parts) -> "Mapping[str, Scores]":
        """Return the scores of scikit-learn's methods on the same rows."""
        from primal_attention.tasks.tables.baselines import baseline_scores

        return baseline_scores(self, data)

    def spectra(self, model: Any, data: Any) -> "list[LayerSpectrum]":
        """Return the spectra of attention from some rows to the context, by layer."""
        from primal_attention.tasks.tables.showing import row_spectra

        return row_spectra(model, data)

    def show(self, report: "Report", results: "Sequence[Result]") -> None:
        """Add the confusion matrix, or predicted against true numbers, and the calibration."""
        from primal_attention.tasks.tables.showing import show_calibration

        kind = ClassificationTask if self.is_class else RegressionTask
        kind.show(self, report, results)  # type: ignore[arg-type]
        show_calibration(self, report, results)

    def explain(self, report: "Report", results: "Sequence[Result]", data: Parts) -> None:
        """Add what predictions lean on: single rows, a corrupted context, the learned map."""
        from primal_attention.tasks.tables.showing import show_rows

        show_rows(self, report, results, data)

    @classmethod
    def recognize(cls, source: Source, given: Mapping[str, str]) -> Recognition | None:
        """Return how to read a table with a target, if no other task knows it by its columns."""
        if source.suffix not in TABLE_SUFFIXES:
            return None
        usual = "target" if "target" in source.columns else "label"
        target = given.get("target", usual)
        check_column(source, target)
        words = f"a table, {target!r} from {len(source.columns) - 1} columns"
        return Recognition(words, {"data": {"target": target, **_DATA}, **_REST}, is_general=True)
