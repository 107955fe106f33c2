"""Projection scores of Primal-Attention in linear time (Chen et al. 2023, arXiv 2305.19798).

A layer computes ``e_i = W_{e|X}ᵀ φ(q_i)`` and ``r_i = W_{r|X}ᵀ φ(k_i)`` with cosine features
``φ(z) = z / ‖z‖``, and never forms an ``n × n`` matrix. The three ways to obtain the projection
weights are sampled rows times codes (:func:`sample_rows`, :func:`effective_weights`), free
parameters, and dual variables (:func:`dual_weights`).

Speed comes from one identity: the norm is a scalar per row, so ``φ(q) W = (q W) / ‖q‖``. Dividing
the ``n × s`` product instead of the ``n × d`` input saves a second copy of ``q`` and everything
autograd would keep of it.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.functional.linear import from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision, representable

__all__ = [
    "Projection",
    "decayed_sum",
    "dual_weights",
    "effective_weights",
    "even_indices",
    "feature_gram",
    "normalize_rows",
    "prefix_sum",
    "project",
    "sample_rows",
]


class Projection(NamedTuple):
    """Scores and their energy."""

    scores: Float[Tensor, "b h n k"]
    """``Wᵀ φ(q_i)``, zero at padded tokens; the sides next to each other."""
    energy: Float[Tensor, "b h k"]
    """``Σ_i scores_i²`` per column, in float32 or better."""


def even_indices(
    length: int | Int[Tensor, " b"], num: int, device: torch.device | None = None
) -> Int[Tensor, "*batch num"]:
    """Return ``num`` evenly spaced positions of a sequence, first and last included.

    Position ``m`` is ``floor(m (length - 1) / (num - 1))`` in integer arithmetic, so that eager,
    compiled and exported programs agree. Shorter sequences than ``num`` repeat positions.

    Args:
        length: Length of the sequence, or one length per batch entry.
        num: How many positions to return.
        device: Where to put the result when ``length`` is an ``int``.

    Example:
        >>> even_indices(4, 3)
        tensor([0, 1, 3])
    """
    if isinstance(length, Tensor):
        steps = torch.arange(num, device=length.device)
        return steps * (length[:, None] - 1).clamp_min(0) // max(num - 1, 1)
    return torch.arange(num, device=device) * (length - 1) // max(num - 1, 1)


def sample_rows(
    x: Float[Tensor, "b n c"], num: int, key_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b {num} c"]:
    """Return ``num`` evenly spaced real tokens of each sequence; zeros where there is none.

    Padding is skipped before positions are counted, so left, right and interior padding give the
    rows of the unpadded sequence. Costs ``O(b num c)``.
    """
    b, n, c = x.shape
    if n == 0:
        return x.new_zeros(b, num, c)
    if key_mask is None:
        return x.index_select(1, even_indices(n, num, x.device))
    seen = key_mask.cumsum(1)
    length = seen[:, -1]
    position = torch.searchsorted(seen, even_indices(length, num) + 1).clamp_max(n - 1)
    rows = x.gather(1, position[:, :, None].expand(-1, -1, c))
    return torch.where((length > 0)[:, None, None], rows, 0.0)


def normalize_rows(x: Float[Tensor, "b m c"], eps: float = 1e-12) -> Float[Tensor, "b m c"]:
    """Return rows with mean zero and variance one, as a pre-norm block would feed them.

    A constant row becomes zero. Computed in float32 or better.
    """
    eps = representable(math.sqrt(eps), x) ** 2
    wide = torch.nn.functional.layer_norm(x.to(accumulator(x)), x.shape[-1:], eps=eps)
    return wide.to(x.dtype)


def effective_weights(
    f: Float[Tensor, "b h m d"], w: Float[Tensor, "h m s"]
) -> Float[Tensor, "b h d s"]:
    """Return ``W_{e|X} = Fᵀ W_e``; costs ``O(m d s)`` per head."""
    return torch.einsum("bhmd,hms->bhsd", f, w.to(f.dtype)).mT


def _inverse_norm(
    q: Float[Tensor, "b h n d"], key_mask: Bool[Tensor, "b n"] | None, eps: float
) -> Float[Tensor, "b h n 1"]:
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=accumulator(q))
    inverse = norm.clamp_min(representable(eps, q)).reciprocal()
    # a zero here makes the score, the energy and every gradient of a padded token vanish
    return inverse if key_mask is None else torch.where(key_mask[:, None, :, None], inverse, 0.0)


def dual_weights(
    k: Float[Tensor, "b h m d"],
    duals: Float[Tensor, "b h m s"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b h d s"]:
    """Return ``Φᵀ H / m``, the projection weights that dual variables ``H`` imply."""
    scaled = duals * _inverse_norm(k, key_mask, eps).to(duals.dtype)
    total = k.transpose(-1, -2) @ scaled
    if key_mask is None:
        return total / max(k.shape[2], 1)
    return total / key_mask.sum(1).clamp_min(1).to(total.dtype)[:, None, None, None]


def feature_gram(
    q: Float[Tensor, "b h n d"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "b h d d"]:
    """Return ``Φᵀ Φ``, in float32 or better, without a copy of the features; ``O(n d²)``.

    Second moments of scores, the KKT residual and off-diagonality all follow from this matrix.
    """
    wide = q.to(accumulator(q))
    with full_precision(q):
        return wide.transpose(-1, -2) @ (wide * _inverse_norm(q, key_mask, eps).square())


def prefix_sum(
    x: Float[Tensor, "b n c"], start: Float[Tensor, "b c"] | None = None
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} x_u`` in float32 or better, continuing from ``start``."""
    total = x.to(accumulator(x)).cumsum(1)
    return total if start is None else total + start[:, None]


