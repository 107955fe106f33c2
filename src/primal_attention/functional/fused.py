"""A layer in one step, with a backward pass of its own.

Between the linear maps tensors are stored features first, ``[g h d t]``: ``g`` chunks of ``t``
tokens. Products of such chunks are one batch that the threads share, a factor per token multiplies
whole rows, and a sum over tokens runs along memory. A tile of chunks passes through the layer
before the next one, while it is in cache.

What belongs to a layer but not to its tokens (folding maps, weights of sampled tokens, the loss) is
small. It costs the calls it takes, so there is one function for all of it, and every part of it
stands as a pair: what it computes, and how its gradient returns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = ["attend_fused", "dual_fused", "layer_fused"]

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

    @property
    def size(self) -> int:
        """How many tokens it has."""
        return (self.rows.stop - self.rows.start) * (self.tokens.stop - self.tokens.start)

    def of(self, x: Float[Tensor, "b n *rest"]) -> Float[Tensor, "g t *rest"]:
        """Return the tile's chunks of a tensor."""
        part = x[self.rows, self.tokens]
        if self.chunks == 1:
            return part
        return part.reshape(part.shape[0] * self.chunks, -1, *x.shape[2:])

    def each(self, own: Float[Tensor, "#b ..."]) -> Float[Tensor, "#g ..."]:
        """Return for each chunk what its sequence has; one thing for all stays as it is."""
        if own.shape[0] > 1:
            own = own[self.rows]
        if own.shape[0] == 1 or self.chunks == 1:
            return own
        return own.repeat_interleave(self.chunks, 0)

    def spread(self, w: Float[Tensor, "#b h d s"], g: int) -> Float[Tensor, "{g}*h d s"]:
        """Return the matrices of all chunks and heads as one batch."""
        return self.each(w).expand(g, -1, -1, -1).flatten(0, 1)

    def add(self, parts: Float[Tensor, "g ..."], total: Float[Tensor, "b ..."]) -> None:
        """Add what every chunk has to the sum of its sequence."""
        rows = total[self.rows]
        rows.add_(parts if self.chunks == 1 else parts.unflatten(0, (-1, self.chunks)).sum(1))


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


def _spans(tiles: Sequence[_Tile], keeps: bool) -> list[slice]:
    """Return where the tokens of each tile stand in memory; one after another, if all are kept."""
    spans, start = [], 0
    for tile in tiles:
        count = tile.size
        spans.append(slice(start, start + count))
        start += count if keeps else 0
    return spans


def _room(spans: Sequence[slice]) -> int:
    """Return for how many tokens that memory is."""
    return max((span.stop for span in spans), default=0)


