"""Blocks and models around any attention of the registry."""

from primal_attention.models.blocks import EncoderBlock
from primal_attention.models.encoder import ClassifierOutput, EncoderClassifier, EncoderConfig
from primal_attention.models.positions import sinusoidal_positions

__all__ = [
    "ClassifierOutput",
    "EncoderBlock",
    "EncoderClassifier",
    "EncoderConfig",
    "sinusoidal_positions",
]
