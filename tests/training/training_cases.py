"""A small model and small data for the tests of training."""

from typing import Any

import torch

from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.training import Columns, TrainingConfig

__all__ = ["config", "data", "model"]


def model(**changes: Any) -> EncoderClassifier:
    torch.manual_seed(0)
    base = {"num_classes": 2, "num_features": 3, "dim": 8, "num_heads": 2, "dropout": 0.0}
    return EncoderClassifier(EncoderConfig(**{**base, "num_layers": 1, **changes}))


def data(count: int = 22) -> Columns:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 2
    x = [torch.randn(3 + i % 4, 3, generator=generator) + labels[i] for i in range(count)]
    return Columns(x=x, labels=labels)


def config(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**{"epochs": 2, "batch_size": 8, "lr": 1e-2, **changes})
