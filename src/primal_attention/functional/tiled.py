"""Projection scores and their gradients, one tile of tokens at a time.

All passes over a tile are done before the next one, while it is in cache, and what a pass needs in
between is never longer than a tile. Heads stay where the projection left them: products run over
slices and write into slices, so no rearranged copy is ever made. Tensors are ``[b n h d]`` here.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = ["attend_tiled", "project_tiled", "tie_tiled", "weigh_tiled"]

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


class _Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def _apply(linear: _Affine, x: Tensor, out: Tensor) -> None:
    """Write ``weight x + bias`` of every token."""
    rows, into = x.flatten(0, 1), out.view(-1, out.shape[-1])
    if linear.bias is None:
        torch.mm(rows, linear.weight.T, out=into)
    else:
        torch.addmm(linear.bias, rows, linear.weight.T, out=into)


class _Gradient:
    """Adds up the gradients of a linear map over tiles, in float32 or better."""

    def __init__(self, linear: _Affine) -> None:
        self._linear = linear
        wide = accumulator(linear.weight)
        self._weight = torch.zeros_like(linear.weight, dtype=wide)
        self._bias = None if linear.bias is None else torch.zeros_like(linear.bias, dtype=wide)

    def add(self, grad: Float[Tensor, "t out"], x: Float[Tensor, "t in"]) -> None:
        if self._weight.dtype == grad.dtype:
            self._weight.addmm_(grad.T, x)
        else:
            self._weight += grad.T @ x
        if self._bias is not None:
            self._bias += grad.sum(0, dtype=self._bias.dtype)

    def result(self) -> _Affine:
        dtype = self._linear.weight.dtype
        bias = None if self._bias is None else self._bias.to(dtype)
        return _Affine(self._weight.to(dtype), bias)


class _Attend(torch.autograd.Function):
    """Keeps tokens, heads, scores and one number per row and head for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        a_bias: Tensor | None,
        w: Tensor,
        o: Tensor,
        o_bias: Tensor | None,
        key_mask: Tensor | None,
        eps: float,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        b, n, _ = x.shape
        h, d, s = w.shape[1:]
        tiles = _tiles(b, n, h, d)
        # without gradients one tile's worth of memory serves all of them
        lead = (b, n) if keeps else _size(tiles)
        q, scores = x.new_empty(*lead, h, d), x.new_empty(*lead, h, s)
        inverse = x.new_empty(*lead, h, 1)
        energy = x.new_zeros(b, h, s, dtype=accumulator(x))
        y = x.new_empty(b, n, o.shape[0])
        for tile in tiles:
            tokens = x[tile]
            here = tile if keeps else (slice(tokens.shape[0]), slice(tokens.shape[1]))
            heads, part = q[here], scores[here]
            keep = None if key_mask is None else key_mask[tile]
            _apply(_Affine(a, a_bias), tokens, heads.flatten(2))
            _score(heads, _of(w, tile), keep, eps, part, inverse[here], energy[tile[0]])
            _apply(_Affine(o, o_bias), part.flatten(2), y[tile])
        ctx.save_for_backward(x, a, a_bias, w, o, o_bias, q, scores, inverse)
        ctx.eps = eps
        return y, energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, a_bias, w, o, o_bias, q, scores, inverse = ctx.saved_tensors
        tiles, twice = _tiles(*q.shape), _twice(grad_energy, scores)
        inward, outward = _Gradient(_Affine(a, a_bias)), _Gradient(_Affine(o, o_bias))
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        grad_w = q.new_zeros(len(q), *w.mT.shape[1:])
        grads, grads_q = (t.new_empty(*_size(tiles), *t.shape[2:]) for t in (scores, q))
        for tile in tiles:
            tokens, known = x[tile], (q[tile], _of(w, tile), scores[tile], inverse[tile])
            here = slice(tokens.shape[0]), slice(tokens.shape[1])
            grad, grad_q = grads[here], grads_q[here]
            out = grad_y[tile].flatten(0, 1)
            outward.add(out, scores[tile].view(len(out), -1))
            torch.mm(out, o, out=grad.view(len(out), -1))
            grad.addcmul_(scores[tile], twice[tile[0]])
            _score_backward(grad, *known, ctx.eps, grad_q, grad_w[tile[0]])
            rows = grad_q.view(len(out), -1)
            inward.add(rows, tokens.flatten(0, 1))
            if grad_x is not None:
                torch.mm(rows, a, out=grad_x[tile].view(len(out), -1))
        done = (*inward.result(), _reduced(grad_w, w), *outward.result())
        return grad_x, *done, None, None, None


