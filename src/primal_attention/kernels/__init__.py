"""Kernels and feature maps as small modules with one interface."""

from primal_attention.kernels.algebra import (
    ProductFeatures,
    ProductKernel,
    SumFeatures,
    SumKernel,
)
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
from primal_attention.kernels.time import BochnerTime, MercerTime, TimeColumn, TimeKernel
from primal_attention.kernels.time_base import Spectrum, TimeFeatures
from primal_attention.kernels.time_baselines import (
    TIME_FEATURES,
    LogGapTime,
    TGATTime,
    Time2VecTime,
    create_time,
)
from primal_attention.kernels.time_scale import TimeScaler

__all__ = [
    "SERIES",
    "TIME_FEATURES",
    "BochnerTime",
    "Cosine",
    "DotProduct",
    "Exponential",
    "FeatureMap",
    "Gaussian",
    "Kernel",
    "LogGapTime",
    "MaclaurinFeatures",
    "MercerTime",
    "PositiveFeatures",
    "PowerSeries",
    "ProductFeatures",
    "ProductKernel",
    "RandomFeatureMap",
    "Relation",
    "Spectrum",
    "SumFeatures",
    "SumKernel",
    "TGATTime",
    "Time2VecTime",
    "TimeColumn",
    "TimeFeatures",
    "TimeKernel",
    "TimeScaler",
    "TrigonometricFeatures",
    "as_series",
    "create_time",
    "draw_directions",
]
