"""Attention with exponential features: exact at any scale, strictly causal.

    A_ij = Σ_p exp(a_ip + b_jp),      y_i = Σ_j A_ij v_j / Σ_j A_ij

A factor per query cancels in the ratio. A factor per feature moves from a set of keys to the query:
keys are divided by their maximum ``M_p``, and the query is ``exp(a_ip + M_p − c_i)`` with
``c_i = max_p (a_ip + M_p)``. No term exceeds one, and the largest is one. So nothing overflows, and
what underflows is negligible beside the rest of the row. No constant is added to the features.

In causal order each set of keys needs its own maximum. The keys before a chunk are summed in a
state, whose maximum runs along the sequence as in online softmax. Inside a chunk, the later half of
each block attends to its earlier half, for blocks of 2, 4, 8, … tokens, which covers every pair
once. No output depends on a later key, not even through rounding.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.linear import append_ones, from_chunks, to_chunks
from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import Context, gradients

__all__ = [
    "LOG_ZERO",
    "ExponentialSums",
    "RelativeSums",
    "divide_sums",
    "exponential_attention",
    "exponential_sums",
]

# finite, unlike -inf: the difference of two is zero, and exp of any other difference is zero
LOG_ZERO = -1e30
"""Logarithm of a weight that counts nothing."""
_GROUP = 16


class RelativeSums(NamedTuple):
    """Weighted sums of values and of ones, divided by ``e^level``, and the state after them."""

    sums: Float[Tensor, "b h n w"]
    """The last column is the sum of the weights; it is zero for a row without keys."""
    level: Float[Tensor, "b h n 1"]
    """The largest logarithm in each row."""
    state: Float[Tensor, "b h p w"]
    """``Σ_j exp(b_j − maximum) [v_j, 1]``."""
    maximum: Float[Tensor, "b h p"]
    """The largest logarithm of each feature so far."""


class ExponentialSums(NamedTuple):
    """Outputs and the state of a causal call."""

    values: Float[Tensor, "b h n v"]
    state: Float[Tensor, "b h p w"]
    """``Σ_j exp(b_j − maximum) [v_j, 1]``."""
    maximum: Float[Tensor, "b h p"]
    """The largest logarithm of each feature so far."""


def exponential_attention(
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
    state: tuple[Float[Tensor, "b h p w"], Float[Tensor, "b h p"]] | None = None,
    chunk: int | None = None,
) -> ExponentialSums:
    """Return attention with weights ``Σ_p exp(log_q_ip + log_k_jp)``; zero for a row without keys.

    ``O((n + m) p v)`` time, also in causal order; there with ``O(n p log(chunk))`` exponentials.

    Args:
        log_q: Logarithms of the query features, float32 or better.
        log_k: Logarithms of the key features.
        v: Values.
        key_mask: ``True`` where a key is real.
        is_causal: Sum over ``j ≤ i`` only; needs as many keys as queries.
        state: Sums and maxima of an earlier call; causal only.
        chunk: Number of tokens in one triangular product, rounded up to a power of two; by default
            64, or 16 where values are narrow.

    Example:
        >>> logs = torch.tensor([[[[0.0], [500.0]]]])
        >>> exponential_attention(logs, logs, torch.eye(2)[None, None]).values[0, 0]
        tensor([[0., 1.],
                [0., 1.]])
    """
    found = exponential_sums(
        log_q, log_k, v, key_mask=key_mask, is_causal=is_causal, state=state, chunk=chunk
    )
    return ExponentialSums(divide_sums(found.sums), found.state, found.maximum)


def exponential_sums(
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
    state: tuple[Float[Tensor, "b h p w"], Float[Tensor, "b h p"]] | None = None,
    chunk: int | None = None,
) -> RelativeSums:
    """Return the sums of :func:`exponential_attention` before the division; arguments as there."""
    v = append_ones(v, key_mask).to(log_k.dtype)
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, LOG_ZERO)
    if state is None:
        b, h, _, p = log_k.shape
        empty = v.new_zeros(b, h, p, v.shape[-1], dtype=accumulator(v))
        state = empty, empty.new_full((b, h, p), LOG_ZERO)
    if log_k.shape[2] == 0:
        # softmax instead of exp: it is finite, and its gradient too
        nothing = log_q.softmax(-1) @ torch.zeros_like(state[0], dtype=log_q.dtype)
        return RelativeSums(nothing, torch.full_like(nothing[..., :1], LOG_ZERO), *state)
    if not is_causal:
        return _attend_all(log_q, log_k, v)
    if log_q.shape[2] == 1:
        return _attend_step(log_q, log_k, v, state)
    if chunk is None:
        chunk = 64 if v.shape[-1] > 32 else 16
    return _attend_chunks(log_q, log_k, v, state, chunk)


def divide_sums(sums: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n v"]:
    """Return relative sums divided by their last column; zero for a row without keys."""
    # the total of a row with keys is at least about one; NaN must stay NaN, so not ">"
    total = sums[..., -1:]
    resolved = ~(total <= 0.5)
    return sums[..., :-1] * torch.where(resolved, 1 / torch.where(resolved, total, 1.0), 0.0)


def _attend_all(log_q: Tensor, log_k: Tensor, v: Tensor) -> RelativeSums:
    # every feature has its own maximum: one maximum for all would underflow the others
    top = log_k.detach().amax(2, keepdim=True)
    sums = (log_k - top).exp_().transpose(-1, -2) @ v
    query = log_q + top
    level = query.detach().amax(-1, keepdim=True)
    return RelativeSums(query.sub_(level).exp_() @ sums, level, sums, top[:, :, 0])


def _attend_step(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: tuple[Tensor, Tensor]
) -> RelativeSums:
    sums, before = state
    # maxima only grow, so old sums shrink and never overflow
    after = torch.maximum(before, log_k.detach()[:, :, 0])
    key = (log_k - after[:, :, None]).exp()
    sums = (before - after).exp()[..., None] * sums + key.transpose(-1, -2) @ v
    query = log_q + after[:, :, None]
    level = query.detach().amax(-1, keepdim=True)
    return RelativeSums(query.sub_(level).exp_() @ sums.to(query.dtype), level, sums, after)


def _attend_chunks(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: tuple[Tensor, Tensor], chunk: int
) -> RelativeSums:
    n = log_q.shape[2]
    if not torch.compiler.is_compiling():
        chunk = min(chunk, n)
    chunk = 1 << (chunk - 1).bit_length()
    q, k, v = _chunks(log_q, chunk), _chunks(log_k, chunk, LOG_ZERO), _chunks(v, chunk)

    # running maxima: under one maximum a large later key would make earlier ones underflow
    top = torch.cat([state[1][:, :, None], k.detach().amax(-2)], dim=2).cummax(2).values
    key = (k - top[:, :, 1:, None]).exp_()  # [b h g i p]
    parts = key.transpose(-1, -2) @ v, state[0].to(v.dtype), top
    if is_traced():
        before, sums = _sums_before(*parts)
        weights, level = _pair_weights(q, k)  # [b h g i j], [b h g i 1]
    else:
        before, sums = _SumsBefore.apply(*parts)  # type: ignore[no-untyped-call]
        weights, level = _PairWeights.apply(q, k)  # type: ignore[no-untyped-call]
    query = q + top[:, :, :-1, None]
    highest = torch.maximum(level, query.detach().amax(-1, keepdim=True))
    outside = query.sub_(highest).exp_() @ before
    inside = (level - highest).exp() * (weights @ v)
    found, level = (from_chunks(t, n) for t in (outside + inside, highest))
    return RelativeSums(found, level, sums, top[:, :, -1])


def _chunks(x: Tensor, chunk: int, fill: float = 0.0) -> Float[Tensor, "*batch g {chunk} w"]:
    """Return tokens in whole chunks, the last one filled up."""
    if not torch.compiler.is_compiling():
        missing = -x.shape[-2] % chunk
        whole = torch.nn.functional.pad(x, (0, 0, 0, missing), value=fill) if missing else x
        return whole.unflatten(-2, (-1, chunk))
    real = to_chunks(torch.ones_like(x[..., :1]), chunk)
    return torch.where(real > 0, to_chunks(x, chunk), fill)


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the earlier and the later half of each block of ``2 size`` tokens."""
    earlier, later = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return earlier, later


