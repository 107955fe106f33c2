"""What the estimators of tables share: parameters, training, folders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from primal_attention.models import PretrainedModel
from primal_attention.support.command import needs, progress
from primal_attention.support.options import read_options
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator, check_fit
from primal_attention.tasks.tables.columns import TableColumn, TableLike, ValidTable, take_items
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.encoding import TableEncoder, accept_tables, validate_table
from primal_attention.tasks.tables.fitting import PREDICTED, calibrate, keep_rows, read_outputs
from primal_attention.tasks.tables.model import NPTModel, NPTOutput
from primal_attention.tasks.tables.preparing import (
    Prepared,
    keep_known,
    merge_rows,
    split_rows,
)
from primal_attention.tasks.tables.settings import NPTOptions, TableFitOptions
from primal_attention.tasks.tables.task import TableTask
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite
from primal_attention.training import FitCost, History, TrainingConfig, fit, fit_cost
from primal_attention.training.evaluation import eval_mode

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted

__all__ = ["TableEstimator", "TargetColumn"]


class TargetColumn(NamedTuple):
    """The target of a training table."""

    name: str
    values: NDArray[np.float64]
    """Codes of classes, or numbers."""


class TableEstimator(SavedEstimator, BaseEstimator):  # type: ignore[misc]
    """Base class of ``TableClassifier``, ``TableRegressor`` and ``TableImputer``."""

    _task: ClassVar[type[Task]] = TableTask
    _model: ClassVar[type[PretrainedModel]] = NPTModel
    _options_type: ClassVar[type[TableFitOptions]] = TableFitOptions
    task_: TableTask
    model_: NPTModel
    history_: History | None

    def __init__(
        self,
        attention: str = "softmax",
        dim: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        max_epochs: int = 20,
        batch_size: int = 256,
        learning_rate: float = 2e-3,
        options: TableFitOptions | Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.attention = attention
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    # settings

    def _fit_options(self) -> TableFitOptions:
        return read_options(TableFitOptions, self.options)

    def _model_options(self) -> NPTOptions:
        """Return the settings of the model: those of the estimator and of its options."""
        given = {**vars(self._fit_options()), **self.get_params(deep=False)}
        return NPTOptions(**{f.name: given[f.name] for f in fields(NPTOptions) if f.name in given})

    def _training(self, rows: int, seed: int, time_limit: float | None = None) -> TrainingConfig:
        options = self._fit_options()
        is_published = options.optimizer == "lamb-lookahead"
        return TrainingConfig(
            epochs=self.max_epochs,
            epoch_steps=options.epoch_steps,
            batch_size=min(rows, self.batch_size),
            lr=self.learning_rate,
            optimizer=options.optimizer,
            schedule="flat-cosine" if is_published else "cosine",
            warmup=0.0 if is_published else 0.05,
            max_seconds=time_limit,
            seed=seed,
        )

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    # training

    def _check(self, time_limit: float | None) -> None:
        """Raise for wrong parameters, before any work."""
        check_fit(self, time_limit)
        self._model_options()

    def _prepare(
        self,
        X: ValidTable,
        y: TargetColumn | None,
        seed: int,
        weight: ArrayLike | None = None,
        unlabeled: TableLike | None = None,
        eval_set: tuple[TableLike, ArrayLike] | None = None,
    ) -> Prepared:
        """Return the encoded training rows and their parts.

        Equal rows become one with the sum of their weights, in an order that depends on their
        content alone. So weights of whole numbers equal repeated rows, and the order of the rows
        has no effect.

        Args:
            X: The table, validated.
            y: The target, if there is one.
            seed: Seed of the validation part.
            weight: Weight of every row; zero leaves a row out.
            unlabeled: Further rows without a target.
            eval_set: Rows with a target that choose the epoch, instead of a part of ``X``.
        """
        options = self._fit_options()
        weights = _check_sample_weight(weight, X, ensure_non_negative=True)
        kept = np.flatnonzero(weights > 0)
        if len(kept) < 2:
            raise ValueError(
                f"Found array with {len(kept)} sample(s) of positive weight, and a model of "
                "attention between rows needs at least 2; n_samples=1 gives nothing to attend to."
            )
        encoder = TableEncoder(options.categorical_features)
        values = None if y is None else y.values
        first, total = merge_rows(encoder.fit(X, sample_weight=weights), X, values, weights, kept)
        table = take_items(X, first)
        encoder = encoder.fit(table, sample_weight=total)
        target, codes = None, None
        if y is not None:
            codes = y.values[first]
            target = self._describe_target(TargetColumn(y.name, codes), total)
            if not target.is_categorical:
                codes = (codes - target.mean) / target.scale
        task = TableTask.fit(encoder, target, 0)
        own = TableRows.join(
            encoder.encode(table),
            codes,
            is_class=task.is_class,
            weight=None if np.allclose(total, total[0]) else total / total.mean(),
        )
        train, valid = split_rows(own, 0.0 if eval_set is not None else options.validation, seed)
        if unlabeled is not None:
            more = task.rows(validate_table(self, unlabeled, reset=False))
            own, train = own.append(more), np.append(train, len(own) + np.arange(len(more)))
        if eval_set is not None:
            more = task.rows(validate_table(self, eval_set[0], reset=False), eval_set[1])
            own, valid = own.append(more), len(own) + np.arange(len(more))
        rows = min(len(train), options.max_context)
        task = replace(task, context_rows=rows, max_context=options.max_context)
        return Prepared(task, own, train, valid)

    def _train(self, prepared: Prepared, seed: int, time_limit: float | None) -> None:
        """Train a model, calibrate it, and give it all rows as its context."""
        task, rows, train, valid = prepared
        config = self._training(len(train), seed, time_limit)
        if task.target is not None and not task.is_class:
            # the likelihood is best early, when the predicted deviation fits; the RMSE of the mean
            # still falls after that, and it is what users compare
            config = replace(config, monitor="RMSE")
        with self._threads():
            model = self._build(task, seed)
            held = rows.take(valid) if len(valid) else None
            if self.verbose:
                progress(f"{type(self).__name__}: {self._cost(prepared, config)}")
            self.history_ = fit(
                model,
                rows.take(train),
                config=config,
                valid=held,
                objective=task.objective,
                measure=lambda m, part: task.measure(m, part, batch_size=PREDICTED).scores,
                collate=task.collate,
                verbose=self.verbose,
            )
            if held is not None and task.target is not None:
                calibrate(model, task, held)
            self.task_, self.model_ = keep_rows(task, model, rows)  # type: ignore[assignment]

    def _build(self, task: TableTask, seed: int) -> NPTModel:
        with isolated(seed):
            return task.build(self._model_options())

    def _cost(self, prepared: Prepared, config: TrainingConfig) -> FitCost:
        """Return what a training will cost, from a few steps of a fresh model."""
        task, rows, train, _ = prepared
        return fit_cost(
            lambda: self._build(task, config.seed),
            rows.take(train[: config.batch_size])._columns(),
            objective=task.objective,
            config=config,
            steps=config.epochs * config.steps_of_epoch(len(train)),
        )

    def estimate_cost(self, X: TableLike, y: ArrayLike | None = None) -> FitCost:
        """Return what a fit on a table will cost, from three training steps.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The training table.

        y : array-like of shape (n_samples,), default=None
            The target.

        Returns
        -------
        cost : FitCost
            Processor seconds, bytes and weights.
        """
        from sklearn.base import clone

        seed = 0
        prepared = clone(self)._prepared(X, y, seed)  # a fit would set attributes of self
        with self._threads():
            return self._cost(prepared, self._training(len(prepared.train), seed))

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use as many threads of torch as the options say, inside the context."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._fit_options().n_jobs or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _prepared(self, X: TableLike, y: ArrayLike | None, seed: int) -> Prepared:
        """Return a training table after all checks; a subclass knows its target."""
        raise NotImplementedError  # abstract

    def _describe_target(self, y: TargetColumn, weight: NDArray[np.float64]) -> TableColumn:
        """Return what the target is, from its values and the weights of the rows."""
        raise NotImplementedError  # abstract

    # prediction

    def _rows(self, X: TableLike) -> TableRows:
        check_is_fitted(self)
        return self.task_.rows(validate_table(self, X, reset=False))

    def _logits(self, X: TableLike, model: NPTModel | None = None) -> torch.Tensor:
        """Return the predictions of rows; those of a transductive model see each other."""
        found = self._answers(self._rows(X), lambda output: output.logits, model).double()
        check_finite({"logits": found})
        return found

    def _answers(
        self,
        rows: TableRows,
        read: Callable[[NPTOutput], torch.Tensor],
        model: NPTModel | None = None,
    ) -> torch.Tensor:
        """Return what ``read`` takes from the outputs of all rows."""
        model = self.model_ if model is None else model
        with self._threads(), eval_mode(model), torch.no_grad():
            return read_outputs(model, rows, read)

    def impute(self, X: TableLike) -> ValidTable:
        """Return a table whose missing cells are predicted from the other cells and rows.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The table.

        Returns
        -------
        filled : frame or ndarray of shape (n_samples, n_features)
            In the form of the training table; numbers are expected values, categories the most
            probable ones. Cells of a column that was empty in training stay missing.
        """
        check_is_fitted(self)
        X = validate_table(self, X, reset=False)
        rows = self.task_.rows(X)
        d = len(self.task_.columns)
        cells = self._answers(rows, self._predict_cells).double()
        check_finite({"cells": cells})
        filled = cells.numpy()
        values, missing = rows.values[:, :d].double().numpy(), rows.missing[:, :d].numpy()
        empty = np.array([c.missing_share == 1 for c in self.task_.columns])
        found = self.task_.encoder.decode(np.where(missing, filled, values), missing & empty)
        return keep_known(found, X, missing)

    def _predict_cells(self, output: NPTOutput) -> torch.Tensor:
        """Return the most probable value of every feature."""
        heads, columns = self.model_.heads, self.task_.columns
        found = [heads.column(output.hidden, j) for j in range(len(columns))]
        return torch.stack(
            [
                # the largest of NaN would be the first category
                torch.where(f.isfinite().all(1), f.argmax(1), torch.nan).to(f.dtype)
                if c.is_categorical
                else f[:, 0]
                for c, f in zip(columns, found, strict=True)
            ],
            dim=1,
        )

    # folders

    @classmethod
    def _parameters_of(cls, task: TableTask, model: NPTModel) -> dict[str, object]:
        config = {**vars(model.config), "max_context": task.max_context}
        options = {f.name: config[f.name] for f in fields(TableFitOptions) if f.name in config}
        found = {name: config[name] for name in cls._get_param_names() if name in config}
        return {**found, "options": TableFitOptions(**options)}

    def _restore(self, content: Mapping[str, object]) -> None:
        self.n_features_in_ = len(self.task_.columns)
        names = self.task_.encoder.__dict__.get("feature_names_in_")
        if names is not None:
            self.feature_names_in_ = names

    def __sklearn_tags__(self) -> Tags:
        tags = accept_tables(super().__sklearn_tags__())
        tags.non_deterministic = False
        return tags
