"""One head of keys with its blocks, and what forward and backward of an adaptive sum share.

Everything is two-dimensional here: queries ``[n d]``, keys ``[m d]``, values ``[m v]``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.adaptive_blocks import BlockPlan, Moments, block_moments

__all__ = ["HeadKeys", "KeyGradients", "Rows", "fused", "fused_backward", "join", "widen"]

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BLOCK_KEYS = 2**12
"""Keys whose moments are computed together; their blocks stay in cache."""


class HeadKeys(NamedTuple):
    """One head of keys of one sequence, with its blocks."""

    k: Float[Tensor, "m d"]
    v: Float[Tensor, "m v"]
    plan: BlockPlan
    is_causal: bool
    at: tuple[int, int, slice]
    """Where the keys lie in the batch: sequence, head, tokens."""
    num_heads: int
    """Heads of keys in the batch."""
    moments: Moments
    """Of the blocks; ``axes`` and ``slopes`` are ``[r j _]``."""
    log_sizes: Float[Tensor, " j"]
    scale: float

    @classmethod
    def read(
        cls,
        k: Tensor,
        v: Tensor,
        plan: BlockPlan,
        is_causal: bool,
        at: tuple[int, int, slice],
        num_heads: int,
    ) -> "HeadKeys":
        """Return the keys with the moments of their blocks; those that fit need none."""
        scale = k.shape[-1] ** -0.5
        width = max(k.shape[-1], v.shape[-1])
        # the fused kernel needs values as wide as the keys
        k, v = widen(k, width), widen(v, width)
        part = slice(0, 0) if len(k) <= plan.reach else slice(None)
        moments = _moments(k[part], v[part], plan)
        sizes = k.new_full((moments.mean.shape[-2],), float(plan.block))
        if len(sizes):
            sizes[-1] = len(k) - plan.sinks - plan.block * (len(sizes) - 1)
        return cls(k, v, plan, is_causal, at, num_heads, moments, sizes.log(), scale)

    @property
    def first(self) -> int | None:
        """Queries before this one read every key that they may; ``None`` for all."""
        if len(self.k) <= self.plan.reach:
            return None
        return self.plan.reach if self.is_causal else 0

    def queries(self, q: Float[Tensor, "b h n d"]) -> Iterator[tuple[int, int, slice]]:
        """Yield where the heads of queries lie that read these keys."""
        row, head, tokens = self.at
        share = q.shape[1] // self.num_heads
        for i in range(head * share, (head + 1) * share):
            yield row, i, tokens if self.is_causal else slice(q.shape[2])

    def blocks(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the blocks of keys and values, flat, and what to add to scores of a short one."""
        size, num = self.plan.block, len(self.log_sizes)
        gap = num * size + self.plan.sinks - len(self.k)
        k, v = (pad(t[self.plan.sinks :], (0, 0, 0, gap)).view(num, -1) for t in (self.k, self.v))
        if not gap:
            return k, v, None
        bias = self.k.new_zeros(num, size)
        bias[-1, size - gap :] = -torch.inf
        return k, v, bias


def _moments(k: Tensor, v: Tensor, plan: BlockPlan) -> Moments:
    """Return the moments with the rank in front, as products of matrices need it."""
    parts = [
        Moments(mean, axes.transpose(0, 1), value, slopes.transpose(0, 1))
        for mean, axes, value, slopes in (
            block_moments(k[at], v[at], plan._replace(sinks=0)) for at in _parts(len(k), plan)
        )
    ]
    return Moments(*(torch.cat(found, -2) for found in zip(*parts, strict=True)))


def _parts(m: int, plan: BlockPlan) -> list[slice]:
    """Return where keys lie whose moments are computed together, at least one part."""
    step = max(_BLOCK_KEYS // plan.block, 1) * plan.block
    starts = range(plan.sinks, max(m, plan.sinks + 1), step)
    return [slice(start, min(start + step, m)) for start in starts]


def widen(x: Float[Tensor, "n d"], width: int) -> Float[Tensor, "n width"]:
    """Return rows with zeros behind."""
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


class Rows(NamedTuple):
    """Queries, and what backward knows of them."""

    q: Float[Tensor, "n d"]
    grad: Float[Tensor, "n v"]
    y: Float[Tensor, "n v"]
    log_total: Float[Tensor, " n"]
    grad_q: Float[Tensor, "n d"]


class KeyGradients(NamedTuple):
    """Gradients of keys, values and moments, summed over the queries that read them."""

    k: Float[Tensor, "m d"]
    v: Float[Tensor, "m v"]
    moments: Moments

    @classmethod
    def zeros(cls, keys: HeadKeys) -> "KeyGradients":
        """Return the gradients before the first query."""
        own = (torch.zeros_like(t) for t in keys.moments)
        return cls(torch.zeros_like(keys.k), torch.zeros_like(keys.v), Moments(*own))

    def total(self, keys: HeadKeys) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values, those through the moments included."""
        if keys.first is None:
            return self.k, self.v
        plan, j = keys.plan._replace(sinks=0), 0
        for at in _parts(len(keys.k), keys.plan):
            stop = j + plan.num_blocks(at.stop - at.start)
            with torch.enable_grad():
                # the moments are computed again: they keep several times the memory of the keys
                k, v = (t[at].detach().requires_grad_() for t in (keys.k, keys.v))
                pulled = tuple(t[..., j:stop, :] for t in self.moments)
                found = torch.autograd.grad(tuple(_moments(k, v, plan)), (k, v), pulled)
            for total, part in zip((self.k, self.v), found, strict=True):
                total[at] += part
            j = stop
        return self.k, self.v


def join(y: Tensor, log_total: Tensor, part: Tensor, log_part: Tensor) -> None:
    """Add a part to a sum; both are divided by their own mass."""
    total = torch.logaddexp(log_total, log_part)
    y.mul_(log_total.sub_(total).exp_()[:, None])
    y.addcmul_(part, (log_part - total).exp_()[:, None])
    log_total.copy_(total)
