"""Projection scores and their gradients, one tile of tokens at a time.

All passes over a tile are done before the next one, while it is in cache, and what a pass needs in
between is never longer than a tile. Heads stay where the projection left them: products run over
slices and write into slices, so no rearranged copy is ever made. Tensors are ``[b n h d]`` here.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = ["project_tiled", "weigh_tiled"]

Tile = tuple[slice, slice]
"""Some sequences whole, or a part of one."""

_NUMBERS = 2**20
"""Numbers that the heads of a tile hold: few enough for the cache, enough to hide the calls."""

_TILE = 2048
"""Tokens per tile at least, also of wide layers."""

_SHORT = 256
"""Up to this length one product over copies sorted by head beats a product for each head."""


def _tiles(b: int, n: int, h: int, d: int) -> list[Tile]:
    """Cut ``b`` sequences of ``n`` tokens into tiles; the first is the largest."""
    tokens = max(_TILE, _NUMBERS // max(h * d, 1))
    rows = max(1, tokens // max(n, 1))
    return [
        (slice(i, min(i + rows, b)), slice(j, min(j + tokens, n)))
        for i in range(0, b, rows)
        for j in range(0, n, tokens)
    ]


def _size(tiles: list[Tile]) -> tuple[int, int]:
    """Return the shape of the largest tile."""
    if not tiles:
        return 0, 0
    rows, columns = tiles[0]
    return rows.stop - rows.start, columns.stop - columns.start


def _of(w: Float[Tensor, "#b h d s"], tile: Tile) -> Float[Tensor, "#t h d s"]:
    """Return the weights of a tile's sequences; one set for all stays as it is."""
    return w if w.shape[0] == 1 else w[tile[0]]


def _invert(
    q: Float[Tensor, "b n h d"],
    keep: Bool[Tensor, "b n"] | None,
    eps: float,
    inverse: Float[Tensor, "b n h 1"],
) -> None:
    """Write the inverse norms of one tile."""
    norm = torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=accumulator(q))
    torch.reciprocal(norm.clamp_min_(eps), out=inverse)
    if keep is not None:
        # zero here makes whatever a padded token would add vanish, and every gradient of it
        inverse.masked_fill_(~keep[:, :, None, None], 0.0)


def _apply_weights(
    q: Float[Tensor, "b n h d"],
    w: Float[Tensor, "#b h d s"],
    inverse: Float[Tensor, "b n h 1"],
    scores: Float[Tensor, "b n h s"],
) -> None:
    """Write ``(q W) / ‖q‖`` of one tile."""
    if q.shape[1] <= _SHORT:
        products = q.transpose(1, 2) @ w
        torch.mul(products.transpose(1, 2), inverse, out=scores)
        return
    product = None
    for i in range(len(q)):
        # into one place, which stays in cache
        product = torch.bmm(q[i].transpose(0, 1), w[i if len(w) > 1 else 0], out=product)
        torch.mul(product.transpose(0, 1), inverse[i], out=scores[i])


def _pull_back(
    grad: Float[Tensor, "b n h s"],
    q: Float[Tensor, "b n h d"],
    w: Float[Tensor, "#b h d s"],
    scores: Float[Tensor, "b n h s"],
    inverse: Float[Tensor, "b n h 1"],
    eps: float,
    grad_q: Float[Tensor, "b n h d"],
) -> None:
    """Write the gradient of ``q`` in one tile's ``scores``; divides ``grad`` by the norms."""
    # d(1/‖q‖) = -q/‖q‖³, and zero where the norm was clamped
    radial = (grad * scores).sum(-1, keepdim=True).mul_(inverse)
    radial.mul_(torch.threshold_(inverse.neg(), -1 / eps, 0.0))
    grad.mul_(inverse)
    if q.shape[1] <= _SHORT:
        torch.mul(q, radial, out=grad_q)
        grad_q += (grad.transpose(1, 2) @ w.mT).transpose(1, 2)
        return
    for i in range(len(q)):
        own = w[i if len(w) > 1 else 0]
        torch.bmm(grad[i].transpose(0, 1), own.mT, out=grad_q[i].transpose(0, 1))
    grad_q.addcmul_(q, radial)


def _add_outer(
    z: Float[Tensor, "b n h s"], q: Float[Tensor, "b n h d"], total: Float[Tensor, "b h s d"]
) -> None:
    """Add ``Σ_i z_i q_iᵀ`` of one tile."""
    # the wider factor on the right: so the product is faster
    if q.shape[1] <= _SHORT:
        total += z.permute(0, 2, 3, 1) @ q.transpose(1, 2)
        return
    for i in range(len(q)):
        total[i] += torch.bmm(z[i].permute(1, 2, 0), q[i].transpose(0, 1))


