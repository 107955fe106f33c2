"""The asymmetric kernel SVD objective, its optimality conditions and its diagnostics.

For scores ``e = W_eᵀ F φ_q`` and ``r = W_rᵀ F φ_k`` of ``n`` tokens the published objective is

    J = ½ Σ_l ℓ_l² (mean_i e_il² + mean_i r_il²) − Tr(W_eᵀ W_r),

and its stationary points are singular triplets of ``K = Φ_q FᵀF Φ_kᵀ`` with ``σ_l = n / ℓ_l²``
(:func:`implied_singular_values`). ``J`` is zero at these points, but also at many others, because
``J = 0`` is one equation for many weights. :func:`kkt_residual` is zero at stationary points only.

All functions use the ``d × d`` Gram matrices ``ΦᵀΦ / n`` of the features. No ``n × n`` matrix is
formed. For the trace of the effective weights, ``Tr(W_{e|X}ᵀ W_{r|X})``, pass ``Fᵀ W`` in place of
``W`` to :func:`parameter_trace` and :func:`kkt_residual`, and leave out ``f``.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.twice import Context, gradients

__all__ = [
    "Reduction",
    "SampleLoss",
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
    "score_gram",
]

Reduction = Literal["sample", "batch", "head"]
"""How the objectives of sequences and heads become one loss; see :func:`reduce_objective`."""

FLOOR = 1e-18
"""Smallest size that a relative residual divides by; its square and inverse fit into float32."""


def parameter_trace(
    w_e: Float[Tensor, "*batch m s"], w_r: Float[Tensor, "*batch m s"]
) -> Float[Tensor, "*batch"]:
    """Return ``Tr(W_eᵀ W_r)`` for each head, in float32 or better."""
    wide = accumulator(w_e)
    return (w_e.to(wide) * w_r.to(wide)).sum((-2, -1))


def ksvd_objective(
    moment_e: Float[Tensor, "b h s"],
    moment_r: Float[Tensor, "b h s"],
    lam: Float[Tensor, "h s"],
    trace: Float[Tensor, "#b h"] | Float[Tensor, " h"],
) -> Float[Tensor, "b h"]:
    """Return ``J`` of every sequence and head, from the mean squares of the scores.

    Args:
        moment_e: Mean squares ``mean_i e_il²`` of the query-side scores.
        moment_r: Mean squares ``mean_j r_jl²`` of the key-side scores.
        lam: ``ℓ``.
        trace: ``Tr(W_eᵀ W_r)`` of the parameters, or of the effective weights.
    """
    return (lam.square() * (moment_e + moment_r)).sum(-1) / 2 - trace


def reduce_objective(
    objective: Float[Tensor, "b h"],
    reduction: Reduction = "sample",
    *,
    keep: Bool[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """Return the squared objective as one number.

    - ``"sample"``: ``mean_b (mean_h J)²``. It does not change when a batch is split.
    - ``"batch"``: ``(mean_{b,h} J)²``. It is smaller, by the variance over the batch.
    - ``"head"``: ``mean_{b,h} J²``. Heads of opposite sign do not cancel.

    For a model with two towers, concatenate the objectives of both.

    Args:
        objective: ``J`` of each sequence and head.
        reduction: One of the three.
        keep: ``True`` for sequences with at least one token; the others are left out.
    """
    if reduction == "sample":
        return average_over_sequences(objective.mean(1).square(), keep)
    if reduction == "batch":
        return average_over_sequences(objective.mean(1), keep).square()
    if reduction == "head":
        return average_over_sequences(objective.square().mean(1), keep)
    raise ValueError(f"reduction must be 'sample', 'batch' or 'head', got {reduction!r}.")


class SampleLoss(torch.autograd.Function):
    """The ``"sample"`` reduction of the objective, from the energy of the scores.

    ``Σ_b weight_b (mean_h J_b)²`` in few calls, because their number decides on short inputs. Takes
    the energy of all query and, after them, all key heads, ``ℓ``, the factors of the trace (free,
    or of each sequence), ``½ / (h tokens)`` and the weights of the sequences.
    """

    @staticmethod
    def forward(
        ctx: Context,
        energy: Tensor,
        lam: Tensor,
        w_e: Tensor,
        w_r: Tensor,
        share: float | Tensor,
        weight: float | Tensor,
    ) -> Tensor:
        """Return the loss."""
        squares = lam.square()
        # ℓ² of both sides in one row, so that one product sums energies of both
        squares = torch.cat([squares, squares]).view(-1)
        if w_e.dim() == 3:
            trace = torch.dot(w_e.flatten(), w_r.flatten())
        else:
            trace = (w_e * w_r).sum((1, 2, 3))
        mean = torch.mv(energy.view(energy.shape[0], -1), squares).mul_(share)
        mean.sub_(trace, alpha=1 / lam.shape[0])
        ctx.save_for_backward(energy, lam, w_e, w_r, squares, mean)
        ctx.share, ctx.weight = share, weight
        return torch.dot(mean, mean * weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        energy, lam, w_e, w_r, squares, mean = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(energy: Tensor, lam: Tensor, w_e: Tensor, w_r: Tensor) -> tuple[Tensor]:
                trace = (w_e * w_r).sum((-3, -2, -1)) / lam.shape[0]
                both = energy.unflatten(1, (2, -1)) * lam.square()
                mean = both.sum((1, 2, 3)) * ctx.share - trace
                return ((mean.square() * ctx.weight).sum(),)

            needed = ctx.needs_input_grad[:4]
            return *gradients(formula, (energy, lam, w_e, w_r), needed, (grad,)), None, None
        # d(weight m²) = 2 weight m: the same factor for all arguments
        each = mean * (grad * (2 * ctx.weight))
        # free weights are shared by all sequences, so that these add up
        trace = each.sum() if w_e.dim() == 3 else each[:, None, None, None]
        trace = trace * (-1 / lam.shape[0])
        each.mul_(ctx.share)
        by_lam = torch.mv(energy.view(each.shape[0], -1).T, each).view(2, *lam.shape).sum(0)
        by_energy = torch.outer(each, squares).view_as(energy)
        return by_energy, by_lam.mul_(lam).mul_(2), w_r * trace, w_e * trace, None, None


def average_over_sequences(
    value: Float[Tensor, " b"], keep: Bool[Tensor, " b"] | None
) -> Float[Tensor, ""]:
    """Return the mean over the sequences that ``keep`` selects; zero if it selects none."""
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
    """Return the squared residual of the KKT conditions, relative to the size of the weights.

    ``(‖F G_q Fᵀ W_e ℓ² − W_r‖² + ‖F G_k Fᵀ W_r ℓ² − W_e‖²) / (‖W_e‖² + ‖W_r‖²)``. It is zero if
    and only if every pair of columns is a singular direction, or zero on both sides. It does not
    depend on the scale of the weights.

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
    floor: float = FLOOR,
) -> Float[Tensor, "b h"]:
    """Return ``(‖ℓ²e − h_e‖² + ‖ℓ²r − h_r‖²) / (‖h_e‖² + ‖h_r‖²)`` over real tokens.

    This is the KKT residual of weights made of dual variables. Such weights satisfy the other
    conditions by construction.

    Args:
        e: Query-side scores.
        r: Key-side scores.
        dual_e: Dual variables ``h_e`` of the query side.
        dual_r: Dual variables ``h_r`` of the key side.
        lam: ``ℓ``.
        key_mask: ``True`` where a token is real.
        floor: The residual of smaller dual variables is relative to this.
    """
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        e, r, dual_e, dual_r = (torch.where(keep, t, 0.0) for t in (e, r, dual_e, dual_r))
    # the residual does not depend on the scale; squares of very small or large numbers do not exist
    both = torch.cat([dual_e.detach(), dual_r.detach()], dim=-1).abs().flatten(2)
    # padded, because there may be no tokens
    size = torch.nn.functional.pad(both, (0, 1)).amax(-1).clamp_min(floor)[..., None, None]
    e, r, dual_e, dual_r = (t / size for t in (e, r, dual_e, dual_r))
    lam2 = lam.square()[:, None]
    left, right = lam2 * e - dual_e, lam2 * r - dual_r
    squared = left.square().sum((-2, -1)) + right.square().sum((-2, -1))
    scale = dual_e.square().sum((-2, -1)) + dual_r.square().sum((-2, -1))
    # below one only if the dual variables are below the floor
    return squared / scale.clamp_min(1.0)


