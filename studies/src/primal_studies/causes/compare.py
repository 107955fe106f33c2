"""Sizes of explanations by method: means, paired intervals, a verdict and a picture.

A row has ``tokens``, the number of tokens that may be removed, and ``found``: for each method the
size of its first set (or ``None``), the calls of the model and, if known, the rank of the new
decision among the options of the original input.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from primal_attention.support.command import needs

__all__ = [
    "ATTENTION",
    "GRAPH",
    "Comparison",
    "Estimate",
    "mean_interval",
    "picture",
    "size_verdict",
    "verdict",
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


class Comparison:
    """What methods found for the same decisions.

    Args:
        rows: All decisions.
        counted: Decisions of which means are taken; the same for every method.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], counted: Sequence[Mapping[str, Any]]
    ) -> None:
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

    def table(self, what: str, *, with_ranks: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return header and lines of the table, smallest sets first."""
        header = ["method", f"{what} [95 %]", "median", "difference", "found", "calls"]
        lines = []
        for name, mean in self.means.items():
            gap = "" if name == ATTENTION else str(self.difference(name, ATTENTION))
            calls, ranks = f"{median(self.calls(name)):g}", self.ranks(name)
            middle, share = f"{median(self.sizes(name)):g}", f"{self.share(name):.0%}"
            line = [name, str(mean), middle, gap, share, calls]
            rank = f"{median(ranks):g}" if ranks else ""
            lines.append([*line, rank] if with_ranks else line)
        return [*header, "rank"] if with_ranks else header, lines

    def estimates(self, what: str) -> dict[str, Estimate]:
        """Return ``"sizes"``, ``"calls"`` or ``"ranks"`` of every method with intervals."""
        values = {name: getattr(self, what)(name) for name in self.means}
        return {name: mean_interval(found) for name, found in values.items()}


def verdict(
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
        >>> verdict("The graph", "attention", Estimate(-0.02, -0.09, 0.05), words)
        'The graph does not differ from attention (-0.02 [-0.09, +0.05]).'
    """
    equal = 1 if is_ratio else 0
    which = words[0] if found.high < equal else words[2] if found.low > equal else words[1]
    mean, low, high = (f"{number:.2f}" if is_ratio else f"{number:+.2f}" for number in found)
    return f"{name} {which} {rival} ({'ratio ' if is_ratio else ''}{mean} [{low}, {high}])."


def size_verdict(methods: Comparison, what: str) -> str:
    """Return how the graph compares with attention and with chance, both with a choice of heads."""
    chance = next(name for name in methods.means if name.startswith("random, best"))
    words = (
        f"needs fewer {what} than",
        f"needs about as many {what} as",
        f"needs more {what} than",
    )
    return " ".join(
        [
            verdict(
                "With the best head, the order of the graph",
                "the order of attention with its best head",
                methods.difference(GRAPH, ATTENTION),
                words,
            ),
            verdict(
                "It",
                "the best of as many random orders",
                methods.difference(GRAPH, chance),
                words,
            ),
        ]
    )


def picture(panels: Mapping[str, Mapping[str, Estimate]], *, xlabels: Sequence[str]) -> bytes:
    """Return a PNG: panels with one dot and interval a method; graphs are red.

    Args:
        panels: Title, then method, then its estimate; all panels have the methods of the first.
        xlabels: What the horizontal axes show; one of calls is logarithmic.
    """
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.report.page import to_png

    names = list(next(iter(panels.values())))[::-1]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(2.4 + 3.2 * len(panels), 1.0 + 0.28 * len(names)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (title, panel), xlabel in zip(axes[0], panels.items(), xlabels, strict=True):
        for place, name in enumerate(names):
            mean, low, high = panel[name]
            color = "tab:red" if "graph" in name else "tab:blue"
            axis.plot([low, high], [place, place], color=color, linewidth=1.5)
            axis.plot([mean], [place], "o", color=color, markersize=5)
        axis.grid(alpha=0.3, axis="x")
        axis.set(title=title, xlabel=xlabel)
        if "calls" in xlabel:
            axis.set_xscale("log")
            axis.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
            axis.minorticks_off()
    axes[0][0].set_yticks(range(len(names)), names)
    return to_png(figure)
