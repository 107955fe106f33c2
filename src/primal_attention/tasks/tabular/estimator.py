"""Attention between datapoints as scikit-learn's classifier and regressor."""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from primal_attention.command import UserError, needs
from primal_attention.tasks.tabular.base import NPTEstimator, Prepared
from primal_attention.tasks.tabular.columns import TableColumn, read_array
from primal_attention.tasks.tabular.encoding import validate_table
from primal_attention.tasks.tabular.influence import RowInfluence, corrupt, row_influence
from primal_attention.tasks.tabular.model import NPTModel

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

__all__ = ["CorruptionTest", "NPTClassifier", "NPTRegressor"]


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


class _Supervised(NPTEstimator):
    """What classifier and regressor share."""

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        X_unlabeled: Any = None,
        eval_set: tuple[Any, Any] | None = None,
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
            Further rows without a target, for ``semi_supervised=True``.

        eval_set : tuple (X, y), default=None
            Rows that choose the epoch and calibrate, instead of a part of the training table.

        Returns
        -------
        self : NPTEstimator
            Fitted.
        """
        if X_unlabeled is not None and not self.semi_supervised:
            raise ValueError(
                "X_unlabeled is given, but semi_supervised is False; set it to True, or leave the "
                "rows out."
            )
        self._options()  # wrong parameters raise before any work
        seed = self._seed()
        self._train(self._prepared(X, y, seed, sample_weight, X_unlabeled, eval_set), seed)
        return self

    def _prepared(
        self,
        X: Any,
        y: Any,
        seed: int,
        weight: Any = None,
        unlabeled: Any = None,
        eval_set: Any = None,
    ) -> Prepared:
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} requires y to be passed, but the target y is None."
            )
        X = validate_table(self, X, reset=True)
        check_consistent_length(X, y)
        name = str(getattr(y, "name", None) or "target")
        y = column_or_1d(y, warn=True)
        if y.dtype.kind == "f":
            assert_all_finite(y, input_name="y")
        found = self._read_target(y)
        if eval_set is not None:
            eval_set = (eval_set[0], np.asarray(eval_set[1]))
        return self._prepare(X, found, name, weight, seed, unlabeled, eval_set)

    def _read_target(self, y: NDArray[Any]) -> NDArray[np.float64]:
        """Return the codes of classes, or numbers."""
        raise NotImplementedError  # abstract

    def row_influence(
        self, X: Any, k: int = 10, *, rows: tuple[Any, Any] | None = None
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
            Training rows to consider. Needed for ``row_attention="primal"``, which keeps none.

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
                "with row_attention='primal'. With row_attention='none' rows have no influence."
            )
        return row_influence(model, self.task_, self._rows(X), k)

    def _with_rows(self, rows: tuple[Any, Any] | None) -> NPTModel:
        """Return the model, with given rows as its context."""
        if rows is None:
            return self.model_
        table = self.task_.rows(rows[0], rows[1])
        return self.model_.with_context(table.values, table.missing).eval()

    def corruption_test(
        self, X: Any, y: ArrayLike, *, repeats: int = 3, rows: tuple[Any, Any] | None = None
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
            Training rows to shuffle. Needed for ``row_attention="primal"``, which keeps none.

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
        seeds = np.random.default_rng(0).integers(2**31, size=repeats)
        scores = [self._rate(X, y, corrupt(model, int(seed))) for seed in seeds]
        return CorruptionTest(self._rate(X, y, model), float(np.mean(scores)))

    def _rate(self, X: Any, y: Any, model: Any) -> float:
        """Return the score of the estimator with another model."""
        raise NotImplementedError  # abstract

    def attention_maps(self, X: Any) -> dict[str, NDArray[np.float64]]:
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
        from primal_attention.tasks.tabular.influence import attention_maps

        return attention_maps(self.model_, self._rows(X))


class NPTClassifier(ClassifierMixin, _Supervised):  # type: ignore[misc]
    """Classifier with attention between the rows of a table (Non-Parametric Transformer).

    A row attends to training rows and reads their classes. Numbers, categories, dates and missing
    values go in as they are. Predictions do not depend on the rows beside them. Probabilities are
    calibrated on held-out rows.

    Parameters
    ----------
    d_embed : int, default=32
        Width of the embedding of a cell.

    depth : int, default=4
        Blocks, half of them between rows, half between the cells of a row; even.

    heads : int, default=4
        Heads of every attention; must divide ``d_embed``.

    row_attention : {"softmax", "primal", "hybrid", "none"}, default="softmax"
        Attention between rows. ``"primal"`` is linear in the number of rows and keeps no row after
        ``fit``; it smooths and cannot copy. ``"hybrid"`` adds one softmax layer over the rows that
        a primal kernel retrieves. ``"none"`` is a Transformer over the cells of single rows.

    p_feature : float, default=0.15
        Probability that a known feature is hidden in training, to be predicted.

    p_target : float, default=0.5
        Probability that a row's target is hidden in training. With 1 the model never reads a
        target.

    semi_supervised : bool, default=False
        Whether ``fit`` takes further rows without a target, as ``X_unlabeled``.

    context : {"train", "transductive"}, default="train"
        What rows to predict attend to: training rows, or also each other (the published form).
        Then a prediction depends on the rows beside it.

    max_context_rows : int, default=4096
        Most training rows that predictions attend to; a larger table is sampled. ``"primal"`` uses
        all rows.

    batch_rows : int, default=None
        Rows of a training step; by default 256, or all of a smaller table.

    steps : int, default=1000
        Training steps.

    optimizer : {"adamw", "lamb-lookahead"}, default="adamw"
        Optimiser; the second is the published one, with its schedule.

    lr : float, default=2e-3
        Peak learning rate.

    numbers : {"piecewise", "linear", "periodic"}, default="piecewise"
        Embedding of numbers; ``"linear"`` is the published one.

    validation : float, default=0.15
        Share of the rows that choose the epoch and calibrate; they join the context after training.
        None of a table with fewer than 20 rows.

    categorical_features : "auto" or array-like of int, str or bool, default="auto"
        Columns of numbers that are categories; words and booleans always are.

    time_limit : float, default=None
        Processor seconds of training after which it ends; the schedule is shortened to fit.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, what is hidden, and the validation rows.

    n_threads : int, default=None
        Threads of torch; by default unchanged.

    verbose : int, default=0
        With 1, print the expected cost before the training and show a progress bar.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The classes.

    model_ : NPTModel
        The trained model; its context is part of it.

    task_ : TableTask
        Columns and target of the training table.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    n_features_in_ : int
        Number of features.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if the training table was a frame.

    References
    ----------
    J. Kossen, N. Band, C. Lyle, A. N. Gomez, T. Rainforth, Y. Gal, "Self-Attention Between
    Datapoints: Going Beyond Individual Input-Output Pairs in Deep Learning", NeurIPS 2021.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from primal_attention.tasks.tabular import NPTClassifier
    >>> X, y = load_iris(return_X_y=True, as_frame=True)
    >>> model = NPTClassifier(d_embed=16, steps=60, random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.8)
    True
    """

    classes_: NDArray[Any]

    def _read_target(self, y: NDArray[Any]) -> NDArray[np.float64]:
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"The target has only one class, {self.classes_[0]!r}; a classifier needs at least "
                "two."
            )
        return codes.astype(np.float64)

    def _describe_target(
        self, name: str, y: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> TableColumn:
        cells = read_array(self.classes_)
        words = tuple(map(str, self.classes_))
        return TableColumn(
            name, "categorical", categories=words, form=cells.form, dtype=cells.dtype
        )

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of every row.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The rows.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Classes.
        """
        logits = self._logits(X)  # raises for an estimator that is not fitted
        return self.classes_[logits.argmax(1).numpy()]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return calibrated probabilities of the classes.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The rows.

        Returns
        -------
        p : ndarray of shape (n_samples, n_classes)
            Probabilities in the order of ``classes_``.
        """
        return self._logits(X).softmax(1).numpy()

    def _rate(self, X: Any, y: Any, model: Any) -> float:
        found = self.classes_[self._logits(X, model).argmax(1).numpy()]
        return float(np.mean(found == np.asarray(y)))

    def _extra(self) -> dict[str, Any]:
        classes = [c.item() if hasattr(c, "item") else c for c in self.classes_]
        return {"classes": classes, "classes_dtype": self.classes_.dtype.str}

    def _restore(self, content: dict[str, Any]) -> None:
        if not self.task_.is_class:
            raise UserError("the model predicts no classes; load it with NPTRegressor.")
        own = np.array(self.task_._numeric_target.category_values().tolist())
        given = np.array(content.get("classes", own), content.get("classes_dtype", own.dtype))
        if len(given) != len(own):
            raise ValueError(f"it has {len(given)} classes, the model {len(own)}")
        self.classes_ = given


class NPTRegressor(RegressorMixin, _Supervised):  # type: ignore[misc]
    """Regressor with attention between the rows of a table (Non-Parametric Transformer).

    A row attends to training rows and reads their targets: a learned kernel smoother. Each
    prediction has a deviation, calibrated on held-out rows.

    Parameters are those of :class:`NPTClassifier`.

    Parameters
    ----------
    d_embed : int, default=32
        Width of the embedding of a cell.

    depth : int, default=4
        Blocks, half of them between rows, half between the cells of a row; even.

    heads : int, default=4
        Heads of every attention; must divide ``d_embed``.

    row_attention : {"softmax", "primal", "hybrid", "none"}, default="softmax"
        Attention between rows.

    p_feature : float, default=0.15
        Probability that a known feature is hidden in training, to be predicted.

    p_target : float, default=0.5
        Probability that a row's target is hidden in training.

    semi_supervised : bool, default=False
        Whether ``fit`` takes further rows without a target, as ``X_unlabeled``.

    context : {"train", "transductive"}, default="train"
        What rows to predict attend to: training rows, or also each other.

    max_context_rows : int, default=4096
        Most training rows that predictions attend to.

    batch_rows : int, default=None
        Rows of a training step; by default 256, or all of a smaller table.

    steps : int, default=1000
        Training steps.

    optimizer : {"adamw", "lamb-lookahead"}, default="adamw"
        Optimiser; the second is the published one.

    lr : float, default=2e-3
        Peak learning rate.

    numbers : {"piecewise", "linear", "periodic"}, default="piecewise"
        Embedding of numbers.

    validation : float, default=0.15
        Share of the rows that choose the epoch and calibrate.

    categorical_features : "auto" or array-like of int, str or bool, default="auto"
        Columns of numbers that are categories.

    time_limit : float, default=None
        Processor seconds of training after which it ends.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, what is hidden, and the validation rows.

    n_threads : int, default=None
        Threads of torch; by default unchanged.

    verbose : int, default=0
        With 1, print the expected cost and show a progress bar.

    Attributes
    ----------
    model_ : NPTModel
        The trained model; its context is part of it.

    task_ : TableTask
        Columns and target of the training table.

    history_ : History
        Loss and scores, epoch by epoch; None after :meth:`load`.

    n_features_in_ : int
        Number of features.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if the training table was a frame.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.tabular import NPTRegressor
    >>> X = np.random.default_rng(0).normal(size=(80, 3))
    >>> model = NPTRegressor(d_embed=16, steps=60, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict(X[:5], return_std=True)
    >>> mean.shape, bool((std > 0).all())
    ((5,), True)
    """

    def _read_target(self, y: NDArray[Any]) -> NDArray[np.float64]:
        try:
            numbers = np.asarray(y, np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"The target must be numbers, got {type_of_target(y)} of type {y.dtype}; use "
                "NPTClassifier for classes."
            ) from None
        assert_all_finite(numbers, input_name="y")
        return numbers

    def _describe_target(
        self, name: str, y: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> TableColumn:
        cells = read_array(y)
        return TableColumn.fit(name, cells, weight, is_categorical=False, max_categories=2)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the expected target of every row.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The rows.

        return_std : bool, default=False
            Whether to return deviations too.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Expected targets; with ``return_std=True`` a tuple with their deviations.
        """
        mean, std = self._moments(self._logits(X))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> NDArray[np.float64]:
        """Return central intervals that hold the target with a probability.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The rows.

        coverage : float, default=0.9
            The probability.

        Returns
        -------
        intervals : ndarray of shape (n_samples, 2)
            Lower and upper ends.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must lie between 0 and 1, got {coverage}.")
        mean, std = self._moments(self._logits(X))
        half = 2**0.5 * float(torch.erfinv(torch.tensor(coverage, dtype=torch.float64)))
        return np.stack([mean - half * std, mean + half * std], 1)

    def _moments(self, logits: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        column = self.task_._numeric_target
        mean, log_std = logits.numpy().T
        return column.mean + column.scale * mean, column.scale * np.exp(log_std)

    def _rate(self, X: Any, y: Any, model: Any) -> float:
        mean, _ = self._moments(self._logits(X, model))
        return float(np.sqrt(np.mean((mean - np.asarray(y, np.float64)) ** 2)))

    def _restore(self, content: dict[str, Any]) -> None:
        if self.task_.target is None or self.task_.is_class:
            raise UserError("the model predicts no numbers; load it with NPTClassifier.")
