"""Sizes of explanations by method: means, paired intervals, a verdict and a picture.

A row has ``tokens``, the number of tokens that may be removed, and ``found``: for each method the
size of its first set (or ``None``), the calls of the model and, if known, the rank of the new
decision among the options of the original input.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from primal_attention.command import needs

__all__ = ["ATTENTION", "GRAPH", "Comparison", "Estimate", "mean_interval", "picture", "verdict"]

GRAPH, ATTENTION = "graph order, best head", "attention, best head"
"""The two methods of the verdict: both choose the best head."""
_DRAWS = 10_000


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
        return [entry[2] for entry in found if entry[0] is not None]

    def share(self, name: str) -> float:
        """Return the share of all decisions for which a method found a set."""
        return sum(row["found"][name][0] is not None for row in self.rows) / len(self.rows)

    def difference(self, name: str, rival: str) -> Estimate:
        """Return how much larger the sets of a method are than those of another."""
        pairs = zip(self.sizes(name), self.sizes(rival), strict=True)
        return mean_interval([a - b for a, b in pairs])

    def table(self, what: str, *, with_ranks: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return header and lines of the table, smallest sets first."""
        header = ["method", f"{what} [95 %]", "difference", "found", "calls"]
        lines = []
        for name, mean in self.means.items():
            gap = "" if name == ATTENTION else str(self.difference(name, ATTENTION))
            calls = f"{median(self.calls(name)):g}"
            line = [name, str(mean), gap, f"{self.share(name):.0%}", calls]
            lines.append([*line, f"{median(self.ranks(name)):g}"] if with_ranks else line)
        return [*header, "rank"] if with_ranks else header, lines

    def estimates(self, what: str) -> dict[str, Estimate]:
        """Return ``"sizes"``, ``"calls"`` or ``"ranks"`` of every method with intervals."""
        return {name: mean_interval(getattr(self, what)(name)) for name in self.means}


def verdict(name: str, rival: str, difference: Estimate, what: str) -> str:
    """Return what the interval of a difference says about two methods; less is better.

    Args:
        name: The method.
        rival: What it is compared with.
        difference: Of what is measured.
        what: What is measured, such as ``"tokens"``.

    Example:
        >>> verdict("The graph", "attention", Estimate(-0.02, -0.09, 0.05), "tokens")
        'The graph needs about as many tokens as attention (difference -0.02 [-0.09, +0.05]).'
    """
    mean, low, high = (f"{number:+.2f}" for number in difference)
    words = f"about as many {what} as"
    if difference.high < 0 or difference.low > 0:
        words = f"{'fewer' if difference.high < 0 else 'more'} {what} than"
    return f"{name} needs {words} {rival} (difference {mean} [{low}, {high}])."


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

    from primal_attention.analysis.report import to_png

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
    axes[0][0].set_yticks(range(len(names)), names)
    return to_png(figure)
