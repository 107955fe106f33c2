"""Kernels and feature maps as small modules with one interface."""

from primal_attention.kernels.base import (
    FeatureMap,
    Kernel,
    RandomFeatureMap,
    Relation,
)
from primal_attention.kernels.exact import Cosine, DotProduct, Exponential, Gaussian
from primal_attention.kernels.maclaurin import MaclaurinFeatures
from primal_attention.kernels.random import (
    PositiveFeatures,
    TrigonometricFeatures,
    draw_directions,
)
from primal_attention.kernels.series import SERIES, PowerSeries, as_series

__all__ = [
    "SERIES",
    "Cosine",
    "DotProduct",
    "Exponential",
    "FeatureMap",
    "Gaussian",
    "Kernel",
    "MaclaurinFeatures",
    "PositiveFeatures",
    "PowerSeries",
    "RandomFeatureMap",
    "Relation",
    "TrigonometricFeatures",
    "as_series",
    "draw_directions",
]