def balance(
    moment_e: Float[Tensor, "b h s"], moment_r: Float[Tensor, "b h s"], *, floor: float = FLOOR
) -> Float[Tensor, "b h"]:
    """Return ``mean_l ((e² − r²) / (e² + r²))²``: zero if both sides have the same energy.

    Args:
        moment_e: Energies of the query side.
        moment_r: Energies of the key side.
        floor: Scores below this count as this in the denominator.
    """
    # both energies may be zero: the ratio of empty sides is zero, not NaN
    total = (moment_e + moment_r).clamp_min(floor**2)
    return ((moment_e - moment_r) / total).square().mean(-1)


def score_gram(
    gram: Float[Tensor, "b h d d"], w: Float[Tensor, "#b h d s"]
) -> Float[Tensor, "b h s s"]:
    """Return ``EᵀE / n = Wᵀ G W``; its diagonal holds the mean squares of the scores."""
    with full_precision(gram):
        return w.transpose(-1, -2) @ gram @ w


def off_diagonality(
    gram: Float[Tensor, "b h s s"], *, floor: float = FLOOR
) -> Float[Tensor, "b h"]:
    """Return ``Σ_{l<m} cos²(E_l, E_m)``: zero if the score columns are orthogonal.

    Args:
        gram: Inner products of the columns.
        floor: Columns with a smaller norm count as shorter than one.
    """
    # first by a constant, which makes the diagonal one: the cube of a large factor overflows
    fixed = gram.detach().diagonal(dim1=-2, dim2=-1).clamp_min(floor**2).rsqrt()
    gram = gram * fixed[..., :, None] * fixed[..., None, :]
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.5).rsqrt()
    cosines = gram * scale[..., :, None] * scale[..., None, :]
    return cosines.square().triu(1).sum((-2, -1))


