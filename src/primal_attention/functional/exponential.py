"""Attention with exponential features, without overflow and strictly causal.

    A_ij = Σ_p exp(a_ip + b_jp),      y_i = Σ_j A_ij v_j / Σ_j A_ij

A factor per query cancels in the ratio, so queries are divided by their largest feature. A factor
common to all keys of a query cancels too. Without a causal order, this is the maximum of each
feature over all keys. In causal order, it is the running maximum ``M_t``: earlier sums are scaled
by ``exp(M_{t-1} − M_t)``, as in online softmax. No output depends on a later key, not even through
rounding. No constant is added to the features.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.functional.linear import append_ones, from_chunks, to_chunks
from primal_attention.functional.precision import accumulator

__all__ = ["ExponentialSums", "exponential_attention"]

# finite, unlike -inf: the difference of two is zero, and exp of any other difference is zero
_LOG_ZERO = -1e30
_GROUP = 16


class ExponentialSums(NamedTuple):
    """Outputs and the state of a causal call."""

    values: Float[Tensor, "b h n v"]
    state: Float[Tensor, "b h p w"]
    """``Σ_j exp(b_j − maximum) [v_j, 1]``."""
    maximum: Float[Tensor, "b h"]
    """The running maximum of the state."""


def exponential_attention(
    log_q: Float[Tensor, "b h n p"],
    log_k: Float[Tensor, "b h m p"],
    v: Float[Tensor, "b h m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
    state: tuple[Float[Tensor, "b h p w"], Float[Tensor, "b h"]] | None = None,
    chunk: int = 64,
) -> ExponentialSums:
    """Return attention with weights ``Σ_p exp(log_q_ip + log_k_jp)``; zero for a row without keys.

    ``O((n + m) p v)`` time, also in causal order. Causal sums use one maximum for all features. If
    all weights of a query are below ``e^-40`` of that maximum (float32), its row is zero.

    Args:
        log_q: Logarithms of the query features, float32 or better.
        log_k: Logarithms of the key features.
        v: Values.
        key_mask: ``True`` where a key is real.
        is_causal: Sum over ``j ≤ i`` only; needs as many keys as queries.
        state: Sums and maximum of an earlier call; causal only.
        chunk: Number of tokens in one triangular product.

    Example:
        >>> logs = torch.tensor([[[[0.0], [500.0]]]])
        >>> exponential_attention(logs, logs, torch.eye(2)[None, None]).values[0, 0]
        tensor([[0., 1.],
                [0., 1.]])
    """
    v = append_ones(v, key_mask).to(log_k.dtype)
    if key_mask is not None:
        log_k = torch.where(key_mask[:, None, :, None], log_k, _LOG_ZERO)
    if state is None:
        b, h, _, p = log_k.shape
        empty = v.new_zeros(b, h, p, v.shape[-1], dtype=accumulator(v))
        state = empty, empty.new_full((b, h), _LOG_ZERO)
    if not is_causal:
        return _attend_all(log_q, log_k, v, state)
    if log_q.shape[2] == 0:
        return ExponentialSums(_divide(log_q.exp() @ state[0].to(log_q.dtype)), *state)
    if log_q.shape[2] == 1:
        return _attend_step(log_q, log_k, v, state)
    return _attend_chunks(log_q, log_k, v, state, chunk)


def _divide(sums: Tensor) -> Tensor:
    total = sums[..., -1:]
    # below the square root of the smallest number the gradient of the ratio overflows
    # "not <=" instead of ">": NaN must stay NaN
    resolved = ~(total <= torch.finfo(total.dtype).tiny ** 0.5)
    return sums[..., :-1] * torch.where(resolved, 1 / torch.where(resolved, total, 1.0), 0.0)


def _query_features(log_q: Tensor) -> Tensor:
    return (log_q - log_q.detach().amax(-1, keepdim=True)).exp_()


def _attend_all(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: tuple[Tensor, Tensor]
) -> ExponentialSums:
    if log_k.shape[2] == 0:
        return ExponentialSums(_divide(log_q.exp() @ state[0].to(log_q.dtype)), *state)
    # the maximum of each feature moves from the keys to the query, so no term exceeds one
    top = log_k.detach().amax(2, keepdim=True)
    sums = (log_k - top).exp_().transpose(-1, -2) @ v
    query = log_q + top
    query = query.sub_(query.detach().amax(-1, keepdim=True)).exp_()
    return ExponentialSums(_divide(query @ sums), sums, state[1])


def _attend_step(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: tuple[Tensor, Tensor]
) -> ExponentialSums:
    sums, before = state
    after = torch.maximum(before, log_k.amax((-2, -1)).detach())
    feature = (log_k - after[:, :, None, None]).exp()
    sums = (before - after).exp()[:, :, None, None] * sums + feature.transpose(-1, -2) @ v
    return ExponentialSums(_divide(_query_features(log_q) @ sums), sums, after)


def _attend_chunks(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: tuple[Tensor, Tensor], chunk: int
) -> ExponentialSums:
    n = log_q.shape[2]
    running = log_k.amax(-1).detach().cummax(-1).values  # [b h n]
    running = torch.maximum(running, state[1][:, :, None])
    key = to_chunks((log_k - running[..., None]).exp(), chunk)  # [b h g i p], at most one
    query, v = to_chunks(_query_features(log_q), chunk), to_chunks(v, chunk)
    running = _chunked_levels(running, chunk)  # [b h g i]
    last = running[..., -1]  # [b h g]

    shrunk = key * (running - last[..., None]).exp()[..., None]
    sums = _decayed_prefix(shrunk.transpose(-1, -2) @ v, last)
    sums = sums + (state[1][:, :, None] - last).exp()[..., None, None] * state[0][:, :, None]
    groups = sums.shape[2]
    before = torch.cat([state[0][:, :, None], sums], dim=2)[:, :, :groups]
    level = torch.cat([state[1][:, :, None], last], dim=2)[:, :, :groups]

    outside = (level[..., None] - running).exp()[..., None] * (query @ before)
    inside = (_decay(running) * (query @ key.transpose(-1, -2))) @ v
    values = from_chunks(_divide(outside + inside), n)
    return ExponentialSums(values, sums[:, :, -1], last[:, :, -1])


def _chunked_levels(level: Float[Tensor, "b h n"], chunk: int) -> Float[Tensor, "b h g i"]:
    """Return levels in chunks, the last chunk padded with the last level."""
    real = to_chunks(torch.ones_like(level)[..., None], chunk)[..., 0]
    return torch.where(real > 0, to_chunks(level[..., None], chunk)[..., 0], level[..., -1:, None])


def _decay(level: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch i i"]:
    """Return ``exp(level_j − level_i)`` for ``j ≤ i``, zero above; levels are non-decreasing."""
    return (level[..., None, :] - level[..., :, None]).clamp_max(0).exp().tril()


def _decayed_prefix(
    x: Float[Tensor, "b h g p w"], level: Float[Tensor, "b h g"]
) -> Float[Tensor, "b h g p w"]:
    """Return ``Σ_{u ≤ g} exp(level_u − level_g) x_u``, within groups and then between groups."""
    g = x.shape[2]
    level = _chunked_levels(level, _GROUP)  # [b h u a]
    inside = _decay(level) @ to_chunks(x.flatten(3), _GROUP)  # [b h u a pw]
    total = _decay(level[..., -1]) @ inside[..., -1, :]  # [b h u pw]
    groups = total.shape[2]
    carry = torch.nn.functional.pad(total, (0, 0, 1, 0))[:, :, :groups]
    start = torch.nn.functional.pad(level[..., -1], (1, 0), value=_LOG_ZERO)[:, :, :groups]
    outside = (start[..., None] - level).exp()[..., None] * carry[..., None, :]
    return from_chunks(inside + outside, g).unflatten(-1, x.shape[-2:])
