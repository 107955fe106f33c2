from .bounds import SeparationBounds, depth_threshold, interactions, log3_sep_bounds
from .field import PrimeField
from .figure import plot_depth
from .fit import TransitionFit, fit_transition
from .inspection import DepthResult, analyze_depth, inspect_depth
from .layers import (
    LayerShape,
    poly_linear_attention,
    poly_primal_attention,
    poly_self_attention,
    poly_static_attention,
)
from .literature import FINDINGS, Finding
from .planner import plan
from .plans import DepthPlan, Shape
from .ranks import function_rank, one_layer_width, separation_rank, two_layer_rank
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
from .sweeps import (
    BestDepth,
    SweepRun,
    SweepShape,
    SweepText,
    fit_best_depth,
    iso_shape,
    sweep,
    train_shape,
)

__all__ = [
    "FINDINGS",
    "BestDepth",
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
    "SweepRun",
    "SweepShape",
    "SweepText",
    "TransitionFit",
    "analyze_depth",
    "depth_error",
    "depth_of_width",
    "depth_threshold",
    "embedding_rank",
    "find_parts",
    "fit_best_depth",
    "fit_transition",
    "function_rank",
    "grid_spectrum",
    "inspect_depth",
    "interactions",
    "iso_shape",
    "log3_sep_bounds",
    "one_layer_width",
    "optimal_depth",
    "optimal_params",
    "optimal_width",
    "plan",
    "plot_depth",
    "poly_linear_attention",
    "poly_primal_attention",
    "poly_self_attention",
    "poly_static_attention",
    "relative_error",
    "separation_rank",
    "separation_spectrum",
    "sweep",
    "train_shape",
    "two_layer_rank",
]
