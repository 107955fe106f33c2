"""The asymmetric kernel SVD: solvers on tensors and a scikit-learn estimator.

:class:`KernelSVD` needs scikit-learn (the extra ``sklearn``) and is imported on
first use. Everything else needs only torch.
"""

from typing import TYPE_CHECKING

from primal_attention.ksvd.balanced import BalancedFeatures, balance_features, balanced_svd
from primal_attention.ksvd.kernels import (
    FEATURE_MAPS,
    KERNELS,
    KernelFunction,
    cosine,
    exponential,
    laplacian,
    linear,
    named_kernel,
    polynomial,
    rbf,
    unit_rows,
)
from primal_attention.ksvd.solvers import (
    KernelMeans,
    KernelTriplets,
    apply_kernel,
    count_nonzero,
    dense_svd,
    feature_svd,
    kernel_means,
    matrix_free_svd,
    nystrom_svd,
    transpose_kernel,
)
from primal_attention.support.command import needs

if TYPE_CHECKING:
    from primal_attention.ksvd.estimator import KernelSVD

__all__ = [
    "FEATURE_MAPS",
    "KERNELS",
    "BalancedFeatures",
    "KernelFunction",
    "KernelMeans",
    "KernelSVD",
    "KernelTriplets",
    "apply_kernel",
    "balance_features",
    "balanced_svd",
    "cosine",
    "count_nonzero",
    "dense_svd",
    "exponential",
    "feature_svd",
    "kernel_means",
    "laplacian",
    "linear",
    "matrix_free_svd",
    "named_kernel",
    "nystrom_svd",
    "polynomial",
    "rbf",
    "transpose_kernel",
    "unit_rows",
]


def __getattr__(name: str) -> "type[KernelSVD]":
    if name != "KernelSVD":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("sklearn", "KernelSVD"):
        from primal_attention.ksvd.estimator import KernelSVD
    return KernelSVD


def __dir__() -> list[str]:
    return __all__
