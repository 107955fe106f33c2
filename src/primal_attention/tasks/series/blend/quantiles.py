"""The quantile part: quantiles of intervals (QUANT) and extremely randomised trees."""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, pad

from primal_attention.support.command import needs
from primal_attention.tasks.series.blend.forest import Forest, ForestSizes

__all__ = ["Quantiles", "quantile_features"]

_TREES, _ROUGH_TREES = 200, 100
"""Trees of the part, and of the forest on samples that answers for cases outside the sample."""
_FEATURES = 10_000
"""More features have fewer quantiles per interval."""
_AT_ONCE = 2**22
"""Values of series that are transformed at once."""


class Quantiles(nn.Module):
    """Answers of a forest to quantiles of the series, their steps, curvature and spectrum.

    Args:
        forest: Sizes of the forest.
        outputs: Numbers that the forest answers with.
    """

    def __init__(self, forest: ForestSizes, outputs: int) -> None:
        super().__init__()
        self.forest = Forest(forest, outputs)

    @classmethod
    def fit(
        cls, x: NDArray[np.float32], y: np.ndarray, outputs: int, seed: int
    ) -> "tuple[Quantiles, NDArray[np.float64]]":
        """Return the part and its answers to training series, from trees that did not see them.

        Args:
            x: Series ``[cases, channels, time]`` of one length.
            y: Classes as whole numbers from zero, or one number a case if there is one output.
            outputs: Number of classes, or one.
            seed: Seed of the trees.
        """
        with needs("series", "The quantile part of a model of series"):
            from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

        features = _features(x)
        kind: Any = ExtraTreesClassifier if outputs > 1 else ExtraTreesRegressor
        criterion = {"criterion": "entropy"} if outputs > 1 else {}
        settings = {"max_features": 0.1, "random_state": seed, **criterion}
        grown = kind(_TREES, **settings).fit(features, y)
        forest = Forest.from_sklearn(grown, outputs)
        made = cls(forest.sizes, outputs)
        made.forest = forest
        rough = kind(_ROUGH_TREES, bootstrap=True, **settings).fit(features, y)
        held_out = np.zeros((len(y), outputs))
        held_out[:, getattr(rough, "classes_", [0])] = _out_of_bag(rough, features)
        return made, held_out

    def forward(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the answers to series ``[cases, channels, time]``."""
        found: NDArray[np.float64] = self.forest(_features(x))
        return found


def _features(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the quantiles of all intervals, ``[cases, features]``."""
    _, channels, length = x.shape
    # about 38 values a time step if all are kept
    divisor = max(4, -(-38 * channels * length // _FEATURES))
    step = max(1, _AT_ONCE // (channels * length))
    parts = [quantile_features(x[i : i + step], divisor) for i in range(0, len(x), step)]
    return np.concatenate(parts)


def quantile_features(x: NDArray[np.float32], divisor: int = 4) -> NDArray[np.float32]:
    """Return what aeon's ``QUANTTransformer`` does, in one call for all intervals of a length.

    The features of a representation are in the order of their intervals' lengths.

    Args:
        x: Series ``[cases, channels, time]``.
        divisor: An interval of ``m`` values has ``1 + (m - 1) // divisor`` quantiles.
    """
    with needs("series", "The quantile part of a model of series"):
        from aeon.transformations.collection.interval_based import QUANTTransformer

    transform: Any = QUANTTransformer(quantile_divisor=divisor)
    with warnings.catch_warnings():  # aeon calls numpy functions of tensors
        warnings.simplefilter("ignore", DeprecationWarning)
        transform._fit(x[:1])  # the intervals depend on the length alone
    series = torch.from_numpy(x)
    steps = avg_pool1d(pad(series.diff(), (2, 2), "replicate"), 5, 1)
    views = (series, steps, series.diff(n=2), torch.fft.rfft(series).abs())
    found = []
    for view, intervals in zip(views, transform.intervals_, strict=True):
        widths = intervals[:, 1] - intervals[:, 0]
        for width in widths.unique().tolist():
            at = intervals[widths == width, :1] + torch.arange(width)
            found.append(_quantiles(view[:, :, at], divisor).flatten(1))
    return torch.cat(found, 1).numpy()


def _quantiles(x: Tensor, divisor: int) -> Tensor:
    """Return quantiles of the last axis; of every second one the mean is taken."""
    size = x.shape[-1]
    count = 1 + (size - 1) // divisor
    if size == 1:
        return x
    ordered = torch.from_numpy(np.sort(x.numpy()))  # several times as fast as torch's
    at = torch.linspace(0, 1, count) * (size - 1) if count > 1 else torch.tensor([(size - 1) / 2])
    left = at.long().clamp(max=size - 2)
    found = torch.lerp(ordered[..., left], ordered[..., left + 1], at - left)
    if count > 1:
        found[..., 1::2] -= x.mean(-1, keepdim=True)
    return found


def _out_of_bag(forest: Any, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mean answer of the trees whose sample lacks a case; the overall mean if none."""
    total: Any = 0
    count = np.zeros((len(features), 1))
    for tree, sample in zip(forest.estimators_, forest.estimators_samples_, strict=True):
        out = np.ones(len(features), bool)
        out[sample] = False
        answer = np.zeros((len(features), tree.tree_.value.shape[2]))
        # also for a sample with all cases, which few cases sometimes have
        answer[out] = tree.tree_.predict(features[out]).reshape(-1, answer.shape[1])
        total, count = total + answer, count + out[:, None]
    mean = total.sum(0) / max(count.sum(), 1)
    return np.where(count > 0, total / np.maximum(count, 1), mean)