def decayed_sum(
    x: Float[Tensor, "b n c"],
    decay: float,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    start: Float[Tensor, "b c"] | None = None,
    chunk: int = 64,
) -> Float[Tensor, "b n c"]:
    """Return ``Σ_{u ≤ t} γ^{t-u} x_u`` in float32 or better, continuing from ``start``.

    Time is counted in real tokens: padding neither adds nor decays. Inside a chunk one triangular
    product; across chunks a doubling scan that stops where ``γ`` has faded below rounding, so the
    cost is ``O(n (chunk + log(1/(1-γ)) / chunk) c)``.
    """
    n, c = x.shape[1:]
    wide = x.to(accumulator(x))
    if key_mask is not None:
        # pack the real tokens to the front; a position reads the sum of as many as it has seen
        wide = torch.where(key_mask[:, :, None], wide, 0.0)
        order = key_mask.logical_not().argsort(dim=1, stable=True)
        packed = wide.gather(1, order[:, :, None].expand(-1, -1, c))
        total = decayed_sum(packed, decay, start=start, chunk=chunk)
        start = wide.new_zeros(x.shape[0], c) if start is None else start
        total = torch.cat([start[:, None], total], dim=1)
        return total.gather(1, key_mask.cumsum(1)[:, :, None].expand(-1, -1, c))
    wide = to_chunks(wide, chunk)  # [b g i c]
    chunk = wide.shape[2]
    rate, steps = math.log(decay), torch.arange(chunk, dtype=wide.dtype, device=x.device)
    inside = (rate * (steps[:, None] - steps).tril()).exp().tril()  # [i j]
    with full_precision(x):
        local = inside @ wide
    # carry over chunks: after k rounds it holds the sum of the last 2^k chunks
    carry, step, groups = local[:, :, -1], 1, local.shape[1]
    memory = 1 + int(math.log(torch.finfo(wide.dtype).eps) / rate) // chunk
    while step <= memory:
        older = torch.nn.functional.pad(carry, (0, 0, step, 0))[:, :groups]
        carry = carry + decay ** (chunk * step) * older
        step *= 2
    before = torch.nn.functional.pad(carry, (0, 0, 1, 0))[:, :groups]
    total = local + (rate * (steps + 1)).exp()[:, None] * before[:, :, None]
    total = from_chunks(total, n)
    if start is None:
        return total
    age = torch.arange(1, n + 1, dtype=wide.dtype, device=x.device)
    return total + (rate * age).exp()[:, None] * start[:, None]


