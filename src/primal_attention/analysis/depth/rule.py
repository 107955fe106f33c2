"""The rule for depth; it lives in :mod:`primal_attention.models.depth_rule`."""

from primal_attention.models.depth_rule import (
    DepthNotice,
    depth_error,
    depth_of_width,
    optimal_depth,
    optimal_params,
    optimal_width,
    relative_error,
)

__all__ = [
    "DepthNotice",
    "depth_error",
    "depth_of_width",
    "optimal_depth",
    "optimal_params",
    "optimal_width",
    "relative_error",
]
