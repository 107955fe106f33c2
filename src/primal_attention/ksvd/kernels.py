"""Kernels between the rows of two data sets, as plain functions ``kernel(x, y) -> [n m]``.

A kernel function is any callable that returns the matrix ``κ(x_i, y_j)``. It need not be symmetric.
Each value depends only on ``x_i`` and ``y_j``, because solvers pass blocks of rows. Two of the
named kernels are inner products of short explicit features (:data:`FEATURE_MAPS`); for these a
solver does not need the matrix.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "FEATURE_MAPS",
    "KERNELS",
    "KernelFunction",
    "cosine",
    "exponential",
    "laplacian",
    "linear",
    "named_kernel",
    "polynomial",
    "rbf",
    "unit_rows",
]

KernelFunction = Callable[[Tensor, Tensor], Tensor]
"""``kernel(x [n d], y [m d]) -> [n m]``."""


def unit_rows(x: Float[Tensor, "*h n d"]) -> Float[Tensor, "*h n d"]:
    """Return ``x_i / ‖x_i‖``; a zero row stays zero."""
    norm = x.norm(dim=-1, keepdim=True)
    # squares of tiny numbers are zero: such a row counts as zero, and none is divided by zero
    return torch.where(norm > 0, x / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)


def linear(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Return ``⟨x_i, y_j⟩``."""
    return x @ y.T


def cosine(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Return the cosine of the angle between ``x_i`` and ``y_j``, as in Primal-Attention."""
    return unit_rows(x) @ unit_rows(y).T


def polynomial(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    *,
    gamma: float | None = None,
    degree: int = 3,
    coef0: float = 1.0,
) -> Float[Tensor, "n m"]:
    """Return ``(γ ⟨x_i, y_j⟩ + c)^degree``; by default ``γ = 1/d``."""
    gamma = 1.0 / x.shape[1] if gamma is None else gamma
    return (x @ y.T).mul_(gamma).add_(coef0).pow_(degree)


def exponential(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], *, gamma: float | None = None
) -> Float[Tensor, "n m"]:
    """Return ``exp(γ ⟨x_i, y_j⟩)``, softmax attention before normalisation.

    By default ``γ = 1/√d``.
    """
    gamma = x.shape[1] ** -0.5 if gamma is None else gamma
    return (x @ y.T).mul_(gamma).exp_()


def rbf(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], *, gamma: float | None = None
) -> Float[Tensor, "n m"]:
    """Return ``exp(−γ ‖x_i − y_j‖²)``; by default ``γ = 1/d``.

    Example:
        >>> rbf(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        tensor([[1.0000, 0.3679]])
    """
    gamma = 1.0 / x.shape[1] if gamma is None else gamma
    # subtracting the mean keeps all distances and makes the rounding of ‖x‖² + ‖y‖² − 2⟨x, y⟩ small
    center = y.mean(0)
    x, y = x - center, y - center
    distances = torch.addmm(y.square().sum(1), x, y.T, alpha=-2).add_(x.square().sum(1)[:, None])
    return distances.clamp_min_(0).mul_(-gamma).exp_()


def laplacian(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], *, gamma: float | None = None
) -> Float[Tensor, "n m"]:
    """Return ``exp(−γ ‖x_i − y_j‖₁)``; by default ``γ = 1/d``."""
    gamma = 1.0 / x.shape[1] if gamma is None else gamma
    return torch.cdist(x, y, p=1).mul_(-gamma).exp_()


KERNELS: dict[str, Callable[..., Tensor]] = {
    "cosine": cosine,
    "exponential": exponential,
    "laplacian": laplacian,
    "linear": linear,
    "polynomial": polynomial,
    "rbf": rbf,
}
"""All named kernels."""

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": unit_rows,
    "linear": lambda x: x,
}
"""Features ``φ`` with ``κ(x, y) = ⟨φ(x), φ(y)⟩``, for the named kernels that have short ones."""

_OPTIONS = {
    "exponential": ("gamma",),
    "laplacian": ("gamma",),
    "polynomial": ("gamma", "degree", "coef0"),
    "rbf": ("gamma",),
}


def named_kernel(
    name: str, *, gamma: float | None = None, degree: int = 3, coef0: float = 1.0
) -> KernelFunction:
    """Return a kernel by name with its options bound; options it does not have are ignored.

    Example:
        >>> named_kernel("polynomial", gamma=1.0, degree=2)(torch.ones(1, 2), torch.ones(1, 2))
        tensor([[9.]])
    """
    if name not in KERNELS:
        raise ValueError(f"kernel is {name!r}; it must be a callable or one of {sorted(KERNELS)}.")
    options = {"gamma": gamma, "degree": degree, "coef0": coef0}
    return partial(KERNELS[name], **{key: options[key] for key in _OPTIONS.get(name, ())})
