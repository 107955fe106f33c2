"""Fits in threads give the weights of fits alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from primal_attention.datasets import EventSequences
from primal_attention.models import EncoderClassifier, EncoderConfig
from primal_attention.support.randomness import isolated
from primal_attention.tasks.events import EventClassifier
from primal_attention.tasks.series import SeriesClassifier
from primal_attention.training import Columns, TrainingConfig, fit

RNG = np.random.default_rng(0)
TIMES = [np.cumsum(row) for row in RNG.exponential(size=(16, 8))]
LOG = EventSequences.from_arrays(TIMES, RNG.integers(3, size=(16, 8)), unit="hours")
SERIES = RNG.normal(size=(16, 2, 20))
LABELS = np.arange(16) % 2


def _series() -> list[torch.Tensor]:
    options = {"parts": ("attention",)}
    made = SeriesClassifier(max_epochs=2, options=options, random_state=0).fit(SERIES, LABELS)
    return list(made.model_.state_dict().values())


def _events() -> list[torch.Tensor]:
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 1, "max_epochs": 2}
    made = EventClassifier(**sizes, random_state=0).fit(LOG, LABELS)
    return list(made.model_.state_dict().values())


def _loop() -> list[torch.Tensor]:
    with isolated(0):
        config = EncoderConfig(
            num_classes=2, num_features=2, dim=16, num_heads=2, num_layers=1, dropout=0.3
        )
        model = EncoderClassifier(config)
    data = Columns(
        x=torch.from_numpy(SERIES).float().transpose(1, 2), labels=torch.from_numpy(LABELS)
    )
    fit(model, data, config=TrainingConfig(epochs=4, batch_size=4, seed=1))
    return list(model.state_dict().values())


def test_a_seed_is_that_of_all_generators() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        with isolated(seed):
            return float(torch.rand(())), float(np.random.rand()), random.random()

    first, other = draw(0), draw(1)
    assert draw(0) == first
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("train", [_loop, _events, _series])
def test_four_fits_in_four_threads_are_four_fits_alone(train, monkeypatch) -> None:
    for limit in ("_STEPS", "_LONG_STEPS", "_FOLDS"):
        monkeypatch.setattr(f"primal_attention.tasks.series.estimator.{limit}", 2)
    alone, barrier = train(), threading.Barrier(4)

    def together(_: int) -> list[torch.Tensor]:
        barrier.wait()
        return train()

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(together, range(4)):
            assert all(a.equal(b) for a, b in zip(alone, found, strict=True))
