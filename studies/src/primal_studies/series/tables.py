"""Tables, picture and verdict of the study of time-series classifiers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row
from primal_studies.kit.tables import GREY, Column, Picture, bold, bullets, columns_table, grouped
from primal_studies.series.contenders import HYDRA, METHODS, MINIROCKET, OURS

__all__ = ["SeriesComparison", "series_picture", "series_verdict", "set_table", "summary_table"]

_TIE = 1e-9
"""Accuracies that differ by less are equal: they are means of fractions."""


@dataclass(frozen=True)
class SeriesComparison:
    """Rows of the sets that every method has, with the seeds that all share."""

    rows: Sequence[Row]
    methods: tuple[str, ...]
    sets: tuple[str, ...]
    accuracy: Mapping[tuple[str, str], float]
    """Mean accuracy over seeds in %, by set and method."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "SeriesComparison | None":
        """Return what can be compared; ``None`` if no set has all methods and ours."""
        there = {row["method"] for row in rows}
        methods = tuple(name for name in METHODS if name in there)
        if OURS not in methods:
            return None
        by_set: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            by_set.setdefault(row["set"], {}).setdefault(row["method"], []).append(row)
        kept: list[Row] = []
        for found in by_set.values():
            if set(found) != there:
                continue
            seeds = set.intersection(
                *({r["seed"] for r in found[m]} for m in methods if METHODS[m].is_random)
            )
            if seeds:
                kept += [
                    row for method in methods for row in found[method]
                    if row["seed"] in seeds or not METHODS[method].is_random
                ]  # fmt: skip
        if not kept:
            return None
        sets = tuple(sorted({row["set"] for row in kept}, key=str.lower))
        groups: dict[tuple[str, str], list[float]] = {}
        for row in kept:
            groups.setdefault((row["set"], row["method"]), []).append(100 * row["accuracy"])
        return cls(kept, methods, sets, {key: fmean(values) for key, values in groups.items()})

    @property
    def averages(self) -> dict[str, float]:
        """Average accuracy of every method in %."""
        return {m: fmean(self.accuracy[name, m] for name in self.sets) for m in self.methods}

    @property
    def ranks(self) -> dict[str, float]:
        """Average rank of every method; 1 is the best, equal accuracies share a rank."""
        scores = np.array([[self.accuracy[s, m] for m in self.methods] for s in self.sets])
        above = (scores[:, None, :] > scores[:, :, None] + _TIE).sum(2)
        equal = (np.abs(scores[:, None, :] - scores[:, :, None]) <= _TIE).sum(2)
        means = (1 + above + (equal - 1) / 2).mean(0)
        return {method: float(mean) for method, mean in zip(self.methods, means, strict=True)}

    def differences(self, method: str) -> list[float]:
        """Return how many points ours is ahead of a method, set by set."""
        return [self.accuracy[name, OURS] - self.accuracy[name, method] for name in self.sets]

    def duels(self, method: str) -> tuple[int, int, int]:
        """Return how often ours wins, draws and loses against a method."""
        ahead = self.differences(method)
        wins, losses = sum(d > _TIE for d in ahead), sum(d < -_TIE for d in ahead)
        return wins, len(ahead) - wins - losses, losses

    def p_value(self, method: str) -> float | None:
        """Return that of Wilcoxon's signed-rank test; ``None`` below six unequal sets."""
        unequal = [d for d in self.differences(method) if abs(d) > _TIE]
        if len(unequal) < 6:
            return None
        from scipy.stats import wilcoxon

        # rounded, so that differences that are equal share a rank
        return float(wilcoxon(np.round(unequal, 9), method="approx").pvalue)

    def ratio(self, key: str, method: str, base: str) -> float | None:
        """Return the median ratio of seconds to those of another method on the same set."""
        runs = grouped(self.rows, "set", "seed").values()
        found = [{row["method"]: row[key] for row in group} for group in runs]
        pairs = [p for p in found if method in p and base in p]
        return median(p[method] / p[base] for p in pairs) if pairs else None

    def seconds(self, key: str, method: str) -> float:
        """Return the median seconds of a method."""
        return median(row[key] for row in self.rows if row["method"] == method)

    def nll(self, method: str) -> float | None:
        """Return the mean negative log-likelihood, averaged over sets; ``None`` without one."""
        by_set = [
            [row["nll"] for row in self.rows
             if row["set"] == name and row["method"] == method and "nll" in row]
            for name in self.sets
        ]  # fmt: skip
        return fmean(fmean(values) for values in by_set) if all(by_set) else None


