"""The first stage of a primal layer on tiles: the projection weights that tokens imply::

    W = Fᵀ codes  or  W = Φᵀ H / n          [b 2h d s], all that tokens share

Each function has a backward pass of its own and also returns what to attend from. Attending from
that lets the gradients of both stages add up in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.plain import dual_weights, swap_sides
from primal_attention.functional.tiles import (
    Buffers,
    LinearMap,
    Tile,
    TileTotals,
    add_up,
    features_first,
    inverse_norms,
    norm_gradient,
    tokens_first,
)
from primal_attention.functional.twice import Context, gradients

__all__ = ["TieDual", "TieRows"]


class TieRows(torch.autograd.Function):
    """The projection weights of both sides from sampled tokens, and the tokens.

    Takes the same in operations that autograd knows, the tokens (zero where padded), the codes of
    both sides, functions of position (for all sequences or for each), which tokens to use (the same
    of every sequence, or as many of each, counted through all sequences; ``None`` for all) and the
    smallest variance in standardising them (``None`` to leave them as they are). Keeps the sampled
    rows for backward.
    """

    @staticmethod
    def forward(
        ctx: Context,
        formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        x: Tensor,
        w_e: Tensor,
        w_r: Tensor,
        basis: Tensor | None,
        index: Tensor | None,
        variance: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the weights, and what to attend from."""
        (b, _, c), (h, k, s) = x.shape, w_e.shape
        rows = x
        if index is not None:
            per = k if basis is None else basis.shape[-1]
            # an index per sequence counts through all of them
            rows = (x if index.shape[0] == per else x.reshape(1, -1, c)).index_select(1, index)
        unit, mean, deviation = rows, None, None
        if variance is not None:
            unit, mean, deviation = torch.native_layer_norm(rows, (c,), None, None, variance)
        f = unit if basis is None else torch.bmm(basis.expand(b, -1, -1), unit.view(b, -1, c))
        # all sequences in one product per head
        f = f.view(b, k, h, c // h).permute(2, 0, 3, 1).reshape(h, -1, k)
        codes = torch.cat([w_e, w_r], dim=-1)
        w = torch.bmm(f, codes).view(h, b, c // h, 2, s).permute(1, 3, 0, 2, 4)  # [b 2 h d s]
        # the codes themselves are for second derivatives
        ctx.save_for_backward(x, w_e, w_r, basis, index, rows, mean, deviation, f, codes)
        ctx.formula = formula
        return w.flatten(1, 2), x

    @staticmethod
    def backward(ctx: Context, grad_w: Tensor, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        x, w_e, w_r, basis, index, rows, mean, deviation, f, codes = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads, needed = (grad_w, grad_x), ctx.needs_input_grad[1:4]
            return None, *gradients(ctx.formula, (x, w_e, w_r), needed, grads), None, None, None
        (b, _, d, s), (h, _, k) = grad_w.shape, f.shape
        by_head = grad_w.view(b, 2, h, d, s).permute(2, 0, 3, 1, 4).reshape(h, b * d, 2 * s)
        grad_e, grad_r = torch.bmm(f.mT, by_head).chunk(2, dim=-1)
        if not ctx.needs_input_grad[1]:
            return None, None, grad_e, grad_r, None, None, None
        # back from all sequences side by side to rows of one sequence each
        grad = torch.bmm(by_head, codes.mT).view(h, b, d, k).permute(1, 3, 0, 2)
        grad = grad.reshape(b, k, h * d)
        grad = grad if basis is None else torch.bmm(basis.mT.expand(b, -1, -1), grad)
        grad = grad.reshape(rows.shape)
        if mean is not None:
            grad = torch.ops.aten.native_layer_norm_backward.default(
                *(grad, rows, rows.shape[-1:], mean, deviation, None, None, [True, False, False])
            )[0]
        # the tokens went through this function, so their gradient is at hand: no second one; that
        # of a second derivative may have other strides
        grad_x = grad_x.contiguous()
        if index is None:
            grad_x.add_(grad)
        else:
            grad_x.view(rows.shape[0], -1, h * d).index_add_(1, index, grad)
        return None, grad_x, grad_e, grad_r, None, None, None


class TieDual(torch.autograd.Function):
    """The projection weights of dual variables, the heads of each tile, and their inverse norms.

    Takes tokens and the maps to heads and to dual variables, or both of these instead of tokens
    and no maps. ``share`` is one over the number of real tokens, in float32 or better. Keeps heads,
    dual variables and one number per token and head for backward.

    The sum is the gradient of scores in their weights, so its own gradients are scores.
    """

    @staticmethod
    def forward(
        ctx: Context,
        tiles: Sequence[Tile],
        key_mask: Tensor | None,
        h: int,
        eps: float,
        has_grad: bool,
        share: Tensor,
        x: Tensor,
        z: Tensor | None,
        a: Tensor | None,
        a_bias: Tensor | None,
        v: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the weights, and what to attend from."""
        inward = None if a is None else LinearMap(a, a_bias)
        outward = None if v is None else LinearMap(v)
        # half of the division before the sum, which a narrow type might not hold
        ctx.root = None if x.dtype == share.dtype else share.sqrt()
        keeps = has_grad and any(ctx.needs_input_grad)
        buffers, kept, sums = Buffers(x, keeps), [], []
        for tile in tiles:
            g, t = tile.shape
            tokens = tile.of(x)
            d = (tokens.shape[-1] if a is None else a.shape[0]) // h
            q = x.new_empty(g * h, d, t)
            features_first(tokens, inward, q.view(g, h * d, t))
            norm = x.new_empty(g * h, 1, t, dtype=share.dtype)
            inverse_norms(q, None if key_mask is None else tile.of(key_mask), eps, norm)
            given = tokens if z is None else tile.of(z)
            s = (given.shape[-1] if v is None else v.shape[0]) // h
            duals = buffers("duals", g * h, s, t)
            features_first(given, outward, duals.view(g, h * s, t))
            # the factor goes to the duals: they are s wide, the heads d
            unit = duals * _weigh(norm, tile, ctx.root, x.dtype)
            sums.append(tile.sums(torch.bmm(unit, q.mT), h))
            kept.append((q, norm, duals))
        heads, norms, duals_of = zip(*kept, strict=True)
        total = add_up(tiles, sums, x.shape[0]).mul_(share if ctx.root is None else ctx.root)
        # without gradients nothing may be kept: a prompt can be long
        if keeps:
            ctx.save_for_backward(x, z, a, a_bias, v, share, *heads, *norms, *duals_of)
        ctx.tiles, ctx.h, ctx.eps, ctx.key_mask = tiles, h, eps, key_mask
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*norms)
        return swap_sides(total).mT.to(x.dtype), *heads, *norms

    @staticmethod
    def backward(
        ctx: Context, grad_w: Tensor | None, *of_heads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        (x, z, a, a_bias, v, share, *kept), tiles, h = ctx.saved_tensors, ctx.tiles, ctx.h
        n, count = x.shape[1], len(tiles)
        if torch.is_grad_enabled():

            def formula(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
                z, a, bias, v = given
                both = x if a is None else linear(x, a, bias)
                duals = z if v is None else linear(x, v)
                w = dual_weights(both, duals, h, share, ctx.key_mask, ctx.eps)
                parts = [tile.of(both).mT.unflatten(1, (h, -1)).flatten(0, 1) for tile in tiles]
                return w, *parts

            grads = grad_w, *of_heads[:count]
            found = gradients(formula, (x, z, a, a_bias, v), ctx.needs_input_grad[6:], grads)
            return *[None] * 6, *found
        heads, norms, duals = (kept[i * count : (i + 1) * count] for i in range(3))
        # only the heads were used, so the weights pull nothing
        if grad_w is None:
            grad_w = x.new_zeros(x.shape[0], h, heads[0].shape[1], duals[0].shape[1])
        pulls = (swap_sides(grad_w.mT) * (share if ctx.root is None else ctx.root)).to(x.dtype)
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[6] else None
        grad_z = None if v is not None else x.new_empty(x.shape[0], n, h * duals[0].shape[1])
        buffers, total = Buffers(x, keeps=False), TileTotals(share.dtype)
        for tile, q, norm, dual, given in zip(tiles, heads, norms, duals, of_heads, strict=False):
            (g, t), pull, narrow = tile.shape, tile.each(pulls), norm.to(x.dtype)
            weight = _weigh(norm, tile, ctx.root, x.dtype)
            own = torch.bmm(pull, q, out=buffers("own", *dual.shape)).mul_(weight)
            radial = torch.mul(own, dual, out=buffers("work", *dual.shape)).sum(1, keepdim=True)
            # the inverse norm depends on q, too: this is its share of the gradient
            radial.mul_(narrow).mul_(norm_gradient(narrow, ctx.eps))
            unit = torch.mul(dual, weight, out=buffers("work", *dual.shape))
            # the gradient that the heads bring along is reused as memory for the sum; that of a
            # second derivative may have other strides
            grad_q = q * radial if given is None else given.contiguous().addcmul_(q, radial)
            rows = grad_q.baddbmm_(pull.mT, unit).view(g, -1, t)
            own = own.view(g, -1, t)
            if a is not None:
                total.add("a", torch.bmm(rows, tile.of(x)))
                total.add("v", torch.bmm(own, tile.of(x)))
            if a_bias is not None:
                total.add("bias", rows, (0, 2))
            if grad_z is not None:
                tokens_first(own, None, tile.of(grad_z))
            if grad_x is not None:
                into = tile.of(grad_x)
                tokens_first(rows, None if a is None else LinearMap(a.T), into)
                if v is not None:
                    into.baddbmm_(own.mT, v.expand(g, -1, -1))
        of_maps = (total.get(name, x.dtype) for name in ("a", "bias", "v"))
        return *[None] * 6, grad_x, grad_z, *of_maps


def _weigh(
    norm: Float[Tensor, "gh 1 t"], tile: Tile, root: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "gh 1 t"]:
    """Return the factor of the dual variables of each token and head."""
    if root is None:
        return norm
    return (norm.view(tile.shape[0], -1, tile.shape[1]) * tile.each(root)).view_as(norm).to(dtype)
