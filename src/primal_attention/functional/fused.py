"""A layer as two functions with backward passes of their own: weights from tokens, and the rest.

Between the linear maps tensors are stored features first, ``[g h d t]``: ``g`` chunks of ``t``
tokens. Products of such chunks are one batch that the threads share, a factor per token multiplies
whole rows, and a sum over tokens runs along memory. A tile of chunks passes through the layer
before the next one, while it is in cache.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.functional.precision import accumulator, full_precision

__all__ = ["attend_fused", "fold_fused", "tie_fused"]

_NUMBERS = 2**18
"""Numbers that the heads of a chunk hold."""

_CHUNK = 1024
"""Tokens of a chunk at least, also of wide layers."""

_CHUNKS = 4
"""Chunks of a tile at least; more for more threads."""


class _Tile(NamedTuple):
    """Sequences, or a part of one, and into how many chunks each of them is cut."""

    rows: slice
    tokens: slice
    chunks: int

    def of(self, x: Float[Tensor, "b n *rest"]) -> Float[Tensor, "g t *rest"]:
        """Return the tile's chunks of a tensor."""
        part = x[self.rows, self.tokens]
        if self.chunks == 1:
            return part
        return part.reshape(len(part) * self.chunks, -1, *x.shape[2:])

    def each(self, own: Float[Tensor, "#b ..."]) -> Float[Tensor, "#g ..."]:
        """Return for each chunk what its sequence has; one thing for all stays as it is."""
        if len(own) > 1:
            own = own[self.rows]
        if len(own) == 1 or self.chunks == 1:
            return own
        return own.repeat_interleave(self.chunks, 0)

    def spread(self, w: Float[Tensor, "#b h d s"], g: int) -> Float[Tensor, "{g}*h d s"]:
        """Return the matrices of all chunks and heads as one batch."""
        return self.each(w).expand(g, -1, -1, -1).flatten(0, 1)

    def add(self, parts: Float[Tensor, "g ..."], total: Float[Tensor, "b ..."]) -> None:
        """Add what every chunk has to the sum of its sequence."""
        rows = total[self.rows]
        rows.add_(parts if self.chunks == 1 else parts.view(len(rows), -1, *parts.shape[1:]).sum(1))


