"""Gaussian-kernel attention, exact and by the lifted Nyström method (Chen et al. 2021, 2111.00035).

    C = κ(Q, K),   κ(x, y) = exp(−‖x − y‖² / 2)
    C ≈ κ(Q, Z) (κ(Z, Z) + γ I)⁻¹ κ(Z, K)       for landmarks Z among queries *and* keys

``C`` is a block of the Gram matrix of the stacked queries and keys; that matrix is positive
definite, so the classical Nyström theory holds although ``C`` itself is not even symmetric.

Points arrive scaled: a layer with head width ``d`` passes ``q d^(-1/4)`` and ``k d^(-1/4)``.
Everything runs in float32 or better, also under autocast.

The exact form costs what fused softmax costs. ``κ(q, k) = exp(q·k − ‖k‖²/2 − ‖q‖²/2)`` is a softmax
score with a key bias, carried by one more channel; and a *sink*, one more key whose logit is
``‖q‖²/2``, has weight one on the scale of ``C``, so the ratio to its weight undoes the softmax
denominator. Both are exact, differentiable and never form ``n × m``.

Distances come from inner products, so an exponent is off by a few ``eps (‖x‖² + ‖y‖²)``. The kernel
does not feel a shift: norms are taken from a point among the keys, and an offset common to
queries and keys costs nothing. What remains is the spread of the points. In float32 a weight is
good to 1 % while they lie within 100 of that point; beyond, pairs closer than ``‖x‖ √eps`` are told
apart less and less, and no weight exceeds one.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from primal_attention.functional.linear import from_chunks, to_chunks, with_ones
from primal_attention.functional.precision import accumulator, full_precision
from primal_attention.functional.primal import even_indices, first_reaching

__all__ = [
    "Inverse",
    "WindowedNystrom",
    "gaussian_attention",
    "gaussian_gram",
    "kmeans_landmarks",
    "landmark_gram",
    "nystrom_attention",
    "nystrom_error",
    "nystrom_features",
    "nystrom_residual",
    "nystromformer_attention",
    "row_average",
    "schulz_inverse",
    "segment_means",
    "strided_landmarks",
    "token_convolution",
    "windowed_nystrom",
]

Inverse = Literal["cholesky", "schulz", "published"]

_ABSENT = -1e30
"""Logit of a key that is not there; finite, so that no infinity meets a zero in backward."""


_ROUNDING = 16
"""Multiples of ``eps ‖x‖²/2`` by which an exponent between points of that norm is off at most."""
_UNNOTICED = 0.01
"""Error of an exponent that is let pass."""
_ENOUGH = 80.0
"""Logarithm of a factor that lifts any weight a float32 can hold to one, and can be held itself."""

_BLOCK = 32
"""Tokens that one banded matrix convolves at least."""


class _Gram(torch.autograd.Function):
    """``exp(−‖x − y‖²/2)``, keeping the points and the result for backward and nothing between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, origin: Tensor) -> Tensor:
        near_x, near_y = x - origin, y - origin
        gram = (near_x @ near_y.mT).sub_(_half_square(near_x)).sub_(_half_square(near_y).mT)
        gram.clamp_max_(0).exp_()
        ctx.save_for_backward(x, y, gram)
        return gram

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, gram = ctx.saved_tensors
        weight = grad * gram
        grad_x = (weight @ y).addcmul_(x, weight.sum(-1, keepdim=True), value=-1)
        grad_y = (weight.mT @ x).addcmul_(y, weight.sum(-2).unsqueeze(-1), value=-1)
        return grad_x.sum_to_size(x.shape), grad_y.sum_to_size(y.shape), None


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def gaussian_gram(
    x: Float[Tensor, "*#batch n d"],
    y: Float[Tensor, "*#batch m d"],
    origin: Float[Tensor, "*#batch 1 d"] | None = None,
) -> Float[Tensor, "*batch n m"]:
    """Return ``exp(−‖x_i − y_j‖² / 2)`` in float32 or better; never above one.

    Args:
        x: Points.
        y: Points.
        origin: Where norms are taken from, for the rounding only; the mean of ``y`` without one.

    Example:
        >>> x = torch.zeros(1, 1, 1, 2)
        >>> gaussian_gram(x, x + 1).round(decimals=4)
        tensor([[[[0.3679]]]])
    """
    wide = accumulator(x)
    with full_precision(x):
        x, y = x.to(wide), y.to(wide)
        origin = _origin(y, None) if origin is None else origin.detach()
        if torch.compiler.is_compiling():
            x, y = x - origin, y - origin
            exponent = x @ y.mT - _half_square(x) - _half_square(y).mT
            return exponent.clamp_max(0).exp()
        return _Gram.apply(x, y, origin)  # type: ignore[no-untyped-call]


