"""Causal sums of outer products in linear time, for attention with a feature map.

    y_i = Σ_{j ≤ i} ⟨q_i, k_j⟩ v_j

The function does not store the ``n × p × v`` tensor of prefix sums. It works in chunks: earlier
keys enter through one ``p × v`` state, keys of the same chunk through one small triangular product.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.precision import accumulator

__all__ = [
    "CausalSums",
    "append_ones",
    "causal_sums",
    "from_chunks",
    "to_chunks",
]


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
    chunk: int = 64,
) -> CausalSums:
    """Return ``y_i = ⟨q_i, state⟩ + Σ_{j ≤ i} ⟨q_i, k_j⟩ v_j`` and the state after the last key.

    Exact and strictly causal; ``O(n p v + n chunk (p + v))`` time, ``O(n (p + v) + n p v / chunk)``
    memory. The state is float32 or better.

    Example:
        >>> ones = torch.ones(1, 1, 3, 1)
        >>> causal_sums(ones, ones, ones).values.flatten()
        tensor([1., 2., 3.])
    """
    n = q.shape[2]
    wide = accumulator(q)
    if n == 1 and state is not None and not torch.compiler.is_compiling():
        after = state + k.transpose(-1, -2) @ v  # decoding one token: two small products
        return CausalSums(q @ after.to(q.dtype), after)
    q_, k_, v_ = (to_chunks(t, chunk) for t in (q, k, v))  # [b h g i p]
    increments = (k_.transpose(-1, -2) @ v_).to(wide)  # [b h g p v]
    total = increments.cumsum(2)
    # shift instead of total - increments: a large key of the chunk would leave rounding errors
    before = torch.nn.functional.pad(total, (0, 0, 0, 0, 1, 0))[:, :, : total.shape[2]]
    if state is not None:
        before, total = before + state[:, :, None], total + state[:, :, None]
    inside = (q_ @ k_.transpose(-1, -2)).tril() @ v_
    values = inside + q_ @ before.to(q.dtype)
    last = total[:, :, -1] if n > 0 else _empty_state(q, v, state)
    return CausalSums(from_chunks(values, n), last)


def to_chunks(x: Float[Tensor, "*batch n w"], chunk: int) -> Float[Tensor, "*batch g i w"]:
    """Return the tokens in groups of ``chunk``, the last group padded with zeros.

    A short sequence is one short chunk. A compiled program must work for all lengths: it always
    uses the full chunk size and one extra chunk, because torch specialises on a single chunk.
    """
    n = x.shape[-2]
    if not torch.compiler.is_compiling():
        chunk = min(chunk, max(n, 1))
        return torch.nn.functional.pad(x, (0, 0, 0, -n % chunk)).unflatten(-2, (-1, chunk))
    missing = (n + chunk - 1) // chunk * chunk + chunk - n
    return torch.nn.functional.pad(x, (0, 0, 0, missing)).unfold(-2, chunk, chunk).mT


def from_chunks(x: Float[Tensor, "*batch g i w"], n: int) -> Float[Tensor, "*batch n w"]:
    """Return the first ``n`` tokens of groups made by :func:`to_chunks`."""
    flat = x.flatten(-3, -2)
    if not torch.compiler.is_compiling():
        return flat[..., :n, :]
    # a slice would restrict an exported program to lengths that do not change the strides
    return torch.nn.functional.pad(flat, (0, 0, 0, n - flat.shape[-2]))


def _empty_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    shape = (*q.shape[:2], q.shape[-1], v.shape[-1])
    return q.new_zeros(shape, dtype=accumulator(q)) if state is None else state


def append_ones(
    v: Float[Tensor, "b h m v"], key_mask: Bool[Tensor, "b m"] | None
) -> Float[Tensor, "b h m u"]:
    """Return the values with a column of ones, all zero where a key is masked."""
    v = v.to(accumulator(v))
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    return v if key_mask is None else torch.where(key_mask[:, None, :, None], v, 0.0)
