"""Tables and pictures of the study of small tables."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from primal_attention.datasets.tables import TABLES
from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row
from primal_studies.tables.methods import METHODS
from primal_studies.tables.ranks import Interval, Ranking, rank_methods

__all__ = ["cost_page", "more_page", "rank_page", "rank_picture", "score_page", "score_picture"]

_BASE = "random-forest"
"""Method that costs and ranks are compared with."""
_NAMES = {
    "rmse": "RMSE",
    "r2": "R²",
    "nll": "NLL",
    "auroc": "AUROC",
    "accuracy": "accuracy",
    "log_loss": "log-loss",
}
_LOWER = ("rmse", "nll", "log_loss")
"""Scores that are better when lower."""
_DIGITS = {"rmse": 2, "r2": 3, "nll": 2, "auroc": 4, "accuracy": 3, "log_loss": 3}


def main_score(row: Row) -> str:
    """Return the score that ranks a row, as in Kossen et al. (2021)."""
    if row["kind"] == "number":
        return "rmse"
    return "auroc" if row["classes"] == 2 else "accuracy"


def main_loss(row: Row) -> float:
    """Return the main score of a row, negated if higher is better."""
    name = main_score(row)
    return row[name] if name in _LOWER else -row[name]


def score_page(rows: Sequence[Row]) -> str:
    """Return the main score of every method on every table."""
    rows = _shared(rows)
    caption = (
        "Main score on the test rows, mean ± standard deviation over the splits that all methods "
        "of a table have; best mean in bold. "
        "RMSE in units of the target (lower is better), AUROC of two classes, accuracy of several "
        f"classes. {_splits(rows)}"
    )
    columns = [(name, main_score(group[0])) for name, group in _by_set(rows).items()]
    return page(caption, *_by_kind(rows, columns))


def _splits(rows: Sequence[Row]) -> str:
    """Return how many splits every table has, and where they come from."""
    notes: dict[str, list[str]] = {}
    for name, group in _by_set(rows).items():
        count = len({row["split"] for row in group})
        notes.setdefault(TABLES[name].note, []).append(f"{name} ({count})")
    return "Splits: " + "; ".join(f"{n}: {', '.join(sets)}" for n, sets in notes.items()) + "."


def more_page(rows: Sequence[Row]) -> str:
    """Return the other scores of every method on every table."""
    rows = _shared(rows)
    columns = []
    for name, group in _by_set(rows).items():
        others = ("r2", "nll") if group[0]["kind"] == "number" else ("accuracy", "log_loss")
        there = [score for score in others if any(score in row for row in group)]
        columns += [(name, score) for score in there if score != main_score(group[0])]
    caption = (
        "Other scores of the same predictions. R² compares with the mean of the test rows; NLL is "
        "that of a normal distribution, for methods that predict one. A log-loss of k-NN is large "
        "when no neighbour has the right class."
    )
    return page(caption, *_by_kind(rows, columns))


def _by_kind(rows: Sequence[Row], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return a table for numbers and one for classes."""
    kinds = {row["set"]: row["kind"] for row in rows}
    parts = [[c for c in columns if kinds[c[0]] == kind] for kind in ("number", "classes")]
    return [_score_table(rows, part) for part in parts if part]


def _score_table(rows: Sequence[Row], columns: Sequence[tuple[str, str]]) -> str:
    cells: dict[str, list[str]] = {method: [] for method in _methods(rows)}
    for name, score in columns:
        found: dict[str, list[float]] = {}
        for row in rows:
            if row["set"] == name and score in row:
                found.setdefault(row["method"], []).append(row[score])
        shown = {method: f"{fmean(found[method]):.{_DIGITS[score]}f}" for method in found}
        best = (min if score in _LOWER else max)(map(float, shown.values()))
        for method, line in cells.items():
            line.append(_spread(found.get(method, []), _DIGITS[score], best))
    header = ["method", *(f"{name}, {_NAMES[score]}" for name, score in columns)]
    lines = [[METHODS[method].title, *line] for method, line in cells.items()]
    return markdown_table(header, [line for line in lines if set(line[1:]) != {"–"}])