def _origin(k: Tensor, key_mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Return the mean of the real keys; in causal order the first, which every query knows."""
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

    Exact up to rounding, which grows with the spread of the points; the module says how.

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
        origin = _origin(k_, seen, is_causal or pair_mask is not None)
        q_, k_ = q_ - origin, k_ - origin
        level, sink = -_half_square(k_), _half_square(q_)
        # no weight exceeds one, but rounding of large exponents can make it seem so; a sink raised
        # by all that rounding can do stays above every key
        slack = (_ROUNDING * torch.finfo(wide).eps * sink.detach() - _UNNOTICED).clamp_min(0)
        if key_mask is not None:
            level = torch.where(key_mask[:, None, :, None], level, _ABSENT)
        # one channel for the key bias and one for the sink
        q_ = torch.cat([q_, torch.ones_like(sink), sink + slack], dim=-1)
        k_ = torch.cat([k_, level, torch.zeros_like(level)], dim=-1)
        if not normalize:
            # a column of values for the keys' weight and one for the sink's; the sink comes first
            # and brings a query of its own, so that causal order holds
            v_ = torch.cat([v_, torch.ones_like(v_[..., :1])], dim=-1)
            q_, k_, v_ = pad(q_, (0, 0, 1, 0)), pad(k_, (0, 0, 1, 0)), pad(v_, (0, 1, 1, 0))
            k_[:, :, 0, -1] = 1.0
            v_[:, :, 0, -1] = 1.0
            pair_mask = None if pair_mask is None else pad(pair_mask, (1, 0, 1, 0), value=True)
        gap = q_.shape[-1] - v_.shape[-1]
        # the fused kernel wants values as wide as the keys
        q_, k_ = pad(q_, (0, max(-gap, 0))), pad(k_, (0, max(-gap, 0)))
        mask = None if pair_mask is None else pair_mask[:, None].expand(-1, q.shape[1], -1, -1)
        y = scaled_dot_product_attention(
            q_, k_, pad(v_, (0, max(gap, 0))), mask, is_causal=is_causal, scale=1.0
        )
        if normalize:
            return _drop_empty_rows(y[..., :width], key_mask, pair_mask, is_causal).to(v.dtype)
        y, total, sunk = y[:, :, 1:].split([width, 1, 1, max(gap, 0)], dim=-1)[:3]
        with torch.no_grad():
            # the slack is taken back as far as the row sum stays at one or below
            back = torch.minimum(slack.clamp_max(_ENOUGH).exp(), (sunk / total).clamp_min(1))
        return (y / sunk * back).to(v.dtype)


def _drop_empty_rows(
    y: Tensor, key_mask: Tensor | None, pair_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Zero the rows that see no key: a softmax over nothing has no meaning."""
    if pair_mask is not None:
        seen = pair_mask if key_mask is None else pair_mask & key_mask[:, None]
        return torch.where(seen.any(-1)[:, None, :, None], y, 0.0)
    if key_mask is None:
        return y
    if is_causal:
        return torch.where((key_mask.cumsum(1) > 0)[:, None, :, None], y, 0.0)
    return torch.where(key_mask.any(1)[:, None, None, None], y, 0.0)


def landmark_gram(z: Float[Tensor, "b h s d"], ridge: float) -> Float[Tensor, "b h s s"]:
    """Return ``κ(Z, Z) + γ I``, safe to factor whatever the norm of the landmarks.

    Distances are summed difference by difference. The expanded square loses ``‖z‖² eps`` of each
    exponent, enough to make the matrix indefinite; this form is off by a few ``eps`` per entry. The
    ridge is at least ``4 s eps``, which covers that and the rounding of the factorisation, so one
    attempt suffices.
    """
    wide, s = accumulator(z), z.shape[2]
    with full_precision(z):
        z = z.to(wide)
        distance = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
        gamma = max(ridge, 4 * s * torch.finfo(wide).eps)
        return (distance.square() / -2).exp() + gamma * torch.eye(s, dtype=wide, device=z.device)


def schulz_inverse(
    m: Float[Tensor, "b h s s"], steps: int = 8, *, published_start: bool = False
) -> Float[Tensor, "b h s s"]:
    """Return the inverse of a positive definite, entrywise positive matrix by matrix products only.

    The matrix is scaled by its row sums to ``N = D^(-1/2) M D^(-1/2)``, whose eigenvalues lie in
    ``(0, 1]``; then ``Z ← Z (13 − N Z (15 − N Z (7 − N Z))) / 4``. An eigenvalue ``λ`` is inverted
    once ``3.25^steps`` times the starting gap exceeds one, and damped until then.

    Args:
        m: The matrix.
        steps: Iterations; six in the paper.
        published_start: Start at ``Nᵀ / ‖N‖₁``, gap ``λ²``, as the paper does. By default at the
            identity, gap ``λ``, which needs half the steps.

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
            # the norm of each matrix by itself: batch mates must not meet here
            z = n_m.mT / n_m.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
        return scale * _iterate(n_m, z, steps) * scale.mT


class _Iterate(torch.autograd.Function):
    """Products that add to what is there already, in both directions: no pass between them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, z: Tensor, steps: int) -> Tensor:
        kept: list[Tensor] = []
        for _ in range(steps):
            after, *inside = _improved(a, z)
            kept += [z, *inside]
            z = after
        ctx.save_for_backward(a, *kept)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, *kept = ctx.saved_tensors
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


