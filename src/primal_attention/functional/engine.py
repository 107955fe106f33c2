"""Both stages of a primal layer on tiles, each with a backward pass of its own::

    tie       W = Fᵀ codes  or  W = Φᵀ H / n          [b 2h d s], all that tokens share
    attend    z = Wᵀ q / ‖q‖      y = O (C z)          "scores"
              u = q / ‖q‖         y = O ((W C)ᵀ u)     "folded": no score is formed

Many processes that share a sequence would add up the ``2 d s`` numbers of ``W`` between the two.
Only :mod:`primal_attention.functional.primal` calls this module; it says which function runs when.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from primal_attention.functional.precision import accumulator
from primal_attention.functional.tiles import (
    Buffers,
    LinearMap,
    Tile,
    add_up,
    features_first,
    inverse_norms,
    needs_grad,
    norm_gradient,
    tokens_first,
)

__all__ = [
    "LayerMaps",
    "attend_tiles",
    "fold_output",
    "fold_weights",
    "head_tiles",
    "sum_tiles",
    "tie_rows_tiles",
]


class LayerMaps(NamedTuple):
    """The four linear maps of a layer."""

    q: LinearMap
    """From tokens to the query heads."""
    k: LinearMap
    """From tokens to the key heads."""
    concat: LinearMap
    """From both scores of a head to the width of the head."""
    out: LinearMap
    """From all heads to the output."""


# folding


def join(first: LinearMap, second: LinearMap) -> LinearMap:
    """Return two maps of the same input as one."""
    weight = torch.cat([first.weight, second.weight])
    if first.bias is None and second.bias is None:
        return LinearMap(weight, None)
    biases = [
        weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in (first, second)
    ]
    return LinearMap(weight, torch.cat(biases))


def fold_output(concat: LinearMap, out: LinearMap) -> LinearMap:
    """Return ``O (C z + c) + o`` as one map of the scores of all query and all key heads."""
    (d, both), c = concat.weight.shape, out.weight.shape[0]
    by_head = (out.weight.reshape(-1, d) @ concat.weight).view(c, -1, 2, both // 2)
    return LinearMap(by_head.transpose(1, 2).reshape(c, -1), fold_bias(concat, out))


def _fold_output_backward(
    grad: Float[Tensor, "c all"], concat: LinearMap, out: LinearMap
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both weights."""
    (d, both), c = concat.weight.shape, out.weight.shape[0]
    rows = grad.reshape(c, 2, -1, both // 2).transpose(1, 2).reshape(-1, both)
    return out.weight.reshape(-1, d).T @ rows, (rows @ concat.weight.T).view(c, -1)


def fold_weights(
    w: Float[Tensor, "#b both d s"], concat: LinearMap
) -> Float[Tensor, "#b h pair e"]:
    """Return ``W C``, which maps the unit query and key of a head to its output."""
    b, both, d, s = w.shape
    by_side = concat.weight.view(-1, 2, 1, s).permute(1, 2, 3, 0)  # [2 1 s e]
    folded = w.view(b, 2, both // 2, d, s) @ by_side
    return folded.transpose(1, 2).reshape(b, both // 2, 2 * d, -1)


def _fold_weights_backward(
    grad: Float[Tensor, "#b h pair e"], w: Float[Tensor, "#b both d s"], concat: LinearMap
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the projection weights and of the weight of ``concat``."""
    b, both, d, s = w.shape
    by_side = grad.view(b, both // 2, 2, d, -1).transpose(1, 2)  # [b 2 h d e]
    grad_w = by_side @ concat.weight.view(-1, 2, 1, s).permute(1, 2, 0, 3)
    sides = by_side, w.view(grad_w.shape)
    rows, columns = (t.transpose(0, 1).reshape(2, -1, t.shape[-1]) for t in sides)
    return grad_w.flatten(1, 2), torch.bmm(rows.mT, columns).transpose(0, 1).reshape(-1, 2 * s)


def fold_bias(concat: LinearMap, out: LinearMap) -> Float[Tensor, " c"] | None:
    """Return what the two biases add to the output."""
    if concat.bias is None:
        return out.bias
    heads = out.weight.shape[1] // concat.bias.shape[0]
    return linear(concat.bias.expand(heads, -1).reshape(-1), out.weight, out.bias)


def _by_head(rows: Tensor, h: int, dim: int = 0) -> Tensor:
    """Order an axis by heads, query before key, instead of all queries before all keys."""
    return rows.unflatten(dim, (2, h, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _by_side(rows: Tensor, h: int, dim: int = 0) -> Tensor:
    """Undo :func:`_by_head`."""
    return rows.unflatten(dim, (h, 2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


# the first stage: weights


class _TieRows(torch.autograd.Function):
    """Keeps the sampled rows for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_e: Tensor,
        w_r: Tensor,
        basis: Tensor | None,
        index: Tensor | None,
        variance: float | None,
    ) -> tuple[Tensor, Tensor]:
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
        ctx.save_for_backward(basis, index, rows, mean, deviation, f, codes)
        return w.flatten(1, 2), x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_w: Tensor, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        basis, index, rows, mean, deviation, f, codes = ctx.saved_tensors
        (b, _, d, s), (h, _, k) = grad_w.shape, f.shape
        by_head = grad_w.view(b, 2, h, d, s).permute(2, 0, 3, 1, 4).reshape(h, b * d, 2 * s)
        grad_e, grad_r = torch.bmm(f.mT, by_head).chunk(2, dim=-1)
        if not ctx.needs_input_grad[0]:
            return None, grad_e, grad_r, None, None, None
        grad = torch.bmm(by_head, codes.mT).view(h, b, d, k).permute(1, 3, 0, 2)
        grad = grad.reshape(b, k, h * d)
        grad = grad if basis is None else torch.bmm(basis.mT.expand(b, -1, -1), grad)
        grad = grad.view_as(rows)
        if mean is not None:
            grad = torch.ops.aten.native_layer_norm_backward.default(
                *(grad, rows, rows.shape[-1:], mean, deviation, None, None, [True, False, False])
            )[0]
        # the tokens went through this function, so their gradient is at hand: no second one
        if index is None:
            grad_x.add_(grad)
        else:
            grad_x.view(rows.shape[0], -1, h * d).index_add_(1, index, grad)
        return grad_x, grad_e, grad_r, None, None, None


def tie_rows_tiles(
    x: Float[Tensor, "b n c"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    *,
    basis: Float[Tensor, "*#b k m"] | None,
    index: Int[Tensor, " rows"] | None,
    variance: float | None,
) -> tuple[Float[Tensor, "b both d s"], Float[Tensor, "b n c"]]:
    """Return the projection weights of both sides, and the tokens to attend from.

    Attending from the returned tokens and not from ``x`` lets both gradients add up in place.

    Args:
        x: Tokens, zero where padded, in the precision of all parameters.
        w_e: Codes of the query side.
        w_r: Codes of the key side.
        basis: Functions of position, for all sequences or for each.
        index: Which tokens make the weights: the same of every sequence, or as many of each,
            counted through all sequences; ``None`` for all.
        variance: Smallest variance of a token in standardising it; ``None`` to leave it as it is.
    """
    return _TieRows.apply(x, w_e, w_r, basis, index, variance)  # type: ignore[no-untyped-call]


class _HeadTiles(torch.autograd.Function):
    """Keeps the tokens for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiles: Sequence[Tile], *maps: Tensor | None) -> Any:
        ctx.tiles, ctx.maps = tiles, len(maps) // 2
        ctx.save_for_backward(x, *maps)
        found = []
        for weight, bias in zip(maps[::2], maps[1::2], strict=True):
            given = None if weight is None else LinearMap(weight, bias)
            width = x.shape[-1] if weight is None else weight.shape[0]
            for tile in tiles:
                g, t = tile.shape
                found.append(x.new_empty(g, width, t))
                features_first(tile.of(x), given, found[-1])
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *maps), tiles = ctx.saved_tensors, ctx.tiles
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for i in range(ctx.maps):
            weight, bias = maps[2 * i : 2 * i + 2]
            mine = grads[i * len(tiles) : (i + 1) * len(tiles)]
            total: Tensor | None = None
            for tile, grad in zip(tiles, mine, strict=True):
                if weight is not None:
                    part = torch.bmm(grad, tile.of(x)).sum(0, dtype=accumulator(x))
                    total = part if total is None else total.add_(part)
                if grad_x is None:
                    continue
                into = tile.of(grad_x)
                if i == 0:
                    tokens_first(grad, None if weight is None else LinearMap(weight.T), into)
                else:
                    into.baddbmm_(grad.mT, weight.expand(grad.shape[0], -1, -1))
            found.append(None if total is None else total.to(x.dtype))
            by_tile = [grad.sum((0, 2), dtype=accumulator(x)) for grad in mine]
            found.append(None if bias is None else torch.stack(by_tile).sum(0).to(x.dtype))
        return grad_x, None, *found


def head_tiles(
    x: Float[Tensor, "b n c"], tiles: Sequence[Tile], *maps: LinearMap | None
) -> list[tuple[Tensor, ...]]:
    """Return the tiles of each map of the tokens, features first; ``None`` maps to themselves."""
    flat = [t for given in maps for t in (given or (None, None))]
    found = _HeadTiles.apply(x, tiles, *flat)  # type: ignore[no-untyped-call]
    return [found[i * len(tiles) : (i + 1) * len(tiles)] for i in range(len(maps))]


class _SumTiles(torch.autograd.Function):
    """Keeps its inputs and one number per token and head for backward.

    The sum is the gradient of scores in their weights, so its own gradients are scores. Heads are
    returned as well, so that their gradients add up in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Sequence[Tile],
        key_mask: Tensor | None,
        h: int,
        eps: float,
        *heads: Tensor,
    ) -> tuple[Tensor, ...]:
        norms, sums = [], []
        for tile, q, z in zip(tiles, heads[: len(tiles)], heads[len(tiles) :], strict=True):
            (g, t), q, z = tile.shape, *(a.view(a.shape[0] * h, -1, a.shape[-1]) for a in (q, z))
            norm = q.new_empty(g * h, 1, t, dtype=accumulator(q))
            inverse_norms(q, None if key_mask is None else tile.of(key_mask), eps, norm)
            norms.append(norm.to(q.dtype))
            sums.append(tile.sums(torch.bmm(z * norms[-1], q.mT), h))
        ctx.save_for_backward(*heads, *norms)
        ctx.tiles, ctx.h, ctx.eps = tiles, h, eps
        ctx.set_materialize_grads(False)
        return add_up(tiles, sums, tiles[-1].rows.stop).mT, *heads[: len(tiles)]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *of_heads: Tensor | None) -> Any:
        saved, tiles, h = ctx.saved_tensors, ctx.tiles, ctx.h
        if grad is None:
            return *[None] * 4, *of_heads, *[None] * len(tiles)
        count, grads_q, grads_z = len(tiles), [], []
        buffers = Buffers(saved[0], keeps=False)
        grad = grad.mT.to(saved[0].dtype)
        for i, tile in enumerate(tiles):
            q, z = (a.view(a.shape[0] * h, -1, a.shape[-1]) for a in (saved[i], saved[count + i]))
            norm, pull = saved[2 * count + i], tile.each(grad)
            grad_z = torch.bmm(pull, q).mul_(norm)
            radial = torch.mul(grad_z, z, out=buffers("work", *z.shape)).sum(1, keepdim=True)
            radial.mul_(norm).mul_(norm_gradient(norm, ctx.eps))
            unit, given = torch.mul(z, norm, out=buffers("work", *z.shape)), of_heads[i]
            grad_q = q * radial if given is None else given.view_as(q).addcmul_(q, radial)
            grads_q.append(grad_q.baddbmm_(pull.mT, unit).view_as(saved[i]))
            grads_z.append(grad_z.view_as(saved[count + i]))
        return *[None] * 4, *grads_q, *grads_z


def sum_tiles(
    tiles: Sequence[Tile],
    q: Sequence[Tensor],
    z: Sequence[Tensor],
    h: int,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
) -> tuple[Float[Tensor, "b {h} d s"], tuple[Tensor, ...]]:
    """Return ``Σ_i (q_i / ‖q_i‖) z_iᵀ`` of ``h`` heads, in float32 or better, and the heads.

    Attending from the returned heads and not from ``q`` lets both gradients add up in place.
    """
    total, *heads = _SumTiles.apply(tiles, key_mask, h, eps, *q, *z)  # type: ignore[no-untyped-call]
    return total, tuple(heads)


# the second stage: tokens


class Plan(NamedTuple):
    """How :func:`attend_tiles` runs."""

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


class _Attend(torch.autograd.Function):
    """Keeps heads, scores (folded: outputs of heads) and one number per token and head."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, keeps: bool, x: Tensor | None, w: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        maps, heads = _layer_maps(given[:8]), given[8:]
        both, d, _ = w.shape[1:]
        inward, outward, blocks = _prepare(plan, w, maps)
        _, h, _, e = blocks.shape
        buffers, kept, sums = Buffers(w, keeps), [], []
        y = w.new_empty(*plan.shape, h * e if outward is None else outward.weight.shape[0])
        for i, tile in enumerate(plan.tiles):
            g, t = tile.shape
            if x is None:
                q = heads[i].view(g * both, d, t)  # type: ignore[union-attr]
            else:
                q = buffers("heads", g * both, d, t)
                features_first(tile.of(x), inward, q.view(g, both * d, t))
            norm = buffers("norms", g * both, 1, t, dtype=accumulator(w))
            mask = None if plan.key_mask is None else tile.of(plan.key_mask)
            inverse_norms(q, mask, plan.eps, norm)
            z = buffers("outputs", g * h, e, t)
            if plan.folded:
                q.mul_(norm)
                torch.bmm(tile.each(blocks).mT, q.view(g * h, 2 * d, t), out=z)
            else:
                torch.bmm(tile.each(blocks).mT, q, out=z).mul_(norm)
            if plan.has_energy:
                sums.append(tile.sums(_moments(q, z, plan.folded), both))
            tokens_first(z.view(g, h * e, t), outward, tile.of(y))
            kept += [q, z, norm] if keeps else []
        moments = add_up(plan.tiles, sums, plan.shape[0]) if plan.has_energy else None
        if plan.folded and moments is not None:
            moments = _by_side(moments, h, 1) @ w
        ctx.plan = plan
        ctx.save_for_backward(
            *(x, w, moments, blocks, *given[:8]),
            *(*(inward or (None, None)), *(outward or (None, None)), *kept),
        )
        return y, (w * moments).sum(2) if plan.folded and moments is not None else moments

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor | None) -> tuple[Any, ...]:
        x, w, moments, blocks, *saved = ctx.saved_tensors
        a, a_bias, o, o_bias, *kept = saved[8:]
        plan, (both, d, _), (_, h, _, e) = ctx.plan, w.shape[1:], blocks.shape
        pull = twice = None
        if plan.has_energy and grad_energy is not None:
            twice = 2 * grad_energy.to(w.dtype)[:, :, None]  # [b both 1 s]
            pull = _by_head((w * twice) @ w.mT, h, 1) if plan.folded else twice.mT
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[2] else None
        buffers, total = Buffers(w, keeps=False), _Totals(accumulator(w))
        grads_q = []
        grads_blocks = []
        for tile, q, z, norm in zip(plan.tiles, kept[::3], kept[1::3], kept[2::3], strict=True):
            (g, t), out, norm = tile.shape, tile.of(grad_y), norm.to(w.dtype)
            each, grad_z = tile.each(blocks), buffers("outputs", g * h, e, t)
            rows = grad_z.view(g, h * e, t)
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
                grad_q.baddbmm_(each, grad_z)
            rows = grad_q.view(g, both * d, t)
            if x is None:
                grads_q.append(rows)
                continue
            total.add("in", torch.bmm(rows, tile.of(x)))
            if a_bias is not None:
                total.add("in bias", rows, (0, 2))
            if grad_x is not None:
                tokens_first(rows, LinearMap(a.T), tile.of(grad_x))
        if o_bias is not None:
            total.add("out bias", grad_y, (0, 1))
        grad_blocks = add_up(plan.tiles, grads_blocks, grad_y.shape[0])
        if w.shape[0] != grad_y.shape[0]:
            grad_blocks = grad_blocks.sum(0, keepdim=True)
        grad_blocks = grad_blocks.to(w.dtype)
        grad_w, *grads = _prepare_backward(plan, w, _layer_maps(saved[:8]), grad_blocks, total)
        if plan.folded and twice is not None:
            by_energy = moments * twice
            grad_w += by_energy if w.shape[0] == grad_y.shape[0] else by_energy.sum(0, keepdim=True)
        return None, None, grad_x, grad_w, *grads, *grads_q


def _layer_maps(tensors: Sequence[Tensor | None]) -> LayerMaps:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return LayerMaps(*(LinearMap(*pair) for pair in pairs))  # type: ignore[arg-type]


def _prepare(
    plan: Plan, w: Float[Tensor, "#b both d s"], maps: LayerMaps
) -> tuple[LinearMap | None, LinearMap | None, Tensor]:
    """Return the maps to the heads and to the output, and what maps a head to its output."""
    inward = None if maps.q.weight is None else join(maps.q, maps.k)
    if plan.folded and inward is not None:
        h = w.shape[1] // 2
        bias = None if inward.bias is None else _by_head(inward.bias, h)
        outward = LinearMap(maps.out.weight, fold_bias(maps.concat, maps.out))
        return LinearMap(_by_head(inward.weight, h), bias), outward, fold_weights(w, maps.concat)
    return inward, None if maps.out.weight is None else fold_output(maps.concat, maps.out), w


def _prepare_backward(
    plan: Plan, w: Tensor, maps: LayerMaps, grad_blocks: Tensor, total: "_Totals"
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the weights and of all maps from those of what was prepared."""
    grad_a, grad_bias, grad_o, out_bias = (
        total.get(name, w.dtype) for name in ("in", "in bias", "out", "out bias")
    )
    grad_c = bias = None
    if plan.folded:
        grad_w, grad_c = _fold_weights_backward(grad_blocks, w, maps.concat)
        h = w.shape[1] // 2
        grad_a, grad_bias = (None if t is None else _by_side(t, h) for t in (grad_a, grad_bias))
        grad_o = None if grad_o is None else grad_o.T
    else:
        grad_w = grad_blocks.mT
        if grad_o is not None:
            grad_c, grad_o = _fold_output_backward(grad_o.T, maps.concat, maps.out)
    if grad_o is not None and out_bias is not None and maps.concat.bias is not None:
        d = maps.concat.bias.shape[0]
        grad_o = torch.addcmul(
            grad_o.unflatten(1, (-1, d)), out_bias[:, None, None], maps.concat.bias
        ).flatten(1)
        bias = (out_bias @ maps.out.weight).view(-1, d).sum(0)
    q, k = (None, None) if grad_a is None else grad_a.chunk(2)
    q_bias, k_bias = (None, None) if grad_bias is None else grad_bias.chunk(2)
    return (
        *(grad_w, q, None if maps.q.bias is None else q_bias),
        *(k, None if maps.k.bias is None else k_bias),
        *(grad_c, bias, grad_o, None if maps.out.bias is None else out_bias),
    )


def _moments(
    q: Float[Tensor, "all d t"], z: Float[Tensor, "gh e t"], folded: bool
) -> Float[Tensor, "all *rest"]:
    """Return the energy of scores, or the Gram matrices of unit heads."""
    if folded:
        return torch.bmm(q, q.mT)
    return torch.linalg.vector_norm(z, dim=-1, dtype=accumulator(z)).square_()


class _Totals:
    """Sums by name, in float32 or better."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, parts: Tensor, dims: tuple[int, ...] = (0,)) -> None:
        """Add the sum over some axes."""
        part = parts.sum(dims, dtype=self._dtype)
        self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def get(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return the sum so far; ``None`` if there is none."""
        return self._sums[name].to(dtype) if name in self._sums else None


def attend_tiles(
    x: Float[Tensor, "b n c"] | None,
    w: Float[Tensor, "#b both d s"],
    maps: LayerMaps | None,
    plan: Plan,
    heads: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, "b n out"], Float[Tensor, "b both s"] | None]:
    """Return the layer's output and the energy of its scores.

    Args:
        x: Tokens, finite also where padded; ``None`` to attend from ``heads``.
        w: Projection weights of all query heads and, after them, of all key heads.
        maps: The maps of the layer; without them the output is the scores themselves.
        plan: How to run.
        heads: Tiles of the heads, from :func:`head_tiles`.
    """
    tensors: tuple[Tensor | None, ...] = (None,) * 8
    if maps is not None:
        tensors = (*maps.q, *maps.k, *maps.concat, *maps.out)
        tensors = tensors if x is not None else (None,) * 4 + tensors[4:]
    keeps = needs_grad((x, w, *tensors, *heads))
    return _Attend.apply(plan, keeps, x, w, *tensors, *heads)  # type: ignore[no-untyped-call]
