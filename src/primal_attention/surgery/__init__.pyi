from .advice import Advice, AdviceTable, HeadStatistics, LayerCost, LayerFit
from .advisor import advise
from .checks import Target
from .config import SurgeryConfig
from .conversion import (
    Conversion,
    PreparedConversion,
    apply_conversion,
    conversion_record,
    convert,
    prepare_conversion,
    revert,
)
from .converting import convert_and_compare
from .distillation import DistillConfig, DistillResult, distill
from .fidelity import Fidelity
from .fitting import fit_outputs
from .fold import fold_output, is_folded
from .hybrid import linear_part_off, linear_parts, start_at_clusters
from .interface import register_implementation, register_implementations
from .loading import LoadedModel, file_batches, load_any, sample_texts, text_batches
from .options import AdviceConfig
from .outcome import ConvertedModel, CurvePoint, ExtensionLoss
from .positions import ExtendedPositions, extend_positions, position_limit
from .recording import layer_r2, output_r2
from .storage import load_converted, load_pretrained, read_conversion, save_converted
from .targets import inspect_targets, targets_table

__all__ = [
    "Advice",
    "AdviceConfig",
    "AdviceTable",
    "Conversion",
    "ConvertedModel",
    "CurvePoint",
    "DistillConfig",
    "DistillResult",
    "ExtendedPositions",
    "ExtensionLoss",
    "Fidelity",
    "HeadStatistics",
    "LayerCost",
    "LayerFit",
    "LoadedModel",
    "PreparedConversion",
    "SurgeryConfig",
    "Target",
    "advise",
    "apply_conversion",
    "conversion_record",
    "convert",
    "convert_and_compare",
    "distill",
    "extend_positions",
    "file_batches",
    "fit_outputs",
    "fold_output",
    "inspect_targets",
    "is_folded",
    "layer_r2",
    "linear_part_off",
    "linear_parts",
    "load_any",
    "load_converted",
    "load_pretrained",
    "output_r2",
    "position_limit",
    "prepare_conversion",
    "read_conversion",
    "register_implementation",
    "register_implementations",
    "revert",
    "sample_texts",
    "save_converted",
    "start_at_clusters",
    "targets_table",
    "text_batches",
]
