"""Tests of conditional independence between nodes, given other nodes.

Partial correlation of ``i`` and ``j`` given a set ``S``, in three ways that agree::

    recursion      ρ_ij·(S∪k) = (ρ_ij·S − ρ_ik·S ρ_jk·S) / √((1 − ρ_ik·S²)(1 − ρ_jk·S²))
    sub-inverse    ρ_ij·S = −P_ij / √(P_ii P_jj),   P = ρ[{i, j} ∪ S]⁻¹
    full order     the same with the inverse of the whole matrix

Independent means ``p > α`` with ``z = atanh ρ`` and ``p = 2 (1 − Φ(|z| √(m − |S| − 3)))``. This is
the same as ``|ρ| < τ(|S|)`` with::

    τ(|S|) = tanh(Φ⁻¹(1 − α/2) / √(m − |S| − 3)).

An attention matrix is no sample of anything, so ``p`` says nothing about chance here. ``m`` and
``α`` only choose the threshold ``τ`` below which a correlation counts as zero.

Singular matrices neither raise nor give NaN. A test uses the rows and columns of its own nodes
only. If the condition number of this part is above 1e12, the test adds ``1e-8`` to its eigenvalues
and sets ``Outcomes.ridged``.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from primal_attention.analysis.causes.primal import Matrix, promote

__all__ = [
    "CallableTest",
    "IndependenceTest",
    "Outcomes",
    "PartialCorrelationTest",
    "inverse_correlations",
    "normal_quantile",
    "p_values",
    "tau",
]

LARGEST = 1 - 1e-12
"""Largest absolute correlation; the transform to ``z`` would be infinite at one."""
_MAX_CONDITION = 1e12
_RIDGE = 1e-8


class Outcomes(NamedTuple):
    """Results of several tests."""

    rho: Float[np.ndarray, " t"]
    """Strength of the dependence; a partial correlation, or 0 and 1 for tests that only decide."""
    tau: Float[np.ndarray, " t"]
    """Threshold of each test."""
    ridged: Bool[np.ndarray, " t"]
    """Where a ridge was needed because nodes are almost copies of each other."""

    @property
    def independent(self) -> Bool[np.ndarray, " t"]:
        """``True`` where the dependence is below the threshold."""
        return np.abs(self.rho) < self.tau


@runtime_checkable
class IndependenceTest(Protocol):
    """A test of conditional independence, as a structure search calls it."""

    num_nodes: int
    alpha: float | None
    """Level, if the thresholds come from one; then results have p-values."""
    max_size: int | None
    """Largest set it can condition on; ``None`` for any."""
    chunk: int
    """How many sets to evaluate at once. Tests that are slow one by one say 1."""
    warnings: tuple[str, ...]

    def evaluate(self, i: int, j: int, sets: Int[np.ndarray, "t k"]) -> Outcomes:
        """Return the outcomes for one pair and several sets of the same size."""
        ...

    def strength(self) -> Float[np.ndarray, "n n"]:
        """Return how strongly nodes depend on each other; breaks ties between sets."""
        ...


def tau(alpha: float, m: float, size: int = 0) -> float:
    """Return the correlation below which a test counts two nodes as independent.

    Args:
        alpha: Significance level.
        m: Effective number of samples.
        size: Number of nodes in the conditioning set.

    Returns:
        The threshold; zero, which no correlation is below, if ``m - size - 3`` is not positive.

    Example:
        >>> round(tau(0.01, 768), 3), round(tau(0.01, 64), 3)
        (0.093, 0.318)
    """
    _check_level(alpha)
    if m - size - 3 <= 0:
        return 0.0
    return math.tanh(normal_quantile(alpha) / math.sqrt(m - size - 3))


def normal_quantile(alpha: float) -> float:
    """Return how many standard deviations a normal variable exceeds with probability ``alpha``.

    Example:
        >>> round(normal_quantile(0.05), 2)
        1.96
    """
    _check_level(alpha)
    # by the lower tail: 1 - alpha / 2 would lose the digits of a small alpha
    return -NormalDist().inv_cdf(alpha / 2)


def p_values(
    rho: Float[np.ndarray, " t"], thresholds: Float[np.ndarray, " t"], alpha: float
) -> Float[np.ndarray, " t"]:
    """Return the p-values of correlations whose thresholds have the level ``alpha``."""
    z = np.arctanh(np.minimum(np.abs(rho), LARGEST))
    # a threshold is tanh(quantile * standard error)
    error = np.arctanh(thresholds) / normal_quantile(alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > 0, z / error, np.inf)
    return torch.special.erfc(torch.from_numpy(ratio / math.sqrt(2))).numpy()


def inverse_correlations(
    corr: Float[np.ndarray, "n n"], i: int, j: int, sets: Int[np.ndarray, "t k"]
) -> tuple[Float[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
    """Return the partial correlations by inverses of parts, and where they needed a ridge.

    Example:
        >>> corr = np.array([[1, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 1]])
        >>> rho, ridged = inverse_correlations(corr, 0, 2, np.array([[1]]))
        >>> bool(abs(rho[0]) < 1e-12), bool(ridged[0])
        (True, False)
    """
    # eigh instead of inv: eigenvalues show which matrices are singular, and can be raised
    values, vectors = np.linalg.eigh(_parts(corr, i, j, sets))
    ridged = values[:, 0] <= values[:, -1] / _MAX_CONDITION
    # clipped correlations may have negative eigenvalues, which no data have
    safe = np.where(ridged[:, None], np.maximum(values + _RIDGE, _RIDGE), values)
    first, second = vectors[:, -2], vectors[:, -1]  # [t k]: the rows of i and j
    p_ii, p_jj = (first**2 / safe).sum(1), (second**2 / safe).sum(1)
    rho = -(first * second / safe).sum(1) / np.sqrt(p_ii * p_jj)
    return np.clip(rho, -LARGEST, LARGEST), ridged


class PartialCorrelationTest:
    """Test of partial correlations against the threshold ``τ``.

    Args:
        corr: Correlation or covariance matrix of the nodes; computed with in float64.
        m: Effective number of samples, such as the width of a head.
        alpha: Significance level; 0.01 if ``tau`` is not given.
        tau: Threshold for all sizes of sets, instead of ``m`` and ``alpha``.

    Example:
        >>> corr = np.array([[1, 0.6, 0.36], [0.6, 1, 0.6], [0.36, 0.6, 1]])
        >>> test = PartialCorrelationTest(corr, m=100)
        >>> test.evaluate(0, 2, np.array([[1]])).independent
        array([ True])
    """

    chunk = 8192

    def __init__(
        self,
        corr: Float[np.ndarray, "n n"],
        m: float | None = None,
        alpha: float | None = None,
        *,
        tau: float | None = None,
    ) -> None:
        self.corr = _correlation(corr)
        self.num_nodes = len(self.corr)
        self.m, self.tau = m, tau
        if tau is None:
            if m is None:
                raise ValueError(
                    "A test needs m and alpha, or tau; m is the effective number of samples, "
                    "such as the width of a head."
                )
            self.alpha: float | None = 0.01 if alpha is None else alpha
            _check_level(self.alpha or 0.0)
            # m - size - 3 must be positive
            self.max_size: int | None = max(math.ceil(m) - 4, -1)
        else:
            if alpha is not None:
                raise ValueError("Give alpha or tau, not both: alpha and m set a threshold tau.")
            if not 0 <= tau <= 1:
                raise ValueError(f"tau must be between 0 and 1, got {tau}.")
            self.alpha, self.max_size = None, None
        self.warnings = _copies(self.corr)

    def threshold(self, size: int) -> float:
        """Return the threshold for conditioning sets of a size."""
        if self.tau is not None:
            return self.tau
        if self.m is None or self.alpha is None:
            raise RuntimeError("The test has neither tau nor m and alpha.")
        return tau(self.alpha, self.m, size)

    def evaluate(self, i: int, j: int, sets: Int[np.ndarray, "t k"]) -> Outcomes:
        """Return the outcomes for one pair and several sets of the same size."""
        rho, ridged = _eliminate(self.corr, i, j, sets)
        return Outcomes(rho, np.full(len(sets), self.threshold(sets.shape[1])), ridged)

    def strength(self) -> Float[np.ndarray, "n n"]:
        """Return the absolute correlations."""
        return np.abs(self.corr)


class CallableTest:
    """Test by a function ``decide(i, j, given)`` that returns ``True`` if independent.

    Example:
        >>> test = CallableTest(lambda i, j, given: 1 in given, num_nodes=3)
        >>> test.evaluate(0, 2, np.array([[1]])).independent
        array([ True])
    """

    alpha: float | None = None
    max_size: int | None = None
    chunk = 1
    warnings: tuple[str, ...] = ()

    def __init__(self, decide: Callable[[int, int, tuple[int, ...]], bool], num_nodes: int) -> None:
        self.decide, self.num_nodes = decide, num_nodes

    def evaluate(self, i: int, j: int, sets: Int[np.ndarray, "t k"]) -> Outcomes:
        """Return the outcomes for one pair and several sets of the same size."""
        rho = np.array([0.0 if self.decide(i, j, tuple(s)) else 1.0 for s in sets.tolist()])
        return Outcomes(rho, np.full(len(sets), 0.5), np.zeros(len(sets), dtype=bool))

    def strength(self) -> Float[np.ndarray, "n n"]:
        """Return zeros: nothing is known before a test."""
        return np.zeros((self.num_nodes, self.num_nodes))


def _eliminate(
    corr: Float[np.ndarray, "n n"], i: int, j: int, sets: Int[np.ndarray, "t k"]
) -> tuple[Float[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
    """Return partial correlations and flags like ``inverse_correlations``, faster.

    Removes one conditioning node after another, which is the recursion without its roots.
    """
    part = _parts(corr, i, j, sets)  # [t k k], i and j last
    size = part.shape[1]
    determinant = np.ones(len(part))
    with np.errstate(all="ignore"):
        while part.shape[1] > 2:
            # one step of Gaussian elimination: what is left is the covariance given this node
            pivot, column = part[:, 0, 0], part[:, 1:, 0]
            determinant *= pivot
            part = (
                part[:, 1:, 1:] - (column[:, :, None] * column[:, None, :]) / pivot[:, None, None]
            )
        v_i, v_j, c_ij = part[:, 0, 0], part[:, 1, 1], part[:, 0, 1]
        determinant *= v_i * v_j - c_ij**2
        rho = np.clip(c_ij / np.sqrt(v_i * v_j), -LARGEST, LARGEST)
    # A determinant is cheap here, a condition number is not. For a correlation matrix the condition
    # number is at most e * size / determinant, so only small determinants need the slow way.
    # The negated comparison is also true for NaN.
    doubtful = ~(determinant > math.e * size / _MAX_CONDITION)
    if size > 2 and doubtful.any():
        ridged = doubtful.copy()
        rho[doubtful], ridged[doubtful] = inverse_correlations(corr, i, j, sets[doubtful])
        return rho, ridged
    return rho, np.zeros(len(part), dtype=bool)


def _parts(
    corr: Float[np.ndarray, "n n"], i: int, j: int, sets: Int[np.ndarray, "t k"]
) -> Float[np.ndarray, "t k+2 k+2"]:
    """Return the part of the matrix that belongs to each test: the set, then ``i`` and ``j``."""
    pair = np.broadcast_to(np.array([i, j], dtype=np.intp), (len(sets), 2))
    index = np.concatenate([sets, pair], axis=1)
    return corr[index[:, :, None], index[:, None, :]]


def _correlation(matrix: Matrix) -> Float[np.ndarray, "n n"]:
    """Return a symmetric float64 correlation matrix with clipped entries."""
    found = promote(matrix).numpy()
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise ValueError(f"A correlation matrix is square, got shape {found.shape}.")
    if not np.isfinite(found).all():
        raise ValueError(
            "The correlation matrix has NaN or infinite entries; a node without variance has no "
            "correlation, leave it out."
        )
    found = (found + found.T) / 2
    variance = np.diagonal(found)
    if (variance <= 0).any():
        raise ValueError(
            f"The diagonal must be positive, but node {int(variance.argmin())} has "
            f"{variance.min()}; leave out nodes without variance."
        )
    scale = np.sqrt(variance)
    found = np.clip(found / np.outer(scale, scale), -LARGEST, LARGEST)
    np.fill_diagonal(found, 1.0)
    return found


def _copies(corr: Float[np.ndarray, "n n"]) -> tuple[str, ...]:
    """Return a warning if nodes are copies of each other."""
    pairs = np.argwhere(np.triu(np.abs(corr) >= 1 - 1e-10, 1)).tolist()
    if not pairs:
        return ()
    shown = ", ".join(f"{i} and {j}" for i, j in pairs[:5])
    more = f", and {len(pairs) - 5} other pairs" if len(pairs) > 5 else ""
    return (
        f"The correlation of some nodes is one in size ({shown}{more}). Such nodes cannot be told "
        "apart; keep one of each, or merge them.",
    )


def _check_level(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}.")
