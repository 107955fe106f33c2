"""Linear attention inside models that exist already: inspect, convert, revert, save, load."""

from primal_attention.surgery.advice import Advice, advise
from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.conversion import (
    Conversion,
    Target,
    convert,
    inspect_targets,
    read_attention,
    revert,
)
from primal_attention.surgery.distillation import DistillConfig, Distilled, distill
from primal_attention.surgery.fitting import fit_outputs
from primal_attention.surgery.fold import fold_output
from primal_attention.surgery.interface import register_implementation, register_implementations
from primal_attention.surgery.layers import Converted, converted_layers
from primal_attention.surgery.recording import layer_r2
from primal_attention.surgery.storage import load_converted, load_pretrained, save_converted
from primal_attention.surgery.vision import register_timm_models, timm_attention

__all__ = [
    "Advice",
    "Conversion",
    "ConversionError",
    "Converted",
    "DistillConfig",
    "Distilled",
    "SurgeryConfig",
    "Target",
    "advise",
    "convert",
    "converted_layers",
    "distill",
    "fit_outputs",
    "fold_output",
    "inspect_targets",
    "layer_r2",
    "load_converted",
    "load_pretrained",
    "read_attention",
    "register_implementation",
    "register_implementations",
    "register_timm_models",
    "revert",
    "save_converted",
    "timm_attention",
]