def _iterate(a: Tensor, z: Tensor, steps: int) -> Tensor:
    """Return ``z`` after ``z ← z (13 − a z (15 − a z (7 − a z))) / 4``, four products a step."""
    flat = a.flatten(0, -3), z.flatten(0, -3)
    if not torch.compiler.is_compiling():
        return _Iterate.apply(*flat, steps).view(a.shape)  # type: ignore[no-untyped-call]
    z = flat[1]
    for _ in range(steps):
        z = _improved(flat[0], z)[0]
    return z.view(a.shape)


def _improved(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the next ``z``, and the products inside the brackets, innermost first."""
    az = a @ z
    first = torch.baddbmm(az, az, az, beta=7, alpha=-1)
    second = torch.baddbmm(az, az, first, beta=15, alpha=-1)
    return torch.baddbmm(z, z, second, beta=13 / 4, alpha=-1 / 4), az, first, second


def _solve(m: Tensor, t: Tensor, inverse: Inverse) -> Tensor:
    """Return ``M⁻¹ t``."""
    if inverse == "cholesky":
        # _ex: a NaN among the inputs must come out as NaN, not as an exception mid-graph
        return torch.cholesky_solve(t, torch.linalg.cholesky_ex(m).L)
    if inverse == "schulz":
        return schulz_inverse(m) @ t
    if inverse == "published":
        return schulz_inverse(m, 6, published_start=True) @ t
    raise ValueError(f"inverse must be one of {get_args(Inverse)}, got {inverse!r}.")


def row_average(y: Float[Tensor, "b h n u"], ridge: float) -> Float[Tensor, "b h n v"]:
    """Return sums over the row sum in their last column, ``t / (t² + γ²)`` times as much.

    A low-rank row sum below the ridge is noise, maybe negative; such a row fades to zero.
    """
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
        normalize: Divide each row by its sum; rows whose sum is below the ridge fade to zero.
        inverse: ``"cholesky"``, or the iteration of the paper, well started (``"schulz"``, 8 steps)
            or as published (``"published"``, 6 steps: a spectral filter rather than an inverse).

    Example:
        >>> x = torch.randn(1, 1, 5, 2, dtype=torch.float64)
        >>> exact = gaussian_attention(x, x, x)
        >>> torch.allclose(nystrom_attention(x, x, x, x, ridge=1e-9), exact)
        True
    """
    with full_precision(q):
        t = gaussian_gram(k, z).mT @ with_ones(v, key_mask)  # [b h s u]
        y = gaussian_gram(q, z) @ _solve(landmark_gram(z, ridge), t, inverse)
        return (row_average(y, ridge) if normalize else y[..., :-1]).to(v.dtype)


def nystrom_features(
    x: Float[Tensor, "b h n d"], z: Float[Tensor, "#b h s d"], ridge: float = 1e-3
) -> Float[Tensor, "b h n s"]:
    """Return ``φ(x) = L⁻¹ κ(Z, x)``, ``L Lᵀ = κ(Z, Z) + γ I``: inner products are Nyström's kernel.

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
    """Return ``κ(x, x) − φ(x)·φ(x)`` per token: 0 where the landmarks explain it, 1 where not.

    This is also the posterior variance of a Gaussian process with inducing points ``z``.
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
    """Return ``‖C − C̃‖₂ / ‖C‖₂`` over the real tokens; forms ``n × m``, so for diagnosis only."""
    unit = torch.eye(k.shape[2], dtype=accumulator(k), device=k.device).expand(*k.shape[:3], -1)
    exact = gaussian_gram(q, k)
    if key_mask is not None:
        exact = torch.where(key_mask[:, None, None, :], exact, 0.0)
    low = nystrom_attention(q, k, unit, z, ridge=ridge, key_mask=key_mask, inverse=inverse)
    if query_mask is not None:
        exact, low = (torch.where(query_mask[:, None, :, None], t, 0.0) for t in (exact, low))
    difference, size = (torch.linalg.matrix_norm(t, 2) for t in (exact - low, exact))
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)


