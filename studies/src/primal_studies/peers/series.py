"""Classifiers of aeon beside ours: what each accepts, and what a fit costs.

Peers have the defaults of aeon. A peer that cannot take gaps gets them interpolated linearly, one
that cannot take unequal lengths gets zeros beyond the ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import needs
from primal_attention.support.settings import fingerprint
from primal_attention.tasks.series.data import SeriesCollection
from primal_attention.tasks.study import Row
from primal_studies.series.archive import as_cases, interpolated, zero_padded
from primal_studies.series.contenders import (
    HYDRA,
    METHODS,
    MINIROCKET,
    OURS,
    Contender,
)

__all__ = [
    "make_classifier",
    "mark",
    "measure",
    "one_thread",
    "prepare_parts",
    "warm_up",
]

_BATCH = 1000
"""Series that are classified at once; bounds the memory of every method."""
_FLOOR = 1e-3
"""Smallest probability that counts: one zero of a forest would make the mean infinite."""
_UNNAMED = {
    "dim": 64, "num_heads": 4, "num_layers": 2, "max_epochs": 20, "batch_size": 32,
    "learning_rate": 2e-3, "attention_options": {}, "dropout": 0.2,
}  # fmt: skip
"""Defaults of ours that a fingerprint leaves out, so that rows of the first results keep theirs."""
_WARM = 120
"""Generated series before the first timed fit: enough for every part of ours."""


def make_classifier(name: str, seed: int, **changes: Any) -> Any:
    """Return an unfitted classifier.

    Args:
        name: One of :data:`METHODS`.
        seed: Seed of everything that it draws.
        changes: Arguments that differ from those of the comparison.
    """
    method = METHODS[name]
    given = {**method.options, **changes, **({"random_state": seed} if method.is_random else {})}
    return _classes()[name](**given)


def _classes() -> dict[str, Callable[..., Any]]:
    with needs("series", "A comparison of time-series classifiers"):
        from aeon.classification.convolution_based import (
            MiniRocketClassifier,
            MultiRocketHydraClassifier,
        )
        from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier
        from aeon.classification.interval_based import QUANTClassifier

    from primal_attention.tasks.series.estimator import SeriesClassifier

    return {
        OURS: SeriesClassifier,
        MINIROCKET: MiniRocketClassifier,
        HYDRA: MultiRocketHydraClassifier,
        "quant": QUANTClassifier,
        "dtw": KNeighborsTimeSeriesClassifier,
    }


def mark(name: str, **changes: Any) -> str:
    """Return a fingerprint of the settings of a method; those of ours hold its defaults too."""
    options = dict(METHODS[name].options) | changes
    if name == OURS:
        from primal_attention.support.options import read_options
        from primal_attention.tasks.series.settings import SeriesFitOptions

        given = make_classifier(OURS, 0, **changes).get_params()
        rare = vars(read_options(SeriesFitOptions, given["options"]))
        options = {
            name: value
            for name, value in {**given, **rare}.items()
            if name not in ("options", "random_state", "verbose") and value != _UNNAMED.get(name)
        }
        options["time_limit"] = None  # once an argument; its name is in the first fingerprints
    return fingerprint(options)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS, numba and torch to one thread inside the context."""
    import torch

    with needs("series", "A comparison of time-series classifiers"):
        import numba
        from threadpoolctl import threadpool_limits

    numba_before, torch_before = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        numba.set_num_threads(numba_before)
        torch.set_num_threads(torch_before)


def measure(
    name: str, train: SeriesCollection, test: SeriesCollection, seed: int, **changes: Any
) -> Row:
    """Fit a method on the training part and score the test part, on one thread.

    Args:
        name: One of :data:`METHODS`.
        train: Labelled series; gaps and unequal lengths are prepared as the method needs.
        test: Labelled series with the same classes.
        seed: Seed of the method.
        changes: Arguments that differ from those of the comparison.

    Returns:
        Accuracy, mean negative log-likelihood if the method has probabilities, shares of the parts
        of ours, and seconds of wall clock to fit and to predict.
    """
    method = METHODS[name]
    X, X_test = prepare_parts(method, train, test)
    with one_thread():
        warm_up(name, train.num_channels, isinstance(X, list), tuple(changes.items()))
        model = make_classifier(name, seed, **changes)
        began = time.perf_counter()
        model.fit(X, _labels(train))
        fitted = time.perf_counter()
        found = _answers(model, X_test, method.has_chances)
        predicted = time.perf_counter()
    y = _labels(test)
    scores: dict[str, Any] = {}
    if name == OURS:
        scores["shares"] = {part: round(share, 4) for part, share in model.shares_.items()}
    if method.has_chances:
        true = found[np.arange(len(y)), np.searchsorted(model.classes_, y)]
        scores["nll"] = float(-np.log(np.maximum(true, _FLOOR)).mean())
        found = model.classes_[found.argmax(1)]
    return {
        "accuracy": float((found == y).mean()),
        **scores,
        "fit_seconds": fitted - began,
        "predict_seconds": predicted - fitted,
    }


def _answers(model: Any, X: Any, has_chances: bool) -> NDArray[Any]:
    """Return probabilities, or classes if a method has none, batch by batch."""
    ask = model.predict_proba if has_chances else model.predict
    return np.concatenate([ask(X[i : i + _BATCH]) for i in range(0, len(X), _BATCH)])


def _labels(series: SeriesCollection) -> NDArray[np.str_]:
    if series.y is None:
        raise ValueError("the series have no labels; a comparison needs those of both parts.")
    return np.array(series.classes)[series.y]


def prepare_parts(method: Contender, train: SeriesCollection, test: SeriesCollection) -> list[Any]:
    """Return both parts as a method takes them.

    Zeros beyond the ends reach up to the longest series of both parts.
    """
    steps = max(int(part.length.max()) for part in (train, test))
    found = []
    for part in (train, test):
        filled = part if method.has_gaps else interpolated(part)
        found.append(as_cases(filled if method.has_lengths else zero_padded(filled, steps)))
    return found


@cache
def warm_up(
    name: str, channels: int, is_list: bool = False, changes: tuple[tuple[str, Any], ...] = ()
) -> None:
    """Fit and predict generated series, once in a process: numba compiles at the first call.

    Args:
        name: One of :data:`METHODS`.
        channels: Channels of the series.
        is_list: Whether they have unequal lengths.
        changes: Names and values of arguments that differ from those of the comparison.
    """
    rng = np.random.default_rng(0)
    X: Any = rng.normal(size=(_WARM, channels, 64))
    y = np.array(["a", "b"] * (_WARM // 2))
    X[y == "a"] += np.sin(np.arange(64) / 4)
    if is_list:
        X = [case[:, : 64 - i % 9] for i, case in enumerate(X)]
    model = make_classifier(name, 0, **dict(changes)).fit(X, y)
    _answers(model, X[:4], METHODS[name].has_chances)
