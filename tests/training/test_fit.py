"""The training loop: what comes out, and what does not change the result."""

import pytest
import torch

from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.training import Columns, TrainingConfig, evaluate, fit


def model(**changes) -> EncoderClassifier:
    torch.manual_seed(0)
    base = {"num_classes": 2, "num_features": 3, "dim": 8, "num_heads": 2, "dropout": 0.0}
    return EncoderClassifier(EncoderConfig(**{**base, **changes}))


def data(count: int = 22) -> Columns:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 2
    x = [torch.randn(3 + i % 4, 3, generator=generator) + labels[i] for i in range(count)]
    return Columns(x=x, labels=labels)


def test_a_model_learns_and_ends_at_its_best_epoch():
    net, train = model(), data()
    history = fit(net, train, config=TrainingConfig(epochs=5, lr=1e-2, batch_size=8), valid=train)
    assert history.ended == "epochs"
    assert len(history.records) == 5
    assert history.records[-1].loss < history.records[0].loss
    assert history.records[-1].ksvd is not None
    assert not net.training
    assert evaluate(net, train).loss == pytest.approx(history.best.valid_loss, rel=1e-5)
