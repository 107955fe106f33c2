"""Blocks and models around any attention of the registry."""

from primal_attention.models.base import (
    ClassifierOutput,
    ModelFileError,
    ModelOutput,
    PretrainedModel,
)
from primal_attention.models.blocks import EncoderBlock
from primal_attention.models.decoder import CausalDecoder, DecoderConfig, DecoderState
from primal_attention.models.encoder import DualTowerClassifier, EncoderClassifier, EncoderConfig
from primal_attention.models.positions import (
    ROTARY_ATTENTIONS,
    rotary_positions,
    sinusoidal_positions,
)
from primal_attention.models.sequence import SequenceConfig, SequenceModel

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