def _tiles(b: int, n: int, width: int) -> list[_Tile]:
    """Cut ``b`` sequences of ``n`` tokens whose heads are ``width`` wide."""
    chunk = max(_CHUNK, _NUMBERS // max(width, 1))
    size = max(_CHUNKS, torch.get_num_threads()) * chunk
    if b > 1 and n < 2 * chunk:
        chunk = max(n, 1)
        size = max(size, chunk)
    rest = n % chunk
    rows = 1 if rest else max(1, size // max(n, 1))
    tiles = [
        _Tile(slice(i, min(i + rows, b)), slice(j, end), (end - j) // chunk)
        for i in range(0, b, rows)
        for j in range(0, n - rest, size)
        for end in (min(j + size, n - rest),)
    ]
    if rest:
        rows = max(1, size // rest)
        ends = slice(n - rest, n)
        tiles += [_Tile(slice(i, min(i + rows, b)), ends, 1) for i in range(0, b, rows)]
    return tiles


def _enter(
    x: Float[Tensor, "g t in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "g out t"]:
    """Return ``weight x + bias`` of every token, features first."""
    weight = weight.expand(len(x), -1, -1)
    return torch.bmm(weight, x.mT) if bias is None else torch.baddbmm(bias[:, None], weight, x.mT)


def _leave(
    z: Float[Tensor, "g in t"],
    weight: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None,
    out: Float[Tensor, "g t out"],
) -> None:
    """Write ``weight z + bias`` of every token, tokens first."""
    weight = weight.T.expand(len(z), -1, -1)
    if bias is None:
        torch.bmm(z.mT, weight, out=out)
    else:
        torch.baddbmm(bias, z.mT, weight, out=out)


def _inverse_norms(
    q: Float[Tensor, "g h d t"], keep: Bool[Tensor, "g t"] | None, eps: float
) -> Float[Tensor, "g h 1 t"]:
    squares = q.to(accumulator(q)).square().sum(2, keepdim=True)
    inverse = squares.sqrt_().clamp_min_(eps).reciprocal_().to(q.dtype)
    if keep is not None:
        # zero here makes whatever a padded token would add vanish, and every gradient of it
        inverse.masked_fill_(~keep[:, None, None, :], 0.0)
    return inverse


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
        energy = x.new_zeros(b, h, s, dtype=accumulator(x))
        y = x.new_empty(b, n, o.shape[0])
        tiles, kept = _tiles(b, n, h * d), []
        for tile in tiles:
            q = _enter(tile.of(x), a, a_bias)  # [g h*d t]
            g, _, t = q.shape
            heads = q.view(g * h, d, t)
            inverse = _inverse_norms(
                q.view(g, h, d, t), None if key_mask is None else tile.of(key_mask), eps
            )
            scores = torch.bmm(tile.spread(w, g).mT, heads).view(g, h, s, t).mul_(inverse)
            norms = torch.linalg.vector_norm(scores, dim=-1, dtype=energy.dtype)
            tile.add(norms.square_(), energy)
            _leave(scores.view(g, h * s, t), o, o_bias, tile.of(y))
            if keeps:
                kept += [heads, scores, inverse]
        ctx.save_for_backward(x, a, a_bias, w, o, o_bias, *kept)
        ctx.eps, ctx.tiles = eps, tiles
        return y, energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, a_bias, w, o, o_bias, *kept = ctx.saved_tensors
        h, d, s = w.shape[1:]
        wide = accumulator(x)
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        grad_a, grad_o = a.new_zeros(a.shape, dtype=wide), o.new_zeros(o.T.shape, dtype=wide)
        grad_bias = a.new_zeros(len(a), dtype=wide)
        grad_w = w.new_zeros(len(x), h, s, d, dtype=wide)
        twice = 2 * grad_energy[..., None].to(x.dtype)
        for i, tile in enumerate(ctx.tiles):
            heads, scores, inverse = kept[3 * i : 3 * i + 3]
            g, _, _, t = scores.shape
            out = tile.of(grad_y)
            grad_o += torch.bmm(scores.view(g, h * s, t), out).sum(0, dtype=wide)
            grad = _enter(out, o.T, None).view(g, h, s, t)
            grad.addcmul_(scores, tile.each(twice))
            # d(1/‖q‖) = -q/‖q‖³, and zero where the norm was clamped
            radial = (grad * scores).sum(2, keepdim=True).mul_(inverse)
            radial.mul_(torch.threshold_(inverse.neg(), -1 / ctx.eps, 0.0))
            rows = grad.mul_(inverse).view(g * h, s, t)
            tile.add(torch.bmm(rows, heads.mT).view(g, h, s, d), grad_w)
            grad_q = torch.bmm(tile.spread(w, g), rows)
            grad_q = grad_q.addcmul_(heads, radial.view(g * h, 1, t)).view(g, h * d, t)
            grad_a += torch.bmm(grad_q, tile.of(x)).sum(0, dtype=wide)
            if a_bias is not None:
                grad_bias += grad_q.sum((0, 2), dtype=wide)
            if grad_x is not None:
                _leave(grad_q, a.T, None, tile.of(grad_x))
        grad_w = (grad_w if len(w) == len(x) else grad_w.sum(0, keepdim=True)).mT
        grads = (
            grad_a.to(a.dtype),
            None if a_bias is None else grad_bias.to(a_bias.dtype),
            grad_w.to(w.dtype),
            grad_o.T.to(o.dtype),
            None if o_bias is None else grad_y.sum((0, 1), dtype=wide).to(o_bias.dtype),
        )
        return grad_x, *grads, None, None, None


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
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return _Attend.apply(*given, key_mask, eps, keeps)  # type: ignore[no-untyped-call]


class _Fold(torch.autograd.Function):
    """Small products of parameters; as separate steps they would cost what they compute."""

    @staticmethod
    def forward(
        ctx: Any, c: Tensor, c_bias: Tensor | None, o: Tensor, o_bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        (d, both), dim = c.shape, len(o)
        heads = o.shape[1] // d
        weight = (o.view(-1, d) @ c).view(dim, heads, 2, both // 2).transpose(1, 2)
        bias = o_bias
        if c_bias is not None:
            bias = o @ c_bias.repeat(heads)
            bias = bias if o_bias is None else bias.add_(o_bias)
        ctx.save_for_backward(c, c_bias, o)
        return weight.reshape(dim, -1), bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        c, c_bias, o = ctx.saved_tensors
        (d, both), dim = c.shape, len(o)
        rows = grad.view(dim, 2, -1, both // 2).transpose(1, 2).reshape(-1, both)  # [dim*h 2*s]
        grad_c, grad_o = o.view(-1, d).T @ rows, (rows @ c.T).view(dim, -1, d)
        grad_c_bias = None
        if c_bias is not None and grad_bias is not None:
            grad_o.addcmul_(grad_bias[:, None, None], c_bias)
            grad_c_bias = (grad_bias @ o).view(-1, d).sum(0)
        wanted = ctx.needs_input_grad[3]
        return grad_c, grad_c_bias, grad_o.view_as(o), grad_bias if wanted else None


def fold_fused(
    inner: tuple[Float[Tensor, "d 2*s"], Float[Tensor, " d"] | None],
    outer: tuple[Float[Tensor, "c h*d"], Float[Tensor, " c"] | None],
) -> tuple[Float[Tensor, "c 2*h*s"], Float[Tensor, " c"] | None]:
    """Return ``O (C s + c) + o`` as one map of the scores of all query and all key heads."""
    with full_precision(inner[0]):
        return _Fold.apply(*inner, *outer)  # type: ignore[no-untyped-call]


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
        f = f.view(b, -1, h, c // h).transpose(1, 2)  # [b h k d]
        codes = torch.cat([w_e, w_r], dim=-1)
        w = (f.mT @ codes).view(b, h, c // h, 2, s).permute(0, 3, 1, 2, 4)  # [b 2 h d s]
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
        b, h, _, d = f.shape
        grad_w = grad_w.view(b, 2, h, d, -1).permute(0, 2, 3, 1, 4).flatten(3)  # [b h d 2*s]
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


def tie_fused(
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
