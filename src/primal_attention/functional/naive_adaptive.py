"""The adaptive kernel sum query by query, straight from its formulas.

Far blocks enter by moments: a mean key ``μ``, a mean value ``ν`` and, in a few directions ``u``,
the variance ``λ`` of the keys and their covariance ``x`` with the values. For a query ``q``, with
the scale inside, and ``a = √λ (q·u)``, shortened to at most ``√(2 cap)``:

    mass of a block  n exp(q·μ + ½ ‖a‖²)     its mean value  ν + Σ (a / √λ) x
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["NaiveAdaptive", "NaiveBlock", "adaptive_attention", "block_moments"]


class NaiveBlock(NamedTuple):
    """Moments of one block of keys and values."""

    size: int
    mean: Float[Tensor, " d"]
    directions: Float[Tensor, "r d"]
    variances: Float[Tensor, " r"]
    value: Float[Tensor, " v"]
    slopes: Float[Tensor, "r v"]


class NaiveAdaptive(NamedTuple):
    """Outputs, and what of every query's mass was not read exactly."""

    y: Float[Tensor, "b h n v"]
    mass: Float[Tensor, "b h n"]
    """Share of the mass that comes from moments."""
    spread: Float[Tensor, "b h n"]
    """Estimated standard deviation of that share."""
    is_read: Float[Tensor, "b h n m"]
    """One where a query reads a key exactly."""


def block_moments(
    k: Float[Tensor, "n d"], v: Float[Tensor, "n v"], rank: int, tiny: float = 1e-12
) -> NaiveBlock:
    """Return the moments of a block.

    A direction starts at the key farthest from the mean. One step of the power method turns it
    towards the largest variance; then it is removed from the keys.
    """
    mean, value = k.mean(0), v.mean(0)
    rest, directions, variances, slopes = k - mean, [], [], []
    for _ in range(rank):
        farthest = rest[rest.square().sum(1).argmax()]
        along = rest @ _unit(farthest, tiny)
        u = _unit(rest.T @ _unit(along, tiny), tiny)
        z = rest @ u
        directions.append(u)
        variances.append(z.square().mean() + tiny)
        slopes.append((z[:, None] * (v - value)).mean(0))
        rest = rest - z[:, None] * u
    empty = mean.new_zeros(0)
    return NaiveBlock(
        len(k),
        mean,
        torch.stack(directions) if rank else empty.view(0, len(mean)),
        torch.stack(variances) if rank else empty,
        value,
        torch.stack(slopes) if rank else empty.view(0, len(value)),
    )


def _unit(x: Tensor, tiny: float) -> Tensor:
    return x / (x.square().sum() + tiny).sqrt()


def adaptive_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    *,
    block: int,
    window: int,
    top: int | None,
    sinks: int,
    rank: int,
    error: float = 0.0,
    exact: int = 0,
    is_causal: bool = False,
    reach: float = 2.0,
    cap: float = 4.0,
) -> NaiveAdaptive:
    """Return the adaptive sum of unpadded sequences.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        block: Keys of a block.
        window: Blocks that are read exactly before a query's own one; without order also after it.
        top: Far blocks that are read exactly; ``None`` for as many as ``error`` needs.
        sinks: First keys, which are always read and belong to no block.
        rank: Directions of the covariances.
        error: With ``top=None``, the share of the mass that may come from moments.
        exact: Keys up to which all are read, rounded up to whole blocks.
        is_causal: Read keys ``j ≤ i`` only.
        reach: Standard deviations above its mean at which the best key of a block is expected.
        cap: Largest exponent that the covariance may add.
    """
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h], v[b, h]
            starts = range(sinks, len(keys), block)
            parts = [slice(s, min(s + block, len(keys))) for s in starts]
            blocks = [block_moments(keys[p], values[p], rank) for p in parts]
            whole = sinks + block * math.ceil(max(exact - sinks, 0) / block)
            for i, query in enumerate(q[b, h] * q.shape[-1] ** -0.5):
                reads_all = (i if is_causal else len(keys) - 1) < whole
                own = min(max((i - sinks) // block, 0), len(blocks) - 1)
                far = [j for j in range(own - window) if j < len(blocks)]
                if not is_causal:
                    far += range(own + window + 1, len(blocks))
                far = [] if reads_all else far
                moments = {j: _estimate(query, blocks[j], reach, cap) for j in far}
                best = sorted(far, key=lambda j: -moments[j][0].item())
                near = [
                    j
                    for j in range(len(keys))
                    if (j <= i or not is_causal)
                    and (reads_all or j < sinks or abs((j - sinks) // block - own) <= window)
                ]
                near_mass = (keys[near] @ query).exp().sum()
                count = top
                if count is None:
                    masses = [moments[j][1] for j in best]
                    total = near_mass + sum(masses)
                    count = next(
                        t for t in range(len(best) + 1) if sum(masses[t:]) <= error * total
                    )
                read = near + [t for j in best[:count] for t in range(*parts[j].indices(len(keys)))]
                weights = (keys[read] @ query).exp()
                total, y = weights.sum(), weights @ values[read]
                mass, variance = 0.0 * total, 0.0 * total
                for j in best[count:]:
                    _, m, value, square = moments[j]
                    mass, y = mass + m, y + m * value
                    # of the mean of exp(x) over n Gaussian keys
                    variance = variance + m**2 * torch.expm1(square) / blocks[j].size
                is_read = torch.zeros(len(keys), dtype=q.dtype)
                is_read[read] = 1
                total = total + mass
                rows.append((y / total, mass / total, variance.sqrt() / total, is_read))
    shape = q.shape[:3]
    y, mass, spread, is_read = (torch.stack(list(t)) for t in zip(*rows, strict=True))
    return NaiveAdaptive(
        y.view(*shape, -1), mass.view(shape), spread.view(shape), is_read.view(*shape, -1)
    )


def _estimate(
    query: Tensor, block: NaiveBlock, reach: float, cap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return score, mass, mean value and squared exponent of a block for one query."""
    along = block.directions @ query
    variance = (block.variances * along.square()).sum()
    score = query @ block.mean + reach * variance.sqrt()
    if variance > 2 * cap:
        along = along * math.sqrt(2 * cap) / variance.sqrt()
    square = (block.variances * along.square()).sum()
    mass = block.size * (query @ block.mean + square / 2).exp()
    return score, mass, block.value + along @ block.slopes, square
