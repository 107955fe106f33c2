"""The kernel SVD of a Sinkhorn-balanced kernel, without its trivial pair.

    P = diag(u) Φ_q Φ_kᵀ diag(v)        all rows have one sum, all columns have one sum

Scaling acts on the features: ``φ_q ← u φ_q``, ``φ_k ← v φ_k``. Everything that works on features
works on the balanced kernel, at ``O((n + m) p)`` per scaling step. ``P`` is scaled so that its
largest singular value is one; for ``n = m`` it is doubly stochastic. The first singular pair is
known without computing: both vectors are constant. It says only that the kernel is positive.
Removing it is the same as centring the balanced features. What remains is correspondence analysis.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.sinkhorn import factored_sinkhorn
from primal_attention.ksvd.solvers import KernelTriplets, feature_svd

__all__ = ["BalancedFeatures", "balance_features", "balanced_svd"]


class BalancedFeatures(NamedTuple):
    """Features whose kernel has constant row sums and constant column sums."""

    phi_q: Float[Tensor, "n f"]
    phi_k: Float[Tensor, "m f"]


def balance_features(
    phi_q: Float[Tensor, "n f"],
    phi_k: Float[Tensor, "m f"],
    *,
    max_iterations: int = 10_000,
    tolerance: float | None = None,
) -> BalancedFeatures:
    """Return scaled features: rows of ``Φ_q Φ_kᵀ`` sum to ``√(m/n)``, columns to ``√(n/m)``.

    Args:
        phi_q: Query-side features; all inner products with key-side features must be positive.
        phi_k: Key-side features; the identity matrix, if ``phi_q`` is a kernel matrix.
        max_iterations: Largest number of scaling steps.
        tolerance: Sum over rows of the relative errors of their sums; by default a hundred times
            the rounding error.

    Raises:
        RuntimeError: If the error is larger than the tolerance after all steps.

    Example:
        >>> found = balance_features(torch.rand(6, 3), torch.rand(6, 3))
        >>> (found.phi_q @ found.phi_k.T).sum(0)
        tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
    """
    n, m = len(phi_q), len(phi_k)
    if tolerance is None:
        tolerance = 100 * torch.finfo(phi_q.dtype).eps
    u, v, error = factored_sinkhorn(
        phi_q, phi_k, max_iterations=max_iterations, tolerance=tolerance
    )
    if not bool(error <= tolerance):
        raise RuntimeError(
            f"The kernel is not balanced after {max_iterations} steps: the error is "
            f"{float(error):.1e}, above {tolerance:.1e}. Raise max_iterations or tolerance, or add "
            "a small constant feature to both sides."
        )
    # rows sum to 1/n and columns to 1/m so far; the largest singular value is to be one
    scale = (n * m) ** 0.25
    return BalancedFeatures(scale * u[:, None] * phi_q, scale * v[:, None] * phi_k)


def balanced_svd(
    phi_q: Float[Tensor, "n f"],
    phi_k: Float[Tensor, "m f"],
    rank: int,
    *,
    max_iterations: int = 10_000,
    tolerance: float | None = None,
) -> KernelTriplets:
    """Return the leading triplets of the balanced kernel after its trivial pair.

    Singular values are at most one. Vectors are orthogonal to constants. Arguments as in
    :func:`balance_features`.

    Args:
        phi_q: Query-side features.
        phi_k: Key-side features.
        rank: Number of triplets, not counting the trivial one.
        max_iterations: Largest number of scaling steps.
        tolerance: Largest error of the row sums.

    Example:
        >>> found = balanced_svd(torch.rand(50, 4), torch.rand(40, 4), 3)
        >>> bool(found.singular_values[0] < 1), found.left.shape
        (True, torch.Size([50, 3]))
    """
    balanced = balance_features(phi_q, phi_k, max_iterations=max_iterations, tolerance=tolerance)
    # both trivial vectors are constant, so centring removes them and nothing else
    return feature_svd(*balanced, rank, center=True)
