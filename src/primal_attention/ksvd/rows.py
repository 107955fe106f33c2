"""Kernels of dense or sparse rows in numpy and scipy, and of matrices; needs scikit-learn.

Solvers work on tensors. Sparse rows and rows of a matrix reach them by number: the data of a side
are the numbers of its rows, and the kernel looks the rows up. Only blocks of kernel values are
dense.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse, sparray, spmatrix
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from sklearn.metrics import pairwise
from sklearn.preprocessing import normalize
from torch import Tensor

from primal_attention.ksvd.kernels import FEATURE_MAPS, KernelFunction, named_kernel
from primal_attention.ksvd.solvers import apply_kernel, transpose_kernel

__all__ = [
    "CallableKernel",
    "DataRows",
    "Matrix",
    "RowKernel",
    "Sides",
    "matrix_sides",
    "to_array",
    "to_tensor",
]

DataRows: TypeAlias = NDArray[np.floating] | sparray | spmatrix
"""A two-dimensional array, or a sparse one in CSR form; of a matrix also its transpose."""

Matrix: TypeAlias = DataRows | LinearOperator
"""What solvers multiply by."""

CallableKernel: TypeAlias = Callable[[DataRows, DataRows], DataRows]
"""A function of two blocks of rows that returns the values of all pairs."""


class Sides(NamedTuple):
    """A kernel function and the data of its two sides, for solvers on tensors."""

    kernel: KernelFunction
    x: Tensor
    y: Tensor


class RowKernel:
    """A kernel between the rows of arrays or CSR arrays.

    Args:
        kernel: A name, or a function of two blocks of rows that returns an array.
        gamma: Scale of a named kernel.
        degree: Degree of the polynomial kernel.
        coef0: Constant of the polynomial kernel.
    """

    def __init__(
        self,
        kernel: str | CallableKernel,
        *,
        gamma: float | None = None,
        degree: int = 3,
        coef0: float = 1.0,
    ) -> None:
        self.name = None if callable(kernel) else kernel
        if callable(kernel):
            self._function: CallableKernel = partial(_call, kernel)
        else:
            self._dense = named_kernel(kernel, gamma=gamma, degree=degree, coef0=coef0)
            self._function = _sparse_kernel(kernel, gamma, degree, coef0)

    @property
    def has_features(self) -> bool:
        """Whether the kernel is an inner product of features as long as the rows."""
        return self.name in FEATURE_MAPS

    def features(self, x: DataRows) -> DataRows:
        """Return the features of rows; those of sparse rows are sparse."""
        if issparse(x):
            return normalize(x) if self.name == "cosine" else x
        return FEATURE_MAPS[str(self.name)](to_tensor(x)).numpy()

    def sides(self, x: DataRows, y: DataRows) -> Sides:
        """Return the kernel between two data sets for solvers on tensors."""
        if issparse(x) or issparse(y):
            left, right = _numbers(x.shape[0], x.dtype), _numbers(y.shape[0], x.dtype)
            return Sides(self._numbered(x, y), left, left if y is x else right)
        left = to_tensor(x)
        right = left if y is x else to_tensor(y)
        if self.name is not None:
            return Sides(self._dense, left, right)
        return Sides(
            lambda a, b: to_tensor(np.asarray(self._function(a.numpy(), b.numpy()), x.dtype)),
            left,
            right,
        )

    def apply(
        self, new: DataRows, old: DataRows, v: NDArray[np.floating], *, swapped: bool = False
    ) -> NDArray[np.floating]:
        """Return ``κ(new, old) v``, or ``κ(old, new)ᵀ v`` if swapped."""
        if self.has_features:
            return np.asarray(self.features(new) @ (self.features(old).T @ v))
        kernel, x, y = self.sides(*((old, new) if swapped else (new, old)))
        if swapped:
            kernel, x, y = transpose_kernel(kernel), y, x
        return apply_kernel(kernel, x, y, torch.from_numpy(v)).numpy()

    def matrix(self, x: DataRows, y: DataRows, *, stores: bool) -> Matrix:
        """Return ``κ(x, y)`` for products: the matrix, or the product of features if cheaper.

        Args:
            x: Rows of the left side.
            y: Rows of the right side.
            stores: Whether the matrix fits into memory. If not, the kernel must have features.
        """
        size = x.shape[0] * y.shape[0]
        if self.has_features and not (stores and _count(x) + _count(y) > size):
            phi_x, phi_y = self._both_features(x, y)
            return aslinearoperator(phi_x) @ aslinearoperator(phi_y).T
        if self.has_features and not issparse(x) and not issparse(y):
            phi_x, phi_y = self._both_features(x, y)
            # numpy computes half of a product with itself
            with np.errstate(all="ignore"):
                return phi_x @ phi_y.T
        kernel, left, right = self.sides(x, y)
        return kernel(left, right).numpy()

    def _both_features(self, x: DataRows, y: DataRows) -> tuple[DataRows, DataRows]:
        phi_x = self.features(x)
        return phi_x, phi_x if y is x else self.features(y)

    def _numbered(self, x: DataRows, y: DataRows) -> KernelFunction:
        def call(i: Tensor, j: Tensor) -> Tensor:
            values = self._function(_take(x, i), _take(y, j))
            return torch.from_numpy(np.ascontiguousarray(values, dtype=x.dtype))

        return call


def matrix_sides(matrix: DataRows) -> Sides:
    """Return a matrix as a kernel between the numbers of its rows and columns."""

    def call(i: Tensor, j: Tensor) -> Tensor:
        block = _take(_take(matrix, i).T, j).T
        return to_tensor(np.ascontiguousarray(to_array(block)))

    return Sides(call, *(_numbers(size, matrix.dtype) for size in matrix.shape))


def to_tensor(array: NDArray[np.floating]) -> Tensor:
    """Return a tensor that shares the array's memory; a read-only array is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_array(rows: DataRows) -> NDArray[np.floating]:
    """Return sparse rows as an array, and an array as it is."""
    if isinstance(rows, np.ndarray):
        return np.asarray(rows)
    return np.asarray(rows.toarray() if issparse(rows) else rows)


