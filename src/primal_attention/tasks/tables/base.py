"""What the estimators of Non-Parametric Transformers share: parameters, training, folders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.models import PretrainedModel
from primal_attention.support.command import did_you_mean, needs, progress
from primal_attention.support.randomness import isolated
from primal_attention.tasks.estimators import SavedEstimator
from primal_attention.tasks.tables.columns import TableColumn
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.encoding import TableEncoder, validate_table
from primal_attention.tasks.tables.fitting import PREDICTED, calibrate, keep_rows
from primal_attention.tasks.tables.model import NPTModel, NPTOutput
from primal_attention.tasks.tables.preparing import (
    Prepared,
    keep_known,
    merge_rows,
    split_rows,
    take_rows,
)
from primal_attention.tasks.tables.settings import ROW_ATTENTIONS, NPTOptions
from primal_attention.tasks.tables.task import TableTask
from primal_attention.tasks.task import Task
from primal_attention.tasks.trained import check_finite
from primal_attention.training import FitCost, History, TrainingConfig, fit, fit_cost
from primal_attention.training.evaluation import eval_mode

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted

__all__ = ["NPTEstimator"]

_EPOCHS = 20
"""Times that the validation rows are scored in a training."""
_BATCH = 256
"""Rows of a training step, unless ``batch_rows`` is given."""


class NPTEstimator(SavedEstimator, BaseEstimator):  # type: ignore[misc]
    """Base class of :class:`NPTClassifier`, :class:`NPTRegressor` and :class:`NPTImputer`."""

    _task: ClassVar[type[Task]] = TableTask
    _model: ClassVar[type[PretrainedModel]] = NPTModel
    task_: TableTask
    model_: NPTModel
    history_: History | None

    def __init__(
        self,
        d_embed: int = 32,
        depth: int = 4,
        heads: int = 4,
        row_attention: str = "softmax",
        p_feature: float = 0.15,
        p_target: float = 0.5,
        semi_supervised: bool = False,
        context: str = "train",
        max_context_rows: int = 4096,
        batch_rows: int | None = None,
        steps: int = 1000,
        optimizer: str = "adamw",
        lr: float = 2e-3,
        numbers: str = "piecewise",
        validation: float = 0.15,
        categorical_features: Any = "auto",
        time_limit: float | None = None,
        random_state: int | np.random.RandomState | None = None,
        n_threads: int | None = None,
        verbose: int | bool | None = 0,
    ) -> None:
        self.d_embed = d_embed
        self.depth = depth
        self.heads = heads
        self.row_attention = row_attention
        self.p_feature = p_feature
        self.p_target = p_target
        self.semi_supervised = semi_supervised
        self.context = context
        self.max_context_rows = max_context_rows
        self.batch_rows = batch_rows
        self.steps = steps
        self.optimizer = optimizer
        self.lr = lr
        self.numbers = numbers
        self.validation = validation
        self.categorical_features = categorical_features
        self.time_limit = time_limit
        self.random_state = random_state
        self.n_threads = n_threads
        self.verbose = verbose

    # settings

    def _options(self) -> NPTOptions:
        if self.depth < 2 or self.depth % 2:
            raise ValueError(
                f"depth must be an even number of blocks, at least 2, got {self.depth}: one block "
                "between rows and one between cells are a layer."
            )
        if self.row_attention not in ROW_ATTENTIONS:
            raise ValueError(
                f"row_attention must be one of {', '.join(ROW_ATTENTIONS)}, got "
                f"{self.row_attention!r}.{did_you_mean(str(self.row_attention), ROW_ATTENTIONS)}"
            )
        if self.optimizer not in ("adamw", "lamb-lookahead"):
            raise ValueError(f"optimizer must be adamw or lamb-lookahead, got {self.optimizer!r}.")
        return NPTOptions(
            dim=self.d_embed,
            num_heads=self.heads,
            num_layers=self.depth // 2,
            p_feature=self.p_feature,
            p_target=self.p_target,
            context=self.context,  # type: ignore[arg-type]
            numbers=self.numbers,  # type: ignore[arg-type]
            **ROW_ATTENTIONS[self.row_attention],  # type: ignore[arg-type]
        )

    def _training(self, rows: int, seed: int) -> TrainingConfig:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")
        epochs = min(_EPOCHS, self.steps)
        return TrainingConfig(
            epochs=epochs,
            epoch_steps=-(-self.steps // epochs),
            batch_size=min(rows, self.batch_rows or _BATCH),
            lr=self.lr,
            optimizer=self.optimizer,  # type: ignore[arg-type]
            schedule="flat-cosine" if self.optimizer == "lamb-lookahead" else "cosine",
            warmup=0.0 if self.optimizer == "lamb-lookahead" else 0.05,
            max_seconds=self.time_limit,
            seed=seed,
        )

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    # training

    def _prepare(
        self,
        X: Any,
        y: NDArray[np.float64] | None,
        name: str,
        weight: Any,
        seed: int,
        unlabeled: Any = None,
        eval_set: Any = None,
    ) -> Prepared:
        """Return the encoded training rows and their parts.

        Equal rows become one with the sum of their weights, in an order that depends on their
        content alone. So weights of whole numbers equal repeated rows, and the order of the rows
        has no effect.

        Args:
            X: The table, validated.
            y: Codes of classes, or numbers; ``None`` without a target.
            name: Name of the target.
            weight: Weight of every row; zero leaves a row out.
            seed: Seed of the validation part.
            unlabeled: Further rows without a target.
            eval_set: Rows with a target that choose the epoch, instead of a part of ``X``.
        """
        weights = _check_sample_weight(weight, X, ensure_non_negative=True)
        kept = np.flatnonzero(weights > 0)
        if len(kept) < 2:
            raise ValueError(
                f"Found array with {len(kept)} sample(s) of positive weight, and a model of "
                "attention between rows needs at least 2; n_samples=1 gives nothing to attend to."
            )
        encoder = TableEncoder(self.categorical_features)
        first, total = merge_rows(encoder.fit(X, sample_weight=weights), X, y, weights, kept)
        table = take_rows(X, first)
        encoder = encoder.fit(table, sample_weight=total)
        target, codes = None, None
        if y is not None:
            target = self._describe_target(name, y[first], total)
            codes = y[first] if target.is_categorical else (y[first] - target.mean) / target.scale
        task = TableTask.fit(encoder, target, 0)
        own = TableRows.join(
            encoder.encode(table),
            codes,
            is_class=task.is_class,
            weight=None if np.allclose(total, total[0]) else total / total.mean(),
        )
        train, valid = split_rows(own, 0.0 if eval_set is not None else self.validation, seed)
        if unlabeled is not None:
            more = task.rows(validate_table(self, unlabeled, reset=False))
            own, train = own.append(more), np.append(train, len(own) + np.arange(len(more)))
        if eval_set is not None:
            more = task.rows(validate_table(self, eval_set[0], reset=False), eval_set[1])
            own, valid = own.append(more), len(own) + np.arange(len(more))
        rows = min(len(train), self.max_context_rows)
        task = replace(task, context_rows=rows, max_context=self.max_context_rows)
        return Prepared(task, own, train, valid)

    def _train(self, prepared: Prepared, seed: int) -> None:
        """Train a model, calibrate it, and give it all rows as its context."""
        task, rows, train, valid = prepared
        config = self._training(len(train), seed)
        if task.target is not None and not task.is_class:
            # the likelihood of the deviation is best long before the error of the mean is
            config = replace(config, monitor="RMSE")
        with _threads(self.n_threads):
            model = _build(task, self._options(), seed)
            parts = rows.take(train), rows.take(valid) if len(valid) else None
            if self.verbose:
                progress(f"{type(self).__name__}: {self._cost(prepared, config)}")
            self.history_ = fit(
                model,
                parts[0],
                config=config,
                valid=parts[1],
                objective=task.objective,
                measure=lambda m, part: task.measure(m, part, batch_size=PREDICTED).scores,
                collate=task.collate,
                verbose=bool(self.verbose),
            )
            if parts[1] is not None and task.target is not None:
                calibrate(model, task, parts[1])
            self.task_, self.model_ = keep_rows(task, model, rows)  # type: ignore[assignment]

    def _cost(self, prepared: Prepared, config: TrainingConfig) -> FitCost:
        """Return what a training will cost, from a few steps of a fresh model."""
        task, rows, train, _ = prepared
        return fit_cost(
            lambda: _build(task, self._options(), config.seed),
            rows.take(train[: config.batch_size])._columns(),
            objective=task.objective,
            config=config,
            steps=config.epochs * config.steps_of_epoch(len(train)),
        )

    def estimate_cost(self, X: Any, y: Any = None) -> FitCost:
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

        probe = clone(self).set_params(steps=1, verbose=0, random_state=0)
        seed = 0
        prepared = probe._prepared(X, y, seed)
        config = self._training(len(prepared.train), seed)
        with _threads(self.n_threads):
            return self._cost(prepared, config)

    def _prepared(self, X: Any, y: Any, seed: int) -> Prepared:
        """Return a training table after all checks; a subclass knows its target."""
        raise NotImplementedError  # abstract

    def _describe_target(
        self, name: str, y: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> TableColumn:
        """Return what the target is, from its values and the weights of the rows."""
        raise NotImplementedError  # abstract

    # prediction

    def _rows(self, X: Any) -> TableRows:
        check_is_fitted(self)
        return self.task_.rows(validate_table(self, X, reset=False))

    def _logits(self, X: Any, model: NPTModel | None = None) -> torch.Tensor:
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
        size = len(rows) if self.context == "transductive" else PREDICTED
        pairs = zip(rows.values.split(size), rows.missing.split(size), strict=True)
        with _threads(self.n_threads), eval_mode(model), torch.no_grad():
            return torch.cat([read(model(v, m)) for v, m in pairs])

    def impute(self, X: Any) -> Any:
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
    def _parameters_of(cls, task: Any, model: Any) -> dict[str, Any]:
        config = model.config
        kinds = {str(v.get("attention", "none")): k for k, v in ROW_ATTENTIONS.items()}
        return {
            "d_embed": config.dim,
            "depth": 2 * config.num_layers,
            "heads": config.num_heads,
            "row_attention": kinds.get(config.attention, "softmax") if config.has_rows else "none",
            "context": config.context,
            "numbers": config.numbers,
        }

    def _restore(self, content: Mapping[str, Any]) -> None:
        self.n_features_in_ = len(self.task_.columns)
        names = self.task_.encoder.__dict__.get("feature_names_in_")
        if names is not None:
            self.feature_names_in_ = names

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.non_deterministic = False
        return tags


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use so many threads of torch inside the context; ``None`` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(task: TableTask, options: NPTOptions, seed: int) -> NPTModel:
    with isolated(seed):
        return task.build(options)
