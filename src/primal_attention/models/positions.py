"""Where a token stands: as a vector to add to it, or as an angle to turn it by.

Rotary positions are taken where attention weights then depend on the distance of two tokens: where
the kernel of a query and a key knows them by inner products and norms alone. That excludes
element-wise feature maps (``linear``, ``flow``, ``cosformer``) and learned landmarks, whose answer
would change with the absolute position, and primal layers with sampled or prefix weights, which
never compare two tokens. Random features keep it in expectation.
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
