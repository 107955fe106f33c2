"""A layer in one step, with a backward pass of its own.

What belongs to a layer but not to its tokens (folding maps, weights of sampled tokens, the loss) is
small. It costs the calls it takes, so there is one function for all of it, and every part of it
stands as a pair: what it computes, and how its gradient returns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.chunks import (
    Map,
    Room,
    Tile,
    enter,
    gather,
    invert_norms,
    leave,
    needs_grad,
    score,
    score_backward,
    tiles_of,
)
from primal_attention.functional.precision import accumulator

__all__ = ["attend_fused", "layer_fused"]


# tokens


class _Attended(NamedTuple):
    y: Float[Tensor, "b n c_out"]
    energy: Float[Tensor, "b h s"]
    kept: list[Tensor]
    """Heads, scores and inverse norms of tile after tile, features first."""


def _attend(
    x: Float[Tensor, "b n c"],
    tiles: Sequence[Tile],
    inward: Map,
    w: Float[Tensor, "#b h d s"],
    outward: Map,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
    keeps: bool,
) -> _Attended:
    (b, n, _), (h, d, s), wide = x.shape, w.shape[1:], accumulator(x)
    room, kept, energies = Room(x, keeps), [], []
    y = x.new_empty(b, n, outward.weight.shape[0])
    for tile in tiles:
        g, t = tile.shape
        q, z = room("heads", g * h, d, t), room("scores", g * h, s, t)
        norm = room("norms", g * h, 1, t, dtype=wide)
        enter(tile.of(x), inward, q.view(g, h * d, t))
        invert_norms(q, None if key_mask is None else tile.of(key_mask), eps, norm)
        energies.append(tile.sums(score(q, norm, tile.each(w), z), h))
        leave(z.view(g, h * s, t), outward, tile.of(y))
        kept += [q, z, norm] if keeps else []
    return _Attended(y, gather(tiles, energies, b), kept)


class _AttendGrads(NamedTuple):
    x: Float[Tensor, "b n c"] | None
    inward: Map
    w: Float[Tensor, "#b h s d"]
    outward: Map


def _attend_backward(
    grad_y: Float[Tensor, "b n c_out"],
    twice: Float[Tensor, "b h s"],
    x: Float[Tensor, "b n c"],
    tiles: Sequence[Tile],
    inward: Map,
    w: Float[Tensor, "#b h d s"],
    outward: Map,
    kept: Sequence[Tensor],
    eps: float,
    wants_x: bool,
) -> _AttendGrads:
    """Return the gradients, given that of the output and twice that of the energy.

    Those of maps come in float32 or better, that of ``w`` transposed.
    """
    b, (h, d, s), wide = x.shape[0], w.shape[1:], accumulator(x)
    grad_x = x.new_empty(x.shape) if wants_x else None
    room, grads_w = Room(x, keeps=False), []
    grad_a: Tensor | None = None
    grad_o: Tensor | None = None
    grad_bias: Tensor | None = None
    back, out_of = outward.weight.T, Map(inward.weight.T)
    out_bias = None if outward.bias is None else grad_y.sum((0, 1), dtype=wide)
    twice = twice[..., None].to(x.dtype)
    for tile, q, z, norm in zip(tiles, kept[::3], kept[1::3], kept[2::3], strict=True):
        g, t = tile.shape
        tokens, out, norm = tile.of(x), tile.of(grad_y), norm.to(x.dtype)
        grad_o = _plus(grad_o, torch.bmm(z.view(g, h * s, t), out).sum(0, dtype=wide))
        grad = torch.mul(z, tile.each(twice), out=room("scores", g * h, s, t))
        grad.view(g, h * s, t).baddbmm_(back.expand(g, -1, -1), out.mT)
        work = room("work", g * h * max(d, s) * t)
        radial = score_backward(grad, z, norm, eps, work[: z.numel()].view_as(z))
        grads_w.append(tile.sums(torch.bmm(grad, q.mT), h))
        grad_q = torch.mul(q, radial, out=work[: q.numel()].view_as(q))
        grad_q = grad_q.baddbmm_(tile.each(w), grad).view(g, h * d, t)
        grad_a = _plus(grad_a, torch.bmm(grad_q, tokens).sum(0, dtype=wide))
        if inward.bias is not None:
            grad_bias = _plus(grad_bias, grad_q.sum((0, 2), dtype=wide))
        if grad_x is not None:
            leave(grad_q, out_of, tile.of(grad_x))
    assert grad_a is not None  # there is always a tile
    assert grad_o is not None
    grad_w = gather(tiles, grads_w, b)
    return _AttendGrads(
        grad_x,
        Map(grad_a, grad_bias),
        grad_w if w.shape[0] == b else grad_w.sum(0, keepdim=True),
        Map(grad_o.T, out_bias),
    )


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


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
        ctx.eps, ctx.tiles = eps, tiles_of(x.shape[0], x.shape[1], a.shape[0])
        maps = Map(a, a_bias), w, Map(o, o_bias)
        y, energy, kept = _attend(x, ctx.tiles, *maps, key_mask, eps, keeps)
        ctx.save_for_backward(x, a, a_bias, w, o, o_bias, *kept)
        return y, energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, a_bias, w, o, o_bias, *kept = ctx.saved_tensors
        maps = Map(a, a_bias), w, Map(o, o_bias)
        wants_x = ctx.needs_input_grad[0]
        given = grad_y, 2 * grad_energy, x, ctx.tiles
        found = _attend_backward(*given, *maps, kept, ctx.eps, wants_x)
        grads = (*found.inward, found.w.mT, *found.outward)
        narrow = [None if g is None else g.to(x.dtype) for g in grads]
        return found.x, *narrow, None, None, None


def attend_fused(
    x: Float[Tensor, "b n c"],
    inward: tuple[Tensor, Tensor | None],
    w: Float[Tensor, "#b h d s"],
    outward: tuple[Tensor, Tensor | None],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b h s"]]:
    """Return the outward map of the scores of the inward map, and the energy of the scores."""
    given = (x, *inward, w, *outward)
    return _Attend.apply(*given, key_mask, eps, needs_grad(given))  # type: ignore[no-untyped-call]


# weights of sampled tokens


class _Tied(NamedTuple):
    """The weights, and what their gradient needs."""

    w: Float[Tensor, "b both d s"]
    rows: Float[Tensor, "groups m c"]
    mean: Tensor | None
    deviation: Tensor | None
    f: Float[Tensor, "h bd k"]
    codes: Float[Tensor, "h k 2*s"]


def _tie(
    x: Float[Tensor, "b n c"],
    index: Int[Tensor, " rows"] | None,
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    basis: Float[Tensor, "*#b k m"] | None,
    eps: float | None,
) -> _Tied:
    (b, _, c), (h, k, s) = x.shape, w_e.shape
    rows = x if index is None else _sequences(x, index, w_e, basis).index_select(1, index)
    unit, mean, deviation = rows, None, None
    if eps is not None:
        unit, mean, deviation = torch.native_layer_norm(rows, (c,), None, None, eps)
    f = unit if basis is None else torch.bmm(basis.expand(b, -1, -1), unit.view(b, -1, c))
    # all sequences in one product per head
    f = f.view(b, k, h, c // h).permute(2, 0, 3, 1).reshape(h, -1, k)
    codes = torch.cat([w_e, w_r], dim=-1)
    w = torch.bmm(f, codes).view(h, b, c // h, 2, s).permute(1, 3, 0, 2, 4)  # [b 2 h d s]
    return _Tied(w.flatten(1, 2), rows, mean, deviation, f, codes)


def _sequences(x: Tensor, index: Tensor, w_e: Tensor, basis: Tensor | None) -> Tensor:
    """Return ``x`` so that an index along its tokens means what it says."""
    per = w_e.shape[1] if basis is None else basis.shape[-1]
    return x if index.shape[0] == per else x.reshape(1, -1, x.shape[-1])


def _tie_backward(
    grad_w: Float[Tensor, "b both s d"],
    grad_x: Float[Tensor, "b n c"] | None,
    index: Tensor | None,
    basis: Tensor | None,
    tied: _Tied,
) -> Sequence[Tensor]:
    """Return the gradients of both codes, and add that of the tokens to ``grad_x``."""
    _, rows, mean, deviation, f, codes = tied
    (b, _, s, d), (h, _, k) = grad_w.shape, f.shape
    by_head = grad_w.view(b, 2, h, s, d).permute(2, 0, 4, 1, 3).reshape(h, b * d, 2 * s)
    grads = torch.bmm(f.mT, by_head).chunk(2, dim=-1)
    if grad_x is None:
        return grads
    grad = torch.bmm(by_head, codes.mT).view(h, b, d, k).permute(1, 3, 0, 2).reshape(b, k, h * d)
    grad = grad if basis is None else torch.bmm(basis.mT.expand(b, -1, -1), grad)
    grad = grad.view_as(rows)
    if mean is not None:
        wanted, shape = [True, False, False], rows.shape[-1:]
        grad = torch.ops.aten.native_layer_norm_backward.default(
            grad, rows, shape, mean, deviation, None, None, wanted
        )[0]
    if index is None:
        grad_x.add_(grad)
    else:
        grad_x.view(rows.shape[0], -1, h * d).index_add_(1, index, grad)
    return grads


# maps


def _fold(inner: Map, outer: Map) -> Map:
    """Return ``O (C s + c) + o`` as one map of the scores of all query and all key heads."""
    (d, both), c = inner.weight.shape, outer.weight.shape[0]
    by_head = outer.weight.view(-1, d)  # [c*h d]
    weight = (by_head @ inner.weight).view(c, -1, 2, both // 2).transpose(1, 2)
    bias = outer.bias
    if inner.bias is not None:
        for_all = inner.bias.expand(outer.weight.shape[1] // d, d).reshape(-1)
        bias = linear(for_all, outer.weight, bias)
    return Map(weight.reshape(c, -1), bias)


def _fold_backward(grad: Map, inner: Map, outer: Map) -> tuple[Map, Map]:
    (d, both), c = inner.weight.shape, outer.weight.shape[0]
    by_head = outer.weight.view(-1, d)
    rows = grad.weight.reshape(c, 2, -1, both // 2).transpose(1, 2).reshape(-1, both)
    weight, bias = (rows @ inner.weight.T).view(c, -1, d), None
    if inner.bias is not None and grad.bias is not None:
        weight.addcmul_(grad.bias[:, None, None], inner.bias)
        bias = (grad.bias @ outer.weight).view(-1, d).sum(0)
    grad_outer = Map(weight.view_as(outer.weight), None if outer.bias is None else grad.bias)
    return Map(by_head.T @ rows, bias), grad_outer


# the loss


def _objective(
    energy: Float[Tensor, "b both s"],
    lam: Float[Tensor, "h s"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    count: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, " b"], Float[Tensor, " 2*h*s"]]:
    """Return ``mean_b (mean_h J)²`` of sequences of ``count`` tokens, the means, and all ``ℓ²``."""
    b, h = energy.shape[0], lam.shape[0]
    squares = lam.square().repeat(2, 1).view(-1)
    trace = torch.dot(w_e.flatten(), w_r.flatten()).expand(b)
    mean = torch.addmv(trace, energy.view(b, -1), squares, beta=-1 / h, alpha=0.5 / (count * h))
    return torch.dot(mean, mean).div_(b), mean, squares


class _ObjectiveGrads(NamedTuple):
    twice: Float[Tensor, "b both s"]
    """Two times the gradient of the energy."""
    lam: Float[Tensor, "h s"]
    trace: Float[Tensor, ""]


def _objective_backward(
    grad: Float[Tensor, ""],
    energy: Float[Tensor, "b both s"],
    mean: Float[Tensor, " b"],
    squares: Float[Tensor, " all"],
    lam: Float[Tensor, "h s"],
    count: int,
) -> _ObjectiveGrads:
    b = energy.shape[0]
    each = mean * (grad * (2 / (b * len(lam) * count)))  # of ½ ℓ² energy
    by_lam = torch.mv(energy.view(b, -1).T, each).view(2, *lam.shape).sum(0).mul_(lam)
    twice = torch.outer(each, squares).view_as(energy)
    return _ObjectiveGrads(twice, by_lam, each.sum().mul_(-count))


# all of it


class _Layer(torch.autograd.Function):
    """Keeps what :class:`_Attend` keeps, and the sampled rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        q: Tensor,
        q_bias: Tensor | None,
        k: Tensor,
        k_bias: Tensor | None,
        w_e: Tensor,
        w_r: Tensor,
        c: Tensor,
        c_bias: Tensor | None,
        o: Tensor,
        o_bias: Tensor | None,
        lam: Tensor | None,
        basis: Tensor | None,
        index: Tensor | None,
        key_mask: Tensor | None,
        variance: float | None,
        eps: float,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        tied = _tie(x, index, w_e, w_r, basis, variance)
        both = None if q_bias is None or k_bias is None else torch.cat([q_bias, k_bias])
        inward = Map(torch.cat([q, k]), both)
        outward = _fold(Map(c, c_bias), Map(o, o_bias))
        ctx.eps, ctx.tiles = eps, tiles_of(x.shape[0], x.shape[1], 2 * q.shape[0])
        y, energy, kept = _attend(x, ctx.tiles, inward, tied.w, outward, key_mask, eps, keeps)
        found, mean, squares = energy, None, None
        if lam is not None:
            found, mean, squares = _objective(energy, lam, w_e, w_r, x.shape[1])
        ctx.save_for_backward(
            *(x, w_e, w_r, c, c_bias, o, o_bias, lam, basis, index),
            *(*tied, *inward, *outward, energy, mean, squares, *kept),
        )
        return y, found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_found: Tensor) -> tuple[Tensor | None, ...]:
        x, w_e, w_r, c, c_bias, o, o_bias, lam, basis, index, *more = ctx.saved_tensors
        tied = _Tied(*more[:6])
        inward, outward = Map(*more[6:8]), Map(*more[8:10])
        energy, mean, squares, *kept = more[10:]
        loss: _ObjectiveGrads | None = None
        if lam is not None:
            loss = _objective_backward(grad_found, energy, mean, squares, lam, x.shape[1])
        given = grad_y, 2 * grad_found if loss is None else loss.twice, x, ctx.tiles
        wants_x = ctx.needs_input_grad[0]
        found = _attend_backward(*given, inward, tied.w, outward, kept, ctx.eps, wants_x)
        grad_e, grad_r = _tie_backward(found.w, found.x, index, basis, tied)
        if loss is not None:
            grad_e = torch.addcmul(grad_e, w_r, loss.trace)
            grad_r = torch.addcmul(grad_r, w_e, loss.trace)
        inner, outer = _fold_backward(found.outward, Map(c, c_bias), Map(o, o_bias))
        a, a_bias = found.inward
        grad_q, grad_k = a.chunk(2)
        q_bias, k_bias = (None, None) if a_bias is None else a_bias.chunk(2)
        grads = (grad_q, q_bias, grad_k, k_bias, grad_e, grad_r, *inner, *outer)
        return found.x, *grads, None if loss is None else loss.lam, *[None] * 6


