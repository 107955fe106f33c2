"""Attention between datapoints as scikit-learn's classifier."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, needs
from primal_attention.tasks.estimators import restore_classes
from primal_attention.tasks.tables.columns import TableColumn, read_array
from primal_attention.tasks.tables.supervised import SupervisedEstimator

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets

__all__ = ["NPTClassifier"]


class NPTClassifier(ClassifierMixin, SupervisedEstimator):  # type: ignore[misc]
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
    >>> from primal_attention.tasks.tables import NPTClassifier
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

    def _restore(self, content: Mapping[str, Any]) -> None:
        super()._restore(content)
        if not self.task_.is_class:
            raise UserError("the model predicts no classes; load it with NPTRegressor.")
        target = self.task_._numeric_target
        self.classes_ = np.array(target.category_values().tolist())
        if "classes" in content:
            dtype = content.get("classes_dtype")
            self.classes_ = restore_classes(content["classes"], dtype, len(self.classes_))
