"""Markdown tables of Table 1 and its ablation, published figures beside ours."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from primal_attention.support.output import markdown_table, page, percent
from primal_studies.series.uea_table import (
    ABLATION,
    GRID,
    GRID_SETS,
    MODELS,
    PUBLISHED,
    SETS,
    UeaSettings,
)

__all__ = ["ablation_table", "table_one", "table_one_picture", "trainings_table"]

Rows = Sequence[Mapping[str, Any]]


def table_one(
    rows: Rows, settings: Mapping[str, UeaSettings], published: Mapping[str, UeaSettings]
) -> str:
    """Return the tables of all protocols.

    Args:
        rows: Rows of the study; each has a ``protocol``.
        settings: UeaSettings of the selected protocol, set by set.
        published: UeaSettings of the published protocol.
    """
    by = {key: [r for r in rows if r["protocol"] == key] for key in ("selected", "best", "grid")}
    selected, best = by["selected"], by["best"]
    parts = ["Test accuracy in %, mean ± standard deviation over seeds. One thread of a CPU."]
    if selected:
        parts += [
            "**Validation-selected** (the epoch chosen without the test part). "
            + _caption(selected, settings),
            _table(selected, "selected_test"),
            "**Last epoch** of the same runs (nothing is chosen; as in the classifier).",
            _table(selected, "last_test"),
        ]
    if best:
        parts += [
            "**Best test epoch** (the protocol of the paper; optimistic, for comparison only). "
            "PrimalFormer and Primal.+ have the published η of each set. "
            + _caption(best, published),
            _table(best, "best_test"),
            _verdict(best),
        ]
    if pairs := _pairs(by["grid"]):
        parts += [
            "**Best pair and best test epoch**, Primal.+ alone: the best of nine pairs of rank and "
            "η, chosen by the test part as in the paper. The published figure is of one seed; "
            "*best for each* chooses for every seed, then averages.",
            pairs,
        ]
    return page(*filter(None, parts))


def table_one_picture(rows: Rows) -> bytes:
    """Return a PNG of the validation-selected accuracies, set by set."""
    from primal_attention.report import plot_dots, to_png

    selected = [r for r in rows if r["protocol"] == "selected"]
    sets, models = _present(selected)
    grid = _grid(selected, "selected_test", sets, models)
    values = {
        name: {
            MODELS[m].title: 100 * statistics.fmean(grid[name, m])
            for m in models
            if (name, m) in grid
        }
        for name in sets
    }
    return to_png(plot_dots(values, xlabel="test accuracy in %, validation-selected"))


def ablation_table(rows: Rows, settings: UeaSettings) -> str:
    """Return the table of the ablation."""
    sets = [n for n in SETS if any(r["set"] == n for r in rows)]
    variants = [v for v in ABLATION if any(r["model"] == v for r in rows)]
    grid = _grid(rows, "last_test", sets, variants)
    lines = []
    for variant in variants:
        cells = [percent(grid[n, variant]) if (n, variant) in grid else "—" for n in sets]
        complete = all((n, variant) in grid for n in sets)
        means = [statistics.fmean(grid[n, variant]) for n in sets] if complete else []
        lines.append([variant, *cells, _mean(means) if means else "—"])
    table = markdown_table(["variant", *sets, "average"], lines)
    text = "Test accuracy in % after the last epoch, mean ± standard deviation over seeds. "
    text += f"All variants have {_describe(settings)} One thread of a CPU."
    return page(text, table)


def trainings_table(rows: Rows) -> str:
    """Return which training held-out thirds prefer, set by set."""
    lines = []
    for name in dict.fromkeys(r["set"] for r in rows):
        found: dict[str, list[float]] = {}
        for row in rows:
            if row["set"] == name:
                found.setdefault(row["training"], []).append(row["best"])
        means = {training: statistics.fmean(scores) for training, scores in found.items()}
        better = max(means, key=lambda training: means[training])  # the first of equals
        lines.append([name, *(f"{100 * means[t]:.1f}" for t in ("published", "ours")), better])
    return markdown_table(["set", "published", "ours", "to use"], lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(values):.1f}"


def _grid(
    rows: Rows, field_: str, sets: Sequence[str], models: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    return {
        (name, model): found
        for name in sets
        for model in models
        if (found := [r[field_] for r in rows if r["set"] == name and r["model"] == model])
    }


def _table(rows: Rows, field_: str) -> str:
    """Return one protocol as markdown, the published figures beside, averages at the foot."""
    sets, models = _present(rows)
    grid = _grid(rows, field_, sets, models)
    titles = [MODELS[m].title for m in models]
    published = ["Trans. (paper)", "Primal. (paper)", "Primal.+ (paper)"]
    lines = []
    for name in sets:
        cells = [percent(grid[name, m]) if (name, m) in grid else "—" for m in models]
        theirs = [f"{v:.1f}" for v in PUBLISHED[name]] if name in PUBLISHED else ["—"] * 3
        lines.append([name, *cells, *theirs])
    for label, members in (
        ("average", [n for n in sets if all((n, m) in grid for m in models)]),
        (
            "average, sets of the paper",
            [n for n in sets if n in PUBLISHED and all((n, m) in grid for m in models)],
        ),
    ):
        if not members:
            continue
        means = [_mean([statistics.fmean(grid[n, m]) for n in members]) for m in models]
        theirs = ["—"] * 3
        if all(n in PUBLISHED for n in members):
            theirs = [f"{statistics.fmean(PUBLISHED[n][i] for n in members):.1f}" for i in range(3)]
        lines.append([f"{label} ({len(members)})", *means, *theirs])
    return markdown_table(["set", *titles, *published], lines)


def _verdict(best: Rows) -> str:
    """Return which columns reach the published Primal.+, set by set."""
    sets, models = _present(best)
    grid = _grid(best, "best_test", sets, models)
    found = []
    for name in sets:
        if name in PUBLISHED:
            goal = PUBLISHED[name][2]
            reach = [
                MODELS[m].title
                for m in models
                # compared as shown, to a tenth
                if (name, m) in grid and float(_mean(grid[name, m])) >= goal
            ]
            found.append(f"{name} ({goal}): {', '.join(reach) or 'none'}")
    return f"Means at or above the published Primal.+: {'; '.join(found)}." if found else ""


def _pairs(grid: Rows) -> str:
    """Return what choosing among the pairs by the test part gives, beside the published figure."""
    lines = []
    for name in GRID_SETS:
        scores = {
            pair: found for (_, pair), found in _grid(grid, "best_test", [name], list(GRID)).items()
        }
        if len(scores) == len(GRID) and len({len(found) for found in scores.values()}) == 1:
            best = max(scores, key=lambda pair: statistics.fmean(scores[pair]))
            each = [max(seed) for seed in zip(*scores.values(), strict=True)]
            mean = _mean([score for found in scores.values() for score in found])
            cells = [mean, percent(scores[best]), best, percent(each), f"{PUBLISHED[name][2]:.1f}"]
            lines.append([name, *cells])
    columns = [
        "set",
        "all nine",
        "best for all seeds",
        "which",
        "best for each",
        "Primal.+ (paper)",
    ]
    return markdown_table(columns, lines) if lines else ""


def _present(rows: Rows) -> tuple[list[str], list[str]]:
    """Return the sets and the models that have rows, in the order of the table."""
    sets = [n for n in SETS if any(r["set"] == n for r in rows)]
    return sets, [m for m in MODELS if any(r["model"] == m for r in rows)]


def _caption(rows: Rows, settings: Mapping[str, UeaSettings]) -> str:
    """Return the settings of most sets, those of the others, and how long all were trained."""
    sets, _ = _present(rows)
    used: dict[UeaSettings, list[str]] = {}
    for name in sets:
        used.setdefault(settings[name], []).append(name)
    shared = max(used, key=lambda s: len(used[s]))
    others = "".join(f" {', '.join(used[s])}: {_describe(s)}" for s in used if s != shared)
    passes = {r["set"]: (r["passes"], r["patch"]) for r in rows}
    runs = ", ".join(f"{n} {e:.0f} ({p})" for n, (e, p) in passes.items())
    return (
        f"All models have {_describe(shared)}{others} Scored {shared.epochs} times in a run. "
        f"Passes over the training part, and time steps per token in brackets: {runs}."
    )


def _describe(settings: UeaSettings) -> str:
    s = settings
    rate = f"AdamW with peak {s.lr:g}" if s.recipe == "ours" else f"RAdam at a constant {s.lr:g}"
    length = f"{s.min_passes} passes"
    if s.steps > 1:
        length = f"{s.steps} steps (at least {length})"
    return (
        f"width {s.dim}, {s.num_heads} heads, {s.num_layers} blocks, at most "
        f"{s.max_tokens} tokens, {s.segments} segments in the head, {rate} and "
        f"batches of {s.batch_size} for {length}."
    )
