"""The Gaussian kernel between points, and exact attention with it.

    C = κ(Q, K),   κ(x, y) = exp(−‖x − y‖² / 2)

Points are scaled: a layer with head width ``d`` passes ``q d^(-1/4)`` and ``k d^(-1/4)``.
Everything runs in float32 or better, also under autocast.

Attention uses the fused softmax kernel and has its cost. ``κ(q, k) = exp(q·k − ‖k‖²/2 − ‖q‖²/2)``
is a softmax score with a key bias, which is one more channel. A *sink* is one more key with logit
``‖q‖²/2``. Its weight is one on the scale of ``C``, so dividing by it removes the softmax
denominator. Both steps are exact and differentiable, and no ``n × m`` matrix is formed.

Distances are computed from inner products, so an exponent has an error of a few ``eps (‖x‖² +
‖y‖²)``. The kernel is invariant to shifts, so norms are taken relative to an origin among the keys;
an offset common to queries and keys adds no error. In float32 a weight is accurate to 1 % for
points within a distance of 100 of the origin. Beyond, the accuracy falls for pairs closer than
``‖x‖ √eps``, but no weight exceeds one.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import Context, gradients

__all__ = ["gaussian_attention", "gaussian_gram", "half_square", "key_origin", "square_distances"]

_MASKED_LOGIT = -1e30
"""Logit of a masked key; finite, because infinity times zero in backward is NaN."""
_ROUNDING = 16
"""Largest error of an exponent, in multiples of ``eps ‖x‖²/2``."""
_TOLERANCE = 0.01
"""Error of an exponent that needs no correction."""
_MAX_EXPONENT = 40.0
"""Largest exponent of a correction factor; in backward it multiplies values of any size."""


def half_square(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """Return ``‖x‖² / 2`` of every point."""
    return x.square().sum(-1, keepdim=True) / 2


def square_distances(
    x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
) -> Float[Tensor, "*batch n m"]:
    """Return ``‖x_i − y_j‖²`` from differences: products would round small distances of far points.

    Example:
        >>> square_distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[25.]])
    """
    if torch.compiler.is_compiling():
        return _distances(x, y).square()
    if is_traced():
        return _squares(x, y)[0]
    return _SquareDistances.apply(x, y)  # type: ignore[no-untyped-call]


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _squares(x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Return the squares, differentiated by autograd; needs ``n m d`` numbers."""
    return ((x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1),)


class _SquareDistances(torch.autograd.Function):
    """The squares; torch differentiates its distances once only."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor) -> Tensor:
        distances = _distances(x, y)
        ctx.save_for_backward(x, y, distances)
        return distances.square()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, distances = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients(_squares, (x, y), ctx.needs_input_grad, (grad,))
        back = torch.ops.aten._cdist_backward
        grad = 2 * grad * distances
        grad_x, grad_y = ctx.needs_input_grad
        return (
            back(grad, x, y, 2.0, distances) if grad_x else None,
            back(grad.mT.contiguous(), y, x, 2.0, distances.mT.contiguous()) if grad_y else None,
        )


class _Gram(torch.autograd.Function):
    """``exp(−‖x − y‖²/2)``; keeps only the points and the result for backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, y: Tensor, origin: Tensor) -> Tensor:
        near_x, near_y = x - origin, y - origin
        gram = (near_x @ near_y.mT).sub_(half_square(near_x)).sub_(half_square(near_y).mT)
        gram.clamp_max_(0).exp_()
        ctx.save_for_backward(x, y, gram, origin)
        return gram

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, gram, origin = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients(_gram, (x, y, origin), ctx.needs_input_grad, (grad,))
        weight = grad * gram
        grad_x = (weight @ y).addcmul_(x, weight.sum(-1, keepdim=True), value=-1)
        grad_y = (weight.mT @ x).addcmul_(y, weight.sum(-2).unsqueeze(-1), value=-1)
        return grad_x.sum_to_size(x.shape), grad_y.sum_to_size(y.shape), None


def _gram(x: Tensor, y: Tensor, origin: Tensor) -> tuple[Tensor]:
    """Return the same, differentiated by autograd."""
    x, y = x - origin, y - origin
    exponent = x @ y.mT - half_square(x) - half_square(y).mT
    return (exponent.clamp_max(0).exp(),)


def gaussian_gram(
    x: Float[Tensor, "*#batch n d"],
    y: Float[Tensor, "*#batch m d"],
    origin: Float[Tensor, "*#batch 1 d"] | None = None,
) -> Float[Tensor, "*batch n m"]:
    """Return ``exp(−‖x_i − y_j‖² / 2)`` in float32 or better; never above one.

    Args:
        x: Points.
        y: Points.
        origin: Point that norms are relative to; it affects only the rounding. By default the mean
            of ``y``.

    Example:
        >>> x = torch.zeros(1, 1, 1, 2)
        >>> gaussian_gram(x, x + 1).round(decimals=4)
        tensor([[[[0.3679]]]])
    """
    wide = accumulator(x)
    with full_precision(x):
        x, y = x.to(wide), y.to(wide)
        origin = key_origin(y, None) if origin is None else origin.detach()
        if is_traced():
            return _gram(x, y, origin)[0]
        return _Gram.apply(x, y, origin)  # type: ignore[no-untyped-call]


