"""A layer with dual weights in one step, with a backward pass of its own."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.chunks import (
    Map,
    enter,
    invert_norms,
    leave,
    room_for,
    score,
    score_backward,
    spans_of,
    tiles_of,
)

__all__ = ["dual_fused"]


def _swap(sums: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
    """Exchange the halves: the weights of queries come from keys, and the other way round."""
    return torch.cat(sums.chunk(2, dim=1)[::-1], dim=1)


class _Dual(torch.autograd.Function):
    """Keeps tokens, heads, duals, scores and one number per row and head for backward.

    The weights are a sum over all tokens, so tokens pass twice, and their gradients too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        a_bias: Tensor | None,
        v: Tensor,
        o: Tensor,
        o_bias: Tensor | None,
        share: Tensor,
        key_mask: Tensor | None,
        h: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (b, n, _), d, s = x.shape, a.shape[0] // h, v.shape[0] // h
        tiles = tiles_of(b, n, h * d)
        spans = spans_of(tiles, keeps=True)
        heads, duals, scores = (x.new_empty(b * n, h * k) for k in (d, s, s))
        inverse, y = x.new_empty(b * n, h), x.new_empty(b, n, o.shape[0])
        sums, energy = x.new_zeros(b, h, s, d), x.new_zeros(b, h, s)
        for tile, span in zip(tiles, spans, strict=True):
            tokens = tile.of(x)
            g, t, _ = tokens.shape
            q, z, norm = heads[span], duals[span], inverse[span].view(g, h, 1, t)
            enter(tokens, Map(a, a_bias), q.view(g, h * d, t))
            enter(tokens, Map(v), z.view(g, h * s, t))
            keep = None if key_mask is None else tile.of(key_mask)
            invert_norms(q.view(g, h, d, t), keep, eps, norm)
            # its own scores come later
            unit = torch.mul(z.view(g, h, s, t), norm, out=scores[span].view(g, h, s, t))
            outer = torch.bmm(unit.view(g * h, s, t), q.view(g * h, d, t).mT)
            tile.add(outer.view(g, h, s, d), sums)
        w = _swap(sums * share).mT
        for tile, span in zip(tiles, spans, strict=True):
            out = tile.of(y)
            g, t, _ = out.shape
            z, norm = scores[span].view(g, h, s, t), inverse[span].view(g, h, 1, t)
            score(tile, heads[span].view(g * h, d, t), norm, w, z, energy)
            leave(z.view(g, h * s, t), Map(o, o_bias), out)
        ctx.save_for_backward(x, a, a_bias, v, o, o_bias, share, w, heads, duals, scores, inverse)
        ctx.eps, ctx.tiles = eps, tiles
        return y, energy, w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor, grad_energy: Tensor, grad_w: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, a, a_bias, v, o, o_bias, share, w, heads, duals, scores, inverse = ctx.saved_tensors
        h, d, s = w.shape[1:]
        grad_a, grad_v, grad_o = (torch.zeros_like(m) for m in (a, v, o.T))
        grad_bias = a.new_zeros(a.shape[0])
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        tiles, twice = ctx.tiles, 2 * grad_energy[..., None]
        spans, room = spans_of(tiles, keeps=True), room_for(spans_of(tiles, keeps=False))
        grads, factor = torch.empty_like(scores), torch.empty_like(inverse)
        work, grad_z = (x.new_empty(room * h * k) for k in (max(d, s), s))
        total = grad_w.mT.clone(memory_format=torch.contiguous_format)
        for tile, span in zip(tiles, spans, strict=True):
            out = tile.of(grad_y)
            g, t, _ = out.shape
            z, norm = scores[span].view(g, h, s, t), inverse[span].view(g, h, 1, t)
            grad_o += torch.bmm(z.view(g, h * s, t), out).sum(0)
            grad = grads[span].view(g, h, s, t)
            enter(out, Map(o.T), grad.view(g, h * s, t))
            grad.addcmul_(z, tile.each(twice))
            factor[span].view(g, h, 1, t).copy_(score_backward(grad, z, norm, ctx.eps, work))
            outer = torch.bmm(grad.view(g * h, s, t), heads[span].view(g * h, d, t).mT)
            tile.add(outer.view(g, h, s, d), total)
        by_sum = _swap(total) * share  # [b h s d]
        for tile, span in zip(tiles, spans, strict=True):
            tokens = tile.of(x)
            g, t, _ = tokens.shape
            q, norm = heads[span].view(g * h, d, t), inverse[span].view(g, h, 1, t)
            pull, z = tile.spread(by_sum, g), duals[span].view(g, h, s, t)
            # the sum is the gradient of scores in their weights, so its own gradients are scores
            own = grad_z[: z.numel()].view_as(z)
            torch.bmm(pull, q, out=own.view(g * h, s, t))
            own.mul_(norm)
            unit = z * norm
            radial = torch.mul(own, z, out=work[: z.numel()].view_as(z)).sum(2, keepdim=True)
            radial.mul_(norm).mul_(torch.threshold_(norm.neg(), -1 / ctx.eps, 0.0))
            radial.add_(factor[span].view_as(radial))
            grad_q = work[: q.numel()].view_as(q)
            torch.bmm(tile.spread(w, g), grads[span].view(g * h, s, t), out=grad_q)
            grad_q.baddbmm_(pull.mT, unit.view(g * h, s, t))
            grad_q.addcmul_(q, radial.view(g * h, 1, t))
            rows, own = grad_q.view(g, h * d, t), own.view(g, h * s, t)
            grad_a += torch.bmm(rows, tokens).sum(0)
            grad_v += torch.bmm(own, tokens).sum(0)
            if a_bias is not None:
                grad_bias += rows.sum((0, 2))
            if grad_x is not None:
                into = tile.of(grad_x)
                leave(rows, Map(a.T), into)
                into.baddbmm_(own.mT, v.expand(g, -1, -1))
        biases = (
            None if a_bias is None else grad_bias,
            None if o_bias is None else grad_y.sum((0, 1)),
        )
        return grad_x, grad_a, biases[0], grad_v, grad_o.T, biases[1], *[None] * 4


def dual_fused(
    x: Float[Tensor, "b n c"],
    inward: tuple[Tensor, Tensor | None],
    duals: Float[Tensor, "hs c"],
    outward: tuple[Tensor, Tensor | None],
    key_mask: Bool[Tensor, "b n"] | None,
    num_heads: int,
    eps: float,
) -> tuple[Float[Tensor, "b n c_out"], Float[Tensor, "b h s"], Float[Tensor, "b h d s"]]:
    """Return the outward map of the scores, their energy, and the weights that duals imply.

    Args:
        x: Tokens, finite also where padded, in the precision of all parameters.
        inward: From tokens to the heads of the queries and, after them, of the keys.
        duals: From tokens to the dual variables of as many heads.
        outward: From the scores of all heads to the output.
        key_mask: ``True`` where a token is real.
        num_heads: Heads of both sides together.
        eps: Norms below this count as this.
    """
    if key_mask is None:
        share = x.new_full((1, 1, 1, 1), 1 / max(x.shape[1], 1))
    else:
        share = key_mask.sum(1).clamp_min(1).to(x.dtype).reciprocal()[:, None, None, None]
    given = (x, *inward, duals, *outward)
    return _Dual.apply(*given, share, key_mask, num_heads, eps)  # type: ignore[no-untyped-call]
