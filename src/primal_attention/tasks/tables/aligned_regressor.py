"""A regressor that carries rows to matched targets along a line."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from primal_attention.support.command import needs
from primal_attention.tasks.tables.aligned_base import AlignedEstimator, Problem
from primal_attention.tasks.tables.aligned_geometry import (
    Floats,
    Labels,
    MatchedClasses,
)
from primal_attention.tasks.tables.aligned_model import AlignedConfig
from primal_attention.tasks.tables.columns import TableLike

with needs("sklearn", "An estimator of aligned classes"):
    from sklearn.base import RegressorMixin
    from sklearn.utils import check_array, column_or_1d

__all__ = ["OTAlignedRegressor"]

_LENGTH = 24.0
"""Length of the line."""
_BINS, _BIN_SIZE = 10, 20
"""Most bins in which rows are matched, and fewest instances of one."""
_KNOTS = 513
"""Most points of the curve from the line to the numbers."""


class OTAlignedRegressor(RegressorMixin, AlignedEstimator):  # type: ignore[misc]
    """Regressor whose learned map spreads rows along a line, by the quantile of their target.

    The line points where the target grows. Across the line, rows are matched with normal dummies by
    optimal transport, in bins of the target. The prediction is the number at the mapped point's
    place on the line. It is nearer to the median than to the mean of skewed targets, and never
    outside the range of the training targets.

    Parameters
    ----------
    hidden : sequence of int, default=(32, 32)
        Widths of the hidden layers.

    n_components : int, default=None
        Coordinates of a mapped point; by default those of an encoded row. With fewer, rows start
        from their principal components.

    max_epochs : int, default=60
        Most passes over the training part.

    batch_size : int, default=None
        Instances of an optimiser step; by default a tenth of the training part.

    learning_rate : float, default=0.01
        Learning rate.

    options : AlignedFitOptions, dict or None, default=None
        What is rarely changed: how rows are matched with dummies, patience, validation,
        categorical features.

    random_state : int, RandomState instance or None, default=None
        Seed of dummies, weights and batches.

    verbose : bool or None, default=None
        Whether to show progress; by default on a terminal only.

    Attributes
    ----------
    knots_ : ndarray of shape (2, n_knots)
        Quantiles, and the numbers that belong to them.

    targets_ : ndarray of shape (n_instances, n_tokens, n_outputs)
        Targets of the distinct instances of the training part.

    encoder_ : TableEncoder
        The fitted encoder.

    model_ : AlignedMap
        The fitted network.

    history_ : History
        Losses of the training; ``None`` after :meth:`load`.

    n_features_in_ : int
        Number of columns.

    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if the training table was a frame with string names.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(200, 3))
    >>> y = X[:, 0] - 2 * X[:, 1]
    >>> bool(OTAlignedRegressor(random_state=0).fit(X, y).score(X, y) > 0.9)
    True
    """

    def fit(
        self,
        X: TableLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        time_limit: float | None = None,
    ) -> Self:
        """Train the map.

        Parameters
        ----------
        X : frame or array-like of shape (n_samples, n_features) or \
                (n_samples, n_tokens, n_features)
            A table; or instances with several rows each, which share a number.

        y : array-like of shape (n_samples,)
            Numbers to predict.

        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each instance; zero leaves it out.

        time_limit : float or None, default=None
            Seconds of training after which it ends; the schedule is shortened to fit.

        Returns
        -------
        self : OTAlignedRegressor
            The fitted regressor.
        """
        self._check(y, time_limit)
        target = check_array(column_or_1d(y, warn=True), ensure_2d=False, input_name="y")
        instances, kept, mass = self._distinct(X, target.astype(np.float64), sample_weight)
        shares, self.knots_ = _quantile_curve(kept, mass)
        bins = max(1, min(_BINS, len(kept) // _BIN_SIZE))
        strata = np.minimum((shares * bins).astype(np.int64), bins - 1)
        self._train(instances, np.stack([shares, strata], 1), mass, strata, time_limit)
        return self

    def predict(self, X: TableLike) -> Floats:
        """Return predicted numbers.

        Parameters
        ----------
        X : frame or array-like
            Rows as in :meth:`fit`. Tokens of an instance are averaged on the line.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Numbers.
        """
        mapped = self._mapped(self._dense(self._read(X, reset=False)))
        places = (mapped @ self.direction_).mean(1)
        return np.interp(places / _LENGTH + 0.5, *self.knots_)

    @property
    def direction_(self) -> Floats:
        """Direction of the line, of length one."""
        return self.model_.centres[0].detach().numpy()

    def _config(self, num_inputs: int) -> AlignedConfig:
        return AlignedConfig(num_inputs, self.n_components or num_inputs, 1, tuple(self.hidden))

    def _place(self, whole: Problem) -> Floats:
        """Return the direction in which the target grows ``[1 q]``."""
        shares, points = whole.y[:, 0], whole.points.mean(1)
        direction = (whole.weights * (shares - np.average(shares, weights=whole.weights))) @ points
        length = float(np.linalg.norm(direction))
        if length < 1e-12:
            direction, length = np.eye(len(direction))[0], 1.0
        return direction[None] / length

    def _codes(self, y: np.ndarray) -> Labels:
        return y[:, 1].astype(np.int64)

    def _match(self, part: Problem, seed: int) -> MatchedClasses:
        line = self.direction_
        across = part.points - (part.points @ line)[..., None] * line
        bins = self._codes(part.y)
        centres = np.zeros((bins.max() + 1, across.shape[-1]))
        found = self._match_classes(across, bins, centres, part.weights, seed)
        # what dummies have along the line shifts all costs alike, so the matching is optimal
        flat = found.targets - (found.targets @ line)[..., None] * line
        place = _LENGTH * (part.y[:, 0] - 0.5)
        return found._replace(targets=flat + place[:, None, None] * line)

    def _fitted(self) -> dict[str, Any]:
        return {"knots": self.knots_.tolist()}

    def _restore(self, fitted: dict[str, Any]) -> None:
        self.knots_ = np.array(fitted["knots"], np.float64)
        if self.knots_.ndim != 2 or len(self.knots_) != 2 or not np.isfinite(self.knots_).all():
            raise ValueError("knots must be two rows of numbers")


def _quantile_curve(y: Floats, mass: Floats) -> tuple[Floats, Floats]:
    """Return the quantile of every number, and the curve from quantiles to numbers ``[2 knots]``.

    Equal numbers share the middle of their quantiles.
    """
    values, where = np.unique(y, return_inverse=True)
    masses = np.bincount(where, mass)
    shares = (np.cumsum(masses) - masses / 2) / masses.sum()
    chosen = np.unique(np.linspace(0, len(values) - 1, _KNOTS).round().astype(np.int64))
    return shares[where], np.stack([shares[chosen], values[chosen]])