def key_origin(k: Tensor, key_mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Return the mean of the real keys; in causal order the first real key.

    Every causal query may depend on the first key, but not on the mean.
    """
    k = k.detach()
    if key_mask is None and is_causal:
        return k[..., :1, :].sum(-2, keepdim=True)  # zero without keys
    if key_mask is None:
        return k.sum(-2, keepdim=True) / max(k.shape[-2], 1)
    if is_causal:
        first = key_mask & (key_mask.cumsum(1) == 1)
        return (k * first[:, None, :, None]).sum(2, keepdim=True)
    keep = key_mask[:, None, :, None]
    return (k * keep).sum(2, keepdim=True) / keep.sum(2, keepdim=True).clamp_min(1)


def gaussian_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    pair_mask: Bool[Tensor, "b n m"] | None = None,
    is_causal: bool = False,
    normalize: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return ``κ(q, k) v`` exactly, at the speed and memory of fused softmax attention.

    Exact up to rounding, which grows with the spread of the points; see the module docstring.

    Args:
        q: Scaled queries.
        k: Scaled keys.
        v: Values.
        key_mask: ``True`` where a key is real.
        pair_mask: ``True`` where a query may see a key; instead of ``is_causal``.
        is_causal: Sum over ``j ≤ i`` only; needs as many keys as queries.
        normalize: Divide each row by its sum. A row without keys is zero either way.

    Example:
        >>> x = torch.zeros(1, 1, 3, 2)
        >>> gaussian_attention(x, x, torch.ones(1, 1, 3, 1), is_causal=True).flatten()
        tensor([1., 2., 3.])
    """
    wide, width = accumulator(q), v.shape[-1]
    with full_precision(q):
        q_, k_, v_ = (t.to(wide) for t in (q, k, v))
        seen = key_mask if pair_mask is None else pair_mask.any(1)
        origin = key_origin(k_, seen, is_causal or pair_mask is not None)
        q_, k_ = q_ - origin, k_ - origin
        level, sink = -half_square(k_), half_square(q_)
        # rounding of large exponents can make a weight exceed one; raising the sink by the largest
        # possible error keeps it above every key
        slack = (_ROUNDING * torch.finfo(wide).eps * sink.detach() - _TOLERANCE).clamp_min(0)
        if key_mask is not None:
            level = torch.where(key_mask[:, None, :, None], level, _MASKED_LOGIT)
        # one channel for the key bias and one for the sink
        q_ = torch.cat([q_, torch.ones_like(sink), sink + slack], dim=-1)
        k_ = torch.cat([k_, level, torch.zeros_like(level)], dim=-1)
        if not normalize:
            # one more value column for the sum of the keys' weights and one for the sink's weight;
            # the sink is the first key and gets a query too, so that causal order holds
            v_ = torch.cat([v_, torch.ones_like(v_[..., :1])], dim=-1)
            q_, k_, v_ = pad(q_, (0, 0, 1, 0)), pad(k_, (0, 0, 1, 0)), pad(v_, (0, 1, 1, 0))
            k_[:, :, 0, -1] = 1.0
            v_[:, :, 0, -1] = 1.0
            pair_mask = None if pair_mask is None else pad(pair_mask, (1, 0, 1, 0), value=True)
        gap = q_.shape[-1] - v_.shape[-1]
        # the fused kernel needs values as wide as the keys
        q_, k_ = pad(q_, (0, max(-gap, 0))), pad(k_, (0, max(-gap, 0)))
        mask = None if pair_mask is None else pair_mask[:, None].expand(-1, q.shape[1], -1, -1)
        y = scaled_dot_product_attention(
            q_, k_, pad(v_, (0, max(gap, 0))), mask, is_causal=is_causal, scale=1.0
        )
        if normalize:
            return _drop_empty_rows(y[..., :width], key_mask, pair_mask, is_causal).to(v.dtype)
        y, total, sunk = y[:, :, 1:].split([width, 1, 1, max(gap, 0)], dim=-1)[:3]
        with torch.no_grad():
            # undo the slack, as long as the row sum stays at one or below
            back = torch.minimum(slack.clamp_max(_MAX_EXPONENT).exp(), (sunk / total).clamp_min(1))
        return (y / sunk * back).to(v.dtype)


def _drop_empty_rows(
    y: Tensor, key_mask: Tensor | None, pair_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Set rows without keys to zero; softmax over an empty set is undefined."""
    if pair_mask is not None:
        seen = pair_mask if key_mask is None else pair_mask & key_mask[:, None]
        return torch.where(seen.any(-1)[:, None, :, None], y, 0.0)
    if key_mask is None:
        return y
    if is_causal:
        return torch.where((key_mask.cumsum(1) > 0)[:, None, :, None], y, 0.0)
    return torch.where(key_mask.any(1)[:, None, None, None], y, 0.0)
