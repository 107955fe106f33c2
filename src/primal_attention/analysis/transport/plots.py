"""Pictures of moving points: paths, the map beside the optimal one, numbers over epochs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from primal_attention.analysis.transport.metrics import PathMetrics
from primal_attention.functional.transport import cost_matrix, optimal_assignment
from primal_attention.report.plots import COLORS, panel_layout, plot_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["evenly", "plot_map", "plot_metrics", "plot_paths"]


def plot_paths(
    positions: Float[Tensor, "e n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    max_points: int = 200,
) -> "Figure":
    """Return a figure of the path of each point: a circle at the start, a dot at the end.

    More than two dimensions are shown by the two principal components of all positions.

    Args:
        positions: Positions of the same points at several times.
        labels: Class of each point, shown by colour.
        max_points: Number of points to draw, evenly spaced among all.
    """
    from matplotlib import pyplot as plt

    shown = evenly(positions.shape[1], max_points)
    places = _plane(positions.detach().double())[:, shown]
    colors = _colors(labels, shown)
    figure, axis = plt.subplots(figsize=(6, 5), layout=panel_layout())
    for i, color in enumerate(colors):
        axis.plot(*places[:, i].T, color=color, lw=0.7, alpha=0.5)
    (x, y), (x_end, y_end) = places[0].T, places[-1].T
    axis.scatter(x, y, s=14, facecolors="none", edgecolors=colors, lw=0.8, label="start")
    axis.scatter(x_end, y_end, s=14, c=colors, label="end")
    _finish(axis, f"paths of {len(shown)} points")
    axis.legend(frameon=False)
    return figure


def plot_map(
    start: Float[Tensor, "n d"],
    end: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    max_points: int = 150,
) -> "Figure":
    """Return a figure of a map as arrows, beside the optimal map between the same two clouds.

    Both panels have the same arrows if the map is optimal.

    Args:
        start: Points before the map.
        end: Points after the map.
        labels: Class of each point, shown by colour.
        max_points: Number of points to draw; the optimal map is that of these points.
    """
    from matplotlib import pyplot as plt

    shown = evenly(len(start), max_points)
    start, end = start.detach().double()[shown], end.detach().double()[shown]
    order = optimal_assignment(cost_matrix(start, end))
    places = _plane(torch.stack([start, end]))
    colors = _colors(labels, shown)
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 4.8), sharex=True, sharey=True, layout=panel_layout()
    )
    panels = {"the map": places[1], "the optimal map": places[1][order]}
    for axis, (title, heads) in zip(axes, panels.items(), strict=True):
        moved = heads - places[0]
        axis.quiver(
            *places[0].T,
            *moved.T,
            angles="xy",
            scale_units="xy",
            scale=1,
            color=colors,
            width=2.5e-3,
            headwidth=7,
            headlength=8,
        )
        axis.scatter(places[1, :, 0], places[1, :, 1], s=8, c="#5b6472", zorder=0)
        _finish(axis, title)
    return figure


def plot_metrics(rows: Sequence[PathMetrics]) -> "Figure":
    """Return a figure of cost and gap, optimality, efficiency and regret over the epochs.

    Args:
        rows: From :func:`~primal_attention.analysis.transport.maps.path_metrics`. The start, where
            nothing has moved, is left out.
    """
    moved = rows[1:] or rows
    # equal steps on the axis: epochs are recorded at regular intervals
    curves: dict[str, dict[str, list[float]]] = {
        "cost and gap": {
            "cost": [row.cost for row in moved],
            "gap": [row.gap for row in moved],
        },
        "optimality": {"optimality": [row.optimality for row in moved]},
        "efficiency": {"efficiency": [row.efficiency for row in moved]},
        "regret": {"regret": [row.regret for row in moved]},
    }
    return plot_curves(curves, xlabel="recorded epoch")


def _plane(positions: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n two"]:
    """Return the two principal components of points; points of a plane stay as they are."""
    d = positions.shape[-1]
    if d <= 2:
        return torch.nn.functional.pad(positions, (0, 2 - d))
    flat = positions.flatten(0, -2)
    centred = positions - flat.mean(0)
    _, _, vt = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    return centred @ vt[:2].T


def evenly(n: int, count: int) -> Int[Tensor, " k"]:
    """Return at most ``count`` indices, evenly spaced among ``n``."""
    count = min(n, count)
    return torch.arange(count) * n // max(count, 1)


def _colors(labels: Tensor | None, shown: Tensor) -> list[str]:
    if labels is None:
        return [COLORS[1]] * len(shown)
    classes = labels.unique(return_inverse=True)[1][shown.to(labels.device)]
    return [COLORS[c % len(COLORS)] for c in classes.tolist()]


def _finish(axis: "Axes", title: str) -> None:
    axis.set(title=title, aspect="equal")
    axis.grid(alpha=0.25)
