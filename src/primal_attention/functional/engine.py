"""The second stage of a primal layer on tiles, with a backward pass of its own::

    z = Wᵀ q / ‖q‖      y = O (C z)          "scores"
    u = q / ‖q‖         y = O ((W C)ᵀ u)     "folded": no score is formed

Only :mod:`primal_attention.functional.primal` calls this module; it says which function runs when.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.folding import (
    LayerMaps,
    by_head,
    by_side,
    fold_bias,
    fold_concat,
    fold_concat_backward,
    fold_weights,
    fold_weights_backward,
    join_maps,
)
from primal_attention.functional.plain import plain_folded, plain_scores
from primal_attention.functional.precision import accumulator
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

__all__ = ["Attend", "Heads", "TilePlan"]


class Heads(NamedTuple):
    """Heads of all tokens in the layout of tiles."""

    parts: tuple[Tensor, ...]
    """One tile ``[gh d t]`` after another; without tiles one tensor ``[b n hd]``."""
    norms: tuple[Float[Tensor, "gh 1 t"], ...]
    """Inverse norms, zero where padded."""
    tiles: Sequence[Tile]
    """How the tokens are cut; empty for autograd."""
    shape: tuple[int, int]
    """Sequences, and tokens of each."""


class TilePlan(NamedTuple):
    """How :class:`Attend` runs."""

    tiles: Sequence[Tile]
    shape: tuple[int, int]
    """Sequences, and tokens of each."""
    key_mask: Bool[Tensor, "b n"] | None
    eps: float
    """Norms below this count as this."""
    folded: bool = False
    """Fold the output map into the weights; needs all maps, in float32 or better."""
    has_energy: bool = True
    """Whether to return the energy."""


class Attend(torch.autograd.Function):
    """The layer's output and the energy of its scores.

    Takes tokens, the projection weights and the maps of the layer; or, instead of tokens, the heads
    and inverse norms of each tile. Without maps tokens are heads side by side, and the output is
    the scores. Keeps heads, scores (folded: outputs of heads) and one number per token and head.
    """

    @staticmethod
    def forward(
        ctx: Context, plan: TilePlan, has_grad: bool, x: Tensor | None, w: Tensor, *given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and energy."""
        # under no_grad inputs say that they need gradients, but nobody will ask for them
        keeps = has_grad and any(ctx.needs_input_grad)
        # autograd sees only tensors that are arguments themselves, so maps arrive flat
        maps = LayerMaps(*map(LinearMap, given[:8:2], given[1:8:2]))
        count = len(plan.tiles)
        heads, norms = given[8 : 8 + count], given[8 + count :]
        both, d, _ = w.shape[1:]
        h = both // 2 if plan.folded else both
        inward = outward = None
        if maps.q.weight is not None:
            # folded: query and key of a head side by side, so that one product maps both
            inward = join_maps(maps.q, maps.k, h if plan.folded else 1)
        if plan.folded:
            blocks = fold_weights(w, maps.concat)
            outward = LinearMap(maps.out.weight, fold_bias(maps.concat, maps.out))
        else:
            blocks = w
            if maps.out.weight is not None:
                outward = fold_concat(maps.concat, maps.out)
        e = blocks.shape[-1]
        buffers, kept, sums = Buffers(w, keeps), [], []
        y = w.new_empty(*plan.shape, h * e if outward is None else outward.weight.shape[0])
        for i, tile in enumerate(plan.tiles):
            g, t = tile.shape
            if x is None:
                q, norm = heads[i], norms[i]
            else:
                q = buffers("heads", g * both, d, t)
                features_first(tile.of(x), inward, q.view(g, both * d, t))
                norm = buffers("norms", g * both, 1, t, dtype=accumulator(w))
                mask = None if plan.key_mask is None else tile.of(plan.key_mask)
                inverse_norms(q, mask, plan.eps, norm)
            z = buffers("outputs", g * h, e, t)
            # scaled in place: backward of the folded engine needs unit heads, not heads
            if plan.folded:
                q.mul_(norm)
                torch.bmm(tile.each(blocks).mT, q.view(g * h, 2 * d, t), out=z)
            else:
                # norms divide the scores: s numbers per token and head instead of d
                torch.bmm(tile.each(blocks).mT, q, out=z).mul_(norm)
            if plan.has_energy:
                if plan.folded:
                    parts = torch.bmm(q, q.mT)  # Gram matrices of unit heads
                else:
                    # a norm accumulates in a wider type without a wide copy of the scores
                    wide = accumulator(z)
                    parts = torch.linalg.vector_norm(z, dim=-1, dtype=wide).square_()
                sums.append(tile.sums(parts, both))
            tokens_first(z.view(g, h * e, t), outward, tile.of(y))
            kept += [q, z, norm] if keeps else []
        moments = None
        if plan.has_energy:
            moments = sums[0] if len(sums) == 1 else add_up(plan.tiles, sums, plan.shape[0])
        if plan.folded and moments is not None:
            # w_sᵀ G w_s for every direction s: the energy without a score
            moments = by_side(moments, h, 1) @ w
        ctx.plan = plan
        ctx.save_for_backward(
            *(x, w, moments, blocks, *given[:8]),
            *(*(inward or (None, None)), *(outward or (None, None)), *kept),
        )
        return y, (w * moments).sum(2) if plan.folded and moments is not None else moments

    @staticmethod
    def backward(
        ctx: Context, grad_y: Tensor, grad_energy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        x, w, moments, blocks, *saved = ctx.saved_tensors
        a, a_bias, o, o_bias, *kept = saved[8:]
        if torch.is_grad_enabled():
            heads, norms = (kept[::3], kept[2::3]) if x is None else ((), ())
            given, needed = (x, w, *saved[:8], *heads), ctx.needs_input_grad
            needed = needed[2 : 2 + len(given)]
            formula = functools.partial(_plain, ctx.plan, norms)
            found = gradients(formula, given, needed, (grad_y, grad_energy))
            return None, None, *found, *[None] * len(norms)
        maps = LayerMaps(*map(LinearMap, saved[:8:2], saved[1:8:2]))
        plan, (both, d, _), (_, h, _, e) = ctx.plan, w.shape[1:], blocks.shape
        pull = twice = None
        # the energy is a sum of squares, so it pulls each score by twice itself
        if plan.has_energy and grad_energy is not None:
            twice = 2 * grad_energy.to(w.dtype)[:, :, None]  # [b both 1 s]
            pull = by_head((w * twice) @ w.mT, h, 1) if plan.folded else twice.mT
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[2] else None
        buffers, total = Buffers(w, keeps=False), TileTotals(accumulator(w))
        grads_q: list[Tensor] = []
        grads_blocks = []
        for tile, q, z, norm in zip(plan.tiles, kept[::3], kept[1::3], kept[2::3], strict=True):
            (g, t), out, norm = tile.shape, tile.of(grad_y), norm.to(w.dtype)
            # memory of the forward pass is kept; that of backward is shared by all tiles
            each, grad_z = tile.each(blocks), buffers("outputs", g * h, e, t)
            rows = grad_z.view(g, h * e, t)
            # sums over tokens add up in a wider type: tiles may number in the hundreds
            if o is not None:
                total.add("out", torch.bmm(z.view(g, h * e, t), out))
            if pull is None or plan.folded:
                features_first(out, None if o is None else LinearMap(o.T), rows)
            else:
                torch.mul(z, tile.each(pull), out=grad_z)
                if o is None:
                    rows.add_(out.mT)
                else:
                    rows.baddbmm_(o.T.expand(g, -1, -1), out.mT)
            # heads that were given take their gradient along
            grad_q = torch.empty_like(q) if x is None else buffers("heads", *q.shape)
            if plan.folded:
                pairs, grad_pairs = (m.view(g * h, 2 * d, t) for m in (q, grad_q))
                grads_blocks.append(tile.sums(torch.bmm(pairs, grad_z.mT), h))
                torch.bmm(each, grad_z, out=grad_pairs)
                if pull is not None:
                    grad_q.baddbmm_(tile.each(pull), q)
                # a unit vector cannot change in its own direction: remove the radial part
                radial = torch.mul(q, grad_q, out=buffers("work", *q.shape)).sum(1, keepdim=True)
                grad_q.mul_(norm).addcmul_(q, radial.mul_(norm_gradient(norm, plan.eps)))
            else:
                grad_z.mul_(norm)
                # in the memory of what comes next, which is then in cache
                work = buffers("work", *z.shape) if x is None or e > d else grad_q
                work = work.view(-1)[: z.numel()].view_as(z)
                radial = torch.mul(grad_z, z, out=work).sum(1, keepdim=True)
                grads_blocks.append(tile.sums(torch.bmm(grad_z, q.mT), h))
                torch.mul(q, radial.mul_(norm_gradient(norm, plan.eps)), out=grad_q)
                # q r, the radial part, is in place; add what comes through the weights
                grad_q.baddbmm_(each, grad_z)
            if x is None:
                grads_q.append(grad_q)
                continue
            rows = grad_q.view(g, both * d, t)
            if a is not None:
                total.add("in", torch.bmm(rows, tile.of(x)))
            if a_bias is not None:
                total.add("in bias", rows, (0, 2))
            if grad_x is not None:
                tokens_first(rows, None if a is None else LinearMap(a.T), tile.of(grad_x))
        if o_bias is not None:
            total.add("out bias", grad_y, (0, 1))
        grad_blocks = add_up(plan.tiles, grads_blocks, grad_y.shape[0])
        # one set of weights for all sequences collects from all of them
        if w.shape[0] != grad_y.shape[0]:
            grad_blocks = grad_blocks.sum(0, keepdim=True)
        grad_blocks = grad_blocks.to(w.dtype)
        grad_w, grads = _grads_of_maps(plan, w, maps, grad_blocks, total)
        if plan.folded and twice is not None:
            # the weights enter the energy directly, too: d(wᵀ G w) = 2 G w
            by_energy = moments * twice
            grad_w += by_energy if w.shape[0] == grad_y.shape[0] else by_energy.sum(0, keepdim=True)
        return None, None, grad_x, grad_w, *grads, *grads_q, *[None] * len(grads_q)


def _plain(
    plan: TilePlan, norms: Sequence[Tensor], x: Tensor | None, w: Tensor, *given: Any
) -> tuple[Tensor, Tensor]:
    """Return output and energy, differentiated by autograd; arguments as for :class:`Attend`."""
    maps, both = LayerMaps(*map(LinearMap, given[:8:2], given[1:8:2])), w.shape[1]
    if x is None:
        heads = _in_order(plan, given[8:], both)
        key_mask: Tensor | None = _in_order(plan, norms, both)[:, 0, :, 0] > 0
    else:
        heads = x if maps.q.weight is None else linear(x, *join_maps(maps.q, maps.k))
        heads, key_mask = heads.unflatten(-1, (both, -1)).transpose(1, 2), plan.key_mask
    if plan.folded:
        return plain_folded(heads, w, maps, key_mask, plan.eps)
    return plain_scores(heads, w, None if maps.out.weight is None else maps, key_mask, plan.eps)


def _in_order(
    plan: TilePlan, parts: Sequence[Float[Tensor, "_ d _"]], h: int
) -> Float[Tensor, "b h n d"]:
    """Return tiles as one tensor of all tokens."""
    b, n = plan.shape
    whole = parts[0].new_zeros(b, h, parts[0].shape[1], n)
    for tile, part in zip(plan.tiles, parts, strict=True):
        by_chunk = part.unflatten(0, (-1, tile.chunks, h))  # [rows chunks h d t]
        whole[tile.rows, :, :, tile.tokens] = by_chunk.permute(0, 2, 3, 1, 4).flatten(3)
    return whole.mT


def _grads_of_maps(
    plan: TilePlan, w: Tensor, maps: LayerMaps, grad_blocks: Tensor, total: TileTotals
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the gradients of the weights and of all maps from those of the folded ones."""
    grad_a, grad_bias, grad_o, out_bias = (
        total.get(name, w.dtype) for name in ("in", "in bias", "out", "out bias")
    )
    grad_c = bias = None
    if plan.folded:
        grad_w, grad_c = fold_weights_backward(grad_blocks, w, maps.concat)
        h = w.shape[1] // 2
        grad_a, grad_bias = (None if t is None else by_side(t, h) for t in (grad_a, grad_bias))
        grad_o = None if grad_o is None else grad_o.T
    else:
        grad_w = grad_blocks.mT
        if grad_o is not None:
            grad_c, grad_o = fold_concat_backward(grad_o.T, maps.concat, maps.out)
    # the folded bias O c + o depends on O and on c: both get a share of its gradient
    if grad_o is not None and out_bias is not None and maps.concat.bias is not None:
        d = maps.concat.bias.shape[0]
        grad_o = torch.addcmul(
            grad_o.unflatten(1, (-1, d)), out_bias[:, None, None], maps.concat.bias
        ).flatten(1)
        bias = (out_bias @ maps.out.weight).view(-1, d).sum(0)
    q, k = (None, None) if grad_a is None else grad_a.chunk(2)
    q_bias, k_bias = (None, None) if grad_bias is None else grad_bias.chunk(2)
    return grad_w, (
        *(q, None if maps.q.bias is None else q_bias),
        *(k, None if maps.k.bias is None else k_bias),
        *(grad_c, bias, grad_o, None if maps.out.bias is None else out_bias),
    )
