"""The one place that decides in which precision sums, norms and losses are computed."""

import torch
from torch import Tensor

__all__ = ["accumulator"]


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over ``x``: float64 stays, everything narrower becomes float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
