"""Solvers for the coupled equations ``K H_r = H_e Σ`` and ``Kᵀ H_e = H_r Σ`` of the kernel SVD.

All solvers return the leading triplets of ``K_ij = κ(x_i, y_j)`` with orthonormal columns and
descending singular values:

- :func:`dense_svd` uses the whole matrix: exact, ``O(n m)`` memory.
- :func:`feature_svd` uses ``K = Φ_q FᵀF Φ_kᵀ`` with ``p`` features: exact, ``O((n + m) p)`` memory,
  thin QR of both factors and an SVD of a small matrix.
- :func:`matrix_free_svd` evaluates the kernel in blocks of rows and does not store them. It
  converges to the exact triplets in a few passes over all kernel values; ``O((n + m) s)`` memory.
  :func:`block_lanczos` is its method for any matrix that is known by its products.
- :func:`nystrom_svd` uses the columns and rows of a few landmarks: approximate.

In every column of ``H_e`` the entry of largest magnitude is positive. With ``center=True`` the
kernel is replaced by ``C K C``, ``C = I − 11ᵀ/n``, without forming it.

References: Suykens, *SVD revisited*, 2016; Musco & Musco, *Randomized block Krylov methods*, 2015;
Tao et al., *Learning in feature spaces via coupled covariances*, 2024 (asymmetric Nyström).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.ksvd.kernels import KernelFunction
from primal_attention.ksvd.lanczos import OVERSAMPLING, block_lanczos, is_small
from primal_attention.ksvd.triplets import (
    KernelTriplets,
    check_kernel_values,
    count_nonzero,
    keep_leading,
)

__all__ = [
    "KernelMeans",
    "KernelTriplets",
    "apply_kernel",
    "count_nonzero",
    "dense_svd",
    "feature_svd",
    "kernel_means",
    "matrix_free_svd",
    "nystrom_svd",
    "transpose_kernel",
]

# bytes of one block of kernel values; larger blocks are slower because of page faults
_BLOCK_BYTES = 16 * 2**20


class KernelMeans(NamedTuple):
    """Means of a kernel matrix over its rows and over its columns."""

    columns: Float[Tensor, " m"]
    """``mean_i κ(x_i, y_j)``."""
    rows: Float[Tensor, " n"]
    """``mean_j κ(x_i, y_j)``."""


def _blocks(x: Tensor, width: int) -> Iterator[slice]:
    # rows of the left data: a kernel needs all of y for each of them
    rows = max(1, _BLOCK_BYTES // max(width * x.element_size(), 1))
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows)


@torch.no_grad()
def apply_kernel(
    kernel: KernelFunction,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m dy"],
    v: Float[Tensor, "m s"],
) -> Float[Tensor, "n s"]:
    """Return ``κ(x, y) v``, one block of rows of the kernel matrix at a time.

    With ``y`` the training rows and ``v = H_r`` the result is the scores ``e(x)`` of new rows. For
    the scores ``r(y)`` of the other side use the kernel of :func:`transpose_kernel`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> apply_kernel(lambda x, y: x @ y.T, x, x, torch.ones(2, 1))
        tensor([[3.],
                [6.]])
    """
    out = v.new_empty(x.shape[0], v.shape[1])
    for rows in _blocks(x, y.shape[0]):
        out[rows] = kernel(x[rows], y) @ v
    return out


@torch.no_grad()
def kernel_means(
    kernel: KernelFunction, x: Float[Tensor, "n d"], y: Float[Tensor, "m dy"]
) -> KernelMeans:
    """Return the column and row means of ``κ(x, y)`` in one pass over blocks of rows.

    Singular vectors of ``C K C`` sum to zero, so centring a new row only shifts its scores. The
    centred scores are ``apply_kernel(kernel, new, y, right) - means.columns @ right``, and on the
    other side ``apply_kernel(transpose_kernel(kernel), new, x, left) - means.rows @ left``.
    """
    columns, rows = x.new_zeros(y.shape[0]), x.new_empty(x.shape[0])
    for block in _blocks(x, y.shape[0]):
        values = kernel(x[block], y)
        columns += values.sum(0)
        rows[block] = values.mean(1)
    return KernelMeans(columns / x.shape[0], rows)


def transpose_kernel(kernel: KernelFunction) -> KernelFunction:
    """Return ``κᵀ(y, x) = κ(x, y)``, the kernel with its two arguments exchanged."""
    return lambda y, x: kernel(x, y).T


def _center(a: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    return a - a.mean(0)


def dense_svd(
    kernel_matrix: Float[Tensor, "n m"], rank: int, *, center: bool = False
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of a matrix.

    Args:
        kernel_matrix: ``K``.
        rank: Number of triplets; at most ``min(n, m)`` are returned.
        center: Decompose ``C K C`` instead.

    Example:
        >>> dense_svd(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), 2).singular_values
        tensor([2., 1.])
    """
    _check_rank(rank)
    check_kernel_values(kernel_matrix)
    if center:
        # columns, then rows: C K C without forming C
        kernel_matrix = _center(_center(kernel_matrix).T).T
    u, sigma, vt = torch.linalg.svd(kernel_matrix, full_matrices=False)
    return keep_leading(u, sigma, vt.T, rank)