class _Project(torch.autograd.Function):
    """``(q W) / ‖q‖`` side by side for several ``(q, W)``, and the energy of every column.

    Keeps the inputs, the scores and one number per row for backward. Heads stay where the
    projection left them: ``q`` is a strided view, products run over slices of it and write into
    slices of the result, so no rearranged copy is ever made. All passes over a tile of tokens are
    done before the next tile, while it is in cache; temporaries are never longer than a tile.
    """

    @staticmethod
    def forward(
        ctx: Any, key_mask: Tensor | None, eps: float, *pairs: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, weights = pairs[::2], pairs[1::2]
        b, h, n, _ = inputs[0].shape
        sides, s = len(inputs), weights[0].shape[-1]
        scores = inputs[0].new_empty(b, n, h, sides, s)
        inverse = scores.new_empty(b, n, h, sides, 1)
        energy = scores.new_zeros(b, h * sides * s, dtype=accumulator(scores))
        for tile in _tiles(b, n):
            part, scale = scores[tile], inverse[tile]
            for i, (q, w) in enumerate(zip(inputs, weights, strict=True)):
                q = q.transpose(1, 2)[tile]
                norm = torch.linalg.vector_norm(q, dim=-1, dtype=energy.dtype)
                scale[..., i, 0] = norm.clamp_min_(eps).reciprocal_()
                _multiply(q, _of(w, tile), out=part[..., i, :])
            if key_mask is not None:
                # zero here makes score, energy and every gradient of a padded token vanish
                scale.masked_fill_(~key_mask[tile][..., None, None, None], 0.0)
            part.mul_(scale)
            energy[tile[0]] += part.flatten(2).to(energy.dtype).square().sum(1)
        ctx.save_for_backward(scores, inverse, *pairs)
        ctx.eps = eps
        return scores.flatten(3).transpose(1, 2), energy.unflatten(1, (h, -1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        scores, inverse, *pairs = ctx.saved_tensors
        inputs, weights = pairs[::2], pairs[1::2]
        b, n = scores.shape[:2]
        grad_scores = grad_scores.transpose(1, 2).flatten(2)
        twice = 2 * grad_energy.to(scores.dtype).flatten(1)[:, None]
        grad_inputs = [torch.empty_like(q.transpose(1, 2)).transpose(1, 2) for q in inputs]
        # transposed: with the wider factor on the right the product is faster
        grad_weights = [
            q.new_zeros(b, *w.shape[1:]).mT.contiguous()
            for q, w in zip(inputs, weights, strict=True)
        ]
        for tile in _tiles(b, n):
            part, scale = scores[tile], inverse[tile]
            # one flat row per token: element-wise passes are fastest over long contiguous rows
            grad = torch.addcmul(grad_scores[tile], part.flatten(2), twice[tile[0]]).view_as(part)
            # d(1/‖q‖) = -q/‖q‖³; it vanishes where the norm was clamped
            radial = (grad * part).sum(-1, keepdim=True).mul_(scale).mul_(scale).neg_()
            radial.masked_fill_(scale >= 1 / ctx.eps, 0.0)
            grad.mul_(scale)
            for i, (q, w) in enumerate(zip(inputs, weights, strict=True)):
                q, grad_q = q.transpose(1, 2)[tile], grad_inputs[i].transpose(1, 2)[tile]
                torch.mul(q, radial[..., i, :], out=grad_q)
                _multiply(grad[..., i, :], _of(w, tile).mT, out=grad_q, accumulate=True)
                _contract(grad[..., i, :], q, out=grad_weights[i][tile[0]])
        results: list[Tensor | None] = [None, None]
        for grad_q, grad_w, w in zip(grad_inputs, grad_weights, weights, strict=True):
            results += [grad_q, grad_w.mT if w.shape[0] == b else grad_w.mT.sum(0, keepdim=True)]
        return tuple(results)


_TILE = 4096
"""Tokens per tile: small enough for the cache, large enough to hide the calls."""


def _tiles(b: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Cut ``b`` sequences of ``n`` tokens into tiles: several short ones, or part of a long one."""
    rows = max(1, _TILE // max(n, 1))
    for i in range(0, b, rows):
        for j in range(0, n, _TILE):
            yield slice(i, i + rows), slice(j, j + _TILE)


def _of(w: Tensor, tile: tuple[slice, slice]) -> Tensor:
    """Return the weights of a tile's sequences; one set for all stays as it is."""
    return w if w.shape[0] == 1 else w[tile[0]]


def _pairs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching three-dimensional slices along the shorter of batch and heads."""
    b, h = tensors[0].shape[:2]
    axis = 0 if b <= h else 1
    return zip(*(t.expand(b, -1, -1, -1).unbind(axis) for t in tensors), strict=True)


def _multiply(
    a: Float[Tensor, "b n h d"],
    w: Float[Tensor, "#b h d s"],
    *,
    out: Float[Tensor, "b n h s"],
    accumulate: bool = False,
) -> None:
    """Write or add ``a @ w`` into ``out``."""
    for left, right, slot in _pairs(a.transpose(1, 2), w, out.transpose(1, 2)):
        if accumulate:
            slot.baddbmm_(left, right)
        else:
            torch.bmm(left, right, out=slot)


def _contract(
    g: Float[Tensor, "b n h s"], a: Float[Tensor, "b n h d"], *, out: Float[Tensor, "b h s d"]
) -> None:
    """Add ``gᵀ a`` into ``out``."""
    for left, right, slot in _pairs(g.permute(0, 2, 3, 1), a.transpose(1, 2), out):
        slot.baddbmm_(left, right)


def project(
    *pairs: tuple[Float[Tensor, "b h n d"], Float[Tensor, "#b h d s"]],
    key_mask: Bool[Tensor, "b n"] | None = None,
    eps: float = 1e-6,
) -> Projection:
    """Project cosine features onto ``s`` directions per head, for one or more sides at once.

    Costs ``O(n d s)`` per head; keeps inputs, scores and one norm per row for backward.

    Args:
        pairs: ``(q, w)`` for each side: queries or keys before the feature map, finite also at
            padded positions; projection weights, one set per batch entry or one for all.
        key_mask: ``True`` where a token is real. Scores of padded tokens are zero.
        eps: Norms below this count as this.

    Returns:
        The scores of all sides next to each other, ``k = sides × s`` columns.

    Example:
        >>> q = torch.tensor([[[[3.0, 4.0]]]])
        >>> project((q, torch.eye(2)[None, None])).scores
        tensor([[[[0.6000, 0.8000]]]])
    """
    if torch.compiler.is_compiling():
        # the compiler fuses this by itself and cannot see through in-place slices
        sides = [
            (q @ w.to(q.dtype)) * _inverse_norm(q, key_mask, eps).to(q.dtype) for q, w in pairs
        ]
        scores = torch.cat(sides, dim=-1)
        return Projection(scores, scores.to(accumulator(scores)).square().sum(2))
    eps = representable(eps, pairs[0][0])
    flat = [t for q, w in pairs for t in (q, w.to(q.dtype))]
    return Projection(*_Project.apply(key_mask, eps, *flat))  # type: ignore[no-untyped-call]
