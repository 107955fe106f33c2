"""Where a token stands, as a vector to add to it."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["sinusoidal_positions"]


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
    rate = torch.exp(-math.log(period) / half * torch.arange(half, device=position.device))
    angle = position[..., None] * rate  # [*batch n half], float32
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :dim]
