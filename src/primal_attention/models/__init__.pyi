from .base import (
    ModelFileError,
    ModelOutput,
    PretrainedModel,
)
from .blocks import EncoderBlock
from .config import (
    DecoderConfig,
    EncoderConfig,
    EncoderOptions,
    SequenceConfig,
    StackConfig,
)
from .decoder import CausalDecoder, DecoderState
from .depth_rule import DepthNotice
from .encoder import DualTowerClassifier, EncoderClassifier
from .positions import rotary_positions, sinusoidal_positions
from .sequence import SequenceModel
from .stack import BlockStack, StackOutput

__all__ = [
    "BlockStack",
    "CausalDecoder",
    "DecoderConfig",
    "DecoderState",
    "DepthNotice",
    "DualTowerClassifier",
    "EncoderBlock",
    "EncoderClassifier",
    "EncoderConfig",
    "EncoderOptions",
    "ModelFileError",
    "ModelOutput",
    "PretrainedModel",
    "SequenceConfig",
    "SequenceModel",
    "StackConfig",
    "StackOutput",
    "rotary_positions",
    "sinusoidal_positions",
]