def feature_svd(
    phi_q: Float[Tensor, "n p"],
    phi_k: Float[Tensor, "m p"],
    rank: int,
    *,
    f: Float[Tensor, "rows p"] | None = None,
    center: bool = False,
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of ``Φ_q FᵀF Φ_kᵀ`` without forming the matrix.

    Uses thin QR of both factors; ``O((n + m) p²)`` time. At most ``min(n, m, p)`` triplets exist.

    Args:
        phi_q: Query-side features.
        phi_k: Key-side features.
        rank: Number of triplets.
        f: The matrix ``F``; ``None`` for the identity.
        center: Subtract the mean feature on both sides; this gives ``C K C``.

    Example:
        >>> phi_q, phi_k = torch.randn(500, 8), torch.randn(400, 8)
        >>> feature_svd(phi_q, phi_k, 3).left.shape
        torch.Size([500, 3])
    """
    _check_rank(rank)
    if center:
        phi_q, phi_k = _center(phi_q), _center(phi_k)
    # QR instead of Gram matrices: squaring would halve the digits of small values
    q_left, r_left = torch.linalg.qr(phi_q)
    q_right, r_right = torch.linalg.qr(phi_k)
    if f is not None:
        r_left, r_right = r_left @ f.T, r_right @ f.T
    middle = r_left @ r_right.T
    check_kernel_values(middle)
    u, sigma, vt = torch.linalg.svd(middle, full_matrices=False)
    return keep_leading(q_left @ u[:, :rank], sigma, q_right @ vt[:rank].T, rank)


@torch.no_grad()
def matrix_free_svd(
    kernel: KernelFunction,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m dy"],
    rank: int,
    *,
    center: bool = False,
    tol: float = 1e-6,
    max_passes: int = 50,
    deadline: float | None = None,
    generator: torch.Generator | None = None,
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of ``κ(x, y)`` without storing the matrix.

    One pass over blocks of rows gives both ``K V`` and ``KᵀK V`` for :func:`block_lanczos`.

    Args:
        kernel: ``kernel(x, y) -> [n m]``; it is called with blocks of rows of ``x`` and all ``y``.
        x: Left data.
        y: Right data.
        rank: Number of triplets.
        center: Decompose ``C K C`` instead; this takes one more pass.
        tol: Stop when ``‖Kᵀ u_l − σ_l v_l‖ ≤ tol · σ_1`` for all triplets, or when the residual is
            within the rounding error.
        max_passes: After this many passes, warn and return the current triplets.
        deadline: The same from this time on, as ``time.monotonic()`` gives it.
        generator: Random generator of the start.

    Example:
        >>> from primal_attention.ksvd.kernels import rbf
        >>> x, y = torch.randn(300, 2), torch.randn(200, 2)
        >>> fast, exact = matrix_free_svd(rbf, x, y, 4), dense_svd(rbf(x, y), 4)
        >>> torch.allclose(fast.singular_values, exact.singular_values, rtol=1e-4)
        True
    """
    _check_rank(rank)
    n, m = x.shape[0], y.shape[0]
    # Lanczos needs room for several blocks; a small matrix has none
    if is_small(n, m, rank):
        return dense_svd(kernel(x, y), rank, center=center)
    means = kernel_means(kernel, x, y).columns if center else None
    start = torch.randn(m, rank + OVERSAMPLING, dtype=x.dtype, device=x.device, generator=generator)
    return block_lanczos(
        lambda v: _normal_product(kernel, x, y, v, means),
        n,
        _center(start) if center else start,
        rank,
        tol=tol,
        max_passes=max_passes,
        deadline=deadline,
    )


def _normal_product(
    kernel: KernelFunction, x: Tensor, y: Tensor, v: Tensor, column_means: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``K v`` and ``KᵀK v`` (of ``C K C`` if means are given) in one pass."""
    # C K C v = C (K C v): centre v, subtract the mean of the image, centre at the end
    offset = v.new_zeros(v.shape[1])
    if column_means is not None:
        v = _center(v)
        offset = column_means @ v
    image, normal = v.new_empty(x.shape[0], v.shape[1]), torch.zeros_like(v)
    for rows in _blocks(x, y.shape[0]):
        values = kernel(x[rows], y)
        image[rows] = values @ v - offset
        # both products from one block: kernel values cost more than the products
        normal.addmm_(values.T, image[rows])
    return image, normal if column_means is None else _center(normal)


@torch.no_grad()
def nystrom_svd(
    kernel: KernelFunction,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m dy"],
    rank: int,
    *,
    num_landmarks: int = 256,
    center: bool = False,
    generator: torch.Generator | None = None,
) -> KernelTriplets:
    """Return approximate leading triplets of ``κ(x, y)`` from a few landmarks on each side.

    Let ``U Σ Vᵀ`` be the leading triplets between landmarks ``I`` and ``J``. The asymmetric Nyström
    method extends them to ``K_{:J} V Σ⁻¹`` and ``K_{I:}ᵀ U Σ⁻¹``. These vectors are not orthogonal,
    so the function decomposes the approximation ``K ≈ K_{:J} V Σ⁻¹ Uᵀ K_{I:}`` with ``2 rank``
    triplets. More triplets would divide by small, inaccurate ``σ``. The cost is
    ``(n + m) num_landmarks`` kernel values and ``O((n + m) rank)`` memory.

    Args:
        kernel: ``kernel(x, y) -> [n m]``.
        x: Left data.
        y: Right data; pass the same object as ``x`` to share the landmarks.
        rank: Number of triplets; fewer are returned if the landmarks have a lower rank.
        num_landmarks: Number of rows drawn from each side, without replacement.
        center: Decompose ``C K C`` instead.
        generator: Random generator of the draw.

    Example:
        >>> from primal_attention.ksvd.kernels import rbf
        >>> x = torch.randn(1000, 2)
        >>> fast = nystrom_svd(rbf, x, x, 2, generator=torch.Generator().manual_seed(0))
        >>> exact = dense_svd(rbf(x, x), 2)
        >>> torch.allclose(fast.singular_values, exact.singular_values, rtol=0.05)
        True
    """
    _check_rank(rank)
    x_marks = _draw_rows(x, num_landmarks, generator)
    y_marks = x_marks if y is x else _draw_rows(y, num_landmarks, generator)
    u, sigma, v = dense_svd(kernel(x_marks, y_marks), 2 * rank)
    # dividing by a zero value would fill the features with noise
    kept = max(count_nonzero(sigma, num_landmarks), 1)
    scale = torch.where(sigma[:kept] > 0, sigma[:kept].rsqrt(), 0.0)
    u, v = u[:, :kept] * scale, v[:, :kept] * scale
    phi_q = apply_kernel(kernel, x, y_marks, v)
    phi_k = apply_kernel(transpose_kernel(kernel), y, x_marks, u)
    return feature_svd(phi_q, phi_k, rank, center=center)


def _draw_rows(
    x: Float[Tensor, "n d"], count: int, generator: torch.Generator | None
) -> Float[Tensor, "k d"]:
    order = torch.randperm(x.shape[0], generator=generator, device=x.device)
    return x[order[:count]]


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
