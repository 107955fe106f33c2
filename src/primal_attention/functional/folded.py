"""Heads through maps of their own, with a backward pass of its own: for layers of many directions.

    u = q / ‖q‖      o_h = M_hᵀ (u_h ; u'_h)      y = O o      G = Σ u uᵀ

``M = W C`` is the projection weights and the output map of the scores in one, ``2d × e`` for both
sides of a head, so the ``2 h s`` scores of a token never exist. Their energy is ``wᵀ G w``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.chunks import (
    Map,
    Room,
    enter,
    gather,
    invert_norms,
    leave,
    needs_grad,
    radial_factor,
    tiles_of,
)

__all__ = ["fold_heads"]


class _Folded(torch.autograd.Function):
    """Keeps tokens, unit heads, their outputs and one number per row and head for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        a_bias: Tensor | None,
        m: Tensor,
        o: Tensor,
        o_bias: Tensor | None,
        key_mask: Tensor | None,
        eps: float,
        has_gram: bool,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        (b, n, _), (h, both, e) = x.shape, m.shape[1:]
        d, tiles, room = both // 2, tiles_of(b, n, a.shape[0]), Room(x, keeps)
        y, kept, grams = x.new_empty(b, n, o.shape[0]), [], []
        for tile in tiles:
            g, t = tile.shape
            u, norm = room("units", 2 * g * h, d, t), room("norms", 2 * g * h, 1, t)
            enter(tile.of(x), Map(a, a_bias), u.view(g, h * both, t))
            invert_norms(u, None if key_mask is None else tile.of(key_mask), eps, norm)
            u.mul_(norm)
            if has_gram:
                grams.append(tile.sums(torch.bmm(u, u.mT), 2 * h))
            out = room("outputs", g * h, e, t)
            torch.bmm(tile.each(m).mT, u.view(g * h, both, t), out=out)
            leave(out.view(g, h * e, t), Map(o, o_bias), tile.of(y))
            kept += [u, out, norm] if keeps else []
        ctx.save_for_backward(x, a, a_bias, m, o, o_bias, *kept)
        ctx.eps, ctx.tiles, ctx.has_gram = eps, tiles, has_gram
        return y, gather(tiles, grams, b) if has_gram else x.new_zeros(b, 2 * h, d, d)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_gram: Tensor) -> tuple[Tensor | None, ...]:
        x, a, a_bias, m, o, o_bias, *kept = ctx.saved_tensors
        b, (h, both, e) = x.shape[0], m.shape[1:]
        grad_a, grad_o, grads_m = torch.zeros_like(a), torch.zeros_like(o.T), []
        grad_bias = a.new_zeros(a.shape[0])
        out_bias = None if o_bias is None else grad_y.sum((0, 1))
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        twice, room = grad_gram + grad_gram.mT, Room(x, keeps=False)
        for tile, u, out, norm in zip(ctx.tiles, kept[::3], kept[1::3], kept[2::3], strict=True):
            (g, t), tokens, grad = tile.shape, tile.of(x), tile.of(grad_y)
            grad_o += torch.bmm(out.view(g, h * e, t), grad).sum(0)
            by_head = room("outputs", g * h, e, t)
            enter(grad, Map(o.T), by_head.view(g, h * e, t))
            grads_m.append(tile.sums(torch.bmm(u.view(g * h, both, t), by_head.mT), h))
            grad_u = room("units", g * h, both, t)
            if ctx.has_gram:
                torch.bmm(tile.each(twice), u, out=grad_u.view_as(u))
                grad_u.baddbmm_(tile.each(m), by_head)
            else:
                torch.bmm(tile.each(m), by_head, out=grad_u)
            grad_q = grad_u.view_as(u)
            radial = torch.mul(u, grad_q, out=room("work", *u.shape)).sum(1, keepdim=True)
            grad_q.mul_(norm).addcmul_(u, radial.mul_(radial_factor(norm, ctx.eps)))
            rows = grad_q.view(g, h * both, t)
            grad_a += torch.bmm(rows, tokens).sum(0)
            if a_bias is not None:
                grad_bias += rows.sum((0, 2))
            if grad_x is not None:
                leave(rows, Map(a.T), tile.of(grad_x))
        grad_m = gather(ctx.tiles, grads_m, b)
        if m.shape[0] != b:
            grad_m = grad_m.sum(0, keepdim=True)
        in_bias = None if a_bias is None else grad_bias
        return grad_x, grad_a, in_bias, grad_m, grad_o.T, out_bias, *[None] * 4


def fold_heads(
    x: Float[Tensor, "b n c"],
    inward: tuple[Tensor, Tensor | None],
    m: Float[Tensor, "#b h pair e"],
    outward: tuple[Tensor, Tensor | None],
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
    has_gram: bool,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b both d d"]]:
    """Return the output, and the Gram matrices of the unit heads or, unless asked for, zeros.

    Args:
        x: Tokens, finite also where padded, in the precision of all parameters.
        inward: From tokens to heads: the two sides of the first head, of the second, and so on.
        m: What maps both sides of a head to its output.
        outward: From the outputs of all heads to the result.
        key_mask: ``True`` where a token is real.
        eps: Norms below this count as this.
        has_gram: Whether to compute the Gram matrices.
    """
    given = (x, *inward, m, *outward)
    more = key_mask, eps, has_gram, needs_grad(given)
    return _Folded.apply(*given, *more)  # type: ignore[no-untyped-call]
