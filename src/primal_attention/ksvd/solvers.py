"""Solvers for the coupled equations ``K H_r = H_e Σ`` and ``Kᵀ H_e = H_r Σ`` of the kernel SVD.

All solvers return the leading triplets of ``K_ij = κ(x_i, y_j)`` with orthonormal columns and
descending singular values:

- :func:`dense_svd` uses the whole matrix: exact, ``O(n m)`` memory.
- :func:`feature_svd` uses ``K = Φ_q FᵀF Φ_kᵀ`` with ``p`` features: exact, ``O((n + m) p)`` memory,
  thin QR of both factors and an SVD of a small matrix.
- :func:`matrix_free_svd` evaluates the kernel in blocks of rows and does not store them. It
  converges to the exact triplets in a few passes over all kernel values; ``O((n + m) s)`` memory.
- :func:`nystrom_svd` uses the columns and rows of a few landmarks: approximate.

In every column of ``H_e`` the entry of largest magnitude is positive. With ``center=True`` the
kernel is replaced by ``C K C``, ``C = I − 11ᵀ/n``, without forming it.

References: Suykens, *SVD revisited*, 2016; Musco & Musco, *Randomized block Krylov methods*, 2015;
Tao et al., *Learning in feature spaces via coupled covariances*, 2024 (asymmetric Nyström).
"""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.ksvd.kernels import KernelFunction

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
    "swap_sides",
]

# bytes of one block of kernel values; larger blocks are slower because of page faults
_BLOCK_BYTES = 16 * 2**20
# extra columns of the random start, and number of blocks at which the basis is compressed
_OVERSAMPLING = 8
_MAX_BLOCKS = 10


class KernelTriplets(NamedTuple):
    """Leading singular triplets of a kernel matrix."""

    left: Float[Tensor, "n s"]
    """``H_e``, orthonormal columns."""
    singular_values: Float[Tensor, " s"]
    """``Σ``, descending."""
    right: Float[Tensor, "m s"]
    """``H_r``, orthonormal columns."""


class KernelMeans(NamedTuple):
    """Means of a kernel matrix over its rows and over its columns."""

    columns: Float[Tensor, " m"]
    """``mean_i κ(x_i, y_j)``."""
    rows: Float[Tensor, " n"]
    """``mean_j κ(x_i, y_j)``."""


