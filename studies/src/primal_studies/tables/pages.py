"""Tables and pictures of the study of small tables."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from primal_attention.datasets.tables import TABLES
from primal_attention.support.output import page
from primal_attention.tasks.study import Row
from primal_studies.kit.tables import GREY, Column, Picture, columns_table, grouped, spread
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
    shown: dict[str, Column] = {"method": lambda method: METHODS[method].title}
    groups = grouped(rows, "set", "method")
    there: set[str] = set()
    for name, score in columns:
        found = {
            method: [row[score] for row in groups[name, method] if score in row]
            for method in _methods(rows)
            if (name, method) in groups
        }
        found = {method: values for method, values in found.items() if values}
        shown[f"{name}, {_NAMES[score]}"] = _scores(found, score)
        there |= set(found)
    return columns_table([method for method in _methods(rows) if method in there], shown)


def _scores(found: Mapping[str, Sequence[float]], score: str) -> Column:
    """Return a column: mean and deviation by method; the best mean, as shown, is bold."""
    digits = _DIGITS[score]
    means = {method: float(f"{fmean(values):.{digits}f}") for method, values in found.items()}
    best = (min if score in _LOWER else max)(means.values())

    def cell(method: str) -> str:
        mean, *rest = spread(found.get(method, []), digits).split(" ")
        return " ".join([f"**{mean}**" if means.get(method) == best else mean, *rest])

    return cell


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
    columns: dict[str, Column] = {"method": lambda method: METHODS[method].title}
    for group, ranking in found.items():
        averages = ranking.average()
        best = min(round(rank.mean, 1) for rank in averages.values())
        columns[group] = _looked_up({name: _bold(r, best) for name, r in averages.items()})
        if group == "all tables" and _BASE in ranking.methods:
            ahead = {name: rank.show("+") for name, rank in ranking.average(_BASE).items()}
            columns["− random forest"] = _looked_up(ahead | {_BASE: "–"})
    return page(_rank_caption(found), columns_table(_methods(rows), columns))


def _looked_up(shown: Mapping[str, str]) -> Column:
    return lambda method: shown.get(method, "–")


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
    by_method = grouped(rows, "method")

    def ends(group: Sequence[Row]) -> str:
        by_set = [median(r["fit_seconds"] for r in g) for g in grouped(group, "set").values()]
        return f"{_short(min(by_set))} – {_short(max(by_set))}"

    columns: dict[str, Column] = {
        "method": lambda group: METHODS[group[0]["method"]].title,
        "seconds to fit": lambda group: _short(median(r["fit_seconds"] for r in group)),
        "range over tables": ends,
        "fit, × random forest": lambda group: _ratio(group, base, "fit_seconds"),
        "predict, × random forest": lambda group: _ratio(group, base, "predict_seconds"),
    }
    caption = (
        "Processor seconds on one thread, medians over all splits and tables; the search of k-NN, "
        "linear models and the MLP is part of their fit. Ratios are medians of ratios within a "
        "split."
    )
    return page(caption, columns_table([by_method[name] for name in _methods(rows)], columns))


def _ratio(group: Sequence[Row], base: Mapping[tuple[str, int], Row], key: str) -> str:
    pairs = [(row, base.get((row["set"], row["split"]))) for row in group]
    ratios = [row[key] / other[key] for row, other in pairs if other and other[key] > 0]
    return _short(median(ratios)) if ratios else "–"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 99.5 else f"{x:.2g}"


def _methods(rows: Sequence[Row]) -> list[str]:
    there = {row["method"] for row in rows}
    return [method for method in METHODS if method in there]


def _shared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of splits that every method of a table has: means compare like with like.

    A table without such a split keeps all its rows.
    """
    kept: list[Row] = []
    for group in _by_set(rows).values():
        count = len({row["method"] for row in group})
        complete = [
            row
            for part in grouped(group, "split").values()
            if len({row["method"] for row in part}) == count
            for row in part
        ]
        kept += complete or group
    return kept


def _by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = grouped(rows, "set")
    return {name: found[name] for name in TABLES if name in found}


def _color(picture: Picture, method: str) -> str:
    """Return a colour: ours, the other neural network, the rest."""
    if METHODS[method].is_ours:
        return picture.colors[0]
    return picture.colors[1] if method == "mlp" else GREY


def rank_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: average ranks with intervals over all tables, numbers and classes."""
    found = {name: r for name, r in rankings(rows).items() if name in list(_GROUPS)[:3]}
    methods, count = _methods(rows), max(len(found), 1)
    picture = Picture(count, size=(4 * count + 1, 0.32 * len(methods) + 1.2), share="y")
    for axis, (title, ranking) in zip(picture.axes, found.items(), strict=False):
        for name, rank in ranking.average().items():
            place, color = methods.index(name), _color(picture, name)
            axis.plot([rank.lower, rank.upper], [place, place], color=color, lw=2, alpha=0.5)
            axis.plot(rank.mean, place, "o", ms=7, color=color)
        axis.set(title=title, xlabel="average rank (1 is the best)")
    picture.name_lines([METHODS[name].title for name in methods])
    return picture.png()


def score_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: the main score of every method, a panel for each table, splits as dots."""
    rows = _shared(rows)
    groups, methods = _by_set(rows), _methods(rows)
    columns = min(len(groups), 4)
    lines = -(-len(groups) // columns)
    size = (3.2 * columns + 1, (0.25 * len(methods) + 1.2) * lines)
    picture = Picture(columns, lines, size=size, share="y")
    for axis in picture.axes[len(groups) :]:
        axis.set_axis_off()
    for panel, (name, group) in enumerate(groups.items()):
        score = main_score(group[0])
        for place, method in enumerate(methods):
            values = [row[score] for row in group if row["method"] == method]
            picture.seeds(panel, values, place, _color(picture, method), (3, 6), 0.35)
        picture.axes[panel].set(title=name, xlabel=_NAMES[score])
    picture.name_lines([METHODS[name].title for name in methods])
    return picture.png()