def _spread(values: Sequence[float], digits: int, best: float) -> str:
    """Return mean and standard deviation; the mean is bold if it equals the best as shown."""
    if not values:
        return "–"
    mean = f"{fmean(values):.{digits}f}"
    text = f"**{mean}**" if float(mean) == best else mean
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"


_GROUPS: dict[str, tuple[tuple[str, ...], Callable[[Row], float]]] = {
    "all tables": (("number", "classes"), main_loss),
    "numbers": (("number",), main_loss),
    "classes": (("classes",), main_loss),
    "classes, by log-loss": (("classes",), lambda row: row["log_loss"]),
}
"""Columns of the table of ranks: kinds of target, and what ranks a row."""


def rankings(rows: Sequence[Row]) -> dict[str, Ranking]:
    """Return the ranks of every group of tables that has complete splits."""
    found = {}
    for name, (kinds, loss) in _GROUPS.items():
        ranking = rank_methods([row for row in rows if row["kind"] in kinds], loss)
        if ranking is not None:
            found[name] = ranking
    return found


def rank_page(rows: Sequence[Row]) -> str:
    """Return average ranks with intervals, and differences from random forest."""
    found = rankings(rows)
    if not found:
        return page("No split has all methods yet, so there are no ranks.")
    columns: dict[str, Mapping[str, str]] = {}
    for group, ranking in found.items():
        averages = ranking.average()
        best = min(round(rank.mean, 1) for rank in averages.values())
        columns[group] = {name: _bold(rank, best) for name, rank in averages.items()}
        if group == "all tables" and _BASE in ranking.methods:
            ahead = ranking.average(_BASE)
            columns["− random forest"] = {
                name: "–" if name == _BASE else rank.show("+") for name, rank in ahead.items()
            }
    lines = [
        [METHODS[method].title, *(column.get(method, "–") for column in columns.values())]
        for method in _methods(rows)
    ]
    return page(_rank_caption(found), markdown_table(["method", *columns], lines))


def _bold(rank: Interval, best: float) -> str:
    mean, rest = rank.show().split(" ", 1)
    return f"**{mean}** {rest}" if round(rank.mean, 1) == best else f"{mean} {rest}"


def _rank_caption(found: Mapping[str, Ranking]) -> str:
    counts = "; ".join(
        f"{group}: {len(r.methods)} methods, {len(r.by_set)} tables, {r.splits} splits"
        for group, r in found.items()
        if group in ("all tables", "numbers", "classes")
    )
    return (
        "Average rank by the main score, 1 is the best; equal scores share a rank. Methods are "
        "ranked in every split, then ranks are averaged over the splits of a table, then over "
        "tables. In brackets the 95 % interval of a bootstrap that draws tables, then splits of "
        "them. Only splits that all ranked methods have count, and a method that lacks a table is "
        f"not ranked. What counts: {counts}."
    )


def cost_page(rows: Sequence[Row]) -> str:
    """Return processor times, and how they compare with those of random forest."""
    base = {(r["set"], r["split"]): r for r in rows if r["method"] == _BASE}
    lines = []
    for method in _methods(rows):
        group = [row for row in rows if row["method"] == method]
        by_set = [median(r["fit_seconds"] for r in g) for g in _by_set(group).values()]
        pairs = [(row, base[row["set"], row["split"]]) for row in group
                 if (row["set"], row["split"]) in base]  # fmt: skip
        lines.append(
            [
                METHODS[method].title,
                _short(median(r["fit_seconds"] for r in group)),
                f"{_short(min(by_set))} – {_short(max(by_set))}",
                *(_ratio(pairs, key) for key in ("fit_seconds", "predict_seconds")),
            ]
        )
    header = [
        "method",
        "seconds to fit",
        "range over tables",
        "fit, × random forest",
        "predict, × random forest",
    ]
    caption = (
        "Processor seconds on one thread, medians over all splits and tables; the search of k-NN, "
        "linear models and the MLP is part of their fit. Ratios are medians of ratios within a "
        "split."
    )
    return page(caption, markdown_table(header, lines))