def _block_products(
    q: Float[Tensor, "*batch j i p"], k: Float[Tensor, "*batch j i p"]
) -> Float[Tensor, "*batch j i i"]:
    """Return ``q kᵀ`` of every block."""
    if not torch.compiler.is_compiling():
        return q @ k.transpose(-1, -2)
    # a product merges the batch axes; an export can divide them again if fixed sizes come first
    return (q.movedim(-3, 0) @ k.movedim(-3, 0).transpose(-1, -2)).movedim(0, -3)


def _pair_weights(
    q: Float[Tensor, "*batch i p"], k: Float[Tensor, "*batch i p"]
) -> tuple[Float[Tensor, "*batch i i"], Float[Tensor, "*batch i 1"]]:
    """Return ``A_ij exp(−level_i)`` for ``j ≤ i``, zero above; and the levels."""
    size = q.shape[-2]
    own = q + k
    level = own.detach().amax(-1, keepdim=True)
    blocks = []
    # each pair of halves has maxima of its own, so a large key elsewhere makes nothing underflow
    for half in (2**i for i in range(size.bit_length() - 1)):
        earlier, later = _halves(k, half)[0], _halves(q, half)[1]
        peak = earlier.detach().amax(-2, keepdim=True)
        query = later + peak
        height = query.detach().amax(-1, keepdim=True)
        block = _block_products(query.sub_(height).exp_(), (earlier - peak).exp_())
        blocks.append((block, height))  # [... j half half], [... j half 1]
        first, second = _halves(level, half)
        level = torch.stack([first, torch.maximum(second, height)], dim=-3).flatten(-4, -2)
    weights = own.sub_(level).exp_().sum(-1)[..., None, None]  # [... i 1 1]
    for i, (block, height) in enumerate(blocks):
        block = block * (height - _halves(level, 2**i)[1]).exp()
        first, second = weights.unflatten(-3, (-1, 2)).unbind(-3)
        above = torch.nn.functional.pad(first, (0, first.shape[-1]))
        weights = torch.cat([above, torch.cat([block, second], dim=-1)], dim=-2)
    return weights.squeeze(-3), level


