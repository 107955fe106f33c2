"""A test whose thresholds come from the variation between feature columns.

The correlation of two tokens is a mean over the feature columns of their value vectors. Columns
that are drawn again, with replacement, give other correlations. Their spread ``σ`` on the scale of
``z = atanh ρ`` replaces ``1 / √(m − |S| − 3)``::

    p = 2 (1 − Φ(|z| / σ)),    τ = tanh(Φ⁻¹(1 − α/2) σ).

So no number of samples ``m`` has to be assumed.
"""

import numpy as np
from jaxtyping import Float, Int

from .independence import (
    LARGEST,
    Outcomes,
    PartialCorrelationTest,
    inverse_correlations,
    normal_quantile,
)
from .primal import Matrix, promote

__all__ = ["BootstrapTest"]


class BootstrapTest:
    """Test of partial correlations against their spread over resampled feature columns.

    Args:
        values: Features of each token: values of a head, or its output.
        attention: Rows of the attention matrix of the nodes. Then the nodes are the rows of
            ``attention @ values``.
        alpha: Significance level.
        replicates: How often columns are drawn.
        seed: Seed of the draws.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(3, 400))
        >>> chain = np.stack([noise[0], noise[0] + noise[1], noise[0] + noise[1] + noise[2]])
        >>> test = BootstrapTest(chain)
        >>> test.evaluate(0, 2, np.zeros((1, 0), int)).independent
        array([False])
        >>> test.evaluate(0, 2, np.array([[1]])).independent
        array([ True])
    """

    def __init__(
        self,
        values: Matrix,
        attention: Matrix | None = None,
        *,
        alpha: float = 0.01,
        replicates: int = 100,
        seed: int = 0,
    ) -> None:
        features = promote(values).numpy()
        if attention is not None:
            features = promote(attention).numpy() @ features
        if features.ndim != 2 or features.shape[1] < 4:
            raise ValueError(
                f"values must have a row for each token and at least 4 columns, got shape "
                f"{features.shape}."
            )
        if replicates < 2:
            raise ValueError(f"replicates must be at least 2, got {replicates}.")
        width = features.shape[1]
        self.alpha: float | None = alpha
        self._critical = normal_quantile(alpha)
        # a set of this size leaves a degree of freedom
        self.max_size: int | None = width - 4
        self.num_nodes = len(features)
        self._whole = PartialCorrelationTest(_covariance(features), tau=0.0)
        self.warnings = self._whole.warnings
        columns = np.random.default_rng(seed).integers(width, size=(replicates, width))
        self._replicates = [_correlation_of(features[:, drawn]) for drawn in columns]
        self.chunk = 64

    def evaluate(self, i: int, j: int, sets: Int[np.ndarray, "t k"]) -> Outcomes:
        """Return the outcomes for one pair and several sets of the same size."""
        whole = self._whole.evaluate(i, j, sets)
        drawn = np.stack([inverse_correlations(corr, i, j, sets)[0] for corr in self._replicates])
        spread = np.arctanh(np.clip(drawn, -LARGEST, LARGEST)).std(axis=0, ddof=1)
        return Outcomes(whole.rho, np.tanh(self._critical * spread), whole.ridged)

    def strength(self) -> Float[np.ndarray, "n n"]:
        """Return the absolute correlations of all columns."""
        return self._whole.strength()


def _covariance(features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n n"]:
    centred = features - features.mean(axis=1, keepdims=True)
    return centred @ centred.T / (features.shape[1] - 1)


def _correlation_of(features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n n"]:
    """Return a correlation matrix; a row that is constant in a draw has no correlation."""
    covariance = _covariance(features)
    scale = np.sqrt(np.diagonal(covariance))
    scale = np.where(scale > 0, scale, 1.0)
    corr = np.clip(covariance / np.outer(scale, scale), -LARGEST, LARGEST)
    np.fill_diagonal(corr, 1.0)
    return corr
