"""Causal sums of outer products in linear time, for attention with a feature map.

    y_i = Σ_{j ≤ i} ⟨q_i, k_j⟩ v_j

The function does not store the ``n × p × v`` tensor of prefix sums. It works in chunks: earlier
keys enter through one ``p × v`` state, keys of the same chunk through one small triangular product.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import Context, gradients

__all__ = [
    "CausalSums",
    "append_ones",
    "causal_sums",
    "from_chunks",
    "to_chunks",
]


_SMALL = 2048
"""Numbers in a small state: short chunks then cost less, in time and in memory."""


class CausalSums(NamedTuple):
    """Prefix sums and the state after the last key."""

    values: Float[Tensor, "b h n v"]
    state: Float[Tensor, "b h p v"]


def causal_sums(
    q: Float[Tensor, "b h n p"],
    k: Float[Tensor, "b h n p"],
    v: Float[Tensor, "b h n v"],
    *,
    state: Float[Tensor, "b h p v"] | None = None,
    chunk: int | None = None,
) -> CausalSums:
    """Return ``y_i = ⟨q_i, state⟩ + Σ_{j ≤ i} ⟨q_i, k_j⟩ v_j`` and the state after the last key.

    Exact and strictly causal; ``O(n p v + n chunk (p + v))`` time, ``O(n (p + v) + n p v / chunk)``
    memory. The state is float32 or better.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        state: Sum of the outer products of earlier keys and values.
        chunk: Tokens of a chunk; by default 64, or 32 where a state is small.

    Example:
        >>> ones = torch.ones(1, 1, 3, 1)
        >>> causal_sums(ones, ones, ones).values.flatten()
        tensor([1., 2., 3.])
    """
    n = q.shape[2]
    if n == 1 and state is not None and not torch.compiler.is_compiling():
        after = state + k.transpose(-1, -2) @ v  # decoding one token: two small products
        return CausalSums(q @ after.to(q.dtype), after)
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=accumulator(q))
    if n == 0:
        return CausalSums(q @ state.to(q.dtype), state)
    # a chunk costs chunk² for pairs, and one state for the rest: small states favour short chunks
    if chunk is None:
        chunk = 32 if q.shape[-1] * v.shape[-1] <= _SMALL else 64
    chunks = to_chunks(q, chunk), to_chunks(k, chunk), to_chunks(v, chunk), state  # [b h g i p]
    if is_traced() or not q.dtype == k.dtype == v.dtype == accumulator(q):
        values, last = _chunked_sums(*chunks)
    else:
        values, last = _ChunkedSums.apply(*chunks)  # type: ignore[no-untyped-call]
    return CausalSums(from_chunks(values, n), last)


def _chunked_sums(
    q: Float[Tensor, "b h g i p"],
    k: Float[Tensor, "b h g i p"],
    v: Float[Tensor, "b h g i v"],
    state: Float[Tensor, "b h p v"],
) -> tuple[Float[Tensor, "b h g i v"], Float[Tensor, "b h p v"]]:
    """Return the sums of whole chunks, differentiated by autograd, and the last state."""
    total = (k.transpose(-1, -2) @ v).to(state.dtype).cumsum(2)  # [b h g p v]
    # shift instead of total - increments: a large key of the chunk would leave rounding errors
    before = torch.nn.functional.pad(total, (0, 0, 0, 0, 1, 0))[:, :, : total.shape[2]]
    before = before + state[:, :, None]
    inside = (q @ k.transpose(-1, -2)).tril() @ v
    return inside + q @ before.to(q.dtype), total[:, :, -1] + state


class _ChunkedSums(torch.autograd.Function):
    """The same in fewer products; keeps its inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat_q, flat_k, flat_v = q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)
        # the wider factor on the right: this order is faster
        states = torch.bmm(flat_v.mT, flat_k).unflatten(0, v.shape[:3])
        last = _sums_before(states, range(v.shape[2]), state.mT)
        weights = torch.bmm(flat_q, flat_k.mT).tril_()
        values = torch.bmm(weights, flat_v).baddbmm_(flat_q, states.flatten(0, 2).mT)
        ctx.save_for_backward(q, k, v, state, states)
        return values.view(v.shape), last.mT

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        *given, states = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients(_chunked_sums, given, ctx.needs_input_grad, (grad, grad_last))
        q, k, v, grad = (t.flatten(0, 2) for t in (*given[:3], grad))
        with full_precision(q):  # also if backward runs under autocast
            weights = torch.bmm(k, q.mT).triu_()  # transposed
            # values get from later queries what these queries take from them: the transpose
            grad_v = torch.bmm(weights, grad)
            by_weight = torch.bmm(grad, v.mT, out=weights).tril_()
            grad_q = torch.bmm(by_weight, k).baddbmm_(grad, states.flatten(0, 2))
            grad_k = torch.bmm(by_weight.mT, q)
            # a key adds to the states of all later chunks
            later = torch.bmm(grad.mT, q).view(states.shape)
            grad_state = _sums_before(later, reversed(range(later.shape[2])), grad_last.mT).mT
            after = later.flatten(0, 2)
            grad_v.baddbmm_(k, after.mT)
            grad_k.baddbmm_(v, after)
        grads = (g.view(t.shape) for g, t in zip((grad_q, grad_k, grad_v), given, strict=False))
        return *grads, grad_state


def _sums_before(
    parts: Float[Tensor, "b h g v p"], order: Iterable[int], total: Float[Tensor, "b h v p"]
) -> Float[Tensor, "b h v p"]:
    """Replace each part by the sum of those before it in some order; return the sum of all."""
    for i in order:
        part = parts[:, :, i]
        following = total + part
        part.copy_(total)
        total = following
    return total


def to_chunks(x: Float[Tensor, "*batch n w"], chunk: int) -> Float[Tensor, "*batch g i w"]:
    """Return the tokens in groups of ``chunk``, the last group padded with zeros.

    A short sequence is one short chunk. A compiled program must work for all lengths: it always
    uses the full chunk size and one extra chunk, because torch specialises on a single chunk.
    """
    n = x.shape[-2]
    if not torch.compiler.is_compiling():
        chunk = min(chunk, max(n, 1))
        whole = torch.nn.functional.pad(x, (0, 0, 0, -n % chunk)) if n % chunk or not n else x
        return whole.unflatten(-2, (-1, chunk))
    missing = (n + chunk - 1) // chunk * chunk + chunk - n
    return torch.nn.functional.pad(x, (0, 0, 0, missing)).unfold(-2, chunk, chunk).mT


def from_chunks(x: Float[Tensor, "*batch g i w"], n: int) -> Float[Tensor, "*batch n w"]:
    """Return the first ``n`` tokens of groups made by :func:`to_chunks`."""
    flat = x.flatten(-3, -2)
    if not torch.compiler.is_compiling():
        return flat[..., :n, :]
    # a slice would restrict an exported program to lengths that do not change the strides
    return torch.nn.functional.pad(flat, (0, 0, 0, n - flat.shape[-2]))


def append_ones(
    v: Float[Tensor, "b h m v"], key_mask: Bool[Tensor, "b m"] | None
) -> Float[Tensor, "b h m u"]:
    """Return the values with a column of ones, all zero where a key is masked."""
    v = v.to(accumulator(v))
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    return v if key_mask is None else torch.where(key_mask[:, None, :, None], v, 0.0)
