"""Attention between datapoints as scikit-learn's classifier."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.support.command import UserError, needs
from primal_attention.tasks.estimators import restore_classes
from primal_attention.tasks.tables.base import TargetColumn
from primal_attention.tasks.tables.columns import TableColumn, TableLike, read_cells
from primal_attention.tasks.tables.supervised import SupervisedEstimator

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets

__all__ = ["TableClassifier"]


class TableClassifier(ClassifierMixin, SupervisedEstimator):  # type: ignore[misc]
    """Classifier with attention between the rows of a table (Non-Parametric Transformer).

    A row attends to training rows and reads their classes. Numbers, categories, dates and missing
    values go in as they are. Predictions do not depend on the rows beside them. Probabilities are
    calibrated on held-out rows.

    Parameters
    ----------
    attention : str, default="softmax"
        Attention between rows: a name of ``primal_attention.list_attentions(cross=True)``.
        ``"primal-dual"`` is linear in the number of rows and keeps no row after ``fit``; it
        smooths and cannot copy. ``"primal-sparse"`` is softmax over the rows that a primal kernel
        retrieves.

    dim : int, default=32
        Width of the embedding of a cell.

    num_heads : int, default=4
        Heads of every attention; must divide ``dim``.

    num_layers : int, default=2
        Layers, each of two blocks: between rows, and between the cells of a row.

    max_epochs : int, default=20
        Epochs of 50 training steps, after each of which the validation rows are scored.

    batch_size : int, default=256
        Rows of a training step; all of a smaller table.

    learning_rate : float, default=2e-3
        Peak learning rate.

    options : TableFitOptions, dict or None, default=None
        What is rarely changed: options of the attention, steps of an epoch, embedding of numbers,
        what is hidden in training, context, categorical features, validation, threads.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters, what is hidden, and the validation rows.

    verbose : bool or None, default=None
        Whether to show progress, and the expected cost before; by default a bar if there is a
        terminal.

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
    >>> from primal_attention.tasks.tables import TableClassifier
    >>> X, y = load_iris(return_X_y=True, as_frame=True)
    >>> model = TableClassifier(dim=16, max_epochs=2, random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.8)
    True
    """

    classes_: np.ndarray

    def _read_target(self, y: np.ndarray) -> NDArray[np.float64]:
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"The target has only one class, {self.classes_[0]!r}; a classifier needs at least "
                "two."
            )
        return codes.astype(np.float64)

    def _describe_target(self, y: TargetColumn, weight: NDArray[np.float64]) -> TableColumn:
        cells = read_cells(self.classes_)
        words = tuple(map(str, self.classes_))
        return TableColumn(
            y.name, "categorical", categories=words, form=cells.form, dtype=cells.dtype
        )

    def predict(self, X: TableLike) -> np.ndarray:
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

    def predict_proba(self, X: TableLike) -> NDArray[np.float64]:
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

    def _rate(self, logits: Tensor, y: np.ndarray) -> float:
        return float(np.mean(self.classes_[logits.argmax(1).numpy()] == y))

    def _extra(self) -> dict[str, object]:
        classes = [c.item() if hasattr(c, "item") else c for c in self.classes_]
        return {"classes": classes, "classes_dtype": self.classes_.dtype.str}

    def _restore(self, content: Mapping[str, object]) -> None:
        super()._restore(content)
        if not self.task_.is_class:
            raise UserError("the model predicts no classes; load it with TableRegressor.")
        target = self.task_._numeric_target
        self.classes_ = np.array(target.category_values().tolist())
        if "classes" in content:
            dtype = content.get("classes_dtype")
            self.classes_ = restore_classes(content["classes"], dtype, len(self.classes_))
