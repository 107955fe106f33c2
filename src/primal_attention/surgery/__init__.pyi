from .advice import Advice
from .advisor import advise
from .checks import Target
from .config import ConversionError, SurgeryConfig
from .conversion import Conversion, convert, revert
from .distillation import DistillConfig, DistillResult, distill
from .fitting import fit_outputs
from .fold import fold_output
from .interface import register_implementation, register_implementations
from .layers import ConvertedLayer, converted_layers
from .options import AdviceConfig
from .recording import layer_r2, output_r2
from .storage import load_converted, load_pretrained, save_converted
from .targets import inspect_targets, read_attention
from .vision import register_timm_models, timm_attention

__all__ = [
    "Advice",
    "AdviceConfig",
    "Conversion",
    "ConversionError",
    "ConvertedLayer",
    "DistillConfig",
    "DistillResult",
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
    "output_r2",
    "read_attention",
    "register_implementation",
    "register_implementations",
    "register_timm_models",
    "revert",
    "save_converted",
    "timm_attention",
]
