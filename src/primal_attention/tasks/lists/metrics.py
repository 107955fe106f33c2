"""Quality of ranked lists: average precision, recall, precision, and the revisited protocol.

The revisited Oxford and Paris sets score three settings. *Easy* counts easy images as positive and
ignores hard ones; *medium* counts both; *hard* counts hard images and ignores easy ones. Ignored
images ("junk") are removed from the list before anything is counted. Their average precision is
the trapezoid between the precisions before and after each hit, lower than the rectangle that
scikit-learn computes. (Radenovic et al., CVPR 2018.)
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RevisitedScores",
    "average_precision",
    "evaluate_revisited",
    "list_precision",
    "mean_average_precision",
    "precision_at",
    "recall_at",
]

Kind = Literal["trapezoid", "rectangle"]


def average_precision(ranks: ArrayLike, positives: int, *, kind: Kind = "rectangle") -> float:
    """Return the average precision of a list from the ranks of its hits.

    Args:
        ranks: Ranks of the positives that were found, counted from 0.
        positives: Number of positives that exist, found or not.
        kind: ``"rectangle"`` as in scikit-learn, ``"trapezoid"`` as in the revisited protocol.

    Example:
        >>> round(average_precision([0, 2], 2), 6)
        0.833333
        >>> round(average_precision([0, 2], 2, kind="trapezoid"), 6)
        0.791667
    """
    if kind not in ("trapezoid", "rectangle"):
        raise ValueError(f"kind must be 'trapezoid' or 'rectangle', got {kind!r}.")
    found = np.sort(np.asarray(ranks, dtype=np.float64))
    if len(found) > positives:
        raise ValueError(f"ranks holds {len(found)} hits, but only {positives} positives exist.")
    if not positives:
        return float("nan")
    hits = np.arange(1, len(found) + 1)
    after = hits / (found + 1)
    if kind == "rectangle":
        return float(after.sum() / positives)
    before = np.where(found == 0, 1.0, (hits - 1) / np.maximum(found, 1))
    return float((before + after).sum() / 2 / positives)


def mean_average_precision(
    ids: ArrayLike, relevant: Sequence[ArrayLike], *, kind: Kind = "rectangle"
) -> float:
    """Return the mean average precision of lists; queries without a relevant item are skipped.

    Args:
        ids: Ranked ids [queries, results]; -1 is an empty slot.
        relevant: The relevant ids of each query, found or not.
        kind: See :func:`average_precision`.

    Example:
        >>> mean_average_precision([[5, 1, 2]], [[5, 2]])
        0.8333333333333333
    """
    values = [
        average_precision(_hit_ranks(row, good), len(set(np.asarray(good).tolist())), kind=kind)
        for row, good in _pairs(ids, relevant)
        if len(np.asarray(good))
    ]
    return float(np.mean(values)) if values else float("nan")


def list_precision(scores: "Tensor", labels: "Tensor") -> "Tensor":
    """Return the average precision of each list among its own relevant results.

    Args:
        scores: Scores [lists, results]; equal ones keep their order.
        labels: 1 for relevant results, 0 for others, negative for empty slots.

    Returns:
        Average precisions [lists]; 0 for a list without relevant results.

    Example:
        >>> import torch
        >>> list_precision(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1, 0, 1]]))
        tensor([0.8333])
    """
    import torch

    scores = torch.where(labels >= 0, scores, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    hits = (labels.gather(1, order) == 1).float()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1, device=hits.device)
    return (precision * hits).sum(1) / hits.sum(1).clamp_min(1)


def recall_at(ids: ArrayLike, relevant: Sequence[ArrayLike], k: int) -> float:
    """Return the mean share of relevant items among the first ``k``.

    This is the ceiling of every re-ranking of the first ``k``.

    Example:
        >>> recall_at([[5, 1, 2]], [[5, 2]], 1)
        0.5
    """
    shares = [
        (_hit_ranks(row, good) < k).sum() / len(set(np.asarray(good).tolist()))
        for row, good in _pairs(ids, relevant)
        if len(np.asarray(good))
    ]
    return float(np.mean(shares)) if shares else float("nan")


def precision_at(ids: ArrayLike, relevant: Sequence[ArrayLike], k: int) -> float:
    """Return the mean precision among the first ``k`` results.

    A list whose last positive is found before rank ``k`` is counted up to that rank, as the
    revisited protocol does.

    Example:
        >>> precision_at([[5, 1, 2]], [[5, 2]], 2)
        0.5
    """
    values = [
        _precision(_hit_ranks(row, good), k)
        for row, good in _pairs(ids, relevant)
        if len(np.asarray(good))
    ]
    return float(np.mean(values)) if values else float("nan")


class RevisitedScores(NamedTuple):
    """Scores of one setting of the revisited protocol, in percent."""

    map: float
    """Mean average precision, trapezoid."""
    precision: dict[int, float]
    """Mean precision at each ``k``."""
    queries: int
    """Queries with at least one positive."""


_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}
"""Names of the lists that are positive, and of those that are ignored."""


def evaluate_revisited(
    ids: ArrayLike, gnd: Sequence[Mapping[str, object]], *, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, RevisitedScores]:
    """Return mean average precision and precision for the settings easy, medium and hard.

    Args:
        ids: Ranked ids [queries, results]; -1 is an empty slot.
        gnd: Ground truth of each query: ids under ``"easy"``, ``"hard"`` and ``"junk"``.
        ks: Where to measure precision.

    Example:
        >>> truth = [{"easy": [3], "hard": [1], "junk": [0]}]
        >>> scores = evaluate_revisited([[0, 3, 2, 1]], truth)
        >>> scores["easy"].map, scores["hard"].map  # junk and the other kind are ignored
        (100.0, 25.0)
    """
    lists = np.asarray(ids)
    if lists.ndim != 2 or len(lists) != len(gnd):
        raise ValueError(
            f"ids must have one row for each of the {len(gnd)} queries of gnd, got the shape "
            f"{lists.shape}."
        )
    answers = [_check_truth(truth, i) for i, truth in enumerate(gnd)]
    result = {}
    for setting, (good_keys, junk_keys) in _SETTINGS.items():
        precisions: list[float] = []
        at: dict[int, list[float]] = {k: [] for k in ks}
        for row, truth in zip(lists, answers, strict=True):
            good = np.concatenate([truth[key] for key in good_keys])
            if not len(good):
                continue
            junk = np.concatenate([truth[key] for key in junk_keys])
            ranks = _hit_ranks(row[~np.isin(row, junk)], good)
            precisions.append(average_precision(ranks, len(good), kind="trapezoid"))
            for k in ks:
                at[k].append(_precision(ranks, k))
        result[setting] = RevisitedScores(
            100 * float(np.mean(precisions)) if precisions else float("nan"),
            {k: 100 * float(np.mean(v)) if v else float("nan") for k, v in at.items()},
            len(precisions),
        )
    return result


def _check_truth(truth: object, query: int) -> dict[str, NDArray[np.int64]]:
    """Return the ids of a query's ground truth as arrays."""
    keys = ("easy", "hard", "junk")
    if not isinstance(truth, Mapping):
        raise ValueError(f"gnd, query {query}: it must be a mapping with {', '.join(keys)}.")
    found = {}
    for key in keys:
        if key not in truth:
            raise ValueError(f"gnd, query {query}: {key!r} is missing; an empty list is allowed.")
        try:
            ids = np.asarray(truth[key])
        except ValueError:
            ids = np.asarray(object)  # lists of different lengths
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"gnd, query {query}: {key!r} must be a list of whole numbers.")
        found[key] = ids.astype(np.int64)
    every = np.concatenate(list(found.values()))
    if (every < 0).any():
        raise ValueError(f"gnd, query {query}: it holds {every.min()}; an id is at least 0.")
    if len(np.unique(every)) < len(every):
        raise ValueError(f"gnd, query {query}: it holds an item twice.")
    return found


def _pairs(ids: ArrayLike, relevant: Sequence[ArrayLike]) -> list[tuple[np.ndarray, ArrayLike]]:
    lists = np.asarray(ids)
    if lists.ndim != 2 or len(lists) != len(relevant):
        raise ValueError(
            f"ids must have one row for each of the {len(relevant)} queries of relevant, got the "
            f"shape {lists.shape}."
        )
    return list(zip(lists, relevant, strict=True))


def _hit_ranks(row: np.ndarray, good: ArrayLike) -> NDArray[np.int64]:
    """Return the ranks of relevant items; empty slots are left out first."""
    row = row[row >= 0]
    _, first = np.unique(row, return_index=True)
    if len(first) < len(row):
        raise ValueError("ids holds an item twice in one list; a ranked list holds it once.")
    return np.flatnonzero(np.isin(row, np.asarray(good)))


def _precision(ranks: NDArray[np.int64], k: int) -> float:
    if not len(ranks):
        return 0.0
    length = min(k, int(ranks[-1]) + 1)
    return float((ranks < length).sum() / length)
