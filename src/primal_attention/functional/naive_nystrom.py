"""Readable reference versions of attention by landmarks, with dense matrices and loops.

Inverses are computed from the eigendecomposition. Masks are ``True`` where a token is real.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = [
    "gaussian_attention",
    "gaussian_gram",
    "linformer_attention",
    "nystrom_attention",
    "nystrom_matrix",
    "nystromformer_attention",
    "schulz_inverse",
    "segment_means",
    "windowed_nystrom",
]


def gaussian_gram(
    x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
) -> Float[Tensor, "*batch n m"]:
    """Return ``exp(−‖x_i − y_j‖² / 2)`` from explicit differences."""
    return (-(x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 2).exp()


def _keep(
    weights: Float[Tensor, "b h n m"], key_mask: Bool[Tensor, "b m"] | None, is_causal: bool
) -> Float[Tensor, "b h n m"]:
    if key_mask is not None:
        weights = torch.where(key_mask[:, None, None, :], weights, 0.0)
    return weights.tril() if is_causal else weights


def gaussian_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
    normalize: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``C v`` or ``diag(C 1)⁻¹ C v``; a row without keys is zero."""
    weights = _keep(gaussian_gram(q, k), key_mask, is_causal)
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights @ v


def _inverse(m: Float[Tensor, "*batch s s"]) -> Float[Tensor, "*batch s s"]:
    values, vectors = torch.linalg.eigh(m)
    return (vectors / values[..., None, :]) @ vectors.mT


def nystrom_matrix(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    z: Float[Tensor, "b h s d"],
    ridge: float,
) -> Float[Tensor, "b h n m"]:
    """Return ``κ(q, z) (κ(z, z) + γ I)⁻¹ κ(z, k)``."""
    m = gaussian_gram(z, z) + ridge * torch.eye(z.shape[2], dtype=z.dtype)
    return gaussian_gram(q, z) @ _inverse(m) @ gaussian_gram(z, k)


def nystrom_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    z: Float[Tensor, "b h s d"],
    ridge: float,
    key_mask: Bool[Tensor, "b m"] | None = None,
    normalize: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``C̃ v``, or ``a C̃ v`` with ``a = t / (t² + γ²)`` for row sums ``t``."""
    weights = _keep(nystrom_matrix(q, k, z, ridge), key_mask, False)
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights * total / (total.square() + ridge**2)
    return weights @ v


def windowed_nystrom(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    z: Float[Tensor, "h s d"],
    window: int,
    ridge: float,
    key_mask: Bool[Tensor, "b n"] | None = None,
    normalize: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return causal attention with exact weights for lags below the window, ``C̃`` otherwise."""
    n = q.shape[2]
    lag = torch.arange(n)[:, None] - torch.arange(n)
    low = nystrom_matrix(q, k, z.expand(q.shape[0], -1, -1, -1), ridge)
    weights = torch.where(lag < window, gaussian_gram(q, k), low)
    weights = _keep(weights, key_mask, True)
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights * total / (total.square() + ridge**2)
    return weights @ v


def schulz_inverse(
    m: Float[Tensor, "s s"], steps: int, published_start: bool
) -> Float[Tensor, "s s"]:
    """Return the Newton-Schulz inverse of one matrix, scaled by its row sums."""
    eye = torch.eye(len(m), dtype=m.dtype)
    root = torch.diag(m.sum(1) ** -0.5)
    n_m = root @ m @ root
    z = n_m.T / n_m.abs().sum(0).max() if published_start else eye
    for _ in range(steps):
        z = z @ (13 * eye - n_m @ z @ (15 * eye - n_m @ z @ (7 * eye - n_m @ z))) / 4
    return root @ z @ root


def segment_means(x: Float[Tensor, "n d"], num: int) -> Float[Tensor, "{num} d"]:
    """Return the mean of each segment of one sequence; an empty one repeats the one before it."""
    means: list[Tensor] = []
    for j in range(num):
        members = [row for i, row in enumerate(x) if i * num // len(x) == j]
        means.append(torch.stack(members).mean(0) if members else means[-1])
    return torch.stack(means)


def nystromformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    q_l: Float[Tensor, "b h s d"],
    k_l: Float[Tensor, "b h s d"],
    steps: int = 6,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h n v"]:
    """Return ``softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v`` with the iterated inverse."""
    scale = q.shape[-1] ** -0.5
    left, middle = (scale * q @ k_l.mT).softmax(-1), (scale * q_l @ k_l.mT).softmax(-1)
    right = scale * q_l @ k.mT
    if key_mask is not None:
        right = right.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    right = right.softmax(-1)
    eye = torch.eye(q_l.shape[2], dtype=q.dtype)
    z = torch.empty_like(middle)
    for index in torch.cartesian_prod(*(torch.arange(s) for s in middle.shape[:2])):
        a = middle[*index]
        x = a.T / (a.sum(0).max() * a.sum(1).max())
        for _ in range(steps):
            x = x @ (13 * eye - a @ x @ (15 * eye - a @ x @ (7 * eye - a @ x))) / 4
        z[*index] = x
    return left @ z @ right @ v


def linformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    e_k: Float[Tensor, "b h s m"],
    e_v: Float[Tensor, "b h s m"],
) -> Float[Tensor, "b h n v"]:
    """Return ``softmax(q (E k)ᵀ / √d) (F v)`` for given projections of the sequence."""
    return (q @ (e_k @ k).mT / q.shape[-1] ** 0.5).softmax(-1) @ (e_v @ v)