class _Map(NamedTuple):
    """A linear map, or the gradient of one."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None


# tokens


def _enter(x: Float[Tensor, "g t in"], linear: _Map, out: Float[Tensor, "g out t"]) -> None:
    """Write ``weight x + bias`` of every token, features first."""
    weight = linear.weight.expand(x.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(weight, x.mT, out=out)
    else:
        torch.baddbmm(linear.bias[:, None], weight, x.mT, out=out)


def _leave(z: Float[Tensor, "g in t"], linear: _Map, out: Float[Tensor, "g t out"]) -> None:
    """Write ``weight z + bias`` of every token, tokens first."""
    weight = linear.weight.T.expand(z.shape[0], -1, -1)
    if linear.bias is None:
        torch.bmm(z.mT, weight, out=out)
    else:
        torch.baddbmm(linear.bias, z.mT, weight, out=out)


def _invert_norms(
    q: Float[Tensor, "g h d t"],
    keep: Bool[Tensor, "g t"] | None,
    eps: float,
    inverse: Float[Tensor, "g h 1 t"],
) -> None:
    """Write the inverse norms."""
    wide = accumulator(q)
    # chunk by chunk: what lies in between stays small
    for chunk, row in zip(q, inverse, strict=True):
        torch.sum(chunk.to(wide).square(), 1, keepdim=True, out=row)
    inverse.sqrt_().clamp_min_(eps).reciprocal_()
    if keep is not None:
        # zero here makes whatever a padded token would add vanish, and every gradient of it
        inverse.masked_fill_(~keep[:, None, None, :], 0.0)


def _score(
    tile: _Tile,
    q: Float[Tensor, "g*h d t"],
    norm: Float[Tensor, "g h 1 t"],
    w: Float[Tensor, "#b h d s"],
    scores: Float[Tensor, "g h s t"],
    energy: Float[Tensor, "b h s"],
) -> None:
    """Write ``Wᵀ q / ‖q‖`` of one tile, and add to the energy."""
    g, h, s, t = scores.shape
    torch.bmm(tile.spread(w, g).mT, q, out=scores.view(g * h, s, t))
    scores.mul_(norm)
    tile.add(torch.linalg.vector_norm(scores, dim=-1, dtype=energy.dtype).square_(), energy)


def _score_backward(
    grad: Float[Tensor, "g h s t"],
    scores: Float[Tensor, "g h s t"],
    norm: Float[Tensor, "g h 1 t"],
    eps: float,
    work: Float[Tensor, " size"],
) -> Float[Tensor, "g h 1 t"]:
    """Divide the gradient of the scores by the norms; return the factor of ``q`` in its own."""
    # d(1/‖q‖) = -q/‖q‖³, and zero where the norm was clamped
    product = torch.mul(grad, scores, out=work[: grad.numel()].view_as(grad))
    radial = product.sum(2, keepdim=True).mul_(norm)
    grad.mul_(norm)
    return radial.mul_(torch.threshold_(norm.neg(), -1 / eps, 0.0))


class _Attended(NamedTuple):
    y: Float[Tensor, "b n c"]
    energy: Float[Tensor, "b h s"]
    heads: Float[Tensor, "tokens h*d"]
    """Tile by tile, features first."""
    scores: Float[Tensor, "tokens h*s"]
    """In the same order."""
    inverse: Float[Tensor, "tokens h"]
    """In the same order."""


def _attend(
    x: Float[Tensor, "b n c"],
    inward: _Map,
    w: Float[Tensor, "#b h d s"],
    outward: _Map,
    key_mask: Bool[Tensor, "b n"] | None,
    eps: float,
    keeps: bool,
) -> _Attended:
    (b, n, _), (h, d, s), wide = x.shape, w.shape[1:], accumulator(x)
    tiles = _tiles(b, n, h * d)
    spans = _spans(tiles, keeps)
    room = _room(spans)
    heads, scores = x.new_empty(room, h * d), x.new_empty(room, h * s)
    inverse = x.new_empty(room, h, dtype=wide)
    energy = x.new_zeros(b, h, s, dtype=wide)
    y = x.new_empty(b, n, outward.weight.shape[0])
    for tile, span in zip(tiles, spans, strict=True):
        tokens = tile.of(x)
        g, t, _ = tokens.shape
        q, z, norm = heads[span], scores[span], inverse[span].view(g, h, 1, t)
        _enter(tokens, inward, q.view(g, h * d, t))
        keep = None if key_mask is None else tile.of(key_mask)
        _invert_norms(q.view(g, h, d, t), keep, eps, norm)
        _score(tile, q.view(g * h, d, t), norm, w, z.view(g, h, s, t), energy)
        _leave(z.view(g, h * s, t), outward, tile.of(y))
    return _Attended(y, energy, heads, scores, inverse)


class _AttendGrads(NamedTuple):
    x: Float[Tensor, "b n c"] | None
    inward: _Map
    w: Float[Tensor, "#b h d s"]
    outward: _Map


def _attend_backward(
    grad_y: Float[Tensor, "b n c"],
    grad_energy: Float[Tensor, "b h s"],
    x: Float[Tensor, "b n c"],
    inward: _Map,
    w: Float[Tensor, "#b h d s"],
    outward: _Map,
    kept: Sequence[Tensor],
    eps: float,
    wants_x: bool,
) -> _AttendGrads:
    """Return the gradients; those of maps in float32 or better."""
    (b, n, _), (h, d, s), wide = x.shape, w.shape[1:], accumulator(x)
    heads, scores, inverse = kept
    grad_x = x.new_empty(x.shape) if wants_x else None
    grad_a, grad_o, grad_bias, grad_w = (
        x.new_zeros(shape, dtype=wide)
        for shape in (
            inward.weight.shape,
            outward.weight.T.shape,
            inward.weight.shape[:1],
            (b, h, s, d),
        )
    )
    twice = 2 * grad_energy[..., None].to(x.dtype)
    tiles = _tiles(b, n, h * d)
    # one tile's worth of memory serves all of them
    room = _room(_spans(tiles, keeps=False))
    grads, work = x.new_empty(room, h * s), x.new_empty(room * h * max(d, s))
    for tile, span in zip(tiles, _spans(tiles, keeps=True), strict=True):
        tokens, out = tile.of(x), tile.of(grad_y)
        g, t, _ = tokens.shape
        q, z = heads[span].view(g * h, d, t), scores[span].view(g, h, s, t)
        norm = inverse[span].view(g, h, 1, t).to(x.dtype)
        grad_o += torch.bmm(z.view(g, h * s, t), out).sum(0, dtype=wide)
        grad = grads[: tile.size]
        _enter(out, _Map(outward.weight.T), grad.view(g, h * s, t))
        grad = grad.view(g, h, s, t).addcmul_(z, tile.each(twice))
        radial = _score_backward(grad, z, norm, eps, work)
        rows = grad.view(g * h, s, t)
        tile.add(torch.bmm(rows, q.mT).view(g, h, s, d), grad_w)
        grad_q = torch.bmm(tile.spread(w, g), rows, out=work[: q.numel()].view_as(q))
        grad_q = grad_q.addcmul_(q, radial.view(g * h, 1, t)).view(g, h * d, t)
        grad_a += torch.bmm(grad_q, tokens).sum(0, dtype=wide)
        if inward.bias is not None:
            grad_bias += grad_q.sum((0, 2), dtype=wide)
        if grad_x is not None:
            _leave(grad_q, _Map(inward.weight.T), tile.of(grad_x))
    grad_w = grad_w if w.shape[0] == b else grad_w.sum(0, keepdim=True)
    return _AttendGrads(
        grad_x,
        _Map(grad_a, None if inward.bias is None else grad_bias),
        grad_w.mT,
        _Map(grad_o.T, None if outward.bias is None else grad_y.sum((0, 1), dtype=wide)),
    )


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
        y, energy, *kept = _attend(x, _Map(a, a_bias), w, _Map(o, o_bias), key_mask, eps, keeps)
        ctx.save_for_backward(x, a, a_bias, w, o, o_bias, *kept)
        ctx.eps = eps
        return y, energy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, a_bias, w, o, o_bias, *kept = ctx.saved_tensors
        maps = _Map(a, a_bias), w, _Map(o, o_bias)
        wants_x = ctx.needs_input_grad[0]
        found = _attend_backward(grad_y, grad_energy, x, *maps, kept, ctx.eps, wants_x)
        grads = (*found.inward, found.w, *found.outward)
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
    return _Attend.apply(*given, key_mask, eps, _needs_grad(given))  # type: ignore[no-untyped-call]


def _needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# weights of dual variables


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
        tiles = _tiles(b, n, h * d)
        spans = _spans(tiles, keeps=True)
        heads, duals, scores = (x.new_empty(b * n, h * k) for k in (d, s, s))
        inverse, y = x.new_empty(b * n, h), x.new_empty(b, n, o.shape[0])
        sums, energy = x.new_zeros(b, h, s, d), x.new_zeros(b, h, s)
        for tile, span in zip(tiles, spans, strict=True):
            tokens = tile.of(x)
            g, t, _ = tokens.shape
            q, z, norm = heads[span], duals[span], inverse[span].view(g, h, 1, t)
            _enter(tokens, _Map(a, a_bias), q.view(g, h * d, t))
            _enter(tokens, _Map(v), z.view(g, h * s, t))
            keep = None if key_mask is None else tile.of(key_mask)
            _invert_norms(q.view(g, h, d, t), keep, eps, norm)
            # its own scores come later
            unit = torch.mul(z.view(g, h, s, t), norm, out=scores[span].view(g, h, s, t))
            outer = torch.bmm(unit.view(g * h, s, t), q.view(g * h, d, t).mT)
            tile.add(outer.view(g, h, s, d), sums)
        w = _swap(sums * share).mT
        for tile, span in zip(tiles, spans, strict=True):
            out = tile.of(y)
            g, t, _ = out.shape
            z, norm = scores[span].view(g, h, s, t), inverse[span].view(g, h, 1, t)
            _score(tile, heads[span].view(g * h, d, t), norm, w, z, energy)
            _leave(z.view(g, h * s, t), _Map(o, o_bias), out)
        ctx.save_for_backward(x, a, a_bias, v, o, o_bias, share, w, heads, duals, scores, inverse)
        ctx.eps = eps
        return y, energy, w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor, grad_energy: Tensor, grad_w: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, a, a_bias, v, o, o_bias, share, w, heads, duals, scores, inverse = ctx.saved_tensors
        (b, n, _), (h, d, s) = x.shape, w.shape[1:]
        grad_a, grad_v, grad_o = (torch.zeros_like(m) for m in (a, v, o.T))
        grad_bias = a.new_zeros(a.shape[0])
        grad_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        tiles, twice = _tiles(b, n, h * d), 2 * grad_energy[..., None]
        spans, room = _spans(tiles, keeps=True), _room(_spans(tiles, keeps=False))
        grads, factor = torch.empty_like(scores), torch.empty_like(inverse)
        work, grad_z = (x.new_empty(room * h * k) for k in (max(d, s), s))
        total = grad_w.mT.clone(memory_format=torch.contiguous_format)
        for tile, span in zip(tiles, spans, strict=True):
            out = tile.of(grad_y)
            g, t, _ = out.shape
            z, norm = scores[span].view(g, h, s, t), inverse[span].view(g, h, 1, t)
            grad_o += torch.bmm(z.view(g, h * s, t), out).sum(0)
            grad = grads[span].view(g, h, s, t)
            _enter(out, _Map(o.T), grad.view(g, h * s, t))
            grad.addcmul_(z, tile.each(twice))
            factor[span].view(g, h, 1, t).copy_(_score_backward(grad, z, norm, ctx.eps, work))
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
                _leave(rows, _Map(a.T), into)
                into.baddbmm_(own.mT, v.expand(g, -1, -1))
        biases = (
            None if a_bias is None else grad_bias,
            None if o_bias is None else grad_y.sum((0, 1)),
        )
        return grad_x, grad_a, biases[0], grad_v, grad_o.T, biases[1], *[None] * 4


def dual_fused(
    x: Float[Tensor, "b n c"],
    inward: tuple[Tensor, Tensor | None],
    duals: Float[Tensor, "h*s c"],
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


# weights of sampled tokens


class _Tied(NamedTuple):
    """The weights, and what their gradient needs."""

    w: Float[Tensor, "b 2*h d s"]
    rows: Float[Tensor, "groups m c"]
    mean: Tensor | None
    deviation: Tensor | None
    f: Float[Tensor, "b h k d"]
    codes: Float[Tensor, "h k 2*s"]


def _tie(
    x: Float[Tensor, "b n c"],
    index: Int[Tensor, " m"] | None,
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    basis: Float[Tensor, "*#b k m"] | None,
    eps: float | None,
) -> _Tied:
    (b, _, c), (h, _, s) = x.shape, w_e.shape
    rows = x if index is None else _sequences(x, index, w_e, basis).index_select(1, index)
    unit, mean, deviation = rows, None, None
    if eps is not None:
        unit, mean, deviation = torch.native_layer_norm(rows, (c,), None, None, eps)
    f = unit.view(b, -1, c)
    f = f if basis is None else basis @ f
    f = f.view(b, -1, h, c // h).transpose(1, 2)  # [b h k d]
    codes = torch.cat([w_e, w_r], dim=-1)
    w = (f.mT @ codes).view(b, h, c // h, 2, s).permute(0, 3, 1, 2, 4)  # [b 2 h d s]
    return _Tied(w.flatten(1, 2), rows, mean, deviation, f, codes)


def _sequences(x: Tensor, index: Tensor, w_e: Tensor, basis: Tensor | None) -> Tensor:
    """Return ``x`` so that an index along its tokens means what it says."""
    per = w_e.shape[1] if basis is None else basis.shape[-1]
    return x if index.shape[0] == per else x.reshape(1, -1, x.shape[-1])


def _tie_backward(
    grad_w: Float[Tensor, "b 2*h d s"],
    grad_x: Float[Tensor, "b n c"] | None,
    index: Tensor | None,
    basis: Tensor | None,
    tied: _Tied,
) -> Sequence[Tensor]:
    """Return the gradients of both codes, and add that of the tokens to ``grad_x``."""
    _, rows, mean, deviation, f, codes = tied
    b, h, _, d = f.shape
    grad_w = grad_w.view(b, 2, h, d, -1).permute(0, 2, 3, 1, 4).flatten(3)  # [b h d 2*s]
    grads = (f @ grad_w).sum(0).chunk(2, dim=-1)
    if grad_x is None:
        return grads
    grad = (codes @ grad_w.mT).transpose(1, 2).flatten(2)  # [b k c]
    grad = (grad if basis is None else basis.mT @ grad).view_as(rows)
    if mean is not None:
        wanted, shape = [True, False, False], rows.shape[-1:]
        grad = torch.ops.aten.native_layer_norm_backward(
            grad, rows, shape, mean, deviation, None, None, wanted
        )[0]
    if index is None:
        grad_x.add_(grad)
    else:
        grad_x.view(rows.shape[0], -1, h * d).index_add_(1, index, grad)
    return grads


# maps


def _fold(inner: _Map, outer: _Map) -> _Map:
    """Return ``O (C s + c) + o`` as one map of the scores of all query and all key heads."""
    (d, both), c = inner.weight.shape, outer.weight.shape[0]
    by_head = outer.weight.view(-1, d)  # [c*h d]
    weight = (by_head @ inner.weight).view(c, -1, 2, both // 2).transpose(1, 2)
    bias = outer.bias
    if inner.bias is not None:
        bias = torch.mv(by_head, inner.bias).view(c, -1).sum(1)
        bias = bias if outer.bias is None else bias.add_(outer.bias)
    return _Map(weight.reshape(c, -1), bias)


def _fold_backward(grad: _Map, inner: _Map, outer: _Map) -> tuple[_Map, _Map]:
    (d, both), c = inner.weight.shape, outer.weight.shape[0]
    by_head = outer.weight.view(-1, d)
    rows = grad.weight.reshape(c, 2, -1, both // 2).transpose(1, 2).reshape(-1, both)
    weight, bias = (rows @ inner.weight.T).view(c, -1, d), None
    if inner.bias is not None and grad.bias is not None:
        weight.addcmul_(grad.bias[:, None, None], inner.bias)
        bias = (grad.bias @ outer.weight).view(-1, d).sum(0)
    grad_outer = _Map(weight.view_as(outer.weight), None if outer.bias is None else grad.bias)
    return _Map(by_head.T @ rows, bias), grad_outer


# the loss


def _objective(
    energy: Float[Tensor, "b 2*h s"],
    lam: Float[Tensor, "h s"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    count: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, " b"]]:
    """Return ``mean_b (mean_h J)²`` of sequences of ``count`` tokens, and the means."""
    b, h = energy.shape[0], lam.shape[0]
    trace = torch.dot(w_e.flatten(), w_r.flatten()).expand(b)
    rows, scale = energy.flatten(1), 0.5 / (count * h)
    mean = torch.addmv(trace, rows, _for_both(lam), beta=-1 / h, alpha=scale)
    return torch.dot(mean, mean).div_(b), mean


def _for_both(lam: Float[Tensor, "h s"]) -> Float[Tensor, " 2*h*s"]:
    squares = lam.square()
    return torch.cat([squares, squares]).flatten()


def _objective_backward(
    grad: Float[Tensor, ""],
    energy: Float[Tensor, "b 2*h s"],
    mean: Float[Tensor, " b"],
    lam: Float[Tensor, "h s"],
    w_e: Float[Tensor, "h k s"],
    w_r: Float[Tensor, "h k s"],
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the energy, of ``ℓ`` and of both codes."""
    (h, s), b = lam.shape, energy.shape[0]
    each = mean * (grad / (b * h * count))  # of ½ ℓ² energy
    trace = each.sum() * (-2 * count)
    grad_lam = torch.mv(energy.view(b, -1).T, each).view(2, h, s).sum(0).mul_(2 * lam)
    grad_energy = torch.outer(each, _for_both(lam)).view_as(energy)
    return grad_energy, grad_lam, trace * w_r, trace * w_e


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
        inward = _Map(torch.cat([q, k]), both)
        outward = _fold(_Map(c, c_bias), _Map(o, o_bias))
        y, energy, *kept = _attend(x, inward, tied.w, outward, key_mask, eps, keeps)
        found, mean = energy, None
        if lam is not None:
            found, mean = _objective(energy, lam, w_e, w_r, x.shape[1])
        ctx.save_for_backward(
            *(x, w_e, w_r, c, c_bias, o, o_bias, lam, basis, index),
            *(*tied, *inward, *outward, energy, mean, *kept),
        )
        ctx.eps = eps
        return y, found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_found: Tensor) -> tuple[Tensor | None, ...]:
        x, w_e, w_r, c, c_bias, o, o_bias, lam, basis, index, *more = ctx.saved_tensors
        tied = _Tied(*more[:6])
        inward, outward = _Map(*more[6:8]), _Map(*more[8:10])
        energy, mean, *kept = more[10:]
        grad_lam: Tensor | None = None
        grad_codes: list[Tensor] = []
        if lam is not None:
            grad_found, grad_lam, *grad_codes = _objective_backward(
                grad_found, energy, mean, lam, w_e, w_r, x.shape[1]
            )
        wants_x = ctx.needs_input_grad[0]
        found = _attend_backward(
            grad_y, grad_found, x, inward, tied.w, outward, kept, ctx.eps, wants_x
        )
        grad_e, grad_r = _tie_backward(found.w, found.x, index, basis, tied)
        if grad_codes:
            grad_e, grad_r = grad_codes[0].add_(grad_e), grad_codes[1].add_(grad_r)
        inner, outer = _fold_backward(found.outward, _Map(c, c_bias), _Map(o, o_bias))
        a, a_bias = found.inward
        grad_q, grad_k = a.chunk(2)
        q_bias, k_bias = (None, None) if a_bias is None else a_bias.chunk(2)
        grads = (grad_q, q_bias, grad_k, k_bias, grad_e, grad_r, *inner, *outer, grad_lam)
        return found.x, *grads, *[None] * 6


def layer_fused(
    x: Float[Tensor, "b n c"],
    inward: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    codes: tuple[Float[Tensor, "h k s"], Float[Tensor, "h k s"]],
    outward: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    *,
    index: Int[Tensor, " m"] | None,
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
    return _Layer.apply(*given, *more, _needs_grad(given))  # type: ignore[no-untyped-call]
