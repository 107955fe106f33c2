"""Blocks of an adaptive sum: which ones are near a query, and the moments of every block.

Formulas are in :mod:`primal_attention.functional.naive_adaptive`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.functional.precision import is_traced

__all__ = ["CAP", "REACH", "BlockPlan", "Moments", "block_moments"]

REACH = 2.0
"""Standard deviations above its mean at which the best key of a block is expected."""
CAP = 4.0
"""Largest exponent that the covariance of a block may add."""
_TINY = 1e-12
"""Added to squares before a root, so that equal keys have a gradient."""


class BlockPlan(NamedTuple):
    """What an adaptive sum reads exactly."""

    block: int = 32
    """Keys of a block."""
    window: int = 2
    """Blocks that are read before a query's own one; without order also after it."""
    top: int | None = 8
    """Far blocks that every query reads; ``None`` for as many as ``error`` needs."""
    sinks: int = 4
    """First keys, which every query reads and which belong to no block."""
    rank: int = 4
    """Directions of the covariances."""
    error: float = 0.0
    """With ``top=None``, the share of the mass that may come from moments."""
    exact: int = 1024
    """Keys up to which every query reads all, because this is no slower; whole blocks."""

    @property
    def reach(self) -> int:
        """Largest number of keys of which every query reads all."""
        chosen = self.window + 1 + (self.top or 0)
        return self.sinks + self.block * max(chosen, self.num_blocks(self.exact))

    def num_blocks(self, m: int) -> int:
        """Return the number of blocks of ``m`` keys."""
        return (max(m - self.sinks, 0) + self.block - 1) // self.block


class Moments(NamedTuple):
    """Moments of the blocks of keys and values."""

    mean: Float[Tensor, "*batch j d"]
    axes: Float[Tensor, "*batch j r d"]
    """Directions of large variance, as long as the standard deviation of the keys."""
    value: Float[Tensor, "*batch j v"]
    slopes: Float[Tensor, "*batch j r v"]
    """What one standard deviation along an axis adds to the mean value."""


def block_moments(
    k: Float[Tensor, "*batch m d"],
    v: Float[Tensor, "*batch m v"],
    plan: BlockPlan,
    keep: Bool[Tensor, "*#batch m"] | None = None,
) -> Moments:
    """Return the moments of all blocks; those of a block without keys are zero.

    Args:
        k: Keys.
        v: Values.
        plan: Gives sizes and rank.
        keep: ``True`` where a key is real; all by default.
    """
    m, rank = k.shape[-2], plan.rank
    num = plan.num_blocks(m)
    gap = num * plan.block - max(m - plan.sinks, 0)
    if keep is None and gap:
        keep = torch.ones(m, dtype=torch.bool, device=k.device)
    k, v = (_cut(t, gap, plan, num) for t in (k, v))
    if keep is None:
        mean, value = k.mean(-2), v.mean(-2)
        rest, spread = k - mean.unsqueeze(-2), v - value.unsqueeze(-2)
        count = torch.full((1,), float(plan.block), dtype=k.dtype, device=k.device)
    else:
        real = _cut(keep[..., None], gap, plan, num).to(k.dtype)
        count = real.sum(-2).clamp_min(1)
        # where, not multiply: a NaN in a padded slot must not survive
        k, v = torch.where(real > 0, k, 0.0), torch.where(real > 0, v, 0.0)
        mean, value = k.sum(-2) / count, v.sum(-2) / count
        rest, spread = (k - mean.unsqueeze(-2)) * real, (v - value.unsqueeze(-2)) * real
    if not rank:
        return Moments(mean, k[..., :0, :], value, v[..., :0, :])
    shares, steps = _directions(rest @ rest.mT, rank)
    deviation = (steps.square().sum(-1) / count + _TINY).sqrt()[..., None]
    axes = deviation * (shares @ rest)
    slopes = (steps @ spread) / (count[..., None] * deviation)
    return Moments(mean, axes, value, slopes)


def _directions(
    gram: Float[Tensor, "*batch n n"], rank: int
) -> tuple[Float[Tensor, "*batch r n"], Float[Tensor, "*batch r n"]]:
    """Return directions as combinations of keys, and the place of every key along them.

    The inner products of the keys are enough to find directions, and take less memory than keys.
    """
    shares: list[Tensor] = []
    steps: list[Tensor] = []
    # what is left of a gram matrix after all its directions is rounding, not a direction
    rounding = 4 * gram.shape[-1] * torch.finfo(gram.dtype).eps
    least = rounding * gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    for _ in range(rank):
        size = gram.detach().diagonal(dim1=-2, dim2=-1)
        farthest = size.argmax(-1)[..., None, None].expand(*size.shape[:-1], 1, size.shape[-1])
        start = gram.gather(-2, farthest).squeeze(-2)
        length = start.gather(-1, farthest[..., 0, :1])
        start = torch.where(length > least, start * _inverse_root(length), 0.0)
        start = start * _inverse_root(start.square().sum(-1, keepdim=True))
        moved = (gram @ start.unsqueeze(-1)).squeeze(-1)
        scale = _inverse_root((moved * start).sum(-1, keepdim=True))
        step = moved * scale
        # of the keys as they were given, without the earlier directions
        share = start
        for other, along in zip(shares, steps, strict=True):
            share = share - other * (along * start).sum(-1, keepdim=True)
        shares.append(share * scale)
        steps.append(step)
        if len(shares) < rank:
            gram = torch.addcmul(gram, step.unsqueeze(-1), step.unsqueeze(-2), value=-1)
    return torch.stack(shares, -2), torch.stack(steps, -2)


def _inverse_root(square: Tensor) -> Tensor:
    # what is left of a square may be below zero by rounding
    return (square.clamp_min(0) + _TINY).rsqrt()


def _cut(x: Tensor, gap: int, plan: BlockPlan, num: int) -> Tensor:
    """Return the tokens after the sinks as blocks; the last one is padded with zeros."""
    x = x[..., plan.sinks :, :]
    # a compiler must not ask whether the gap is zero: that would be another program
    return (pad(x, (0, 0, 0, gap)) if is_traced() or gap else x).unflatten(-2, (num, plan.block))