def layer_fused(
    x: Float[Tensor, "b n c"],
    inward: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    codes: tuple[Float[Tensor, "h k s"], Float[Tensor, "h k s"]],
    outward: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    *,
    index: Int[Tensor, " rows"] | None,
    basis: Float[Tensor, "*#b k m"] | None,
    variance: float | None,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
    lam: Float[Tensor, "h s"] | None,
) -> tuple[Float[Tensor, "b n c_out"], Tensor]:
    """Return the layer's output, and the energy of its scores or, with ``lam``, the loss.

    Args:
        x: Tokens, zero where padded, in the precision of all parameters.
        inward: From tokens to the heads of the queries, and of the keys.
        codes: Codes of the query side and of the key side.
        outward: From both scores of a head to its width, and from all heads to the output.
        index: Which tokens make the weights: the same of every sequence, or as many of each,
            counted through all sequences; ``None`` for all.
        basis: Functions of position, for all sequences or for each.
        variance: Smallest variance of a token in normalising it; ``None`` to leave it as it is.
        key_mask: ``True`` where a token is real.
        eps: Norms below this count as this.
        lam: ``ℓ`` of the loss; only without padding.
    """
    given = (x, *inward[0], *inward[1], *codes, *outward[0], *outward[1], lam)
    more = basis, index, key_mask, variance, eps
    return _Layer.apply(*given, *more, needs_grad(given))  # type: ignore[no-untyped-call]
