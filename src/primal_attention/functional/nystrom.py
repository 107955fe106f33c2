"""Gaussian-kernel attention by the lifted Nyström method (Chen et al. 2021, arXiv 2111.00035).

    C ≈ κ(Q, Z) (κ(Z, Z) + γ I)⁻¹ κ(Z, K)       for landmarks Z among queries *and* keys

``C`` is a block of the Gram matrix of the stacked queries and keys. That matrix is positive
definite, so the classical Nyström theory applies although ``C`` itself is not symmetric. For the
kernel, the scaling of the points and the exact form see
:mod:`primal_attention.functional.gaussian`.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.gaussian import gaussian_gram, key_origin, square_distances
from primal_attention.functional.linear import append_ones
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.schulz import schulz_inverse

__all__ = [
    "Inverse",
    "WindowedNystrom",
    "divide_by_row_sum",
    "landmark_gram",
    "nystrom_attention",
    "nystrom_error",
    "nystrom_features",
    "nystrom_residual",
    "windowed_nystrom",
]

Inverse = Literal["cholesky", "schulz", "published"]


def landmark_gram(z: Float[Tensor, "b h s d"], ridge: float) -> Float[Tensor, "b h s s"]:
    """Return ``κ(Z, Z) + γ I``; Cholesky succeeds for landmarks of any norm.

    Distances are sums of squared differences, with an error of a few ``eps`` per entry. The
    expanded square has an error of ``‖z‖² eps`` in each exponent, which can make the matrix
    indefinite. The ridge is at least ``4 s eps``, which covers this error and the rounding of the
    factorisation.
    """
    wide, s = accumulator(z), z.shape[2]
    with full_precision(z):
        z = z.to(wide)
        gamma = max(ridge, 4 * s * torch.finfo(wide).eps)
        return (square_distances(z, z) / -2).exp() + gamma * torch.eye(
            s, dtype=wide, device=z.device
        )


def _solve(m: Tensor, t: Tensor, inverse: Inverse) -> Tensor:
    """Return ``M⁻¹ t``."""
    if inverse == "cholesky":
        # cholesky_ex: a NaN in the inputs must give NaN, not an exception
        return torch.cholesky_solve(t, torch.linalg.cholesky_ex(m).L)
    if inverse == "schulz":
        return schulz_inverse(m) @ t
    if inverse == "published":
        return schulz_inverse(m, 6, published_start=True) @ t
    raise ValueError(f"inverse must be one of {get_args(Inverse)}, got {inverse!r}.")


def divide_by_row_sum(y: Float[Tensor, "b h n u"], ridge: float) -> Float[Tensor, "b h n v"]:
    """Return sums times ``t / (t² + γ²)``, with the row sum ``t`` in the last column.

    A row sum ``t`` below the ridge is noise and can be negative; such a row goes to zero.
    """
    # t / (t² + γ²) instead of 1 / t: it is smooth, and bounded by 1 / 2γ
    total = y[..., -1:]
    return y[..., :-1] * total / (total.square() + ridge * ridge)


def nystrom_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    z: Float[Tensor, "b h s d"],
    *,
    ridge: float = 1e-3,
    key_mask: Bool[Tensor, "b m"] | None = None,
    normalize: bool = False,
    inverse: Inverse = "cholesky",
) -> Float[Tensor, "b h n v"]:
    """Return ``κ(q, z) (κ(z, z) + γ I)⁻¹ κ(z, k) v``, the lifted Nyström form of ``κ(q, k) v``.

    Costs ``O((n + m) s (d + v) + s³)`` per head.

    Args:
        q: Scaled queries.
        k: Scaled keys.
        v: Values.
        z: Landmarks, in the space of the scaled queries and keys.
        ridge: ``γ``, on the scale of the unit diagonal of ``κ(z, z)``.
        key_mask: ``True`` where a key is real.
        normalize: Divide each row by its sum; see :func:`divide_by_row_sum`.
        inverse: ``"cholesky"``; ``"schulz"``, the iteration of the paper with a better start and 8
            steps; or ``"published"``, its 6 steps, which do not converge.

    Example:
        >>> from primal_attention.functional.gaussian import gaussian_attention
        >>> x = torch.randn(1, 1, 5, 2, dtype=torch.float64)
        >>> exact = gaussian_attention(x, x, x)
        >>> torch.allclose(nystrom_attention(x, x, x, x, ridge=1e-9), exact)
        True
    """
    with full_precision(q):
        t = gaussian_gram(k, z).mT @ append_ones(v, key_mask)  # [b h s u]
        y = gaussian_gram(q, z) @ _solve(landmark_gram(z, ridge), t, inverse)
        return (divide_by_row_sum(y, ridge) if normalize else y[..., :-1]).to(v.dtype)


def nystrom_features(
    x: Float[Tensor, "b h n d"], z: Float[Tensor, "#b h s d"], ridge: float = 1e-3
) -> Float[Tensor, "b h n s"]:
    """Return ``φ(x) = L⁻¹ κ(Z, x)`` with ``L Lᵀ = κ(Z, Z) + γ I``.

    Their inner products are the Nyström approximation of the kernel.

    Example:
        >>> x = torch.randn(1, 1, 5, 2, dtype=torch.float64)
        >>> phi = nystrom_features(x, x, 1e-9)
        >>> torch.allclose(phi @ phi.mT, gaussian_gram(x, x), atol=1e-6)
        True
    """
    with full_precision(x):
        factor = torch.linalg.cholesky_ex(landmark_gram(z, ridge)).L
        gram = gaussian_gram(x, z)
        return torch.linalg.solve_triangular(factor, gram.mT, upper=False).mT


def nystrom_residual(
    x: Float[Tensor, "b h n d"], z: Float[Tensor, "#b h s d"], ridge: float = 1e-3
) -> Float[Tensor, "b h n"]:
    """Return ``κ(x, x) − φ(x)·φ(x)`` per token: 0 if represented by the landmarks, 1 if not.

    It is also the posterior variance of a Gaussian process with inducing points ``z``.
    """
    return 1 - nystrom_features(x, z, ridge).square().sum(-1)


def nystrom_error(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    z: Float[Tensor, "b h s d"],
    *,
    ridge: float = 1e-3,
    key_mask: Bool[Tensor, "b m"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
    inverse: Inverse = "cholesky",
) -> Float[Tensor, "b h"]:
    """Return ``‖C − C̃‖₂ / ‖C‖₂`` over the real tokens; it forms the ``n × m`` matrices."""
    unit = torch.eye(k.shape[2], dtype=accumulator(k), device=k.device).expand(*k.shape[:3], -1)
    exact = gaussian_gram(q, k)
    if key_mask is not None:
        exact = torch.where(key_mask[:, None, None, :], exact, 0.0)
    low = nystrom_attention(q, k, unit, z, ridge=ridge, key_mask=key_mask, inverse=inverse)
    if query_mask is not None:
        exact, low = (torch.where(query_mask[:, None, :, None], t, 0.0) for t in (exact, low))
    difference, size = (torch.linalg.matrix_norm(t, 2) for t in (exact - low, exact))
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)


class WindowedNystrom(NamedTuple):
    """Causal outputs and the state after the last key."""

    values: Float[Tensor, "b h n v"]
    state: tuple[Float[Tensor, "b h s v"], Float[Tensor, "b h w d"], Float[Tensor, "b h w v"]]
    """Sums over old keys, then the last ``w`` keys and values."""


def windowed_nystrom(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    z: Float[Tensor, "h s d"],
    *,
    window: int = 64,
    ridge: float = 1e-3,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> WindowedNystrom:
    """Return causal Gaussian attention: exact for the last ``window`` keys, Nyström for older ones.

        y_i = Σ_{i-w < j ≤ i} κ(q_i, k_j) v_j + φ(q_i) Σ_{j ≤ i-w} φ(k_j)ᵀ v_j

    Landmarks are parameters, not tokens. So the result is strictly causal, and the state has
    constant size.

    Args:
        q: Scaled queries.
        k: Scaled keys.
        v: Values, zero where a key is masked.
        z: Landmarks, the same for every sequence.
        window: Number of last keys with exact weights.
        ridge: ``γ``, on the scale of the unit diagonal of ``κ(z, z)``.
        state: State of an earlier call.
    """
    b, h, n, d = q.shape
    with full_precision(q):
        wide = accumulator(q)
        q_, k_, v_ = (t.to(wide) for t in (q, k, v))
        if state is None:
            state = (
                q_.new_zeros(b, h, z.shape[1], v_.shape[-1]),
                q_.new_zeros(b, h, window, d),
                q_.new_zeros(b, h, window, v_.shape[-1]),
            )
        old = state[0]
        k_, v_ = torch.cat([state[1], k_], dim=2), torch.cat([state[2], v_], dim=2)
        points = z[None].to(wide)
        phi_q, phi_k = (nystrom_features(t, points, ridge) for t in (q_, k_))
        if not torch.compiler.is_compiling() and n <= window:
            y = _dense_window(q_, k_, v_, phi_q, phi_k, window)
        else:
            q_, phi = pad(q_, (0, 0, window, 0)), pad(phi_q, (0, 0, window, 0))
            y = _chunked_window(q_, k_, v_, phi, phi_k, window)
            # a copy instead of a view: torch.export cannot prove the strides for every length
            y = y.index_select(2, torch.arange(window, window + n, device=q.device))
        y = y + phi_q @ old
        after = old + phi_k[:, :, :n].mT @ v_[:, :, :n], k_[:, :, n:], v_[:, :, n:]
        return WindowedNystrom(y.to(v.dtype), after)


def _dense_window(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, window: int
) -> Tensor:
    """Return the sums for few queries; the first query is ``window`` tokens after the first key."""
    lag = torch.arange(q.shape[2], device=q.device)[:, None] + window
    lag = lag - torch.arange(k.shape[2], device=q.device)
    origin = key_origin(k[:, :, window:], None, is_causal=True)
    weights = torch.where(lag < window, gaussian_gram(q, k, origin), phi_q @ phi_k.mT)
    return torch.where(lag >= 0, weights, 0.0) @ v


def _chunked_window(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, window: int
) -> Tensor:
    """Return the sums by chunks of ``window`` tokens: own chunk, previous chunk, all older ones."""
    n = q.shape[2]
    groups = (n + window - 1) // window
    q, k, v, phi_q, phi_k = (
        pad(t, (0, 0, 0, groups * window - n)).unflatten(2, (groups, window))
        for t in (q, k, v, phi_q, phi_k)
    )  # [b h g i d]
    origin = key_origin(k, None, is_causal=True)  # the first key of each chunk
    y = gaussian_gram(q, k, origin).tril() @ v
    # chunks two or more back lie wholly behind the window
    total = (phi_k.mT @ v).cumsum(2)
    y = y + phi_q @ pad(total, (0, 0, 0, 0, 2, 0))[:, :, :groups]
    k, v, phi_k = (pad(t, (0, 0, 0, 0, 1, 0))[:, :, :groups] for t in (k, v, phi_k))
    y = y + (gaussian_gram(q, k, origin).triu(1) + (phi_q @ phi_k.mT).tril()) @ v
    return y.flatten(2, 3)
