"""Attention by entropic transport through a few anchors, in linear time.

    A = argmin over plans queries → anchors       B = argmin over plans anchors → keys
    y = A B v

Both are entropic plans for the scores ``⟨q, z⟩/√d`` and ``⟨k, z⟩/√d`` with anchors ``z``. All
queries have the same mass, all keys have the same mass, and anchor ``a`` has the mass ``μ_a``. Rows
of ``A`` and ``B`` are scaled to sum to one. The columns of ``A`` sum to ``n μ_a``, so the columns
of ``A B`` sum to ``n/m``: no key is ignored and no key takes all. With both marginals fixed, inner
products and squared distances give the same plans.

A few scaling steps solve for the plans. Rows sum to one after any number of steps; the sums of
columns are exact in the limit. The kernel ``softmax(scores) + floor`` has positive entries, so no
anchor is lost to underflow.

The idea of composing two plans through learned anchors is that of LOTFormer (Shahbazi et al. 2025,
arXiv 2509.23436).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = ["anchored_attention"]


def anchored_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    z: Float[Tensor, "h r d"],
    mass: Float[Tensor, "h r"],
    *,
    num_steps: int = 5,
    floor: float = 1e-6,
    key_mask: Bool[Tensor, "b m"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n v"]:
    """Return transport attention through the anchors ``z``; ``O((n + m) r (d + v))`` time.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        z: Anchors of each head.
        mass: Masses ``μ`` of the anchors, with sum one in each head.
        num_steps: Pairs of scaling steps for each of the two plans.
        floor: Added to all entries of the kernels.
        key_mask: ``True`` where a key is real.
        query_mask: ``True`` where a query is real; other queries take no mass.

    Example:
        >>> q, k, v = torch.randn(3, 1, 1, 6, 4)
        >>> anchored_attention(q, k, v, torch.randn(1, 3, 4), torch.full((1, 3), 1 / 3)).shape
        torch.Size([1, 1, 6, 4])
    """
    wide = accumulator(q)
    scaled, mass = z.to(wide) * z.shape[-1] ** -0.5, mass.to(wide)[:, None]
    kernel_q, kernel_k = ((x.to(wide) @ scaled.mT).softmax(-1) + floor for x in (q, k))
    u, w = _scale(kernel_q, mass, query_mask, num_steps)
    given, _ = _scale(kernel_k, mass, key_mask, num_steps)
    # one more half step, so that the weights of every anchor sum to one
    share = _divide(torch.ones_like(mass), given @ kernel_k)
    at_anchors = share.mT * (kernel_k.mT @ (given.mT * v.to(wide)))  # B v, [b h r v]
    return _count(query_mask, kernel_q) * u.mT * (kernel_q @ (w.mT * at_anchors))


def _scale(
    kernel: Float[Tensor, "b h n r"],
    mass: Float[Tensor, "h 1 r"],
    mask: Bool[Tensor, "b n"] | None,
    num_steps: int,
) -> tuple[Float[Tensor, "b h 1 n"], Float[Tensor, "b h 1 r"]]:
    """Return ``u, w``: each row of ``diag(u) K diag(w)`` sums to the mass of a token."""
    share = 1 / _count(mask, kernel)
    keep = None if mask is None else mask[:, None, None, :]

    def tokens(w: Tensor) -> Tensor:
        u = share / (w @ kernel.mT)
        return u if keep is None else torch.where(keep, u, 0.0)

    w = mass.expand(kernel.shape[0], -1, -1, -1)
    u = tokens(w)
    # a fixed number of steps: a test of convergence would let sequences influence each other
    for _ in range(num_steps):
        w = _divide(mass, u @ kernel)
        u = tokens(w)
    return u, w


def _divide(mass: Tensor, total: Tensor) -> Tensor:
    """Return ``mass / total``; without tokens nothing arrives, and the total counts as one."""
    return mass / torch.where(total > 0, total, 1.0)


def _count(mask: Bool[Tensor, "b n"] | None, kernel: Tensor) -> Tensor:
    """Return the number of real tokens, at least one, as ``[b 1 1 1]``."""
    if mask is None:
        return kernel.new_full((1, 1, 1, 1), max(kernel.shape[2], 1))
    return mask.sum(1).clamp_min(1).to(kernel.dtype)[:, None, None, None]
