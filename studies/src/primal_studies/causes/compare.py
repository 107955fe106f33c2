"""Sizes of explanations by method: means, paired intervals, a verdict and a picture.

A row has ``tokens``, the number of tokens that may be removed, and ``found``: for each method the
size of its first set (or ``None``), the calls of the model and, if known, the rank of the new
decision among the options of the original input.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from primal_attention.tasks.study import Row
from primal_studies.kit.tables import Column, Picture, columns_table

__all__ = [
    "ATTENTION",
    "GRAPH",
    "Estimate",
    "Explanations",
    "estimate_picture",
    "estimate_verdict",
    "mean_interval",
    "size_verdict",
]

GRAPH, ATTENTION = "graph order, best head", "attention, best head"
"""The two methods of the verdict: both choose the best head."""
_DRAWS = 10_000
_TICKS = (5, 10, 20, 50, 100)


class Estimate(NamedTuple):
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of values over decisions, with an interval over decisions.

    Example:
        >>> print(mean_interval([1, 1, 1, 1]))
        1.00 [1.00, 1.00]
    """
    if not values:
        return Estimate(float("nan"), float("nan"), float("nan"))
    numbers = np.asarray(values, dtype=float)
    chosen = np.random.default_rng(0).integers(len(numbers), size=(_DRAWS, len(numbers)))
    low, high = np.quantile(numbers[chosen].mean(1), [0.025, 0.975])
    return Estimate(float(numbers.mean()), float(low), float(high))


class Explanations:
    """What methods found for the same decisions.

    Args:
        rows: All decisions.
        counted: Decisions of which means are taken; the same for every method.
    """

    def __init__(self, rows: Sequence[Row], counted: Sequence[Row]) -> None:
        self.rows, self.counted = rows, counted
        means = {name: mean_interval(self.sizes(name)) for name in rows[0]["found"]}
        self.means = dict(sorted(means.items(), key=lambda item: item[1].mean))
        """Mean size of each method, the smallest first."""

    def sizes(self, name: str) -> list[int]:
        """Return the sizes of a method; where it found nothing, all tokens count."""
        found = ((row["found"][name][0], row["tokens"]) for row in self.counted)
        return [tokens if size is None else size for size, tokens in found]

    def calls(self, name: str) -> list[int]:
        """Return the calls of the model that a method made."""
        return [row["found"][name][1] for row in self.counted]

    def ranks(self, name: str) -> list[int]:
        """Return the ranks of the new decisions, where the method found one."""
        found = (row["found"][name] for row in self.counted)
        return [rank for size, _, rank in found if size is not None]

    def share(self, name: str) -> float:
        """Return the share of all decisions for which a method found a set."""
        return sum(row["found"][name][0] is not None for row in self.rows) / len(self.rows)

    def difference(self, name: str, rival: str) -> Estimate:
        """Return how much larger the sets of a method are than those of another."""
        pairs = zip(self.sizes(name), self.sizes(rival), strict=True)
        return mean_interval([a - b for a, b in pairs])

    def rank_ratio(self, name: str, rival: str) -> Estimate:
        """Return the ratio of ranks of two methods, where both found a new decision.

        The mean is geometric: a few new decisions rank a hundred times lower than others.
        """
        pairs = [(row["found"][name][2], row["found"][rival][2]) for row in self.counted]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        return Estimate(*np.exp(mean_interval([math.log(a / b) for a, b in known])).tolist())

    def table(self, what: str, *, with_ranks: bool = False) -> str:
        """Return one line a method, smallest sets first."""

        def middle(values: Sequence[float]) -> str:
            return f"{median(values):g}" if values else ""

        columns: dict[str, Column] = {
            "method": str,
            f"{what} [95 %]": lambda name: self.means[name],
            "median": lambda name: middle(self.sizes(name)),
            "difference": lambda name: (
                "" if name == ATTENTION else self.difference(name, ATTENTION)
            ),
            "found": lambda name: f"{self.share(name):.0%}",
            "calls": lambda name: middle(self.calls(name)),
        }
        if with_ranks:
            columns["rank"] = lambda name: middle(self.ranks(name))
        return columns_table(self.means, columns)

    def estimates(self, what: str) -> dict[str, Estimate]:
        """Return ``"sizes"``, ``"calls"`` or ``"ranks"`` of every method with intervals."""
        values = {name: getattr(self, what)(name) for name in self.means}
        return {name: mean_interval(found) for name, found in values.items()}


def estimate_verdict(
    name: str, rival: str, found: Estimate, words: tuple[str, str, str], *, is_ratio: bool = False
) -> str:
    """Return one sentence about two methods, by the interval of a difference or of a ratio.

    Args:
        name: The method.
        rival: What it is compared with.
        found: The difference, or the ratio.
        words: What to say if it is less, if the interval contains equality, and if it is more.
        is_ratio: Whether it is a ratio.

    Example:
        >>> words = "needs fewer tokens than", "does not differ from", "needs more tokens than"
        >>> estimate_verdict("The graph", "attention", Estimate(-0.02, -0.09, 0.05), words)
        'The graph does not differ from attention (-0.02 [-0.09, +0.05]).'
    """
    equal = 1 if is_ratio else 0
    which = words[0] if found.high < equal else words[2] if found.low > equal else words[1]
    mean, low, high = (f"{number:.2f}" if is_ratio else f"{number:+.2f}" for number in found)
    return f"{name} {which} {rival} ({'ratio ' if is_ratio else ''}{mean} [{low}, {high}])."


def size_verdict(methods: Explanations, what: str) -> str:
    """Return how the graph compares with attention and with chance, both with a choice of heads."""
    chance = next(name for name in methods.means if name.startswith("random, best"))
    words = (
        f"needs fewer {what} than",
        f"needs about as many {what} as",
        f"needs more {what} than",
    )
    rivals = (
        ("With the best head, the order of the graph", ATTENTION),
        ("It", chance),
    )
    named = {ATTENTION: "the order of attention with its best head"}
    return " ".join(
        estimate_verdict(
            subject,
            named.get(rival, "the best of as many random orders"),
            methods.difference(GRAPH, rival),
            words,
        )
        for subject, rival in rivals
    )


def estimate_picture(
    panels: Mapping[str, Mapping[str, Estimate]], *, xlabels: Sequence[str]
) -> bytes:
    """Return a PNG: panels with one dot and interval a method; graphs are red.

    Args:
        panels: Title, then method, then its estimate; all panels have the methods of the first.
        xlabels: What the horizontal axes show; one of calls is logarithmic.
    """
    names = list(next(iter(panels.values())))[::-1]
    size = (2.4 + 3.2 * len(panels), 1.0 + 0.28 * len(names))
    picture = Picture(len(panels), size=size, share="y", is_spaced=False)
    for number, ((title, panel), xlabel) in enumerate(zip(panels.items(), xlabels, strict=True)):
        axis = picture.axes[number]
        for place, name in enumerate(names):
            mean, low, high = panel[name]
            color = "tab:red" if "graph" in name else "tab:blue"
            axis.plot([low, high], [place, place], color=color, linewidth=1.5)
            axis.plot([mean], [place], "o", color=color, markersize=5)
        axis.set(title=title, xlabel=xlabel)
        if "calls" in xlabel:
            axis.set_xscale("log")
            picture.ticks(number, _TICKS)
    picture.axes[0].set_yticks(range(len(names)), names)
    return picture.png(along="x", is_open=False)
