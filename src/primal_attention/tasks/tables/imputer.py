"""Missing cells of a table, filled by attention between its rows."""

from collections.abc import Mapping
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from primal_attention.support.command import needs
from primal_attention.tasks.tables.base import TableEstimator
from primal_attention.tasks.tables.columns import TableLike, ValidTable
from primal_attention.tasks.tables.encoding import validate_table
from primal_attention.tasks.tables.preparing import Prepared

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import TransformerMixin
    from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

__all__ = ["TableImputer"]


class TableImputer(TransformerMixin, TableEstimator):  # type: ignore[misc]
    """Imputer with attention between the rows of a table (Non-Parametric Transformer).

    Training hides known cells and predicts them from the other cells of the row and from other
    rows. A table to fill attends to the training rows; its rows do not see each other. No rows are
    held out, so training ends after ``max_epochs``.

    Parameters
    ----------
    attention : str, default="softmax"
        Attention between rows: a name of ``primal_attention.list_attentions(cross=True)``.
        :class:`TableClassifier` says how they differ.

    dim : int, default=32
        Width of the embedding of a cell.

    num_heads : int, default=4
        Heads of every attention; must divide ``dim``.

    num_layers : int, default=2
        Layers, each of two blocks: between rows, and between the cells of a row.

    max_epochs : int, default=20
        Epochs of 50 training steps.

    batch_size : int, default=256
        Rows of a training step; all of a smaller table.

    learning_rate : float, default=2e-3
        Peak learning rate.

    options : TableFitOptions, dict or None, default=None
        What is rarely changed: options of the attention, steps of an epoch, embedding of numbers,
        what is hidden in training, context, categorical features, validation, threads.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters and what is hidden.

    verbose : bool or None, default=None
        Whether to show progress, and the expected cost before; by default a bar if there is a
        terminal.

    Attributes
    ----------
    model_ : NPTModel
        The trained model; its context is part of it.

    task_ : TableTask
        Columns of the training table.

    history_ : History
        Loss, epoch by epoch; None after :meth:`load`.

    n_features_in_ : int
        Number of features.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if the training table was a frame.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.tables import TableImputer
    >>> x = np.random.default_rng(0).normal(size=(60, 1))
    >>> table = np.hstack([x, -x, 2 * x])
    >>> table[::7, 1] = np.nan
    >>> filled = TableImputer(dim=16, max_epochs=2, random_state=0).fit_transform(table)
    >>> bool(np.isnan(filled).any())
    False
    """

    def fit(self, X: TableLike, y: object = None, *, time_limit: float | None = None) -> Self:
        """Train on a table with missing cells.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The training table.

        y : None
            Ignored.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : TableImputer
            Fitted.
        """
        self._check(time_limit)
        seed = self._seed()
        self._train(self._prepared(X, None, seed), seed, time_limit)
        return self

    def _prepared(self, X: TableLike, y: object, seed: int) -> Prepared:
        found = self._prepare(validate_table(self, X, reset=True), None, seed)
        # hidden cells score every step; there is no epoch to choose
        every = np.arange(len(found.rows))
        return found._replace(train=every, valid=every[:0])

    def transform(self, X: TableLike) -> ValidTable:
        """Return a table with its missing cells filled; see :meth:`impute`.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The table.

        Returns
        -------
        filled : frame or ndarray of shape (n_samples, n_features)
            In the form of the training table.
        """
        return self.impute(X)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> np.ndarray:
        """Return the names of the columns.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the columns of the training table.

        Returns
        -------
        names : ndarray of str
            One for each column.
        """
        check_is_fitted(self)
        return _check_feature_names_in(self, input_features)

    def _restore(self, content: Mapping[str, object]) -> None:
        super()._restore(content)
        if self.task_.target is not None:
            raise ValueError(
                "the model has a target; load it with TableClassifier or TableRegressor."
            )
