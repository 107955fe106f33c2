"""Attention between datapoints as scikit-learn's regressor, with intervals."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.support.command import UserError, needs
from primal_attention.tasks.tables.base import TargetColumn
from primal_attention.tasks.tables.columns import TableColumn, TableLike, read_cells
from primal_attention.tasks.tables.supervised import SupervisedEstimator

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import RegressorMixin
    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import type_of_target

__all__ = ["TableRegressor"]


class TableRegressor(RegressorMixin, SupervisedEstimator):  # type: ignore[misc]
    """Regressor with attention between the rows of a table (Non-Parametric Transformer).

    A row attends to training rows and reads their targets: a learned kernel smoother. Each
    prediction has a deviation, calibrated on held-out rows. :class:`TableClassifier` says how
    attentions differ.

    Parameters
    ----------
    attention : str, default="softmax"
        Attention between rows: a name of ``primal_attention.list_attentions(cross=True)``.

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
    >>> from primal_attention.tasks.tables import TableRegressor
    >>> X = np.random.default_rng(0).normal(size=(80, 3))
    >>> model = TableRegressor(dim=16, max_epochs=2, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict(X[:5], return_std=True)
    >>> mean.shape, bool((std > 0).all())
    ((5,), True)
    """

    def _read_target(self, y: np.ndarray) -> NDArray[np.float64]:
        try:
            numbers = np.asarray(y, np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"The target must be numbers, got {type_of_target(y)} of type {y.dtype}; use "
                "TableClassifier for classes."
            ) from None
        assert_all_finite(numbers, input_name="y")
        return numbers

    def _describe_target(self, y: TargetColumn, weight: NDArray[np.float64]) -> TableColumn:
        cells = read_cells(y.values)
        return TableColumn.fit(y.name, cells, weight, is_categorical=False, max_categories=2)

    def predict(
        self, X: TableLike, return_std: bool = False
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
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

    def predict_interval(self, X: TableLike, coverage: float = 0.9) -> NDArray[np.float64]:
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

    def _rate(self, logits: torch.Tensor, y: np.ndarray) -> float:
        mean, _ = self._moments(logits)
        return float(np.sqrt(np.mean((mean - y.astype(np.float64)) ** 2)))

    def _restore(self, content: Mapping[str, object]) -> None:
        super()._restore(content)
        if self.task_.target is None or self.task_.is_class:
            raise UserError("the model predicts no numbers; load it with TableClassifier.")
