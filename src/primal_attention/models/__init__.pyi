from .base import (
    ClassifierOutput,
    ModelFileError,
    ModelOutput,
    PretrainedModel,
)
from .blocks import EncoderBlock
from .config import (
    ROTARY_ATTENTIONS,
    DecoderConfig,
    EncoderConfig,
    SequenceConfig,
)
from .decoder import CausalDecoder, DecoderState
from .encoder import DualTowerClassifier, EncoderClassifier
from .positions import rotary_positions, sinusoidal_positions
from .sequence import SequenceModel

__all__ = [
    "ROTARY_ATTENTIONS",
    "CausalDecoder",
    "ClassifierOutput",
    "DecoderConfig",
    "DecoderState",
    "DualTowerClassifier",
    "EncoderBlock",
    "EncoderClassifier",
    "EncoderConfig",
    "ModelFileError",
    "ModelOutput",
    "PretrainedModel",
    "SequenceConfig",
    "SequenceModel",
    "rotary_positions",
    "sinusoidal_positions",
]
