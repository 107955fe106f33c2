"""The kernel SVD of a matrix that is stored, sparse or a product of features; needs scipy.

One product with such a matrix is cheap, unlike one pass over a kernel function. So the solver uses
narrow products: ARPACK for symmetric matrices, :func:`block_lanczos` for all others.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import get_blas_funcs
from scipy.sparse import issparse
from scipy.sparse.linalg import ArpackError, LinearOperator, aslinearoperator, eigsh

from primal_attention.ksvd.lanczos import OVERSAMPLING, block_lanczos, is_small
from primal_attention.ksvd.rows import Matrix
from primal_attention.ksvd.solvers import dense_svd
from primal_attention.ksvd.triplets import KernelTriplets, check_kernel_values, keep_leading

__all__ = ["is_symmetric", "operator_svd"]

# residual at which the search for missed eigenvalues stops
_SEARCH_TOL = 1e-2
_SEARCH_SIZE = 8
_ROWS = 512


class _Products:
    """Products with ``K`` or ``C K C``, on one vector or several columns."""

    def __init__(self, matrix: Matrix, center: bool) -> None:
        self.matrix = matrix
        self.operator: LinearOperator = aslinearoperator(matrix)
        self.center = center

    def _between(self, a: NDArray[np.floating]) -> NDArray[np.floating]:
        return a - a.mean(0) if self.center else a

    def right(self, v: NDArray[np.floating]) -> NDArray[np.floating]:
        return self._between(self.operator @ self._between(v))

    def left(self, u: NDArray[np.floating]) -> NDArray[np.floating]:
        return self._between(self.operator.T @ self._between(u))

    def symmetric(self) -> Callable[[NDArray[np.floating]], NDArray[np.floating]]:
        """Return the product of a symmetric matrix with one vector."""
        if not isinstance(self.matrix, np.ndarray) or not self.matrix.flags.c_contiguous:
            return self.right
        # symv reads half of the matrix, which halves the time; the transpose is in Fortran order
        symv, stored = get_blas_funcs("symv", (self.matrix,)), self.matrix.T
        return lambda v: self._between(symv(1.0, stored, self._between(v)))


def operator_svd(
    matrix: Matrix,
    rank: int,
    *,
    symmetric: bool = False,
    center: bool = False,
    tol: float = 1e-6,
    max_passes: int = 50,
    deadline: float | None = None,
    random_state: np.random.RandomState,
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of a matrix from products with it.

    Args:
        matrix: Array, sparse array or ``LinearOperator`` of real numbers.
        rank: Number of triplets.
        symmetric: Whether the matrix is symmetric; it need not be positive.
        center: Decompose ``C K C`` instead.
        tol: Relative residual at which to stop.
        max_passes: Most restarts of ARPACK and most passes of block Lanczos.
        deadline: As in :func:`matrix_free_svd`. ARPACK cannot stop early, so it is not used then.
        random_state: Source of the random start.
    """
    products = _Products(matrix, center)
    n, m = products.operator.shape
    if is_small(n, m, rank):
        return dense_svd(torch.from_numpy(_to_array(matrix)), rank, center=center)
    if symmetric and deadline is None:
        found = _arpack(products, n, rank, tol, max_passes, random_state)
        if found is not None:
            return found
    start = random_state.standard_normal((m, rank + OVERSAMPLING)).astype(products.operator.dtype)

    def normal_product(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = products.right(v.numpy())
        return torch.from_numpy(image), torch.from_numpy(products.left(image))

    return block_lanczos(
        normal_product,
        n,
        torch.from_numpy(start),
        rank,
        tol=tol,
        max_passes=max_passes,
        deadline=deadline,
    )


def _arpack(
    products: _Products,
    n: int,
    rank: int,
    tol: float,
    max_passes: int,
    random_state: np.random.RandomState,
) -> KernelTriplets | None:
    """Return the triplets of a symmetric matrix, or None if ARPACK fails or misses some."""
    dtype = products.operator.dtype
    start, other = random_state.uniform(-1, 1, (2, n)).astype(dtype)
    product = products.symmetric()
    with np.errstate(all="ignore"):
        image = product(start)
    check_kernel_values(torch.from_numpy(image))
    # below a fixed size, ARPACK takes any eigenvalue for zero
    scale = np.abs(image).max()
    if not scale > 0:
        return None

    def multiply(v: NDArray[np.floating]) -> NDArray[np.floating]:
        scaled: NDArray[np.floating] = product(v) / scale
        return scaled

    options = {"which": "LM", "maxiter": max_passes}
    try:
        values, vectors = eigsh(
            LinearOperator((n, n), multiply, dtype=dtype), rank, v0=start, tol=tol, **options
        )
        # one start vector has one direction in the eigenspace of a multiple eigenvalue, so that
        # copies may be missing; they are the largest eigenvalues of what remains
        remainder = LinearOperator(
            (n, n), lambda v: multiply(v) - vectors @ (values * (vectors.T @ v)), dtype=dtype
        )
        missed = eigsh(
            remainder,
            1,
            v0=other,
            ncv=_SEARCH_SIZE,
            tol=_SEARCH_TOL,
            return_eigenvectors=False,
            **options,
        )
    except ArpackError:
        return None
    sizes = np.abs(values)
    if np.abs(missed)[0] > sizes.min() + max(tol, np.finfo(dtype).eps) * sizes.max():
        return None
    order = np.argsort(-sizes, kind="stable")
    left = torch.from_numpy(np.ascontiguousarray(vectors[:, order]))
    sign = torch.from_numpy(np.where(values[order] < 0, -1, 1).astype(dtype))
    sigma = torch.from_numpy((sizes[order] * scale).astype(dtype))
    return keep_leading(left, sigma, left * sign, rank)


def is_symmetric(matrix: Matrix) -> bool:
    """Return whether an array or a sparse array is symmetric up to rounding."""
    n, m = matrix.shape
    if n != m:
        return False
    allowed = 10 * np.finfo(matrix.dtype).eps * abs(matrix).max()
    if issparse(matrix):
        return bool(abs(matrix - matrix.T).max() <= allowed)
    return all(
        np.abs(matrix[i : i + _ROWS, i:] - matrix[i:, i : i + _ROWS].T).max() <= allowed
        for i in range(0, n, _ROWS)
    )


def _to_array(matrix: Matrix) -> NDArray[np.floating]:
    if isinstance(matrix, np.ndarray):
        return matrix if matrix.flags.writeable else matrix.copy()
    if issparse(matrix):
        return np.asarray(matrix.toarray())
    n, m = matrix.shape
    if n < m:
        return np.ascontiguousarray((matrix.T @ np.eye(n, dtype=matrix.dtype)).T)
    return np.asarray(matrix @ np.eye(m, dtype=matrix.dtype))