def strided_landmarks(
    x: Float[Tensor, "b h n d"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h {num} d"]:
    """Return ``num`` evenly spaced real tokens; repeated if there are fewer, zeros if none."""
    n = x.shape[2]
    x = pad(x, (0, 0, 0, 1))  # the zero row that an empty sequence samples
    if key_mask is None:
        at = even_indices(n, num, x.device).clamp(0, n)
        return x.index_select(2, at)
    seen = key_mask.cumsum(1)
    rank = even_indices(key_mask.sum(1), num)  # [b num]
    # without any real token the search ends at n, the zero row
    at = first_reaching(seen, rank + 1)
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def segment_means(
    x: Float[Tensor, "b h n d"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h {num} d"]:
    """Return the means of ``num`` consecutive runs of real tokens, as equal in length as possible.

    Runs are counted over real tokens, so padding on any side changes nothing. With fewer tokens
    than runs, an empty run repeats the one before it; without tokens all are zero.

    Example:
        >>> segment_means(torch.arange(4.0).view(1, 1, 4, 1), 2).flatten()
        tensor([0.5000, 2.5000])
    """
    b, h, n, d = x.shape
    if key_mask is None and not torch.compiler.is_compiling() and n and n % num == 0:
        return x.unflatten(2, (num, n // num)).mean(3)
    if key_mask is None:
        segment = torch.arange(n, device=x.device) * num // max(n, 1)
        total = x.new_zeros(b, h, num, d).index_add(2, segment, x)
        count = x.new_zeros(1, num).index_add(1, segment, x.new_ones(1, n))
    else:
        rank = key_mask.cumsum(1) - 1
        segment = rank * num // key_mask.sum(1, keepdim=True).clamp_min(1)
        segment = segment.clamp(0, num - 1)
        share = key_mask.to(x.dtype)
        count = share.new_zeros(b, num).scatter_add(1, segment, share)
        at = segment[:, None, :, None].expand_as(x)
        total = x.new_zeros(b, h, num, d).scatter_add(2, at, x * share[:, None, :, None])
    mean = total / count.clamp_min(1)[:, None, :, None]
    order = torch.arange(num, device=x.device).expand_as(count)
    last = torch.where(count > 0, order, 0).cummax(1).values
    return mean.gather(2, last[:, None, :, None].expand_as(mean))


def kmeans_landmarks(
    x: Float[Tensor, "b h n d"],
    start: Float[Tensor, "b h s d"],
    key_mask: Bool[Tensor, "b n"] | None = None,
    *,
    steps: int = 5,
) -> Float[Tensor, "b h s d"]:
    """Return cluster means of the real tokens after a few Lloyd steps; ``O(steps n s d)``.

    Gradients flow through the means, not through the assignment. A cluster that loses all its
    tokens keeps its centre.
    """
    z, count = start.detach(), torch.zeros_like(start[..., :1])
    origin = _origin(z, None)
    ones = torch.ones_like(x[..., :1])
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        x, ones = torch.where(keep, x, 0.0), torch.where(keep, ones, 0.0)
    for step in range(steps):
        near = z - origin
        nearest = ((x.detach() - origin) @ near.mT - _half_square(near).mT).argmax(-1, keepdim=True)
        count = torch.zeros_like(count).scatter_add(2, nearest, ones)
        points = x if step == steps - 1 else x.detach()
        total = torch.zeros_like(start).scatter_add(2, nearest.expand_as(x), points)
        z = torch.where(count > 0, total / count.clamp_min(1), z)
    return z if steps else start


def nystromformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    q_l: Float[Tensor, "b h s d"],
    k_l: Float[Tensor, "b h s d"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    steps: int = 6,
) -> Float[Tensor, "b h n v"]:
    """Return ``softmax(q k̃ᵀ/√d) softmax(q̃ k̃ᵀ/√d)⁺ softmax(q̃ kᵀ/√d) v`` (Xiong et al. 2021).

    Both tall factors go through the fused kernel, so no ``n × s`` matrix is kept.

    Args:
        q: Queries, not scaled.
        k: Keys.
        v: Values.
        q_l: Query landmarks.
        k_l: Key landmarks.
        key_mask: ``True`` where a key is real.
        steps: Iterations for the pseudo-inverse.
    """
    wide = accumulator(q)
    with full_precision(q):
        q, k, q_l, k_l = (t.to(wide) for t in (q, k, q_l, k_l))
        mask = None
        if key_mask is not None:
            mask = key_mask[:, None, None, :].expand(-1, q.shape[1], q_l.shape[2], -1)
        right = scaled_dot_product_attention(q_l, k, v.to(wide), attn_mask=mask)
        if key_mask is not None:
            right = torch.where(key_mask.any(1)[:, None, None, None], right, 0.0)
        a = (q_l @ k_l.mT * q.shape[-1] ** -0.5).softmax(-1)
        # each matrix by its own norms: batch mates must not meet here
        columns, rows = (a.sum(i, keepdim=True).amax((-2, -1), keepdim=True) for i in (-2, -1))
        inverse = _iterate(a, a.mT / (columns * rows), steps)
        return scaled_dot_product_attention(q, k_l, inverse @ right).to(v.dtype)


def token_convolution(
    x: Float[Tensor, "b h n d"], weight: Float[Tensor, "h k"]
) -> Float[Tensor, "b h n d"]:
    """Return ``y_i = Σ_t w_t x_{i + t - k/2}`` per head, zero beyond the ends; ``k`` is odd.

    By products with banded matrices over blocks of tokens: on a CPU that costs half of what a
    grouped convolution does, whose layout is made for images, and a third in training.

    Example:
        >>> token_convolution(torch.ones(1, 1, 4, 1), torch.ones(1, 3)).flatten()
        tensor([2., 3., 3., 2.])
    """
    n, taps = x.shape[2], weight.shape[1]
    half, block = taps // 2, max(_BLOCK, taps - 1)
    if not torch.compiler.is_compiling():
        block = min(block, max(n + 2 * half, 1))
    at = torch.arange(block, device=x.device)
    tap = torch.arange(2 * block, device=x.device) - at[:, None]
    inside = (tap >= 0) & (tap < taps)
    band = torch.where(inside, weight[:, tap.clamp(0, taps - 1)], 0.0)  # [h i 2i]
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _convolve_in_place(x, band, half)
    blocks = to_chunks(pad(x, (0, 0, half, half)), block)  # [b h g i d]
    pairs = torch.cat([blocks, pad(blocks, (0, 0, 0, 0, 0, 1))[:, :, 1:]], dim=3)
    if torch.compiler.is_compiling():
        # the reshapes of einsum would tie an exported program to some lengths
        return from_chunks(band[:, None] @ pairs, n)
    return from_chunks(torch.einsum("hij,bhgjd->bhgid", band, pairs), n)


def _convolve_in_place(
    x: Float[Tensor, "b h n d"], band: Float[Tensor, "h i j"], half: int
) -> Float[Tensor, "b h n d"]:
    """Multiply two blocks after one another by a band, where they stand: nothing is copied."""
    (b, h, n, d), block = x.shape, band.shape[1]
    g = -(-(n + half) // block) + 1  # the last one stays empty
    tokens = x.new_zeros(h, b, g * block, d)
    tokens[:, :, half : half + n] = x.transpose(0, 1)
    y, count = torch.empty_like(tokens), max(b * g - 1, 0)
    for own, padded, out in zip(band, tokens, y, strict=True):
        pairs = padded.as_strided((count, 2 * block, d), (block * d, d, 1))
        # pairs of two sequences are worked out as well, and thrown away
        torch.bmm(own.expand(count, -1, -1), pairs, out=out.view(-1, block, d)[:count])
    return y[:, :, :n].transpose(0, 1)


class WindowedNystrom(NamedTuple):
    """Causal outputs and the state to continue them."""

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

    Landmarks that belong to no sequence keep this strictly causal, and its state constant in size.

    Args:
        q: Scaled queries.
        k: Scaled keys.
        v: Values, zero where a key is absent.
        z: Landmarks, the same for every sequence.
        window: How many keys are seen exactly.
        ridge: ``γ``, on the scale of the unit diagonal of ``κ(z, z)``.
        state: Where to continue, from an earlier call.
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
            # a copy, not a view: exported programs could not prove its strides for every length
            y = y.index_select(2, torch.arange(window, window + n, device=q.device))
        y = y + phi_q @ old
        after = old + phi_k[:, :, :n].mT @ v_[:, :, :n], k_[:, :, n:], v_[:, :, n:]
        return WindowedNystrom(y.to(v.dtype), after)


def _dense_window(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, window: int
) -> Tensor:
    """Return the sums for a few queries, the first of them ``window`` slots after the first key."""
    lag = torch.arange(q.shape[2], device=q.device)[:, None] + window
    lag = lag - torch.arange(k.shape[2], device=q.device)
    origin = _origin(k[:, :, window:], None, is_causal=True)
    weights = torch.where(lag < window, gaussian_gram(q, k, origin), phi_q @ phi_k.mT)
    return torch.where(lag >= 0, weights, 0.0) @ v


def _chunked_window(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, window: int
) -> Tensor:
    """Return the sums by chunks of ``window`` slots: own, previous, and all older ones."""
    n = q.shape[2]
    groups = (n + window - 1) // window
    q, k, v, phi_q, phi_k = (
        pad(t, (0, 0, 0, groups * window - n)).unflatten(2, (groups, window))
        for t in (q, k, v, phi_q, phi_k)
    )  # [b h g i d]
    origin = _origin(k, None, is_causal=True)  # the first key of each chunk
    y = gaussian_gram(q, k, origin).tril() @ v
    total = (phi_k.mT @ v).cumsum(2)
    y = y + phi_q @ pad(total, (0, 0, 0, 0, 2, 0))[:, :, :groups]
    k, v, phi_k = (pad(t, (0, 0, 0, 0, 1, 0))[:, :, :groups] for t in (k, v, phi_k))
    y = y + (gaussian_gram(q, k, origin).triu(1) + (phi_q @ phi_k.mT).tril()) @ v
    return y.flatten(2, 3)
