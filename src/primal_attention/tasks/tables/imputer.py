"""Missing cells of a table, filled by attention between its rows."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import needs
from primal_attention.tasks.tables.base import NPTEstimator
from primal_attention.tasks.tables.encoding import validate_table
from primal_attention.tasks.tables.preparing import Prepared

with needs("sklearn", "An estimator of tables"):
    from sklearn.base import TransformerMixin
    from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

__all__ = ["NPTImputer"]


class NPTImputer(TransformerMixin, NPTEstimator):  # type: ignore[misc]
    """Imputer with attention between the rows of a table (Non-Parametric Transformer).

    Training hides known cells and predicts them from the other cells of the row and from other
    rows. A table to fill attends to the training rows; its rows do not see each other.

    Parameters
    ----------
    d_embed : int, default=32
        Width of the embedding of a cell.

    depth : int, default=4
        Blocks, half of them between rows, half between the cells of a row; even.

    heads : int, default=4
        Heads of every attention; must divide ``d_embed``.

    row_attention : {"softmax", "primal", "hybrid", "none"}, default="softmax"
        Attention between rows; see :class:`NPTClassifier`.

    p_feature : float, default=0.15
        Probability that a known cell is hidden in training.

    p_target : float, default=0.5
        Share of the rows of a training step in which cells are hidden; the others are context.

    semi_supervised : bool, default=False
        Without effect: a table without a target has no labels.

    context : {"train", "transductive"}, default="train"
        What rows to fill attend to: training rows, or also each other.

    max_context_rows : int, default=4096
        Most training rows that a row attends to.

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
        Without effect: training ends after ``steps``.

    categorical_features : "auto" or array-like of int, str or bool, default="auto"
        Columns of numbers that are categories.

    time_limit : float, default=None
        Processor seconds of training after which it ends.

    random_state : int, RandomState instance or None, default=None
        Draws the parameters and what is hidden.

    n_threads : int, default=None
        Threads of torch; by default unchanged.

    verbose : int, default=0
        With 1, print the expected cost and show a progress bar.

    Attributes
    ----------
    model_ : NPTModel
        The trained model; its context is part of it.

    task_ : TableTask
        Columns of the training table.

    history_ : History
        Loss, epoch by epoch; None after :meth:`load`.

    n_features_in_ : int
        Number of columns.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if the training table was a frame.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.tasks.tables import NPTImputer
    >>> x = np.random.default_rng(0).normal(size=(60, 1))
    >>> table = np.hstack([x, -x, 2 * x])
    >>> table[::7, 1] = np.nan
    >>> filled = NPTImputer(d_embed=16, steps=60, random_state=0).fit_transform(table)
    >>> bool(np.isnan(filled).any())
    False
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on a table with missing cells.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features)
            The training table.

        y : None
            Ignored.

        Returns
        -------
        self : NPTImputer
            Fitted.
        """
        self._options()  # wrong parameters raise before any work
        seed = self._seed()
        self._train(self._prepared(X, None, seed), seed)
        return self

    def _prepared(self, X: Any, y: Any, seed: int) -> Prepared:
        X = validate_table(self, X, reset=True)
        found = self._prepare(X, None, "", None, seed)
        # hidden cells score every step; there is no epoch to choose
        every = np.arange(len(found.rows))
        return found._replace(train=every, valid=every[:0])

    def transform(self, X: Any) -> Any:
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

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
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

    def _restore(self, content: Mapping[str, Any]) -> None:
        super()._restore(content)
        if self.task_.target is not None:
            raise ValueError("the model has a target; load it with NPTClassifier or NPTRegressor")