def attend_tiled(
    x: Float[Tensor, "b n c"],
    inward: tuple[Tensor, Tensor | None],
    w: Float[Tensor, "#b h d s"],
    outward: tuple[Tensor, Tensor | None],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b h s"]]:
    """Return the outward map of the scores of the inward map, and the energy of the scores."""
    given = (x, *inward, w, *outward)
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return _Attend.apply(*given, key_mask, eps, keeps)  # type: ignore[no-untyped-call]


class _Tie(torch.autograd.Function):
    """Adds the gradient of the sampled rows to the other gradient of ``x``, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor | None,
        w_e: Tensor,
        w_r: Tensor,
        basis: Tensor | None,
        eps: float | None,
    ) -> tuple[Tensor, Tensor]:
        b, n, c = x.shape
        h, _, s = w_e.shape
        rows = x.reshape(b * n, c)
        rows = unit = rows if index is None else rows.index_select(0, index)
        mean = deviation = None
        if eps is not None:
            unit, mean, deviation = torch.native_layer_norm(rows, (c,), None, None, eps)
        f = unit.view(b, -1, c)
        f = f if basis is None else basis @ f
        f = f.unflatten(-1, (h, -1)).transpose(1, 2)  # [b h k d]
        codes = torch.cat([w_e, w_r], dim=-1)
        w = (f.mT @ codes).unflatten(-1, (2, s)).movedim(3, 1)  # [b 2 h d s]
        ctx.save_for_backward(index, rows, mean, deviation, basis, f, codes)
        shared = x.view_as(x)
        if not ctx.needs_input_grad[0]:
            # tokens without gradient stay so: whoever reads them has less to do
            ctx.mark_non_differentiable(shared)
            ctx.set_materialize_grads(False)
        return shared, w.flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, grad_w: Tensor) -> tuple[Tensor | None, ...]:
        index, rows, mean, deviation, basis, f, codes = ctx.saved_tensors
        grad_w = grad_w.unflatten(1, (2, f.shape[1])).movedim(1, 3).flatten(-2)  # [b h d 2*s]
        grad_codes = (f @ grad_w).sum(0).chunk(2, dim=-1)
        if grad_x is None:
            return None, None, *grad_codes, None, None
        grad = (codes @ grad_w.mT).transpose(1, 2).flatten(2)  # [b k c]
        grad = (grad if basis is None else basis.mT @ grad).flatten(0, 1)
        if mean is not None:
            wanted, shape = [True, False, False], rows.shape[-1:]
            grad = torch.ops.aten.native_layer_norm_backward(
                grad, rows, shape, mean, deviation, None, None, wanted
            )[0]
        if index is None:
            grad_x.view_as(grad).add_(grad)
        else:
            grad_x.view(-1, grad_x.shape[-1]).index_add_(0, index, grad)
        return grad_x, None, *grad_codes, None, None


def tie_tiled(
    x: Float[Tensor, "b n c"],
    index: Int[Tensor, " rows"] | None,
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    basis: Float[Tensor, "*#b k m"] | None,
    eps: float | None,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b 2*h d s"]]:
    """Return ``x`` and the weights that some of its rows, or all, imply.

    The gradient of the returned ``x`` is overwritten.

    Args:
        x: Tokens.
        index: Which rows of the flattened ``x``, equally many of each sequence; ``None`` for all.
        w_e: Codes of the query side.
        w_r: Codes of the key side.
        basis: Functions of position, for all sequences or for each.
        eps: Smallest variance of a row in normalising it; ``None`` to leave rows as they are.
    """
    return _Tie.apply(x, index, w_e, w_r, basis, eps)  # type: ignore[no-untyped-call]