def _blocks(x: Tensor, width: int) -> Iterator[slice]:
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
    the scores ``r(y)`` of the other side use the kernel of :func:`swap_sides`.

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
    other side ``apply_kernel(swap_sides(kernel), new, x, left) - means.rows @ left``.
    """
    columns, rows = x.new_zeros(y.shape[0]), x.new_empty(x.shape[0])
    for block in _blocks(x, y.shape[0]):
        values = kernel(x[block], y)
        columns += values.sum(0)
        rows[block] = values.mean(1)
    return KernelMeans(columns / x.shape[0], rows)


def swap_sides(kernel: KernelFunction) -> KernelFunction:
    """Return ``κᵀ(y, x) = κ(x, y)``, the kernel with its two arguments exchanged."""
    return lambda y, x: kernel(x, y).T


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


def _center(a: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    return a - a.mean(0)


def _keep_leading(
    left: Tensor, singular_values: Tensor, right: Tensor, rank: int
) -> KernelTriplets:
    """Keep ``rank`` triplets and fix their signs."""
    left, singular_values, right = left[:, :rank], singular_values[:rank], right[:, :rank]
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(left.dtype)
    return KernelTriplets(left * sign, singular_values.clone(), right * sign)


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
    _check_finite(kernel_matrix)
    if center:
        kernel_matrix = _center(_center(kernel_matrix).T).T
    u, sigma, vt = torch.linalg.svd(kernel_matrix, full_matrices=False)
    return _keep_leading(u, sigma, vt.T, rank)


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
    q_left, r_left = torch.linalg.qr(phi_q)
    q_right, r_right = torch.linalg.qr(phi_k)
    if f is not None:
        r_left, r_right = r_left @ f.T, r_right @ f.T
    middle = r_left @ r_right.T
    _check_finite(middle)
    u, sigma, vt = torch.linalg.svd(middle, full_matrices=False)
    return _keep_leading(q_left @ u[:, :rank], sigma, q_right @ vt[:rank].T, rank)


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
    generator: torch.Generator | None = None,
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of ``κ(x, y)`` without storing the matrix.

    Block Lanczos on ``KᵀK``: one pass over blocks of rows gives both ``K V`` and ``KᵀK V``. The
    right basis ``V`` and the left basis ``U`` grow by one block per pass, with ``K V = U B`` for a
    small ``B``. At ten blocks they are compressed to the leading directions.

    Args:
        kernel: ``kernel(x, y) -> [n m]``; it is called with blocks of rows of ``x`` and all ``y``.
        x: Left data.
        y: Right data.
        rank: Number of triplets.
        center: Decompose ``C K C`` instead; this takes one more pass.
        tol: Stop when ``‖Kᵀ u_l − σ_l v_l‖ ≤ tol · σ_1`` for all triplets, or when the residual is
            within the rounding error.
        max_passes: After this many passes, warn and return the current triplets.
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
    width = rank + _OVERSAMPLING
    if min(n, m) <= 4 * width:
        return dense_svd(kernel(x, y), rank, center=center)
    capacity = min(_MAX_BLOCKS * width, min(n, m))
    means = kernel_means(kernel, x, y).columns if center else None
    start = torch.randn(m, width, dtype=x.dtype, device=x.device, generator=generator)
    block = torch.linalg.qr(_center(start) if center else start).Q
    # below this residual the basis is invariant up to rounding; more passes only add noise
    floor = torch.finfo(x.dtype).eps

    right, left = x.new_empty(m, 0), x.new_empty(n, 0)
    coupling = x.new_empty(0, 0)  # B in K V = U B
    u, sigma, vt = coupling, x.new_empty(0), coupling
    for _ in range(max_passes):
        if right.shape[1] + width > capacity:
            left, right = left @ u[:, :width], right @ vt[:width].T
            coupling = torch.diag(sigma[:width])
        image, normal = _normal_product(kernel, x, y, block, means)
        _check_finite(normal)
        fresh, overlap, corner = _orthonormalize(image, left)
        left, right = torch.cat([left, fresh], dim=1), torch.cat([right, block], dim=1)
        below = torch.cat([x.new_zeros(width, coupling.shape[1]), corner], dim=1)
        coupling = torch.cat([torch.cat([coupling, overlap], dim=1), below])
        block, _, remainder = _orthonormalize(normal, right)

        u, sigma, vt = torch.linalg.svd(coupling)
        # only the last block of the basis contributes to the residual of KᵀK V w
        residual = torch.linalg.vector_norm(remainder @ vt[:rank, -width:].T, dim=0)
        allowed = torch.clamp(tol * sigma[:rank] * sigma[0], min=floor * sigma[0] ** 2)
        if bool((residual <= allowed).all()):
            break
    else:
        warnings.warn(
            f"matrix_free_svd did not converge to tol={tol:.1e} in {max_passes} passes; "
            "raise max_passes or tol.",
            RuntimeWarning,
            stacklevel=3,
        )
    return _keep_leading(left @ u[:, :rank], sigma, right @ vt[:rank].T, rank)


def _normal_product(
    kernel: KernelFunction, x: Tensor, y: Tensor, v: Tensor, column_means: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``K v`` and ``KᵀK v`` (of ``C K C`` if means are given) in one pass."""
    offset = v.new_zeros(v.shape[1])
    if column_means is not None:
        v = _center(v)
        offset = column_means @ v
    image, normal = v.new_empty(x.shape[0], v.shape[1]), torch.zeros_like(v)
    for rows in _blocks(x, y.shape[0]):
        values = kernel(x[rows], y)
        image[rows] = values @ v - offset
        normal.addmm_(values.T, image[rows])
    return image, normal if column_means is None else _center(normal)


def _orthonormalize(
    a: Float[Tensor, "n k"], basis: Float[Tensor, "n j"]
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "j k"], Float[Tensor, "k k"]]:
    """Return ``Q, S, R`` with ``a = basis S + Q R`` and ``[basis Q]`` orthonormal."""
    overlap = basis.T @ a
    q, r = torch.linalg.qr(a - basis @ overlap)
    # orthogonalise twice: columns almost inside the basis consist mostly of rounding error
    again = basis.T @ q
    q, r_again = torch.linalg.qr(q - basis @ again)
    return q, overlap + again @ r, r_again @ r


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
    kept = max(count_nonzero(sigma, num_landmarks), 1)
    scale = torch.where(sigma[:kept] > 0, sigma[:kept].rsqrt(), 0.0)
    u, v = u[:, :kept] * scale, v[:, :kept] * scale
    phi_q = apply_kernel(kernel, x, y_marks, v)
    phi_k = apply_kernel(swap_sides(kernel), y, x_marks, u)
    return feature_svd(phi_q, phi_k, rank, center=center)


def _draw_rows(
    x: Float[Tensor, "n d"], count: int, generator: torch.Generator | None
) -> Float[Tensor, "k d"]:
    order = torch.randperm(x.shape[0], generator=generator, device=x.device)
    return x[order[:count]]


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")


def _check_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(
            "The kernel has NaN or infinite values; scale the data or choose a smaller gamma."
        )
