"""Readable reference versions of sums weighted by distance, one pair of tokens at a time."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["grid_sums", "kernelized_attention", "primal_relative_scores", "weighted_sums"]


def weighted_sums(
    q: Float[Tensor, "b h n p"],
    k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    weight: Callable[[int], Float[Tensor, " h"]],
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``y_i = Σ_j c_{j-i} ⟨q_i, k_j⟩ v_j``; ``weight`` returns ``c`` of one lag."""
    rows = []
    for i in range(q.shape[2]):
        row = torch.zeros_like(v[:, :, 0])
        for j in range(k.shape[2]):
            if j <= i or not is_causal:
                score = weight(j - i) * (q[:, :, i] * k[:, :, j]).sum(-1)
                row = row + score[..., None] * v[:, :, j]
        rows.append(row)
    return torch.stack(rows, dim=2)


def grid_sums(
    q: Float[Tensor, "b h n p"],
    k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    weight: Callable[[int, int], Float[Tensor, " h"]],
    width: int,
) -> Float[Tensor, "b h n v"]:
    """Return the sums for tokens on a grid; ``weight`` takes the row lag and the column lag."""
    rows = []
    for i in range(q.shape[2]):
        row = torch.zeros_like(v[:, :, 0])
        for j in range(k.shape[2]):
            c = weight(j // width - i // width, j % width - i % width)
            row = row + (c * (q[:, :, i] * k[:, :, j]).sum(-1))[..., None] * v[:, :, j]
        rows.append(row)
    return torch.stack(rows, dim=2)


def kernelized_attention(
    phi_q: Float[Tensor, "b h n p"],
    phi_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    bias: Callable[[int], Float[Tensor, " h"]],
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``diag(A 1)⁻¹ A v`` with ``A_ij = exp(b_{j-i}) φ(q_i)·φ(k_j)``."""
    keep = torch.ones_like(phi_k[:, 0, :, 0]) if key_mask is None else key_mask.to(phi_k)
    weighted = phi_k * keep[:, None, :, None]
    ones = torch.ones_like(v[..., :1])

    def weight(lag: int) -> Tensor:
        return bias(lag).exp()

    total = weighted_sums(phi_q, weighted, ones, weight, is_causal)
    return weighted_sums(phi_q, weighted, v, weight, is_causal) / torch.where(total > 0, total, 1.0)


def primal_relative_scores(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    duals: Float[Tensor, "b h n s"],
    weight: Callable[[int], Float[Tensor, " h"]],
    is_causal: bool = False,
) -> Float[Tensor, "b h n s"]:
    """Return ``Σ_j c_{j-i} ⟨φ(q_i), φ(k_j)⟩ h_j / Σ_j c_{j-i}`` with cosine features."""
    unit_q, unit_k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    ones = torch.ones_like(q[..., :1])
    total = weighted_sums(ones, ones, ones, weight, is_causal)
    return weighted_sums(unit_q, unit_k, duals, weight, is_causal) / total