def summary_table(found: SeriesComparison) -> str:
    """Return one line a method: accuracy, rank, duels and time."""
    averages, ranks = found.averages, found.ranks
    best = max(f"{value:.1f}" for value in averages.values())
    first = min(f"{value:.2f}" for value in ranks.values())
    columns: dict[str, Column] = {
        "method": lambda m: METHODS[m].title,
        "accuracy, %": lambda m: bold(f"{averages[m]:.1f}", best),
        "rank": lambda m: bold(f"{ranks[m]:.2f}", first),
        "ours wins / draws / loses": lambda m: (
            "–" if m == OURS else " / ".join(map(str, found.duels(m)))
        ),
        "p": lambda m: "–" if (p := found.p_value(m)) is None else f"{p:.2g}",
        "NLL": lambda m: "–" if (nll := found.nll(m)) is None else f"{nll:.3f}",
        "fit, × MiniRocket": lambda m: _short(found.ratio("fit_seconds", m, MINIROCKET)),
        "fit, × MultiRocketHydra": lambda m: _short(found.ratio("fit_seconds", m, HYDRA)),
        "predict, × MiniRocket": lambda m: _short(found.ratio("predict_seconds", m, MINIROCKET)),
        "predict, × MultiRocketHydra": lambda m: _short(found.ratio("predict_seconds", m, HYDRA)),
    }
    order = sorted(found.methods, key=lambda m: ranks[m])
    return page(_caption(found), columns_table(order, columns))


def _caption(found: SeriesComparison) -> str:
    seeds = {
        name: len({r["seed"] for r in found.rows if r["set"] == name and r["method"] == OURS})
        for name in found.sets
    }
    least, most = min(seeds.values()), max(seeds.values())
    count = f"{most} seed{'s' * (most > 1)}" if least == most else f"{least} to {most} seeds"
    return (
        f"{len(found.sets)} sets, {count}, one thread. DTW has a window of 10 % and draws nothing, "
        "so it has one seed. Accuracy: "
        "mean over seeds, then over sets. Rank: average over sets, by the mean over seeds; 1 is "
        "the best, equal accuracies share a rank. p: Wilcoxon's signed-rank test of ours and the "
        "method over sets, not corrected for several comparisons. NLL: mean negative "
        "log-likelihood of the test labels, where a method has probabilities; a probability below "
        "0.001 counts as 0.001. Times: medians over sets and seeds of the ratio of wall-clock "
        "seconds within a set."
    )


def set_table(found: SeriesComparison) -> str:
    """Return one line a set: sizes, the accuracy of every method, and seconds of ours."""
    columns: dict[str, Column] = {
        "set": "{set}",
        "training / test": "{train:,} / {test:,}",
        "steps": "{steps:,}",
        "classes": "{classes}",
        **{METHODS[m].title: _accuracy(found, m) for m in found.methods},
    }
    timed = [m for m in (OURS, HYDRA) if m in found.methods]
    for verb, key in (("fit", "fit_seconds"), ("predict", "predict_seconds")):
        columns |= {f"{verb} s, {METHODS[m].title}": _median_seconds(key, m) for m in timed}
    by_set = grouped(found.rows, "set")
    caption = "Test accuracy in %, mean over seeds, best in bold. Seconds are medians over seeds."
    return page(caption, columns_table([by_set[name] for name in found.sets], columns))


def _accuracy(found: SeriesComparison, method: str) -> Column:
    def cell(group: Sequence[Row]) -> str:
        shown = {m: f"{found.accuracy[group[0]['set'], m]:.1f}" for m in found.methods}
        return bold(shown[method], f"{max(map(float, shown.values())):.1f}")

    return cell


def _median_seconds(key: str, method: str) -> Column:
    return lambda group: _short(median(row[key] for row in group if row["method"] == method))


def series_verdict(found: SeriesComparison) -> str:
    """Return who wins, in sentences, and which goals are reached."""
    averages, ranks = found.averages, found.ranks
    by_accuracy = sorted(averages, key=lambda m: -averages[m])
    by_rank = sorted(ranks, key=lambda m: ranks[m])
    lines = [
        f"**Accuracy**: {_podium(by_accuracy, averages, '{:.1f} %')}",
        f"**Average rank**: {_podium(by_rank, ranks, '{:.2f}')}",
    ]
    for method in found.methods:
        if method != OURS:
            lines.append(_duel(found, method))
    cost = [
        f"{'a fit' if key == 'fit_seconds' else 'a prediction'} takes {_short(ratio)} times as "
        f"long as that of {METHODS[base].title}"
        for key, base in (
            ("fit_seconds", MINIROCKET),
            ("fit_seconds", HYDRA),
            ("predict_seconds", MINIROCKET),
        )
        if (ratio := found.ratio(key, OURS, base)) is not None
    ]
    if cost:
        lines.append(f"**Time** of ours, medians: {'; '.join(cost)}.")
    return "\n\n".join([bullets(lines), *_goals(found)]) + "\n"


