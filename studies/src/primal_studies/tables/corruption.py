"""Study of what predictions on small tables take from other rows.

Three probes of estimators with their default settings: the corruption test, data deletion, and the
share of attention that near rows get.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one, fingerprint, one_of
from primal_attention.tasks.study import Cell, Row, Study

if TYPE_CHECKING:
    from primal_attention.tasks.tables.probes import Estimator

__all__ = ["Corruption", "CorruptionOptions"]

_SETS = ("yacht", "boston-housing", "breast-cancer")
_MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"row_attention": "softmax"},
    "softmax, transductive": {"row_attention": "softmax", "context": "transductive"},
    "primal": {"row_attention": "primal"},
}
"""Arguments of :func:`~primal_studies.tables.methods.row_settings` by name.

The second one is the published form.
"""
_PUBLISHED = {"yacht": "+52 %", "boston-housing": "+20 %", "breast-cancer": "0.0 points"}
"""Table 7 of Kossen et al. (2021): worse RMSE, or change of the accuracy."""
_DELETED = 8
"""Test rows whose context is deleted, for a target of numbers."""
_BINS = 10
"""Equal parts of the context rows, by distance."""


@dataclass(frozen=True)
class CorruptionOptions:
    """Corruption test, data deletion and attention by distance on three small tables."""

    sets: tuple[str, ...] = _SETS
    """Names of tables."""
    models: tuple[str, ...] = tuple(_MODELS)
    """Row attentions; transductive is the published form."""
    splits: int = 3
    """Splits of every table; rows of the context are deleted in the first."""
    steps: int | None = None
    """Training steps; by default those of the estimator."""
    seed: int = 0
    """Seed of the trainings."""
    data: Path | None = None
    """Folder of the data sets; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        from primal_attention.datasets.tables import TABLES

        one_of(self, "sets", TABLES)
        one_of(self, "models", _MODELS)
        at_least_one(self, "splits", *(["steps"] if self.steps is not None else []))


class Corruption(Study[CorruptionOptions]):
    """Fit estimators, then shuffle and delete the rows that they attend to."""

    name = "tables-corruption"
    Options = CorruptionOptions

    def cells(self, options: CorruptionOptions) -> list[Cell]:
        """Return all tables and models of the first split before the second."""
        from primal_attention.datasets.tables import TABLES, table_folder

        for name in options.sets:
            table_folder(name, options.data)  # raises if files are missing
        return [
            {"split": split, "set": name, "model": model, "settings": _mark(model, options)}
            for split in range(options.splits)
            for name in options.sets
            if split < TABLES[name].splits
            for model in options.models
        ]

    def run(self, cell: Cell, options: CorruptionOptions, scratch: Path) -> Row:
        """Fit one estimator and probe it on the test rows."""
        from primal_attention.datasets.tables import load_table
        from primal_attention.tasks.tables import corruption_by_row

        table = load_table(cell["set"], options.data)
        X, X_test, y, y_test = table.parts(cell["split"])
        model = _estimator(cell["model"], table.kind, options)
        began = time.process_time()
        model.fit(X, y)
        fitted = time.process_time()
        rows = (X, y) if cell["model"] == "primal" else None
        shuffled = model.corruption_test(X_test, y_test, rows=rows)
        by_row = corruption_by_row(model, X_test, y_test, rows=rows, limit=len(y_test))
        found = {
            "kind": table.kind,
            "score": shuffled.score,
            "shuffled": shuffled.corrupted,
            "by_row": by_row.corrupted,
            "fit_seconds": fitted - began,
        }
        if cell["model"] == "softmax":
            found["shares"] = _shares(model, X_test)
            if table.kind == "number" and cell["split"] == 0:
                found |= _delete(model, X_test[:_DELETED])
        return found

    def describe(self, row: Row) -> str:
        """Return the scores of a row."""
        return (
            f"{row['model']} on {row['set']}, split {row['split']}: {row['score']:.4g}, "
            f"shuffled {row['by_row']:.4g}"
        )

    def tables(self, rows: Sequence[Row], options: CorruptionOptions) -> Mapping[str, str | bytes]:
        """Return changes of the scores, distances of deleted rows, and a picture."""
        kept = [r for r in rows if r["settings"] == _mark(r["model"], options)]
        if not kept:
            return {}
        files: dict[str, str | bytes] = {"table.md": _table(kept), "picture.png": _picture(kept)}
        if any("kept_distance" in r for r in kept):
            files["deletion.md"] = _deletion_table(kept)
        return files


def _estimator(name: str, kind: str, options: CorruptionOptions) -> Any:
    from primal_attention.tasks.tables import TableClassifier, TableRegressor
    from primal_studies.tables.methods import row_settings

    chosen = TableRegressor if kind == "number" else TableClassifier
    return chosen(**row_settings(**_MODELS[name], steps=options.steps), random_state=options.seed)


def _mark(name: str, options: CorruptionOptions) -> str:
    """Return a fingerprint of the settings of an estimator, defaults included."""
    model = _estimator(name, "number", options)
    # show of progress decides no row
    parameters = {k: v for k, v in model.get_params().items() if k not in ("options", "verbose")}
    return fingerprint(parameters, model._fit_options(), model._model_options())


