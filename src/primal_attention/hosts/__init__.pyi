from .captured import CapturedLayer, CapturedScores
from .capturing import Layers, capture, capture_call
from .converted import ConvertedLayer, converted_layers
from .errors import ConversionError
from .find import FoundModule, find_attentions, read_attention
from .inputs import Batch, LayerInputs, batch_arguments
from .library import HostLibrary
from .optional import quiet_transformers, require_transformers
from .ours import layer_inputs
from .parts import AttentionParts, LinearWeights
from .recording import ModuleCall, record_calls, record_run, run_batch
from .state_cache import cache_numel
from .timm import register_timm_models, timm_attention

__all__ = [
    "AttentionParts",
    "Batch",
    "CapturedLayer",
    "CapturedScores",
    "ConversionError",
    "ConvertedLayer",
    "FoundModule",
    "HostLibrary",
    "LayerInputs",
    "Layers",
    "LinearWeights",
    "ModuleCall",
    "batch_arguments",
    "cache_numel",
    "capture",
    "capture_call",
    "converted_layers",
    "find_attentions",
    "layer_inputs",
    "quiet_transformers",
    "read_attention",
    "record_calls",
    "record_run",
    "register_timm_models",
    "require_transformers",
    "run_batch",
    "timm_attention",
]
