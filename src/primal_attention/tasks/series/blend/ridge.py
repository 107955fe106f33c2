"""Ridge regression in closed form, with exact leave-one-out answers.

    min over W and b of  ‖Y - XW - b‖² + λ ‖W‖²

One decomposition ``X = U S Vᵀ`` of the centred features serves all strengths λ. Without case ``i``
the answer to it is ``yᵢ - (yᵢ - fᵢ) / (1 - hᵢ)``, where ``f`` are the fitted values and
``hᵢ = 1/n + Σⱼ uᵢⱼ² sⱼ² / (sⱼ² + λ)``. Strength and mixture of the features minimise the squared
error of these answers.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ridge", "fit_ridge"]

Matrix = NDArray[np.float64]

_STRENGTHS = np.logspace(-5, 2, 15)
"""Values of λ; the features are scaled so that the rows of X have a mean square norm of one."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares that a block of features may have in the kernel."""
_MOST_CASES = 8192
"""With more cases a sample of the features is used: the cost is cubic in the smaller number."""
_MOST_FEATURES = 4096
_IN_A_SECOND = 1000
"""Size of a matrix whose decomposition takes about a quarter of a second."""
_FEWEST = 100
"""Least size of that matrix, however short the time."""
_COLUMNS = 4096
"""Features that are held in double precision at once."""
_PROBED = 1000
"""Cases that choose the mixture."""


class Ridge(NamedTuple):
    """A fitted ridge regression over blocks of features."""

    weights: tuple[Matrix | None, ...]
    """Weights of every block, ``[features, outputs]``; ``None`` where the block has no share."""
    bias: Matrix
    """Constant of every output."""
    held_out: Matrix
    """Leave-one-out answer to every case, ``[cases, outputs]``."""
    error: float
    """Mean squared error of these answers."""


class _Solution(NamedTuple):
    error: float
    dual: Matrix
    held_out: Matrix


def fit_ridge(
    blocks: Sequence[NDArray[np.float32]],
    targets: Matrix,
    rng: np.random.Generator,
    *,
    seconds: float | None = None,
) -> Ridge:
    """Return the ridge regression whose strength and mixture have the least leave-one-out error.

    The kernel is ``Σ share · Xₖ Xₖᵀ / pₖ`` over the blocks, each standardised. Time
    ``O(n² p + n³)`` for ``n`` cases and ``p`` features.

    Args:
        blocks: Features ``[cases, features]`` of several kinds.
        targets: What to predict, ``[cases, outputs]``.
        rng: Draws the cases that choose the mixture, and features if there are many cases.
        seconds: With a limit, fewer cases count as many; the decomposition takes about a quarter.

    Example:
        >>> x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
        >>> found = fit_ridge([x], 3.0 * x.astype(float) + 1, np.random.default_rng(0))
        >>> bool(found.error < 1e-4)
        True
    """
    scales = [_standard(block) for block in blocks]
    kept = [np.arange(block.shape[1]) for block in blocks]
    fast = np.inf if seconds is None else max(_IN_A_SECOND * seconds ** (1 / 3), _FEWEST)
    if len(targets) > min(_MOST_CASES, fast):
        most = int(min(_MOST_FEATURES, fast)) // len(blocks)
        kept = [np.sort(rng.permutation(k)[:most]) for k in kept]
    features = [
        ((block[:, k] - mean[k]) / (std[k] * np.sqrt(len(k)))).astype(np.float32)
        for block, k, (mean, std) in zip(blocks, kept, scales, strict=True)
    ]
    probed = rng.permutation(len(targets))[: int(min(_PROBED, fast / 3))]
    shares = _choose_shares([f[probed] for f in features], targets[probed])
    # a share weighs a kernel, so the features get its root
    used = [np.sqrt(s) * f for s, f in zip(shares, features, strict=True) if s]
    solution = _solve(*_decompose(np.concatenate(used, axis=1)), targets)
    bias = targets.mean(0)
    weights: list[Matrix | None] = []
    for share, feature, k, (mean, std) in zip(shares, features, kept, scales, strict=True):
        if not share:
            weights.append(None)
            continue
        # in units of the features as they came: predicting needs no standardisation
        weight = np.zeros((len(mean), targets.shape[1]))
        weight[k] = share * (feature.T @ solution.dual) / (std[k, None] * np.sqrt(len(k)))
        weights.append(weight)
        bias = bias - mean @ weight
    return Ridge(tuple(weights), bias, solution.held_out, solution.error)


def _standard(block: NDArray[np.float32]) -> tuple[Matrix, Matrix]:
    """Return mean and deviation of every feature; a constant one has an infinite deviation."""
    mean, std = block.mean(0, dtype=np.float64), block.std(0, dtype=np.float64)
    return mean, np.where(std > 1e-6 * np.maximum(np.abs(mean), 1e-6), std, np.inf)


def _choose_shares(features: Sequence[NDArray[np.float32]], targets: Matrix) -> tuple[float, ...]:
    """Return the mixture of kernels with the least error; of nearly equal ones the first."""
    if len(features) == 1:
        return (1.0,)
    grams = np.stack([_gram(f) for f in features])
    best, chosen = np.inf, (1.0,) + (0.0,) * (len(features) - 1)
    for rest in product(_SHARES, repeat=len(features) - 1):
        if sum(rest) > 1:
            continue
        shares = (1 - sum(rest), *rest)
        gram = np.tensordot(np.array(shares), grams, 1)
        values, vectors = np.linalg.eigh(_centred(gram))
        error = _solve(vectors, np.maximum(values, 0), targets).error
        if error < 0.999 * best:
            best, chosen = error, shares
    return chosen


def _gram(features: NDArray[np.float32]) -> Matrix:
    """Return the products of all rows, in double precision."""
    total = np.zeros((len(features), len(features)))
    for start in range(0, features.shape[1], _COLUMNS):
        wide = features[:, start : start + _COLUMNS].astype(np.float64)
        total += wide @ wide.T
    return total


def _centred(gram: Matrix) -> Matrix:
    """Return the Gram matrix of features from which the mean of these cases is taken."""
    mean = gram.mean(0)
    return gram - mean - mean[:, None] + mean.mean()


def _decompose(features: NDArray[np.float32]) -> tuple[Matrix, Matrix]:
    """Return the left singular vectors and the squared singular values of centred features."""
    if len(features) <= features.shape[1]:
        values, vectors = np.linalg.eigh(_gram(features))
        return vectors, np.maximum(values, 0)
    # the smaller Gram matrix; directions below its rounding would be divided by noise
    values, right = np.linalg.eigh(_gram(features.T))
    keep = values > 1e-10 * values[-1]
    return features @ right[:, keep] / np.sqrt(values[keep]), values[keep]


def _solve(vectors: Matrix, values: Matrix, targets: Matrix) -> _Solution:
    """Return the solution of the best strength from a decomposition of the kernel."""
    mean = targets.mean(0)
    inside = vectors.T @ (targets - mean)
    best: tuple[float, float, Matrix] | None = None
    for strength in _STRENGTHS:
        shrink = values / (values + strength)
        fitted = mean + vectors @ (shrink[:, None] * inside)
        # the error without a case is its residual over one minus its leverage: no second fit
        leverage = 1 / len(targets) + vectors**2 @ shrink
        left = (targets - fitted) / np.maximum(1 - leverage, 1e-9)[:, None]
        error = float(np.mean(left**2))
        if best is None or error < best[0]:
            best = error, strength, targets - left
    assert best is not None
    error, strength, held_out = best
    return _Solution(error, vectors @ (inside / (values + strength)[:, None]), held_out)