def _shares(model: "Estimator", X: Any) -> list[list[float]]:
    """Return the attention of each part of the context, nearest first, for every layer."""
    import numpy as np

    from primal_attention.tasks.tables.probes import row_distances

    rows = model._rows(X)
    order = np.stack(
        [
            row_distances(model.model_, *pair).argsort().numpy()
            for pair in zip(rows.values, rows.missing, strict=True)
        ]
    )
    found = []
    for weights in model.attention_maps(X).values():
        nearest = np.take_along_axis(weights.mean(0), order, 1).mean(0)
        found.append([round(float(part.sum()), 4) for part in np.array_split(nearest, _BINS)])
    return found


def _delete(model: "Estimator", X: Any) -> dict[str, Any]:
    from primal_attention.tasks.tables import data_deletion

    found = data_deletion(model, X)
    return {
        "kept_share": fmean(len(d.kept) / (len(d.kept) + len(d.deleted)) for d in found.deletions),
        "kept_distance": fmean(d.kept_distance for d in found.deletions),
        "deleted_distance": fmean(d.deleted_distance for d in found.deletions),
        "p_value": found.p_value,
    }


def _change(row: Row, key: str) -> float:
    """Return how much worse a corrupted score is: relative for RMSE, points for accuracy."""
    if row["kind"] == "number":
        return 100 * (row[key] / row["score"] - 1)
    return 100 * (row[key] - row["score"])


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return rows by table and model, in the order of both."""
    found = {
        (name, model): [r for r in rows if (r["set"], r["model"]) == (name, model)]
        for name in dict.fromkeys([*_SETS, *(r["set"] for r in rows)])
        for model in _MODELS
    }
    return {key: group for key, group in found.items() if group}


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for (name, model), group in _groups(rows).items():
        unit = "%" if group[0]["kind"] == "number" else "points"
        changes = [[_change(row, key) for row in group] for key in ("by_row", "shuffled")]
        lines.append(
            [
                name,
                model,
                f"{fmean(r['score'] for r in group):.3g}",
                *(f"{fmean(c):+.1f} {unit} ({min(c):+.1f} … {max(c):+.1f})" for c in changes),
                _PUBLISHED.get(name, "–"),
                f"{fmean(r['fit_seconds'] for r in group):.0f}",
            ]
        )
    count = max(len(group) for group in _groups(rows).values())
    caption = (
        f"Test score (RMSE, or accuracy) and its change without information in other rows: mean "
        f"over {count} splits, smallest and largest in brackets. First by the published form, "
        "with a shuffle of all other rows for each test row, then with the context shuffled once "
        "for all."
    )
    header = [
        "table",
        "row attention",
        "score",
        "change, row by row",
        "change, context",
        "published",
        "seconds to fit",
    ]
    return page(caption, markdown_table(header, lines))


def _deletion_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["set"],
            f"{100 * row['kept_share']:.0f} %",
            f"{row['kept_distance']:.2f}",
            f"{row['deleted_distance']:.2f}",
            f"{row['p_value']:.2g}",
        ]
        for row in rows
        if "kept_distance" in row
    ]
    caption = (
        f"Context rows deleted one by one while the prediction stays within 10 %, for {_DELETED} "
        "test rows with softmax: what is left, and mean distance from the test row in standard "
        "deviations. Wilcoxon signed-rank test of equal distances."
    )
    header = ["table", "rows left", "distance of the kept", "of the deleted", "p"]
    return page(caption, markdown_table(header, lines))


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: changes of the scores, and attention by distance."""
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.report import to_png
    from primal_attention.report.plots import COLORS, add_legend, model_colors, panel_layout

    colors = model_colors(m for m in _MODELS if any(r["model"] == m for r in rows))
    sets = list(dict.fromkeys(r["set"] for r in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout=panel_layout())
    for (name, model), group in _groups(rows).items():
        place = sets.index(name) + 0.2 * (list(colors).index(model) - (len(colors) - 1) / 2)
        changes = [_change(row, "by_row") for row in group]
        axes[0].plot(changes, [place] * len(changes), "o", ms=4, alpha=0.4, color=colors[model])
        axes[0].plot(fmean(changes), place, "D", ms=7, color=colors[model])
    axes[0].axvline(0, color="#5b6472", lw=1, ls=":")
    axes[0].set_yticks(range(len(sets)), sets)
    axes[0].invert_yaxis()
    axes[0].set(xlabel="RMSE: % worse; accuracy: change in points", title="other rows shuffled")
    marks = "osD^v"
    for i, name in enumerate(sets):
        found = [r["shares"] for r in rows if r["set"] == name and "shares" in r]
        for layer in range(len(found[0]) if found else 0):
            means = [fmean(shares[layer][b] for shares in found) for b in range(_BINS)]
            axes[1].plot(
                range(1, _BINS + 1),
                means,
                marker=marks[i % len(marks)],
                ls="-" if layer else "--",
                color=COLORS[3 + i % 3],
                label=f"{name}, layer {layer + 1}",
            )
    axes[1].axhline(1 / _BINS, color="#5b6472", lw=1, ls=":")
    axes[1].set(
        xlabel="context rows by distance, tenths", ylabel="attention", title="softmax by distance"
    )
    if axes[1].get_legend_handles_labels()[0]:
        axes[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    add_legend(figure, colors)
    return to_png(figure)
