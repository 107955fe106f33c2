"""Average ranks of methods over tables, with bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.study import Row

__all__ = ["Interval", "Ranking", "rank_methods"]

_DRAWS = 2000
_LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and its bootstrap interval."""

    mean: float
    lower: float
    upper: float

    def show(self, sign: str = "") -> str:
        """Return the mean and the interval in brackets."""
        mean, lower, upper = (f"{round(x, 1) + 0.0:{sign}.1f}" for x in self)  # never -0.0
        return f"{mean} [{lower}, {upper}]"


@dataclass(frozen=True, eq=False)
class Ranking:
    """Ranks of methods in every split of every table; 1 is the best, equal scores share a rank."""

    methods: tuple[str, ...]
    by_set: Mapping[str, NDArray[np.float64]]
    """Ranks by table, ``[splits, methods]``."""

    @property
    def splits(self) -> int:
        """How many splits count, over all tables."""
        return sum(len(ranks) for ranks in self.by_set.values())

    def average(self, against: str | None = None) -> dict[str, Interval]:
        """Return the average rank of every method, or the difference from one of them.

        Splits of a table are averaged first, so that every table counts the same. The bootstrap
        draws tables, then splits of every drawn table.

        Args:
            against: Method whose rank is subtracted.
        """
        ranks = [r - r[:, self.methods.index(against), None] if against else r
                 for r in self.by_set.values()]  # fmt: skip
        means = np.mean([r.mean(0) for r in ranks], axis=0)
        rng, draws = np.random.default_rng(0), np.empty((_DRAWS, len(self.methods)))
        for i in range(_DRAWS):
            drawn = [ranks[k] for k in rng.integers(len(ranks), size=len(ranks))]
            draws[i] = np.mean([r[rng.integers(len(r), size=len(r))].mean(0) for r in drawn], 0)
        ends = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0)
        return {
            name: Interval(float(means[i]), float(ends[0, i]), float(ends[1, i]))
            for i, name in enumerate(self.methods)
        }


def rank_methods(rows: Sequence[Row], loss: Callable[[Row], float]) -> Ranking | None:
    """Return ranks in every split that all ranked methods have; ``None`` if there is none.

    A method without any row on one of the tables is not ranked. A split that a ranked method lacks
    does not count.

    Args:
        rows: Rows of the study.
        loss: What makes a row worse.

    Example:
        >>> rows = [{"set": "a", "split": 0, "method": m, "x": x} for m, x in zip("pqr", (2, 1, 2))]
        >>> rank_methods(rows, lambda row: row["x"]).by_set["a"].tolist()
        [[2.5, 1.0, 2.5]]
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        splits = found.setdefault(row["set"], {})
        splits.setdefault(row["split"], {})[row["method"]] = loss(row)
    methods = tuple(
        method
        for method in dict.fromkeys(row["method"] for row in rows)
        if all(any(method in split for split in splits.values()) for splits in found.values())
    )
    by_set = {}
    for name, splits in found.items():
        complete = [
            [split[method] for method in methods]
            for split in splits.values()
            if all(method in split for method in methods)
        ]
        if complete:
            by_set[name] = np.array([_rank(losses) for losses in complete])
    return Ranking(methods, by_set) if methods and by_set else None


def _rank(losses: Sequence[float]) -> NDArray[np.float64]:
    """Return ranks from 1 on; equal losses share the mean of their ranks."""
    x = np.array(losses)
    below = (x[None, :] < x[:, None]).sum(1)
    equal = (x[None, :] == x[:, None]).sum(1)
    return 1 + below + (equal - 1) / 2
