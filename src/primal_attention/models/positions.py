"""Positions of tokens: as vectors to add, or as angles to turn queries and keys by.

``capabilities.rotary`` of an attention says whether it takes rotary positions: it does if it
compares queries with keys. Its weights then depend on the distance of two tokens alone if its
kernel is a function of inner products and norms (in expectation, for random features). Element-wise
feature maps (``linear``, ``flow``, ``cosformer``) and learned landmarks also see the absolute
position.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.attention import Rotary

__all__ = ["rotary_positions", "sinusoidal_positions"]


def sinusoidal_positions(
    position: Int[Tensor, "*batch n"], dim: int, *, period: float = 10_000.0
) -> Float[Tensor, "*batch n {dim}"]:
    """Return sines and cosines of each position, valid at any length (Vaswani et al. 2017).

    Args:
        position: Positions, counted from zero.
        dim: Width of the result.
        period: Longest wavelength is ``2π`` times this.

    Example:
        >>> sinusoidal_positions(torch.arange(3), 4)[0]
        tensor([0., 0., 1., 1.])
    """
    half = (dim + 1) // 2
    angle = _angles(position, half, period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :dim]


def rotary_positions(
    position: Int[Tensor, "b n"], head_dim: int, *, period: float = 10_000.0
) -> Rotary:
    """Return the turns of each position for heads of width ``head_dim`` (Su et al. 2021).

    Args:
        position: Positions, counted from zero.
        head_dim: Width of a head; a last odd feature is not turned.
        period: Slowest turn takes ``2π`` times this many tokens.

    Example:
        >>> rotary_positions(torch.arange(3)[None], 4).cos.shape
        torch.Size([1, 3, 4])
    """
    angle = _angles(position, head_dim // 2, period).repeat(1, 1, 2)
    return Rotary(angle.cos(), angle.sin())


def _angles(position: Tensor, count: int, period: float) -> Float[Tensor, "*batch n {count}"]:
    rate = torch.exp(-math.log(period) / count * torch.arange(count, device=position.device))
    return position[..., None] * rate
