"""Readable reference versions of attention with times, written as functions of all gaps.

They form the matrix of gaps ``Δ_ij = t_i − t_j`` and no features of time. Only tests import them.
The letters are those of :mod:`~primal_attention.functional.naive`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["bias_logits", "causal_means", "gaps", "rotary_products", "time_kernel", "timed_average"]


def gaps(t: Float[Tensor, "b n"], u: Float[Tensor, "b m"]) -> Float[Tensor, "b n m"]:
    """Return ``t_i − u_j``."""
    return t[:, :, None] - u[:, None, :]


def time_kernel(
    gap: Float[Tensor, "b n m"], omega: Float[Tensor, " f"], weight: Float[Tensor, " f"]
) -> Float[Tensor, "b 1 n m"]:
    """Return ``ψ(Δ) = Σ_l p_l cos ω_l Δ``, the same for all heads."""
    return (weight * (omega * gap[..., None]).cos()).sum(-1)[:, None]


def bias_logits(
    gap: Float[Tensor, "b n m"],
    omega: Float[Tensor, " f"],
    even: Float[Tensor, "h f"],
    odd: Float[Tensor, "h f"],
) -> Float[Tensor, "b h n m"]:
    """Return ``Σ_l a_l cos ω_l Δ + b_l sin ω_l Δ`` for every head."""
    angle = gap[:, None, :, :, None] * omega
    a, b = even[None, :, None, None], odd[None, :, None, None]
    return (a * angle.cos() + b * angle.sin()).sum(-1)


def rotary_products(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    gap: Float[Tensor, "b n m"],
    omega: Float[Tensor, " f"],
) -> Float[Tensor, "b h n m"]:
    """Return ``⟨R(ω t_i) q_i, R(ω t_j) k_j⟩ = Re Σ_l q_il conj(k_jl) exp(i ω_l Δ_ij)``.

    Feature ``l`` of the first half and feature ``l`` of the second half are one complex number. A
    last odd feature does not turn.
    """
    half = len(omega)
    pairs = [torch.complex(x[..., :half], x[..., half : 2 * half]) for x in (q, k)]
    turn = torch.polar(torch.ones_like(gap)[..., None], gap[..., None] * omega)[:, None]
    turned = (pairs[0][:, :, :, None] * pairs[1].conj()[:, :, None] * turn).sum(-1).real
    return turned + q[..., 2 * half :] @ k[..., 2 * half :].mT


def timed_average(
    weights: Float[Tensor, "b h n m"], timed: Float[Tensor, "b h n m"], v: Float[Tensor, "b h m v"]
) -> Float[Tensor, "b h n v"]:
    """Return sums with weights that know time, divided by the sum of those that do not."""
    return timed @ v / weights.sum(-1, keepdim=True)


def causal_means(
    kernel: Float[Tensor, "b h n n"], duals: Float[Tensor, "b h n s"]
) -> Float[Tensor, "b h n s"]:
    """Return ``e_i = (1 / i) Σ_{j ≤ i} κ_ij h_j``, the scores of a dual-tied primal layer."""
    count = torch.arange(1, kernel.shape[-1] + 1, dtype=kernel.dtype)[:, None]
    return kernel.tril() @ duals / count