class _PairWeights(torch.autograd.Function):
    """The same; keeps its inputs only."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        weights, level = _pair_weights(q, k)
        ctx.save_for_backward(q, k, level)
        ctx.mark_non_differentiable(level)
        return weights, level

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, level = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients(_pair_weights, (q, k), ctx.needs_input_grad, (grad, None))
        with full_precision(q):  # also if backward runs under autocast
            grad_q = (q + k).sub_(level).exp_()
            grad_q.mul_(grad.diagonal(dim1=-2, dim2=-1)[..., None])
            grad_k = grad_q.clone()
            for half in (2**i for i in range(q.shape[-2].bit_length() - 1)):
                earlier, later = _halves(k, half)[0], _halves(q, half)[1]
                peak = earlier.amax(-2, keepdim=True)
                query = (later + peak).sub_(_halves(level, half)[1]).exp_()
                key = (earlier - peak).exp_()
                # the block of later queries and earlier keys of every pair of halves
                block = grad.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))
                block = block[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
                _halves(grad_q, half)[1].addcmul_(query, block @ key)
                _halves(grad_k, half)[0].addcmul_(key, block.mT @ query)
        return grad_q, grad_k


def _sums_before(
    parts: Float[Tensor, "b h g p w"],
    start: Float[Tensor, "b h p w"],
    top: Float[Tensor, "b h t p"],
) -> tuple[Float[Tensor, "b h g p w"], Float[Tensor, "b h p w"]]:
    """Return the sums before each chunk relative to their maxima ``top``, and the sum of all."""
    sums = torch.cat([start[:, :, None], parts], dim=2).transpose(2, 3)
    sums = _decayed_prefix(sums, top.transpose(2, 3)).transpose(2, 3)
    return sums[:, :, :-1], sums[:, :, -1]


def _decay(level: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch i i"]:
    """Return ``exp(level_j − level_i)`` for ``j ≤ i``, zero above; levels are non-decreasing."""
    return (level[..., None, :] - level[..., :, None]).clamp_max(0).exp().tril()


def _decayed_prefix(
    x: Float[Tensor, "*batch g w"], level: Float[Tensor, "*batch g"]
) -> Float[Tensor, "*batch g w"]:
    """Return ``Σ_{u ≤ g} exp(level_u − level_g) x_u``, within groups and then between groups."""
    g = x.shape[-2]
    real = to_chunks(torch.ones_like(level)[..., None], _GROUP)[..., 0]
    whole = to_chunks(level[..., None], _GROUP)[..., 0]  # [... u a]
    level = torch.where(real > 0, whole, level[..., -1:, None])
    inside = _decay(level) @ to_chunks(x, _GROUP)  # [... u a w]
    total = _decay(level[..., -1]) @ inside[..., -1, :]  # [... u w]
    groups = total.shape[-2]
    carry = torch.nn.functional.pad(total, (0, 0, 1, 0))[..., :groups, :]
    start = torch.nn.functional.pad(level[..., -1], (1, 0), value=LOG_ZERO)[..., :groups]
    outside = (start[..., None] - level).exp()[..., None] * carry[..., None, :]
    return from_chunks(inside + outside, g)


class _SumsBefore(torch.autograd.Function):
    """The same, chunk by chunk; keeps no sums."""

    @staticmethod
    def forward(ctx: Context, parts: Tensor, start: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        decay = (top[:, :, :-1] - top[:, :, 1:]).exp()[..., None]
        before, total = torch.empty_like(parts), start
        for g in range(parts.shape[2]):
            before[:, :, g] = total
            total = torch.addcmul(parts[:, :, g], total, decay[:, :, g])
        ctx.save_for_backward(decay)
        return before, total

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        (decay,) = ctx.saved_tensors
        # the adjoint of a scan is the same scan from the end
        total, grads = grad_last, []
        for g in reversed(range(grad.shape[2])):
            grads.append(total)
            total = torch.addcmul(grad[:, :, g], total, decay[:, :, g])
        return torch.stack(grads[::-1], dim=2), total, None
