"""Shares and sharpness of answers, chosen by the likelihood of what is known.

Answers are probabilities of classes ``[cases, classes]``, or numbers ``[cases, 1]``. A number is
as likely as under a normal distribution whose variance is the error of the better answers.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["choose_share", "choose_sharpness", "explained", "likelihood", "noise", "sharpened"]

Array = NDArray[np.float64]

_FLOOR = 1e-4
"""Least probability that counts."""
_SHARES = np.linspace(0, 1, 41)
_SHARPNESS = np.exp(np.linspace(-3, 5, 161))


def sharpened(scores: Array, sharpness: float) -> Array:
    """Return the probabilities of scores; those of one column are numbers, and stay.

    Example:
        >>> sharpened(np.array([[0.0, 1.0]]), 2.0).round(2)
        array([[0.12, 0.88]])
    """
    if scores.shape[1] == 1:
        return scores
    scores = sharpness * scores
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(scores / scores.sum(1, keepdims=True))


def likelihood(answers: Array, y: np.ndarray, variance: float = 1.0) -> float:
    """Return the log-likelihood of classes or numbers under some answers."""
    if answers.shape[1] == 1:
        return float(-np.sum((y - answers[:, 0]) ** 2) / (2 * variance))
    return float(np.log(np.maximum(answers[np.arange(len(y)), y], _FLOOR)).sum())


def choose_sharpness(scores: Array, y: np.ndarray) -> float:
    """Return the factor of scores that makes the classes most likely; one for numbers."""
    if scores.shape[1] == 1:
        return 1.0
    # weak prior: without it a few cases that are all right give an infinite sharpness
    weak = 0.01 * len(y)
    found = [likelihood(sharpened(scores, s), y) - weak * np.log(s) ** 2 for s in _SHARPNESS]
    return float(_SHARPNESS[int(np.argmax(found))])


def choose_share(first: Array, second: Array, y: np.ndarray, prior: float = 0.0) -> float:
    """Return the share of the second answers under which the mixture is most likely.

    Args:
        first: Answers.
        second: Other answers to the same cases.
        y: Their classes or numbers.
        prior: Strength of a prior in favour of equal shares; without it both ends are possible.
    """
    shares = _SHARES[1:-1] if prior else _SHARES
    variance = noise(first, second, y)
    found = [
        likelihood((1 - s) * first + s * second, y, variance)
        + (prior * np.log(4 * s * (1 - s)) if prior else 0)
        for s in shares
    ]
    return float(shares[int(np.argmax(found))])


def noise(first: Array, second: Array, y: np.ndarray) -> float:
    """Return the smaller mean squared error of two answers, if they are numbers."""
    if first.shape[1] > 1:
        return 1.0
    return max(min(float(np.mean((y - a[:, 0]) ** 2)) for a in (first, second)), 1e-12)


def explained(answers: Array, y: np.ndarray) -> float:
    """Return the share of the uncertainty of the targets that answers remove, at most one.

    Example:
        >>> explained(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 1]))
        0.5
    """
    if answers.shape[1] == 1:
        return float(1 - np.mean((y - answers[:, 0]) ** 2) / max(np.var(y), 1e-12))
    shares = np.bincount(y) / len(y)
    known = shares[shares > 0]
    return 1 + likelihood(answers, y) / len(y) / float(-(known * np.log(known)).sum())