def effective_rank(
    singular_values: Float[Tensor, "*batch s"], eps: float = 1e-12
) -> Float[Tensor, "*batch"]:
    """Return ``exp(−Σ p log p)`` with ``p = σ / Σσ``: the number of directions that matter.

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

    Learned weights are usually not stationary. Check :func:`kkt_residual` first.

    Args:
        lam: ``ℓ``.
        num_queries: Number ``n`` of queries.
        num_keys: Number ``m`` of keys; by default as many as queries.
    """
    num_keys = num_queries if num_keys is None else num_keys
    return float(num_queries * num_keys) ** 0.5 / lam.square()


def kernel_singular_values(
    gram_q: Float[Tensor, "b h d d"],
    gram_k: Float[Tensor, "b h d d"],
    f: Float[Tensor, "b h m d"] | None = None,
) -> Float[Tensor, "b h d"]:
    """Return the singular values of ``Φ_q FᵀF Φ_kᵀ`` from the Gram matrices of its factors.

    They are those of ``G_q^{1/2} FᵀF G_k^{1/2}``, a ``d × d`` matrix. Values below ``√ε`` times
    the largest are rounding errors.

    Args:
        gram_q: ``Φ_qᵀ Φ_q``; with ``Φ_qᵀ Φ_q / n`` and ``Φ_kᵀ Φ_k / m``, multiply the result by
            ``√(n m)``.
        gram_k: ``Φ_kᵀ Φ_k``.
        f: The rows ``F``; ``None`` for the identity.
    """
    with full_precision(gram_q):
        left, right = _square_root(gram_q), _square_root(gram_k)
        middle = right if f is None else f.transpose(-1, -2) @ (f @ right)
        return torch.linalg.svdvals(left @ middle)


def _square_root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    # a Gram matrix has no negative eigenvalues; rounding makes some
    return vectors * values.clamp_min(0).sqrt()[..., None, :] @ vectors.transpose(-1, -2)
