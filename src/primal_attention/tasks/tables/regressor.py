"""Attention between datapoints as scikit-learn's regressor, with intervals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.support.command import UserError, needs
from primal_attention.tasks.tables.columns import TableColumn, read_array
from primal_attention.tasks.tables.supervised import SupervisedEstimator

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import RegressorMixin
    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import type_of_target

__all__ = ["NPTRegressor"]


class NPTRegressor(RegressorMixin, SupervisedEstimator):  # type: ignore[misc]
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
    >>> from primal_attention.tasks.tables import NPTRegressor
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

    def _restore(self, content: Mapping[str, Any]) -> None:
        super()._restore(content)
        if self.task_.target is None or self.task_.is_class:
            raise UserError("the model predicts no numbers; load it with NPTClassifier.")
