"""Matrix inverses by Newton-Schulz iterations, which use only matrix products."""

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import Context, gradients

__all__ = ["newton_schulz", "schulz_inverse"]


def schulz_inverse(
    m: Float[Tensor, "b h s s"], steps: int = 8, *, published_start: bool = False
) -> Float[Tensor, "b h s s"]:
    """Return the inverse of a positive definite matrix with positive entries.

    The matrix is scaled by its row sums to ``N = D^(-1/2) M D^(-1/2)`` with eigenvalues in ``(0,
    1]``. The iteration is ``Z ← Z (13 − N Z (15 − N Z (7 − N Z))) / 4``. An eigenvalue ``λ`` is
    inverted when ``3.25^steps`` times the starting gap exceeds one; before, its inverse is damped.

    Args:
        m: The matrix.
        steps: Number of iterations; six in the paper.
        published_start: Start at ``Nᵀ / ‖N‖₁`` (gap ``λ²``), as in the paper. By default start at
            the identity (gap ``λ``), which needs half the steps.

    Example:
        >>> m = torch.tensor([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> (schulz_inverse(m) @ m).round(decimals=4)
        tensor([[[[1., 0.],
                  [0., 1.]]]])
    """
    wide, eye = accumulator(m), torch.eye(m.shape[-1], dtype=accumulator(m), device=m.device)
    with full_precision(m):
        m = m.to(wide)
        scale = m.sum(-1, keepdim=True).rsqrt()
        n_m = scale * m * scale.mT
        z = eye.expand_as(n_m)
        if published_start:
            # one norm per matrix: a sequence must not influence the others in the batch
            z = n_m.mT / n_m.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
        return scale * newton_schulz(n_m, z, steps) * scale.mT


class _NewtonSchulz(torch.autograd.Function):
    """The iteration with fused multiply-add products in forward and backward."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, z: Tensor, steps: int) -> Tensor:
        start, kept = z, []
        for _ in range(steps):
            after, *inside = _newton_schulz_step(a, z)
            kept += [z, *inside]
            z = after
        ctx.save_for_backward(a, start, *kept)
        return z

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, start, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            formula = functools.partial(_iterate, steps=len(kept) // 4)
            return *gradients(formula, (a, start), ctx.needs_input_grad[:2], (grad,)), None
        grad_a = torch.zeros_like(a)
        for i in reversed(range(0, len(kept), 4)):
            z, az, first, second = kept[i : i + 4]
            grad_second = torch.baddbmm(grad, z.mT, grad, beta=0, alpha=-1 / 4)
            grad_first = torch.baddbmm(grad, az.mT, grad_second, beta=0, alpha=-1)
            grad_az = torch.baddbmm(grad_second, grad_second, first.mT, beta=15, alpha=-1)
            grad_az.add_(grad_first, alpha=7)
            grad_az.baddbmm_(grad_first, az.mT, alpha=-1).baddbmm_(az.mT, grad_first, alpha=-1)
            grad_a.baddbmm_(grad_az, z.mT)
            grad = torch.baddbmm(grad, grad, second.mT, beta=13 / 4, alpha=-1 / 4)
            grad.baddbmm_(a.mT, grad_az)
        return grad_a, grad, None


def newton_schulz(a: Tensor, z: Tensor, steps: int) -> Tensor:
    """Return ``z`` after ``steps`` of ``z ← z (13 − a z (15 − a z (7 − a z))) / 4``."""
    flat = a.flatten(0, -3), z.flatten(0, -3)
    if is_traced():
        return _iterate(*flat, steps)[0].view(a.shape)
    return _NewtonSchulz.apply(*flat, steps).view(a.shape)  # type: ignore[no-untyped-call]


def _iterate(a: Tensor, z: Tensor, steps: int) -> tuple[Tensor]:
    """Return ``z`` after the steps, differentiated by autograd."""
    for _ in range(steps):
        z = _newton_schulz_step(a, z)[0]
    return (z,)


def _newton_schulz_step(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the next ``z`` and the three inner products, innermost first."""
    az = a @ z
    first = torch.baddbmm(az, az, az, beta=7, alpha=-1)
    second = torch.baddbmm(az, az, first, beta=15, alpha=-1)
    return torch.baddbmm(z, z, second, beta=13 / 4, alpha=-1 / 4), az, first, second
