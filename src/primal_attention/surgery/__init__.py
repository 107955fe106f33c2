"""Linear attention inside models that exist already: inspect, convert, revert."""

from primal_attention.surgery.config import ConversionError, SurgeryConfig
from primal_attention.surgery.conversion import (
    Conversion,
    Target,
    convert,
    inspect_targets,
    read_attention,
    revert,
)
from primal_attention.surgery.layers import Converted, converted_layers

__all__ = [
    "Conversion",
    "ConversionError",
    "Converted",
    "SurgeryConfig",
    "Target",
    "convert",
    "converted_layers",
    "inspect_targets",
    "read_attention",
    "revert",
]