def _podium(order: Sequence[str], values: Mapping[str, float], style: str) -> str:
    """Return the winner, the place of ours and all values."""
    winner, place = order[0], order.index(OURS) + 1
    shown = {m: style.format(values[m]) for m in order}
    tied = [m for m in order if shown[m] == shown[winner]]
    if OURS in tied and len(tied) > 1:
        names = ", ".join(METHODS[m].title for m in tied if m != OURS)
        head = f"ours and {names} share the first place with {shown[winner]}"
    elif winner == OURS:
        head = f"ours is first with {shown[OURS]}"
    else:
        head = f"{METHODS[winner].title} is first with {shown[winner]}, ours is number {place}"
        head += f" with {shown[OURS]}"
        tied = [winner]
    rest = [f"{METHODS[m].title} {shown[m]}" for m in order if m not in (*tied, OURS)]
    return f"{head} ({', '.join(rest)})." if rest else f"{head}."


def _duel(found: SeriesComparison, method: str) -> str:
    wins, draws, losses = found.duels(method)
    mean, p = fmean(found.differences(method)), found.p_value(method)
    side = "level with" if wins == losses else "ahead of" if wins > losses else "behind"
    test = "" if p is None else f", p = {p:.2g}"
    return (
        f"Ours is {side} {METHODS[method].title}: {wins} wins, {draws} draws, {losses} losses, "
        f"{mean:+.1f} points on average{test}."
    )


def _goals(found: SeriesComparison) -> list[str]:
    """Return a table of the goals that were set before the measurement."""
    averages, ranks = found.averages, found.ranks
    lines = []
    if MINIROCKET in averages:
        gain = averages[OURS] - averages[MINIROCKET]
        lines.append(_goal("accuracy above MiniRocket's, points", f"{gain:+.2f}", 1.0, gain, -1))
    others = {m: rank for m, rank in ranks.items() if m != OURS}
    if others:
        best = min(others.values())
        reached = ranks[OURS] < best - _TIE
        lines.append(["average rank", f"{ranks[OURS]:.2f}", f"< {best:.2f}", _yes(reached)])
    fit, predict = (
        found.ratio(key, OURS, base)
        for key, base in (("fit_seconds", HYDRA), ("predict_seconds", MINIROCKET))
    )
    if fit is not None:
        lines.append(_goal("median fit time, × MultiRocketHydra", _short(fit), 1.0, fit, 1))
    if predict is not None:
        lines.append(
            _goal("median prediction time, × MiniRocket", _short(predict), 3.0, predict, 1)
        )
    return [markdown_table(["quantity", "measured", "goal", "reached"], lines)] if lines else []


def _goal(what: str, shown: str, goal: float, value: float, side: int) -> list[str]:
    """Return a line; ``side`` is 1 if lower is better, -1 if higher is."""
    sign = "≤" if side > 0 else "≥"
    return [what, shown, f"{sign} {goal:g}", _yes(side * value <= side * goal + _TIE)]


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


def _short(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:,.0f}" if x >= 99.5 else f"{x:.1f}" if x >= 9.95 else f"{x:.2f}"


def series_picture(found: SeriesComparison) -> bytes:
    """Return a PNG: ours against two peers, a dot a set, and average ranks."""
    peers = [m for m in (MINIROCKET, HYDRA) if m in found.methods]
    picture = Picture(len(peers) + 1, size=(4 * len(peers) + 4.6, 3.9))
    lowest = min(found.accuracy.values()) - 2
    for axis, method in zip(picture.axes, peers, strict=False):
        x, y = ([found.accuracy[s, m] for s in found.sets] for m in (method, OURS))
        axis.plot([lowest, 101], [lowest, 101], color=GREY, lw=1, ls=":")
        axis.scatter(x, y, s=26, alpha=0.8, color=picture.colors[0])
        wins, draws, losses = found.duels(method)
        axis.set(
            xlabel=f"{METHODS[method].title}, accuracy in %",
            ylabel="ours, accuracy in %",
            title=f"{wins} wins, {draws} draws, {losses} losses",
        )
    axis, ranks = picture.axes[-1], found.ranks
    order = sorted(ranks, key=lambda m: ranks[m])
    for place, method in enumerate(order):
        at, color = (ranks[method], place), picture.colors[0] if method == OURS else GREY
        axis.plot(*at, "o", ms=9, color=color)
        axis.annotate(
            f"{ranks[method]:.2f}", at, textcoords="offset points", xytext=(9, -3), fontsize=8
        )
    picture.name_lines([METHODS[m].title for m in order], len(peers))
    axis.margins(x=0.2, y=0.15)
    axis.set(xlabel="average rank (1 is the best)", title=f"{len(found.sets)} sets")
    return picture.png()