def _score(
    q: Float[Tensor, "b n h d"],
    w: Float[Tensor, "#b h d s"],
    keep: Bool[Tensor, "b n"] | None,
    eps: float,
    scores: Float[Tensor, "b n h s"],
    inverse: Float[Tensor, "b n h 1"],
    energy: Float[Tensor, "b h s"],
) -> None:
    """Write the scores and inverse norms of one tile, and add to the energy."""
    _invert(q, keep, eps, inverse)
    _apply_weights(q, w, inverse, scores)
    # one flat row per token: passes are fastest over long contiguous rows
    squares = scores.flatten(2).to(energy.dtype).square()
    if q.shape[1] <= _SHORT:
        energy += squares.sum(1).view_as(energy)
    else:
        one = squares.new_ones(()).expand(len(q), 1, q.shape[1])
        energy.view(len(q), 1, -1).baddbmm_(one, squares)


def _score_backward(
    grad: Float[Tensor, "b n h s"],
    q: Float[Tensor, "b n h d"],
    w: Float[Tensor, "#b h d s"],
    scores: Float[Tensor, "b n h s"],
    inverse: Float[Tensor, "b n h 1"],
    eps: float,
    grad_q: Float[Tensor, "b n h d"],
    grad_w: Float[Tensor, "b h s d"],
) -> None:
    """Write ``grad_q`` of one tile and add to ``grad_w``; overwrites ``grad``."""
    _pull_back(grad, q, w, scores, inverse, eps, grad_q)
    _add_outer(grad, q, grad_w)


def _twice(
    grad_energy: Float[Tensor, "b h s"], scores: Float[Tensor, "b n h s"]
) -> Float[Tensor, "b 1 h s"]:
    """Return the factor of the scores in the gradient of their energy."""
    return 2 * grad_energy.to(scores.dtype)[:, None]


def _reduced(
    grad_w: Float[Tensor, "b h s d"], w: Float[Tensor, "#b h d s"]
) -> Float[Tensor, "#b h d s"]:
    return grad_w.mT if len(w) == len(grad_w) else grad_w.mT.sum(0, keepdim=True)


class _Project(torch.autograd.Function):
    """Keeps the inputs, the scores and one number per row and head for backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, w: Tensor, key_mask: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        b, n, h, d = q.shape
        s = w.shape[-1]
        scores, inverse = q.new_empty(b, n, h, s), q.new_empty(b, n, h, 1)
        energy = q.new_zeros(b, h, s, dtype=accumulator(q))
        for tile in _tiles(b, n, h, d):
            keep = None if key_mask is None else key_mask[tile]
            _score(q[tile], _of(w, tile), keep, eps, scores[tile], inverse[tile], energy[tile[0]])
        ctx.save_for_backward(q, w, scores, inverse)
        ctx.eps = eps
        return scores, energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        q, w, scores, inverse = ctx.saved_tensors
        twice = _twice(grad_energy, scores)
        grad_q, grad_w = torch.empty_like(q), q.new_zeros(len(q), *w.mT.shape[1:])
        for tile in _tiles(*q.shape):
            known = q[tile], _of(w, tile), scores[tile], inverse[tile]
            grad = torch.addcmul(grad_scores[tile], scores[tile], twice[tile[0]])
            _score_backward(grad, *known, ctx.eps, grad_q[tile], grad_w[tile[0]])
        return grad_q, _reduced(grad_w, w), None, None


def project_tiled(
    q: Float[Tensor, "b h n d"],
    w: Float[Tensor, "#b h d s"],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b h n s"], Float[Tensor, "b h s"]]:
    """Return ``(q W) / ‖q‖`` and its energy."""
    scores, energy = _Project.apply(q.transpose(1, 2), w, key_mask, eps)  # type: ignore[no-untyped-call]
    return scores.transpose(1, 2), energy


class _Weigh(torch.autograd.Function):
    """Keeps the inputs and one number per row and head for backward.

    The sum is the gradient of scores in their weights, so its gradients are scores: the same passes
    in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, z: Tensor, key_mask: Tensor | None, eps: float
    ) -> Float[Tensor, "b h d s"]:
        b, n, h, d = q.shape
        inverse = q.new_empty(b, n, h, 1)
        total = q.new_zeros(b, h, z.shape[-1], d, dtype=accumulator(q))
        for tile in _tiles(b, n, h, d):
            _invert(q[tile], None if key_mask is None else key_mask[tile], eps, inverse[tile])
            _add_outer(z[tile] * inverse[tile], q[tile], total[tile[0]])
        ctx.save_for_backward(q, z, inverse)
        ctx.eps = eps
        return total.mT.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, z, inverse = ctx.saved_tensors
        grad_q, grad_z = torch.empty_like(q), z.new_empty(z.shape)
        for tile in _tiles(*q.shape):
            known, scores = (q[tile], grad[tile[0]]), grad_z[tile]
            _apply_weights(*known, inverse[tile], scores)
            _pull_back(z[tile].clone(), *known, scores, inverse[tile], ctx.eps, grad_q[tile])
        return grad_q, grad_z, None, None


def weigh_tiled(
    q: Float[Tensor, "b h n d"],
    z: Float[Tensor, "b h n s"],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> Float[Tensor, "b h d s"]:
    """Return ``Σ_i (q_i / ‖q_i‖) z_iᵀ``."""
    return _Weigh.apply(q.transpose(1, 2), z.transpose(1, 2), key_mask, eps)  # type: ignore[no-untyped-call]
