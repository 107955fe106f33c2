"""Singular triplets, and the rules that all solvers share."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["KernelTriplets", "check_kernel_values", "count_nonzero", "keep_leading"]


class KernelTriplets(NamedTuple):
    """Leading singular triplets of a kernel matrix."""

    left: Float[Tensor, "n s"]
    """``H_e``, orthonormal columns."""
    singular_values: Float[Tensor, " s"]
    """``Σ``, descending."""
    right: Float[Tensor, "m s"]
    """``H_r``, orthonormal columns."""


def count_nonzero(singular_values: Float[Tensor, " s"], size: int, *, norm: float = 0.0) -> int:
    """Return the number of singular values above the rounding error.

    Args:
        singular_values: In descending order.
        size: The longer side of the matrix.
        norm: Norm of the matrix before centring, or a lower bound. Centring keeps its rounding
            error.
    """
    eps = torch.finfo(singular_values.dtype).eps
    return int((singular_values > size * eps * singular_values[0].clamp_min(norm)).sum())


def keep_leading(left: Tensor, singular_values: Tensor, right: Tensor, rank: int) -> KernelTriplets:
    """Keep ``rank`` triplets and fix their signs."""
    left, singular_values, right = left[:, :rank], singular_values[:rank], right[:, :rank]
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(left.dtype)
    return KernelTriplets(left * sign, singular_values.clone(), right * sign)


def check_kernel_values(values: Tensor) -> None:
    """Raise ValueError if a value computed from a kernel is NaN or infinite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            "The kernel has NaN or infinite values; scale the data or choose a smaller gamma."
        )
