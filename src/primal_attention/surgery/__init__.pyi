from .advice import Advice, AdviceTable, HeadStatistics, LayerCost, LayerFit
from .advisor import advise
from .checks import Target
from .config import ConversionError, SurgeryConfig
from .conversion import (
    Conversion,
    PreparedConversion,
    apply_conversion,
    convert,
    prepare_conversion,
    revert,
)
from .distillation import DistillConfig, DistillResult, distill
from .fitting import fit_outputs
from .fold import fold_output, is_folded
from .generation import cache_numel
from .interface import register_implementation, register_implementations
from .layers import ConvertedLayer, conversion_record, converted_layers
from .loading import LoadedModel, file_batches, load_any, sample_texts, text_batches
from .options import AdviceConfig
from .outcome import Outcome, convert_and_compare
from .recording import layer_r2, output_r2
from .storage import load_converted, load_pretrained, read_conversion, save_converted
from .targets import find_attentions, inspect_targets, read_attention, targets_table
from .vision import register_timm_models, timm_attention

__all__ = [
    "Advice",
    "AdviceConfig",
    "AdviceTable",
    "Conversion",
    "ConversionError",
    "ConvertedLayer",
    "DistillConfig",
    "DistillResult",
    "HeadStatistics",
    "LayerCost",
    "LayerFit",
    "LoadedModel",
    "Outcome",
    "PreparedConversion",
    "SurgeryConfig",
    "Target",
    "advise",
    "apply_conversion",
    "cache_numel",
    "conversion_record",
    "convert",
    "convert_and_compare",
    "converted_layers",
    "distill",
    "file_batches",
    "find_attentions",
    "fit_outputs",
    "fold_output",
    "inspect_targets",
    "is_folded",
    "layer_r2",
    "load_any",
    "load_converted",
    "load_pretrained",
    "output_r2",
    "prepare_conversion",
    "read_attention",
    "read_conversion",
    "register_implementation",
    "register_implementations",
    "register_timm_models",
    "revert",
    "sample_texts",
    "save_converted",
    "targets_table",
    "text_batches",
    "timm_attention",
]
