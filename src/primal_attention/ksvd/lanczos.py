"""Block Lanczos: the leading singular triplets of a matrix that is known by its products."""

import time
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.ksvd.triplets import KernelTriplets, check_kernel_values, keep_leading

__all__ = ["OVERSAMPLING", "block_lanczos", "is_small"]

OVERSAMPLING = 8
"""Columns of a random start beyond the rank."""
# number of blocks at which the basis is compressed
_MAX_BLOCKS = 10


def is_small(n: int, m: int, rank: int) -> bool:
    """Return whether a complete SVD costs less than :func:`block_lanczos`."""
    return min(n, m) <= 4 * (rank + OVERSAMPLING)


@torch.no_grad()
def block_lanczos(
    product: Callable[[Tensor], tuple[Tensor, Tensor]],
    n: int,
    start: Float[Tensor, "m k"],
    rank: int,
    *,
    tol: float = 1e-6,
    max_passes: int = 50,
    deadline: float | None = None,
) -> KernelTriplets:
    """Return the ``rank`` leading triplets of a matrix ``K [n m]`` that is known by its products.

    Block Lanczos on ``KᵀK``. The right basis ``V`` and the left basis ``U`` grow by one block per
    pass, with ``K V = U B`` for a small ``B``. At ten blocks they are compressed to the leading
    directions. A singular value may be as multiple as the block is wide.

    Args:
        product: ``v -> K v, KᵀK v``.
        n: Number of rows of ``K``.
        start: Random block; a few columns more than ``rank``, at most ``min(n, m) / 4``.
        rank: Number of triplets.
        tol: As in :func:`matrix_free_svd`.
        max_passes: As in :func:`matrix_free_svd`.
        deadline: As in :func:`matrix_free_svd`.
    """
    m, width = start.shape
    capacity = min(_MAX_BLOCKS * width, min(n, m))
    block = torch.linalg.qr(start).Q
    # below this residual the basis is invariant up to rounding; more passes only add noise
    floor = torch.finfo(start.dtype).eps

    right, left = start.new_empty(m, 0), start.new_empty(n, 0)
    coupling = start.new_empty(0, 0)  # B in K V = U B
    u, sigma, vt = coupling, start.new_empty(0), coupling
    for done in range(1, max_passes + 1):
        if right.shape[1] + width > capacity:
            left, right = left @ u[:, :width], right @ vt[:width].T
            coupling = torch.diag(sigma[:width])
        image, normal = product(block)
        check_kernel_values(normal)
        fresh, overlap, corner = _orthonormalize(image, left)
        left, right = torch.cat([left, fresh], dim=1), torch.cat([right, block], dim=1)
        below = torch.cat([start.new_zeros(width, coupling.shape[1]), corner], dim=1)
        coupling = torch.cat([torch.cat([coupling, overlap], dim=1), below])
        block, _, remainder = _orthonormalize(normal, right)

        u, sigma, vt = torch.linalg.svd(coupling)
        # only the last block of the basis contributes to the residual of KᵀK V w
        residual = torch.linalg.vector_norm(remainder @ vt[:rank, -width:].T, dim=0)
        allowed = torch.clamp(tol * sigma[:rank] * sigma[0], min=floor * sigma[0] ** 2)
        if bool((residual <= allowed).all()):
            break
        is_late = deadline is not None and time.monotonic() >= deadline
        if is_late or done == max_passes:
            limit = "time_limit" if is_late else "max_passes"
            warnings.warn(
                f"The kernel SVD did not converge to tol={tol:.1e} in {done} passes; "
                f"raise {limit} or tol.",
                RuntimeWarning,
                stacklevel=4,
            )
            break
    return keep_leading(left @ u[:, :rank], sigma, right @ vt[:rank].T, rank)


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
