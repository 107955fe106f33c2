"""What the classifier and the regressor of tables share: fit, influences, corruption."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from primal_attention.support.command import needs
from primal_attention.tasks.tables.base import TableEstimator, TargetColumn
from primal_attention.tasks.tables.columns import TableLike
from primal_attention.tasks.tables.encoding import validate_table
from primal_attention.tasks.tables.influence import (
    RowInfluence,
    corrupt,
    row_attention_maps,
    row_influence,
)
from primal_attention.tasks.tables.model import NPTModel
from primal_attention.tasks.tables.preparing import Prepared

with needs("sklearn", "An estimator of tables"):
    from sklearn.utils import assert_all_finite
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

__all__ = ["CorruptionTest", "SupervisedEstimator"]


class CorruptionTest(NamedTuple):
    """Score of a model with its context, and with a context whose columns are shuffled."""

    score: float
    """Accuracy, or root mean squared error."""
    corrupted: float
    """The same without information between rows, mean over shuffles."""

    @property
    def change(self) -> float:
        """Corrupted minus whole score."""
        return self.corrupted - self.score


class SupervisedEstimator(TableEstimator):
    """Base class of ``TableClassifier`` and ``TableRegressor``."""

    def fit(
        self,
        X: TableLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        X_unlabeled: TableLike | None = None,
        eval_set: tuple[TableLike, ArrayLike] | None = None,
        time_limit: float | None = None,
    ) -> Self:
        """Train on a table.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The training table: numbers, categories, dates, missing values.

        y : array-like of shape (n_samples,)
            The target.

        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each row. Whole numbers equal repeated rows; zero leaves a row out.

        X_unlabeled : frame or array-like, default=None
            Further rows without a target, with ``options={"semi_supervised": True}``.

        eval_set : tuple (X, y), default=None
            Rows that choose the epoch and calibrate, instead of a part of the training table.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : TableClassifier or TableRegressor
            Fitted.
        """
        self._check(time_limit)
        if X_unlabeled is not None and not self._fit_options().semi_supervised:
            raise ValueError(
                "X_unlabeled is given, but semi_supervised is False; set it to True in options, or "
                "leave the rows out."
            )
        seed = self._seed()
        prepared = self._prepared(X, y, seed, sample_weight, X_unlabeled, eval_set)
        self._train(prepared, seed, time_limit)
        return self

    def _prepared(
        self,
        X: TableLike,
        y: ArrayLike | None,
        seed: int,
        weight: ArrayLike | None = None,
        unlabeled: TableLike | None = None,
        eval_set: tuple[TableLike, ArrayLike] | None = None,
    ) -> Prepared:
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} requires y to be passed, but the target y is None."
            )
        X = validate_table(self, X, reset=True)
        check_consistent_length(X, y)
        name = str(getattr(y, "name", None) or "target")
        given: np.ndarray = column_or_1d(y, warn=True)
        if given.dtype.kind == "f":
            assert_all_finite(given, input_name="y")
        target = TargetColumn(name, self._read_target(given))
        if eval_set is not None:
            eval_set = (eval_set[0], np.asarray(eval_set[1]))
        return self._prepare(X, target, seed, weight, unlabeled, eval_set)

    def _read_target(self, y: np.ndarray) -> NDArray[np.float64]:
        """Return the codes of classes, or numbers."""
        raise NotImplementedError  # abstract

    def row_influence(
        self, X: TableLike, k: int = 10, *, rows: tuple[TableLike, ArrayLike] | None = None
    ) -> list[RowInfluence]:
        """Return the training rows on which each prediction leans most, in one pass.

        The influence of a row is the first-order change of the prediction when the row's vector is
        removed from every row attention: of the probability of the predicted class, or of the
        predicted number.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            Rows to explain.

        k : int, default=10
            Training rows to return for each, those with the largest absolute influence.

        rows : tuple (X, y), default=None
            Training rows to consider. Needed with ``attention="primal-dual"``, which keeps none.

        Returns
        -------
        influences : list of RowInfluence
            One for each row: indices into the context, influences, features and targets.
        """
        check_is_fitted(self)
        model = self._with_rows(rows)
        if not model.config.context_rows:
            raise ValueError(
                "The model keeps no training rows, so none can have influence; pass rows=(X, y) "
                "with attention='primal-dual'. With has_rows=False rows have no influence."
            )
        return row_influence(model, self.task_, self._rows(X), k)

    def _with_rows(self, rows: tuple[TableLike, ArrayLike] | None) -> NPTModel:
        """Return the model, with given rows as its context."""
        if rows is None:
            return self.model_
        table = self.task_.rows(rows[0], rows[1])
        return self.model_.with_context(table.values, table.missing).eval()

    def corruption_test(
        self,
        X: TableLike,
        y: ArrayLike,
        *,
        repeats: int = 3,
        rows: tuple[TableLike, ArrayLike] | None = None,
    ) -> CorruptionTest:
        """Return how much worse predictions become when the context loses its information.

        Every column of the context, the target included, is shuffled by itself. The rows to
        predict stay as they are, and so do the values of each column.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            Rows to predict.

        y : array-like of shape (n_samples,)
            Their targets.

        repeats : int, default=3
            Shuffles; their mean is returned.

        rows : tuple (X, y), default=None
            Training rows to shuffle. Needed with ``attention="primal-dual"``, which keeps none.

        Returns
        -------
        test : CorruptionTest
            Both scores. A model that uses no other rows has equal ones.
        """
        check_is_fitted(self)
        model = self._with_rows(rows)
        if model.config.has_rows and not model.config.context_rows:
            raise ValueError(
                "The model keeps no training rows, so none can be shuffled; pass rows=(X, y), the "
                "training table."
            )
        y = np.asarray(y)
        seeds = np.random.default_rng(0).integers(2**31, size=repeats)
        scores = [self._rate(self._logits(X, corrupt(model, int(seed))), y) for seed in seeds]
        return CorruptionTest(self._rate(self._logits(X, model), y), float(np.mean(scores)))

    def _rate(self, logits: Tensor, y: np.ndarray) -> float:
        """Return the accuracy, or the root mean squared error."""
        raise NotImplementedError  # abstract

    def attention_maps(self, X: TableLike) -> dict[str, NDArray[np.float64]]:
        """Return how much rows attend to the rows of the context, by layer.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            Rows that attend.

        Returns
        -------
        maps : dict of ndarray of shape (heads, n_samples, context_rows)
            Weights of every head; for layers that have a matrix of weights.
        """
        return row_attention_maps(self.model_, self._rows(X))