def _ratio(pairs: Sequence[tuple[Row, Row]], key: str) -> str:
    ratios = [mine[key] / theirs[key] for mine, theirs in pairs if theirs[key] > 0]
    return _short(median(ratios)) if ratios else "–"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 99.5 else f"{x:.2g}"


def _methods(rows: Sequence[Row]) -> list[str]:
    there = {row["method"] for row in rows}
    return [method for method in METHODS if method in there]


def _sets(rows: Sequence[Row]) -> list[str]:
    there = {row["set"] for row in rows}
    return [name for name in TABLES if name in there]


def _shared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of splits that every method of a table has: means compare like with like.

    A table without such a split keeps all its rows.
    """
    kept: list[Row] = []
    for group in _by_set(rows).values():
        methods = {row["method"] for row in group}
        count = {s: len({r["method"] for r in group if r["split"] == s}) for s in _numbers(group)}
        part = [row for row in group if count[row["split"]] == len(methods)]
        kept += part or group
    return kept


def _numbers(rows: Sequence[Row]) -> set[int]:
    return {row["split"] for row in rows}


def _by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row["set"] == name] for name in _sets(rows)}


def _color(method: str) -> str:
    """Return a colour: ours, the other neural network, the rest."""
    from primal_attention.report.plots import COLORS

    if METHODS[method].is_ours:
        return COLORS[0]
    return COLORS[1] if method == "mlp" else "#5b6472"


def _pyplot() -> Any:
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def rank_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: average ranks with intervals over all tables, numbers and classes."""
    plt = _pyplot()
    from primal_attention.report import to_png
    from primal_attention.report.plots import panel_layout

    found = {name: r for name, r in rankings(rows).items() if name in list(_GROUPS)[:3]}
    methods = _methods(rows)
    count = max(len(found), 1)
    size = (4 * count + 1, 0.32 * len(methods) + 1.2)
    figure, axes = plt.subplots(
        1, count, figsize=size, sharey=True, squeeze=False, layout=panel_layout()
    )
    for axis, (title, ranking) in zip(axes[0], found.items(), strict=False):
        for name, rank in ranking.average().items():
            place = methods.index(name)
            axis.plot([rank.lower, rank.upper], [place, place], color=_color(name), lw=2, alpha=0.5)
            axis.plot(rank.mean, place, "o", ms=7, color=_color(name))
        axis.set(title=title, xlabel="average rank (1 is the best)")
    _finish(axes, methods)
    return to_png(figure)


def score_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: the main score of every method, a panel for each table, splits as dots."""
    plt = _pyplot()
    from primal_attention.report import to_png
    from primal_attention.report.plots import panel_layout

    rows = _shared(rows)
    groups, methods = _by_set(rows), _methods(rows)
    columns = min(len(groups), 4)
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3.2 * columns + 1, (0.25 * len(methods) + 1.2) * lines),
        sharey=True,
        squeeze=False,
        layout=panel_layout(),
    )
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, (name, group) in zip(axes.flat, groups.items(), strict=False):
        score = main_score(group[0])
        for place, method in enumerate(methods):
            values = [row[score] for row in group if row["method"] == method]
            axis.plot(values, [place] * len(values), "o", ms=3, alpha=0.35, color=_color(method))
            if values:
                axis.plot(fmean(values), place, "D", ms=6, color=_color(method))
        axis.set(title=name, xlabel=_NAMES[score])
    _finish(axes, methods)
    return to_png(figure)


def _finish(axes: Any, methods: Sequence[str]) -> None:
    """Name the methods on the left, first one on top; all panels share the axis."""
    axes[0, 0].set_yticks(range(len(methods)), [METHODS[name].title for name in methods])
    axes[0, 0].invert_yaxis()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
