"""A layer with dual weights in one step, with a backward pass of its own."""

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
    score,
    score_backward,
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
        tiles, room = tiles_of(b, n, h * d), Room(x, keeps=True)
        y, kept, sums, energies = x.new_empty(b, n, o.shape[0]), [], [], []
        for tile in tiles:
            g, t = tile.shape
            tokens = tile.of(x)
            q, z, norm = (room(name, g * h, k, t) for name, k in (("q", d), ("z", s), ("norm", 1)))
            enter(tokens, Map(a, a_bias), q.view(g, h * d, t))
            enter(tokens, Map(v), z.view(g, h * s, t))
            invert_norms(q, None if key_mask is None else tile.of(key_mask), eps, norm)
            unit = z * norm  # where its scores will be
            sums.append(tile.sums(torch.bmm(unit, q.mT), h))
            kept.append((q, z, norm, unit))
        w = _swap(gather(tiles, sums, b) * share).mT
        for tile, (q, _, norm, z) in zip(tiles, kept, strict=True):
            energies.append(tile.sums(score(q, norm, tile.each(w), z), h))
            g, t = tile.shape
            leave(z.view(g, h * s, t), Map(o, o_bias), tile.of(y))
        saved = x, a, a_bias, v, o, o_bias, share, w
        ctx.save_for_backward(*saved, *(part for parts in kept for part in parts))
        ctx.eps, ctx.tiles = eps, tiles
        return y, gather(tiles, energies, b), w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor, grad_energy: Tensor, grad_w: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, a, a_bias, v, o, o_bias, share, w, *saved = ctx.saved_tensors
        b, (h, d, s), tiles = x.shape[0], w.shape[1:], ctx.tiles
        kept = list(zip(saved[::4], saved[1::4], saved[2::4], saved[3::4], strict=True))
        grad_a, grad_v, grad_o = (torch.zeros_like(m) for m in (a, v, o.T))
        grad_bias = a.new_zeros(a.shape[0])
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        room, twice = Room(x, keeps=False), 2 * grad_energy[..., None]
        grads, radials, sums = [], [], []
        for tile, (q, _, norm, z) in zip(tiles, kept, strict=True):
            (g, t), out = tile.shape, tile.of(grad_y)
            grad_o += torch.bmm(z.view(g, h * s, t), out).sum(0)
            grad = torch.empty_like(z)
            enter(out, Map(o.T), grad.view(g, h * s, t))
            grad.addcmul_(z, tile.each(twice))
            radials.append(score_backward(grad, z, norm, ctx.eps, room("scores", *z.shape)))
            sums.append(tile.sums(torch.bmm(grad, q.mT), h))
            grads.append(grad)
        by_sum = _swap(gather(tiles, sums, b) + grad_w.mT) * share  # [b h s d]
        for tile, (q, z, norm, _), grad, radial in zip(tiles, kept, grads, radials, strict=True):
            (g, t), tokens, pull = tile.shape, tile.of(x), tile.each(by_sum)
            # the sum is the gradient of scores in their weights, so its own gradients are scores
            own = torch.bmm(pull, q, out=room("own", *z.shape))
            unit = torch.mul(z, norm, out=room("unit", *z.shape))
            radial.add_(score_backward(own, unit, norm, ctx.eps, room("scores", *z.shape)))
            grad_q = torch.bmm(tile.each(w), grad, out=room("heads", *q.shape))
            grad_q.baddbmm_(pull.mT, unit).addcmul_(q, radial)
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
