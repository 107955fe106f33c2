"""The asymmetric kernel SVD objective, its optimality conditions and its diagnostics.

For scores ``e = W_eᵀ F φ_q`` and ``r = W_rᵀ F φ_k`` of ``n`` tokens the published objective is

    J = ½ Σ_l ℓ_l² (mean_i e_il² + mean_i r_il²) − Tr(W_eᵀ W_r),

and its stationary points are singular triplets of ``K = Φ_q FᵀF Φ_kᵀ`` with ``σ_l = n / ℓ_l²``
(:func:`implied_singular_values`). ``J`` is zero there, but ``J = 0`` is a single equation: a small
``J²`` says little. :func:`kkt_residual` is zero if and only if the weights are stationary.

All conditions need only the ``d × d`` Gram matrices ``ΦᵀΦ / n`` of the features, never an
``n × n`` matrix. For the *data* trace ``Tr(W_{e|X}ᵀ W_{r|X})`` pass the effective weights ``Fᵀ W``
to :func:`parameter_trace` and :func:`kkt_residual`, and no ``f``: ``F`` drops out of the kernel.
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator, full_precision

__all__ = [
    "Reduction",
    "average_over_sequences",
    "balance",
    "dual_residual",
    "effective_rank",
    "implied_singular_values",
    "kernel_singular_values",
    "kkt_residual",
    "ksvd_objective",
    "off_diagonality",
    "parameter_trace",
    "reduce_objective",
    "sample_loss",
    "score_gram",
]

Reduction = Literal["sample", "batch", "head"]


def parameter_trace(
    w_e: Float[Tensor, "*batch m s"], w_r: Float[Tensor, "*batch m s"]
) -> Float[Tensor, "*batch"]:
    """Return ``Tr(W_eᵀ W_r)`` per head (and per sequence), in float32 or better."""
    wide = accumulator(w_e)
    return (w_e.to(wide) * w_r.to(wide)).sum((-2, -1))


def ksvd_objective(
    moment_e: Float[Tensor, "b h s"],
    moment_r: Float[Tensor, "b h s"],
    lam: Float[Tensor, "h s"],
    trace: Float[Tensor, "#b h"] | Float[Tensor, " h"],
) -> Float[Tensor, "b h"]:
    """Return ``J`` of every sequence and head from second moments of the scores.

    Args:
        moment_e: ``mean_i e_il²``, query side.
        moment_r: ``mean_j r_jl²``, key side.
        lam: ``ℓ``; it enters squared.
        trace: ``Tr(W_eᵀ W_r)`` of the parameters or of the effective weights.
    """
    return (lam.square() * (moment_e + moment_r)).sum(-1) / 2 - trace


def reduce_objective(
    objective: Float[Tensor, "b h"],
    reduction: Reduction = "sample",
    *,
    keep: Bool[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """Return the squared objective as one number.

    ``"sample"`` is ``mean_b (mean_h J)²`` and does not change when a batch is split; ``"batch"`` is
    ``(mean_{b,h} J)²``, smaller by the variance over the batch; ``"head"`` is ``mean_{b,h} J²``,
    where heads cannot cancel each other. Two towers are one batch: concatenate their objectives.

    Args:
        objective: ``J`` per sequence and head.
        reduction: Which of the three.
        keep: ``False`` for sequences without any token; they are left out.
    """
    if reduction == "sample":
        return average_over_sequences(objective.mean(1).square(), keep)
    if reduction == "batch":
        return average_over_sequences(objective.mean(1), keep).square()
    if reduction == "head":
        return average_over_sequences(objective.square().mean(1), keep)
    raise ValueError(f"reduction must be 'sample', 'batch' or 'head', got {reduction!r}.")


class _SampleLoss(torch.autograd.Function):
    """``Σ_b weight_b (mean_h J_b)²`` in few calls, which is what a short sequence pays for."""

    @staticmethod
    def forward(
        ctx: Any,
        energy: Tensor,
        lam: Tensor,
        w_e: Tensor,
        w_r: Tensor,
        share: float | Tensor,
        weight: float | Tensor,
    ) -> Tensor:
        squares = lam.square().repeat(2, 1).view(-1)
        trace = torch.dot(w_e.flatten(), w_r.flatten())
        mean = torch.mv(energy.view(energy.shape[0], -1), squares).mul_(share)
        mean.sub_(trace, alpha=1 / lam.shape[0])
        ctx.save_for_backward(energy, lam, w_e, w_r, squares, mean)
        ctx.share, ctx.weight = share, weight
        return torch.dot(mean, mean * weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        energy, lam, w_e, w_r, squares, mean = ctx.saved_tensors
        each = mean * (2 * grad * ctx.weight)
        trace = each.sum().mul_(-1 / lam.shape[0])
        each.mul_(ctx.share)
        by_lam = torch.mv(energy.view(each.shape[0], -1).T, each).view(2, *lam.shape).sum(0)
        by_energy = torch.outer(each, squares).view_as(energy)
        return by_energy, by_lam.mul_(lam).mul_(2), w_r * trace, w_e * trace, None, None


def sample_loss(
    energy: Float[Tensor, "b both s"],
    lam: Float[Tensor, "h s"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    count: int | Tensor,
) -> Float[Tensor, ""]:
    """Return the ``"sample"`` reduction of the objective, from the energy of the scores.

    Args:
        energy: ``Σ_i`` of the squared scores of the query side and, after it, of the key side.
        lam: ``ℓ``; it enters squared.
        w_e: Codes of the query side.
        w_r: Codes of the key side.
        count: Tokens of each sequence; those without any are left out.
    """
    weight: float | Tensor = 1 / max(energy.shape[0], 1)
    if isinstance(count, Tensor):
        real = (count > 0).to(energy.dtype)
        weight = real / real.sum().clamp_min(1)
        count = count.clamp_min(1).to(energy.dtype)
    given = energy, lam, w_e, w_r
    share = 0.5 / (lam.shape[0] * count)
    return _SampleLoss.apply(*given, share, weight)  # type: ignore[no-untyped-call]


def average_over_sequences(
    value: Float[Tensor, " b"], keep: Bool[Tensor, " b"] | None
) -> Float[Tensor, ""]:
    """Return the mean over the sequences to keep; zero if there is none."""
    if keep is None:
        return value.sum() / max(value.shape[0], 1)
    return torch.where(keep, value, 0.0).sum() / keep.sum().clamp_min(1)


def kkt_residual(
    gram_q: Float[Tensor, "b h d d"],
    gram_k: Float[Tensor, "b h d d"],
    w_e: Float[Tensor, "#b h m s"],
    w_r: Float[Tensor, "#b h m s"],
    lam: Float[Tensor, "h s"],
    f: Float[Tensor, "b h m d"] | None = None,
) -> Float[Tensor, "b h"]:
    """Return the relative, squared distance of the weights from stationarity.

    ``(‖F G_q Fᵀ W_e ℓ² − W_r‖² + ‖F G_k Fᵀ W_r ℓ² − W_e‖²) / (‖W_e‖² + ‖W_r‖²)``: free of scale,
    zero if and only if the columns are singular directions (or vanish together).

    Args:
        gram_q: ``Φ_qᵀ Φ_q / n``.
        gram_k: ``Φ_kᵀ Φ_k / m``.
        w_e: Query-side weights.
        w_r: Key-side weights.
        lam: ``ℓ``.
        f: The rows ``F``; ``None`` for the identity.
    """
    left = _apply(gram_q, w_e, f) * lam.square()[:, None] - w_r
    right = _apply(gram_k, w_r, f) * lam.square()[:, None] - w_e
    squared = left.square().sum((-2, -1)) + right.square().sum((-2, -1))
    scale = w_e.square().sum((-2, -1)) + w_r.square().sum((-2, -1))
    return squared / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _apply(gram: Tensor, w: Tensor, f: Tensor | None) -> Tensor:
    with full_precision(gram):
        return gram @ w if f is None else f @ (gram @ (f.transpose(-1, -2) @ w))


def dual_residual(
    e: Float[Tensor, "b h n s"],
    r: Float[Tensor, "b h n s"],
    dual_e: Float[Tensor, "b h n s"],
    dual_r: Float[Tensor, "b h n s"],
    lam: Float[Tensor, "h s"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h"]:
    """Return ``(‖ℓ²e − h_e‖² + ‖ℓ²r − h_r‖²) / (‖h_e‖² + ‖h_r‖²)`` over real tokens.

    When the weights are built from dual variables, these two conditions are all that is left of
    stationarity.
    """
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        e, r, dual_e, dual_r = (torch.where(keep, t, 0.0) for t in (e, r, dual_e, dual_r))
    lam2 = lam.square()[:, None]
    squared = (lam2 * e - dual_e).square().sum((-2, -1)) + (lam2 * r - dual_r).square().sum(
        (-2, -1)
    )
    scale = dual_e.square().sum((-2, -1)) + dual_r.square().sum((-2, -1))
    return squared / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def balance(
    moment_e: Float[Tensor, "b h s"], moment_r: Float[Tensor, "b h s"]
) -> Float[Tensor, "b h"]:
    """Return ``mean_l ((e² − r²) / (e² + r²))²``: zero if both sides carry equal energy."""
    total = (moment_e + moment_r).clamp_min(torch.finfo(moment_e.dtype).tiny)
    return ((moment_e - moment_r) / total).square().mean(-1)


def score_gram(
    gram: Float[Tensor, "b h d d"], w: Float[Tensor, "#b h d s"]
) -> Float[Tensor, "b h s s"]:
    """Return ``EᵀE / n = Wᵀ G W``; its diagonal holds the second moments of the scores."""
    with full_precision(gram):
        return w.transpose(-1, -2) @ gram @ w


def off_diagonality(gram: Float[Tensor, "b h s s"]) -> Float[Tensor, "b h"]:
    """Return ``Σ_{l<m} cos²(E_l, E_m)``: zero if the score columns are orthogonal."""
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    cosines = gram * scale[..., :, None] * scale[..., None, :]
    return cosines.square().triu(1).sum((-2, -1))


def effective_rank(
    singular_values: Float[Tensor, "*batch s"], eps: float = 1e-12
) -> Float[Tensor, "*batch"]:
    """Return ``exp(−Σ p log p)`` with ``p = σ / Σσ``: how many directions carry the spectrum.

    Example:
        >>> effective_rank(torch.tensor([1.0, 1.0, 0.0]))
        tensor(2.)
    """
    share = singular_values / singular_values.sum(-1, keepdim=True).clamp_min(eps)
    return torch.special.entr(share).sum(-1).exp()


def implied_singular_values(
    lam: Float[Tensor, "h s"], num_queries: int, num_keys: int | None = None
) -> Float[Tensor, "h s"]:
    """Return ``√(n m) / ℓ²``: the singular values of ``K`` *if* the weights are stationary.

    For learned weights they usually are not; look at :func:`kkt_residual` before believing them.
    """
    num_keys = num_queries if num_keys is None else num_keys
    return float(num_queries * num_keys) ** 0.5 / lam.square()


def kernel_singular_values(
    gram_q: Float[Tensor, "b h d d"],
    gram_k: Float[Tensor, "b h d d"],
    f: Float[Tensor, "b h m d"] | None = None,
) -> Float[Tensor, "b h d"]:
    """Return the singular values of ``Φ_q FᵀF Φ_kᵀ`` from the Gram matrices of its factors.

    They are those of ``G_q^{1/2} FᵀF G_k^{1/2}``, a ``d × d`` matrix. With mean Gram matrices
    (``ΦᵀΦ / n``) multiply by ``√(n m)``. Values below ``√ε`` of the largest are rounding noise.
    """
    with full_precision(gram_q):
        left, right = _square_root(gram_q), _square_root(gram_k)
        middle = right if f is None else f.transpose(-1, -2) @ (f @ right)
        return torch.linalg.svdvals(left @ middle)


def _square_root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()[..., None, :] @ vectors.transpose(-1, -2)
