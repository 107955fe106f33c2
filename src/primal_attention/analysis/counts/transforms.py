"""Association measures of counts: probability, logarithms, PMI and PPMI.

    PMI(i, j)  = log ( C_ij Z / (r_i c_j) )        r, c: sums of rows and columns, Z: sum of all
    PPMI(i, j) = max(PMI(i, j) − log shift, 0)

With context-distribution smoothing ``α`` the column probability ``c_j / Z`` is replaced by
``c_j^α / Σ_k c_k^α`` (Levy, Goldberg, Dagan 2015; α = 0.75). Shift ``k`` is the number of negative
samples of the skip-gram model that factorises the same matrix (Levy, Goldberg 2014).
"""

import math
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Transform", "TransformArguments", "context_probability", "to_dense", "transform_counts"]

Transform = Literal["counts", "probability", "log1p", "pmi", "ppmi", "log"]
"""Name of an association measure; ``"log"`` is ``log(C + epsilon)``."""


class TransformArguments(TypedDict, total=False):
    """Arguments of :func:`transform_counts`."""

    smoothing: float
    shift: float
    context_smoothing: float
    epsilon: float
    pmi_min: float


# a dense matrix of this many rows has 3.2 GB
_MAX_DENSE = 20_000


def context_probability(
    columns: NDArray[np.float64], context_smoothing: float = 1.0
) -> NDArray[np.float64]:
    """Return the smoothed probability of every context word, ``c_j^α / Σ_k c_k^α``.

    Example:
        >>> context_probability(np.array([16.0, 1.0]), 0.5)
        array([0.8, 0.2])
    """
    powers = np.asarray(columns, np.float64) ** context_smoothing
    # 0 ** 0 is 1, but a word without counts has no probability
    powers = np.where(columns > 0, powers, 0.0)
    return powers / max(powers.sum(), np.finfo(np.float64).tiny)


def transform_counts(
    counts: "csr_array | ArrayLike",
    kind: Transform = "ppmi",
    *,
    smoothing: float = 0.0,
    shift: float = 1.0,
    context_smoothing: float = 1.0,
    epsilon: float = 0.0,
    pmi_min: float = -10.0,
) -> "csr_array | NDArray[np.float64]":
    """Return an association measure of counts: a sparse CSR array or a dense array.

    ``"counts"``, ``"probability"``, ``"log1p"`` and ``"ppmi"`` are sparse if ``smoothing`` is 0.
    ``"pmi"`` and ``"log"`` have a value for every pair and are dense.

    Args:
        counts: Square matrix of counts, dense or sparse.
        kind: The measure.
        smoothing: Added to every count first.
        shift: For ``"pmi"`` and ``"ppmi"``: ``log shift`` is subtracted.
        context_smoothing: For ``"pmi"`` and ``"ppmi"``: the exponent ``α``; 0.75 is usual.
        epsilon: For ``"log"``: added inside the logarithm. With 0 a pair without counts has −∞.
        pmi_min: For ``"pmi"``: the value of pairs without counts, and the least of all others.

    Example:
        >>> transform_counts([[0.0, 3.0], [1.0, 0.0]], "ppmi").toarray().round(3)
        array([[0.   , 0.288],
               [1.386, 0.   ]])
    """
    _check(kind, smoothing, shift, context_smoothing, epsilon)
    import scipy.sparse

    sparse = scipy.sparse.csr_array(counts, dtype=np.float64)
    if kind in ("pmi", "log") or smoothing:
        _check_size(sparse.shape[0], kind, smoothing)
        return _dense(
            sparse.toarray() + smoothing, kind, shift, context_smoothing, epsilon, pmi_min
        )
    sparse = sparse.copy()
    sparse.eliminate_zeros()
    if kind == "probability":
        sparse.data /= max(sparse.data.sum(), np.finfo(np.float64).tiny)
    elif kind == "log1p":
        sparse.data = np.log1p(sparse.data)
    elif kind == "ppmi":
        rows = np.asarray(sparse.sum(1)).ravel()
        context = context_probability(np.asarray(sparse.sum(0)).ravel(), context_smoothing)
        row_of = np.repeat(np.arange(sparse.shape[0]), np.diff(sparse.indptr))
        value = np.log(sparse.data) - np.log(rows[row_of]) - np.log(context[sparse.indices])
        sparse.data = np.maximum(value - math.log(shift), 0.0)
        sparse.eliminate_zeros()
    return sparse


def to_dense(matrix: "csr_array | NDArray[np.float64]") -> NDArray[np.float64]:
    """Return a dense array of a sparse or dense one."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.toarray()


def _dense(
    counts: NDArray[np.float64],
    kind: Transform,
    shift: float,
    context_smoothing: float,
    epsilon: float,
    pmi_min: float,
) -> NDArray[np.float64]:
    if kind == "counts":
        return counts
    if kind == "probability":
        return counts / max(counts.sum(), np.finfo(np.float64).tiny)
    if kind == "log1p":
        return np.log1p(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "log":
            return np.log(counts + epsilon)
        rows, context = counts.sum(1), context_probability(counts.sum(0), context_smoothing)
        value = np.log(counts) - np.log(rows)[:, None] - np.log(context) - math.log(shift)
    value = np.where(counts > 0, value, -math.inf)
    return np.maximum(value, 0.0 if kind == "ppmi" else pmi_min)


def _check(
    kind: str, smoothing: float, shift: float, context_smoothing: float, epsilon: float
) -> None:
    if kind not in get_args(Transform):
        raise ValueError(f"transform must be one of {get_args(Transform)}, got {kind!r}.")
    for name, value in (("smoothing", smoothing), ("epsilon", epsilon)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")
    for name, value in (("shift", shift), ("context_smoothing", context_smoothing)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value}.")


def _check_size(n: int, kind: str, smoothing: float) -> None:
    if n > _MAX_DENSE:
        raise ValueError(
            f"transform {kind!r} with smoothing={smoothing} has a value for each of {n} × {n} "
            f"pairs; at most {_MAX_DENSE} words fit. Use 'ppmi' without smoothing, or fewer words."
        )
