from .bounds import SeparationBounds, depth_threshold, interactions, log3_sep_bounds
from .field import PrimeField
from .figure import plot_depth
from .fit import TransitionFit, fit_transition
from .inspection import DepthResult, analyze_depth, inspect_depth
from .layers import (
    LayerShape,
    poly_primal_attention,
    poly_self_attention,
    poly_static_attention,
)
from .literature import FINDINGS, Finding
from .planner import plan
from .plans import DepthPlan, Shape
from .ranks import one_layer_width, separation_rank
from .roles import ModelParts, Roles, embedding_rank, find_parts
from .rule import (
    DepthNotice,
    depth_error,
    depth_of_width,
    optimal_depth,
    optimal_params,
    optimal_width,
    relative_error,
)
from .spectrum import SeparationSpectrum, grid_spectrum, separation_spectrum

__all__ = [
    "FINDINGS",
    "DepthNotice",
    "DepthPlan",
    "DepthResult",
    "Finding",
    "LayerShape",
    "ModelParts",
    "PrimeField",
    "Roles",
    "SeparationBounds",
    "SeparationSpectrum",
    "Shape",
    "TransitionFit",
    "analyze_depth",
    "depth_error",
    "depth_of_width",
    "depth_threshold",
    "embedding_rank",
    "find_parts",
    "fit_transition",
    "grid_spectrum",
    "inspect_depth",
    "interactions",
    "log3_sep_bounds",
    "one_layer_width",
    "optimal_depth",
    "optimal_params",
    "optimal_width",
    "plan",
    "plot_depth",
    "poly_primal_attention",
    "poly_self_attention",
    "poly_static_attention",
    "relative_error",
    "separation_rank",
    "separation_spectrum",
]
