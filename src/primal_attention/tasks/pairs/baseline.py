"""Simple methods beside the model: chance, and a linear map from pixels to words."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.pairs.pairs import PairData
from primal_attention.training.scores import Score, Scores

__all__ = ["chance_scores", "linear_scores"]

_ROWS = 4000
"""Training pairs of the linear map; its cost grows with their cube."""
_RIDGES = (0.01, 0.1, 1.0)


def chance_scores(data: PairData) -> Scores:
    """Return the expected scores of a random order.

    Args:
        data: The pairs that are searched in themselves.
    """
    right = data.is_relevant(np.arange(len(data.texts))[:, None], np.arange(len(data.pixels))[None])
    found: dict[str, Score] = {}
    for words, counts, total, of in (
        ("", right.sum(1), right.shape[1], data.text_of),
        (" of texts", right.sum(0), right.shape[0], data.image_of),
    ):
        for k in (1, 5):
            hit = [1 - _none(total, int(c), min(k, total)) for c in counts[of]]
            found[f"R@{k}{words}"] = Score(float(np.mean(hit)), None, is_share=True)
    return found


def _none(total: int, right: int, k: int) -> float:
    """Return the probability that k of a total of results hold no right one."""
    share = 1.0
    for i in range(k):
        share *= max(total - right - i, 0) / (total - i)
    return share


def linear_scores(train: PairData, valid: PairData, test: PairData) -> Scores:
    """Return the scores of ridge regression from pixels to words.

    Images of 16 x 16 pixels are mapped to the words of their texts, each with unit norm. A search
    orders by cosine. The ridge is chosen on the validation part.

    Args:
        train: Pairs to learn from.
        valid: Pairs that choose the ridge.
        test: Pairs that are scored.
    """
    rows = np.arange(len(train))[:_ROWS]
    x, y = _pixels(train)[train.image_of[rows]], _words(train)[train.text_of[rows]]
    mean = x.mean(0)
    # one decomposition of the kernel serves every ridge; pixels and words outnumber the pairs
    kernel = (x - mean) @ (x - mean).T
    best: tuple[float, Any] = (-1.0, None)
    values, vectors = np.linalg.eigh(kernel)
    inside = vectors.T @ (y - y.mean(0))
    for ridge in _RIDGES:
        weight = inside / (np.maximum(values, 0) + ridge * values.mean() + 1e-9)[:, None]
        linear = (x - mean).T @ (vectors @ weight)

        def guess(data: PairData, linear: object = linear) -> np.ndarray:
            return np.asarray((_pixels(data) - mean) @ linear + y.mean(0))

        reached = _recalls(guess(valid), valid)["R@5"].value
        if reached > best[0]:
            best = reached, guess
    return _recalls(best[1](test), test)


def _pixels(data: PairData) -> NDArray[np.float64]:
    from torch.nn.functional import adaptive_avg_pool2d

    small = adaptive_avg_pool2d(data.pixels.movedim(-1, 1).float() / 255, 16)
    return small.flatten(1).double().numpy()


def _words(data: PairData) -> NDArray[np.float64]:
    """Return which words every text has, with unit norm."""
    size = int(data.vocab_size)
    found = np.zeros((len(data.texts), size))
    at, place = data.keep.nonzero(as_tuple=True)
    found[at.numpy(), data.ids[at, place].numpy()] = 1
    found[:, list(data.special)] = 0
    unit: NDArray[np.float64] = found / np.maximum(
        np.linalg.norm(found, axis=1, keepdims=True), 1e-12
    )
    return unit


def _recalls(guess: np.ndarray, data: PairData) -> Mapping[str, Score]:
    from primal_attention.tasks.pairs.scoring import share_score

    unit = guess / np.maximum(np.linalg.norm(guess, axis=1, keepdims=True), 1e-12)
    close = _words(data) @ unit.T  # [texts images]
    right = data.is_relevant(np.arange(close.shape[0])[:, None], np.arange(close.shape[1])[None])
    found: dict[str, Score] = {}
    for words, s, r, of in (
        ("", close, right, data.text_of),
        (" of texts", close.T, right.T, data.image_of),
    ):
        order = np.argsort(-s, axis=1, kind="stable")[:, :5]
        hits = np.take_along_axis(r, order, 1)[of]
        for k in (1, 5):
            found[f"R@{k}{words}"] = share_score(np.asarray(hits[:, :k].any(1)))
    return found
