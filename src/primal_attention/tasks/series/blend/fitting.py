"""How a blend is fitted: its two closed-form parts, and the shares of all parts.

Every part answers for training series that it did not learn from: the convolutions leave one out,
the quantiles have trees that did not see a series, the attention has models of other series.
The shares are those under which these answers are most likely, with a prior in favour of equal
ones: where there are few series, the prior decides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from primal_attention.support.randomness import isolated
from primal_attention.tasks.series.blend.convolutions import Convolutions
from primal_attention.tasks.series.blend.model import (
    BlendConfig,
    SeriesBlend,
    most_steps,
    padded,
)
from primal_attention.tasks.series.blend.quantiles import Quantiles
from primal_attention.tasks.series.blend.shares import (
    choose_share,
    choose_sharpness,
    likelihood,
    noise,
    sharpened,
)
from primal_attention.tasks.series.data import (
    SeriesCollection,
    SeriesDataset,
    collate_series,
)
from primal_attention.tasks.series.model import SeriesConfig, SeriesNetwork
from primal_attention.tasks.series.settings import Part
from primal_attention.training.evaluation import eval_mode

__all__ = ["Closed", "add_attention", "fit_closed", "score_series"]

_SHORTEST = 16
"""Shorter series are padded: a convolution spans nine steps, and intervals need some."""
_PRIOR = 60
"""Strength of the prior in favour of equal shares, in series."""
_WEAK_PRIOR = 5
"""Strength of the prior for the attention part, which may have a large share or none."""
_GAIN = 1.0
"""Least gain of the log-likelihood for which the attention part gets a share."""
_BATCH = 256
"""Series that a model of the attention part reads at once."""


class Closed(NamedTuple):
    """A blend of closed-form parts."""

    model: SeriesBlend
    """The blend; it may have no part."""
    answers: NDArray[np.float64]
    """Its answers to the training series, each from parts that did not learn from it."""
    y: np.ndarray
    """The classes or numbers of these series."""


def fit_closed(
    series: SeriesCollection,
    config: SeriesConfig,
    *,
    parts: Sequence[str],
    seed: int,
    seconds: float | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Closed:
    """Return a blend of the convolution and the quantile part.

    Args:
        series: Standardised training series with classes, or with standardised numbers.
        config: Sizes of the data, and the attention part that may follow.
        parts: Which of the two to fit; others are ignored.
        seed: Seed of thresholds and trees.
        seconds: Limit of the time. With many series the convolutions get fewer features, and the
            quantile part is left out if they took half of it.
        report: Called with the name of each part before its fit.
    """
    y, outputs = np.asarray(series.y), config.num_classes
    length = min(max(int(series.length.max()), _SHORTEST), most_steps(config))
    x = padded(series.x, series.length, length)
    model = SeriesBlend(BlendConfig(**asdict(config), length=length))
    answers: dict[Part, NDArray[np.float64]] = {}
    begun = time.monotonic()
    if "convolutions" in parts:
        report("convolutions")
        targets = y[:, None].astype(np.float64)
        if outputs > 1:
            targets = np.where(y[:, None] == np.arange(outputs), 1.0, -1.0)
        convolutions, scores = Convolutions.fit(x, targets, seed, seconds)
        model = _with(model, "convolutions", convolutions, rockets=convolutions.sizes)
        model.sharpness[0] = choose_sharpness(scores, y)
        answers["convolutions"] = sharpened(scores, float(model.sharpness[0]))
    has_time = seconds is None or time.monotonic() - begun < seconds / 2
    if "quantiles" in parts and (has_time or not answers):
        report("quantiles")
        quantiles, answers["quantiles"] = Quantiles.fit(x, y, outputs, seed)
        model = _with(model, "quantiles", quantiles, forest=quantiles.forest.sizes)
    shares = [1.0] * len(answers)
    if len(answers) == 2:
        share = choose_share(answers["convolutions"], answers["quantiles"], y, _PRIOR)
        shares = [1 - share, share]
    return _mixed(model, list(answers.values()), shares, y)


def add_attention(
    closed: Closed,
    models: Sequence[SeriesNetwork],
    scores: NDArray[np.float64],
    held: np.ndarray | slice = slice(None),
) -> SeriesBlend:
    """Return the blend with the attention part, or without it if that brings nothing.

    Args:
        closed: The closed-form parts.
        models: Trained models, whose mean answer is that of the part.
        scores: Scores of training series, each from a model that did not learn from it.
        held: Which of the series of ``closed`` these are.
    """
    y, others = closed.y[held], closed.answers[held]
    sharpness = choose_sharpness(scores, y)
    answers, share = sharpened(scores, sharpness), 1.0
    if closed.model.config.parts:
        variance = noise(others, answers, y)
        share = choose_share(others, answers, y, _WEAK_PRIOR)
        mixed = (1 - share) * others + share * answers
        if likelihood(mixed, y, variance) - likelihood(others, y, variance) < _GAIN:
            return closed.model
    model = _with(closed.model, "attention", nn.ModuleList(models), num_attentions=len(models))
    model.sharpness[1] = sharpness
    shares = [*((1 - share) * closed.model.shares).tolist(), share]
    parts = [others] * (len(shares) - 1)  # their own mixture
    return _mixed(model, [*parts, answers], shares, y).model


def score_series(model: SeriesNetwork, series: SeriesCollection) -> NDArray[np.float64]:
    """Return the outputs of a model of the attention part, ``[cases, outputs]``."""
    data = SeriesDataset(series)
    found = []
    with eval_mode(model), torch.no_grad():
        for start in range(0, len(data), _BATCH):
            rows = range(start, min(start + _BATCH, len(data)))
            batch = collate_series([data[i] for i in rows])
            found.append(model(batch["x"], key_mask=batch["key_mask"]).logits)
    return torch.cat(found).double().numpy()


def _mixed(
    model: SeriesBlend,
    answers: Sequence[NDArray[np.float64]],
    shares: Sequence[float],
    y: np.ndarray,
) -> Closed:
    """Return a blend with these shares, calibrated on held-out answers of its parts."""
    outputs = model.config.num_classes
    mean = np.full((len(y), outputs), 1 / outputs)
    if answers:
        mean = np.tensordot(np.asarray(shares), np.stack(answers), 1)
    model.shares = torch.tensor(shares, dtype=torch.float32)
    if outputs > 1:
        model.final.fill_(choose_sharpness(np.log(np.maximum(mean, 1e-4)), y))
    return Closed(model.eval(), mean, y)


def _with(model: SeriesBlend, name: str, part: object, **sizes: Any) -> SeriesBlend:
    """Return a blend with one part more."""
    config = replace(model.config, **sizes)
    with isolated(), torch.device("meta"):
        made = SeriesBlend(config)
    for key in config.parts:
        setattr(made, key, part if key == name else getattr(model, key))
    made.shares = torch.zeros(len(config.parts))
    made.sharpness, made.final = model.sharpness.clone(), model.final.clone()
    return made
