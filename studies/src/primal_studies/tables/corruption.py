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

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, fingerprint, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Files, Picture, columns_table, grouped

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
        files: Files = {"table.md": _table(kept), "picture.png": _picture(kept)}
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
    from primal_studies.tables.deletion import data_deletion

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
    found = grouped(rows, "set", "model")
    names = dict.fromkeys([*_SETS, *(row["set"] for row in rows)])
    return {(n, m): found[n, m] for n in names for m in _MODELS if (n, m) in found}


def _table(rows: Sequence[Row]) -> str:
    groups = _groups(rows)
    columns: dict[str, Column] = {
        "table": "{set}",
        "row attention": "{model}",
        "score": lambda group: f"{fmean(r['score'] for r in group):.3g}",
        "change, row by row": lambda group: _changes(group, "by_row"),
        "change, context": lambda group: _changes(group, "shuffled"),
        "published": lambda group: _PUBLISHED.get(group[0]["set"], "–"),
        "seconds to fit": lambda group: f"{fmean(r['fit_seconds'] for r in group):.0f}",
    }
    caption = (
        f"Test score (RMSE, or accuracy) and its change without information in other rows: mean "
        f"over {max(map(len, groups.values()))} splits, smallest and largest in brackets. First by "
        "the published form, with a shuffle of all other rows for each test row, then with the "
        "context shuffled once for all."
    )
    return page(caption, columns_table(groups.values(), columns))


def _changes(group: Sequence[Row], key: str) -> str:
    changes = [_change(row, key) for row in group]
    unit = "%" if group[0]["kind"] == "number" else "points"
    return f"{fmean(changes):+.1f} {unit} ({min(changes):+.1f} … {max(changes):+.1f})"


def _deletion_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Column] = {
        "table": "{set}",
        "rows left": lambda row: f"{100 * row['kept_share']:.0f} %",
        "distance of the kept": "{kept_distance:.2f}",
        "of the deleted": "{deleted_distance:.2f}",
        "p": "{p_value:.2g}",
    }
    caption = (
        f"Context rows deleted one by one while the prediction stays within 10 %, for {_DELETED} "
        "test rows with softmax: what is left, and mean distance from the test row in standard "
        "deviations. Wilcoxon signed-rank test of equal distances."
    )
    return page(caption, columns_table([r for r in rows if "kept_distance" in r], columns))


def _picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: changes of the scores, and attention by distance."""
    picture = Picture(2, size=(11, 3.4))
    from primal_attention.report.plots import model_colors

    changed, near = picture.axes
    colors = model_colors(m for m in _MODELS if any(r["model"] == m for r in rows))
    by_set = grouped(rows, "set")
    sets, models = list(by_set), list(colors)
    for (name, model), group in _groups(rows).items():
        place = sets.index(name) + 0.2 * (models.index(model) - (len(models) - 1) / 2)
        picture.seeds(0, [_change(row, "by_row") for row in group], place, colors[model])
    changed.axvline(0, color=GREY, lw=1, ls=":")
    picture.name_lines(sets)
    changed.set(xlabel="RMSE: % worse; accuracy: change in points", title="other rows shuffled")
    for i, (name, group) in enumerate(by_set.items()):
        found = [r["shares"] for r in group if "shares" in r]
        for layer in range(len(found[0]) if found else 0):
            near.plot(
                range(1, _BINS + 1),
                [fmean(shares[layer][b] for shares in found) for b in range(_BINS)],
                marker="osD^v"[i % 5],
                ls="-" if layer else "--",
                color=picture.colors[3 + i % 3],
                label=f"{name}, layer {layer + 1}",
            )
    near.axhline(1 / _BINS, color=GREY, lw=1, ls=":")
    xlabel, title = "context rows by distance, tenths", "softmax by distance"
    near.set(xlabel=xlabel, ylabel="attention", title=title)
    if near.get_legend_handles_labels()[0]:
        near.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return picture.png(models=colors)
