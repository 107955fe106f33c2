"""The adaptive kernel sum: exact near, exact for the best far blocks, moments for the rest.

Formulas are in :mod:`primal_attention.functional.naive_adaptive`. One head of one sequence at a
time, in parts that share one normaliser: the sinks, the near blocks, the chosen blocks, and all
other blocks as moments. Exact parts run in the fused softmax kernel, which also returns the
logarithm of their mass, so parts are joined afterwards. Queries that chose the same block are
gathered, which moves far less memory than gathering blocks for every query.

Backward computes the weights of every part again. What the fused kernel needs for the gradient of
a part of a softmax is the output and the normaliser of the whole (as in ring attention).
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from primal_attention.functional.adaptive_blocks import BlockPlan
from primal_attention.functional.adaptive_dense import dense_adaptive
from primal_attention.functional.adaptive_head import HeadSum, attend_head, pull_head
from primal_attention.functional.adaptive_keys import HeadKeys, KeyGradients
from primal_attention.functional.precision import accumulator, full_precision, is_traced
from primal_attention.functional.twice import gradients

__all__ = ["adaptive_attention", "neglected_mass"]


def adaptive_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    v: Float[Tensor, "b g m v"],
    plan: BlockPlan,
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return the adaptive sum; softmax while there are no more than ``plan.reach`` keys.

    Args:
        q: Queries.
        k: Keys; fewer heads than queries serve several of them each.
        v: Values.
        plan: What is read exactly.
        key_mask: ``True`` where a key is real; real keys come first.
        is_causal: Read keys ``j ≤ i`` only; needs as many keys as queries.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 500, 16)
        >>> plan = BlockPlan(block=16, top=4)
        >>> adaptive_attention(q, k, v, plan, is_causal=True).shape
        torch.Size([1, 2, 500, 16])
    """
    wide, kind = accumulator(q), v.dtype
    if is_traced() or q.device.type != "cpu":
        with full_precision(q):
            given = q.to(wide), k.to(wide), v.to(wide), plan
            dense = dense_adaptive(*given, key_mask=key_mask, is_causal=is_causal)
        return dense.y.to(kind)
    if k.shape[2] <= plan.reach:
        return softmax_attention(q, k, v, key_mask=key_mask, is_causal=is_causal)
    # a padded batch is its sequences one by one: each decides by its own length
    lengths = [k.shape[2]] * len(k) if key_mask is None else key_mask.sum(1).tolist()
    with full_precision(q):
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        y: Tensor = _AdaptiveSum.apply(  # type: ignore[no-untyped-call]
            q, k, v, key_mask, plan, lengths, is_causal
        )
    return y.to(kind)


@torch.no_grad()
def neglected_mass(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    v: Float[Tensor, "b g m v"],
    plan: BlockPlan,
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> tuple[Float[Tensor, "b h n"], Float[Tensor, "b h n"]]:
    """Return the share of every query's mass that comes from moments, and its spread.

    The spread is an estimate of the standard deviation, as if the keys of a block were Gaussian.
    Arguments as in :func:`adaptive_attention`.
    """
    wide = accumulator(q)
    with full_precision(q):
        q, k, v = (t.to(wide) for t in (q, k, v))
        if is_traced() or q.device.type != "cpu":
            found = dense_adaptive(q, k, v, plan, key_mask=key_mask, is_causal=is_causal)
            return found.mass, found.spread
        lengths = [k.shape[2]] * len(k) if key_mask is None else key_mask.sum(1).tolist()
        both, unread = q.new_zeros(*q.shape[:3], 2), v.new_empty(*q.shape[2:3], v.shape[3])
        for keys in _each_head(k, v, plan, lengths, is_causal):
            for at in keys.queries(q):
                attend_head(q[at], keys, unread[at[2]], both[at])
        return both[..., 0], both[..., 1]


def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d"],
    v: Float[Tensor, "b g m v"],
    *,
    key_mask: Bool[Tensor, "b m"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n v"]:
    """Return softmax attention; zero for a row without keys."""
    shared = k.shape[1] != q.shape[1]
    if key_mask is None:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shared)
    # one mask row for all queries: if expanded, the fused kernel copies it to n × m floats
    keep = key_mask[:, None, None, :]
    if is_causal:
        keep = keep.expand(-1, -1, q.shape[2], -1).tril()
    y = scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=shared)
    return torch.where(keep.any(-1, keepdim=True), y, 0.0)


class _AdaptiveSum(torch.autograd.Function):
    """The sum of padded sequences; keeps inputs, output, normalisers and choices for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        plan: BlockPlan,
        lengths: list[int],
        is_causal: bool,
    ) -> Tensor:
        y, kept = q.new_zeros(*q.shape[:3], v.shape[3]), []
        for keys in _each_head(k, v, plan, lengths, is_causal):
            for at in keys.queries(q):
                found = attend_head(q[at], keys, y[at])
                kept += [found.log_total, found.choices] if any(ctx.needs_input_grad) else []
        ctx.save_for_backward(q, k, v, key_mask, y, *kept)
        ctx.given = plan, lengths, is_causal
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, y, *kept = ctx.saved_tensors
        plan, lengths, is_causal = ctx.given
        rest = (None,) * 4
        if torch.is_grad_enabled():

            def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
                return dense_adaptive(q, k, v, plan, key_mask=key_mask, is_causal=is_causal)[:1]

            return *gradients(formula, (q, k, v), ctx.needs_input_grad[:3], (grad,)), *rest
        grads, found = [torch.zeros_like(t) for t in (q, k, v)], iter(kept)
        for keys in _each_head(k, v, plan, lengths, is_causal):
            pull = KeyGradients.zeros(keys)
            for at in keys.queries(q):
                sums = HeadSum(y[at], next(found), next(found))
                grads[0][at] = pull_head(q[at], keys, sums, grad[at], pull)
            for total, part in zip(grads[1:], pull.total(keys), strict=True):
                total[keys.at] = part[:, : total.shape[-1]]
        return *grads, *rest


def _each_head(
    k: Tensor, v: Tensor, plan: BlockPlan, lengths: list[int], is_causal: bool
) -> Iterator[HeadKeys]:
    """Yield every head of keys of every sequence that has keys."""
    for i, m in enumerate(lengths):
        for j in range(k.shape[1] if m else 0):
            at = i, j, slice(m)
            yield HeadKeys.read(k[at], v[at], plan, is_causal, at, k.shape[1])
