"""Probes of a fitted estimator in a report, and attention between rows as a picture."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike

from primal_attention.support.command import needs
from primal_attention.tasks.tables.classifier import TableClassifier
from primal_attention.tasks.tables.columns import TableLike, ValidTable
from primal_attention.tasks.tables.model import NPTModel
from primal_attention.tasks.tables.probes import (
    Estimator,
    context_model,
    corruption_by_row,
    intervention,
    row_distances,
)
from primal_attention.tasks.tables.regressor import TableRegressor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from primal_attention.report import Report

__all__ = ["add_probes", "plot_row_attention"]


def plot_row_attention(estimator: Estimator, X: TableLike, anchor: int = 0) -> "Figure":
    """Return a figure of the weights between rows, sorted by their distance from one of them.

    A model that attends to similar rows has large weights near the diagonal. There is a panel for
    each head of each layer that has a matrix of weights.

    Args:
        estimator: Fitted, with ``attention="softmax"`` or ``"primal-sparse"``.
        X: Rows that attend.
        anchor: Number of the row from which all distances are taken.
    """
    with needs("analysis", "A picture"):
        from matplotlib import pyplot as plt
        from matplotlib.colors import PowerNorm
    from primal_attention.report.plots import panel_layout

    maps = estimator.attention_maps(X)
    if not maps:
        raise ValueError(
            f"attention={estimator.attention!r} has no matrix of weights between rows; use "
            "'softmax' or 'primal-sparse'."
        )
    table, model = estimator._rows(X), estimator.model_
    every, holes = model.context_values, model.context_missing
    if model.config.context == "transductive":
        every, holes = torch.cat([every, table.values]), torch.cat([holes, table.missing])
    point = table.values[anchor], table.missing[anchor]
    rows, seen = (
        row_distances(model, *point, pair).argsort().numpy()
        for pair in ((table.values, table.missing), (every, holes))
    )
    heads = len(next(iter(maps.values())))
    figure, axes = plt.subplots(
        len(maps),
        heads,
        figsize=(2.6 * heads, 2.6 * len(maps) + 0.4),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout=panel_layout(),
    )
    for line, (name, weights) in zip(axes, maps.items(), strict=True):
        for h, (axis, weight) in enumerate(zip(line, weights, strict=True)):
            shown = weight[np.ix_(rows, seen)]
            axis.imshow(shown, aspect="auto", cmap="Oranges", norm=PowerNorm(0.5))
            axis.set_title(f"layer {name.split('.')[1]}, head {h}", fontsize=9)
    figure.supxlabel("context rows, nearest first", fontsize=9)
    figure.supylabel("predicted rows, nearest first", fontsize=9)
    return figure


def add_probes(
    report: "Report",
    estimator: Estimator,
    X: ValidTable,
    y: ArrayLike,
    *,
    rows: tuple[TableLike, ArrayLike] | None = None,
) -> "Report":
    """Add a section to a report: what the predictions of an estimator take from other rows.

    Args:
        report: The report.
        estimator: Fitted.
        X: Held-out rows.
        y: Their targets.
        rows: Training rows as ``(X, y)``, if the estimator keeps none.
    """
    report.section("What predictions take from other rows")
    model = estimator.model_
    if not model.config.has_rows:
        return report.text("The model has no attention between rows.")
    if rows is None and not model.config.context_rows:
        return report.text(
            "The model keeps no training rows, only sums over them. Give the training table again "
            "to change rows and see what predictions take from them."
        )
    test = corruption_by_row(estimator, X, y, rows=rows)
    name = "accuracy" if isinstance(estimator, TableClassifier) else "RMSE"
    report.tiles(
        {
            name: f"{test.score:.3g}",
            f"{name}, other rows shuffled": f"{test.corrupted:.3g}",
            "change": f"{test.change:+.3g}",
        }
    ).text(
        "Corruption test: every column of all other rows is shuffled by itself, so that they tell "
        "nothing but the distribution of each column. A model that uses no other rows has equal "
        "scores."
    )
    if isinstance(estimator, TableRegressor):
        _add_intervention(report, context_model(estimator, rows))
    if rows is None and estimator.attention_maps(X[:64]):
        report.figure(
            plot_row_attention(estimator, X[:64]),
            "Attention between rows, sorted by the distance from the first held-out row. Weights "
            "near the top left corner are between rows that are near each other.",
        )
    return report


def _add_intervention(report: "Report", model: NPTModel) -> None:
    """Add how predictions follow the target of a twin in the context."""
    places = torch.linspace(0, len(model.context_values) - 1, 8).long().unique().tolist()
    context = model.context_values, model.context_missing
    slopes = [intervention(model, *context, row).slope for row in places]
    report.text(
        f"Intervention: the target of a training row is overwritten and the row is predicted. The "
        f"prediction follows with a slope of {np.mean(slopes):.2f}, mean over {len(slopes)} rows; "
        "1 means that the target is copied, 0 that it is not read."
    )