def _call(kernel: CallableKernel, x: DataRows, y: DataRows) -> NDArray[np.floating]:
    values = to_array(kernel(x, y))
    if values.shape != (x.shape[0], y.shape[0]):
        raise ValueError(
            f"kernel returned shape {values.shape} for {x.shape[0]} and {y.shape[0]} "
            f"rows; it must return shape {(x.shape[0], y.shape[0])}."
        )
    return values


def _exponential(x: DataRows, y: DataRows, *, gamma: float | None) -> NDArray[np.floating]:
    gamma = x.shape[1] ** -0.5 if gamma is None else gamma
    values: NDArray[np.floating] = pairwise.linear_kernel(x, y)
    values *= gamma
    np.exp(values, out=values)
    return values


def _sparse_kernel(
    name: str, gamma: float | None, degree: int, coef0: float
) -> Callable[[DataRows, DataRows], NDArray[np.floating]]:
    """Return a named kernel for rows of which at least one side is sparse."""
    kernels: dict[str, Callable[[DataRows, DataRows], NDArray[np.floating]]] = {
        "cosine": pairwise.cosine_similarity,
        "exponential": partial(_exponential, gamma=gamma),
        "laplacian": partial(pairwise.laplacian_kernel, gamma=gamma),
        "linear": pairwise.linear_kernel,
        "polynomial": partial(pairwise.polynomial_kernel, gamma=gamma, degree=degree, coef0=coef0),
        "rbf": partial(pairwise.rbf_kernel, gamma=gamma),
    }
    return kernels[name]


def _numbers(count: int, dtype: np.dtype[np.floating]) -> Tensor:
    return torch.from_numpy(np.arange(count).astype(dtype)[:, None])


def _take(x: DataRows, numbers: Tensor) -> DataRows:
    chosen = numbers[:, 0].long().numpy()
    # all rows in order, as on the right side of every block, need no copy
    return x if np.array_equal(chosen, np.arange(x.shape[0])) else x[chosen]


def _count(x: DataRows) -> int:
    """Return the number of stored values."""
    return int(x.size if isinstance(x, np.ndarray) else x.nnz)
