"""The figure: size against depth, with the rule, its error and models as points."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from primal_attention.models.depth_rule import (
    DEEP,
    FITTED_LAYERS,
    SHALLOW,
    depth_error,
    optimal_depth,
    optimal_params,
)
from primal_attention.report.plots import COLORS, panel_layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_depth"]

_INK, _SOFT = "#1c2330", "#5b6472"


def plot_depth(points: Mapping[str, tuple[float, float]], *, chosen: str | None = None) -> "Figure":
    """Return a figure of size against depth: the curve ``L*(N)``, its error, and models.

    The line is dashed where the rule extrapolates. The dark band is two standard errors of the
    fitted constants. The light band is the range inside which the planner and the model builders
    raise no objection.

    Args:
        points: Parameters without embeddings and depth of each model, by its name.
        chosen: Name of the point to stress.

    Example:
        >>> figure = plot_depth({"BERT-base": (8.5e7, 12)})
        >>> figure.axes[0].get_ylabel()
        'layers'
    """
    from matplotlib import pyplot as plt

    sizes = [size for size, _ in points.values()]
    start, end = min([1e6, *(s / 2 for s in sizes)]), max([1e11, *(2 * s for s in sizes)])
    grid = np.geomspace(start, end, 200)
    depth = np.array([optimal_depth(n) for n in grid])
    error = 2 * np.array([depth_error(n) for n in grid])
    figure, axis = plt.subplots(figsize=(8, 4.6), layout=panel_layout())
    axis.fill_between(
        grid, SHALLOW * depth, DEEP * depth, color=COLORS[1], alpha=0.08, lw=0, label="range"
    )
    axis.fill_between(
        grid, depth - error, depth + error, color=COLORS[1], alpha=0.3, lw=0, label="± 2 errors"
    )
    low, high = (optimal_params(layers) for layers in FITTED_LAYERS)
    fitted = (grid >= low) & (grid <= high)
    axis.plot(grid, depth, color=COLORS[1], lw=1.2, ls="--")
    axis.plot(grid[fitted], depth[fitted], color=COLORS[1], lw=2, label="L*(N), Levine et al. 2020")
    for name, (size, layers) in points.items():
        is_chosen = name == chosen or len(points) == 1
        dot, color = (70, COLORS[0]) if is_chosen else (28, _INK)
        axis.scatter(size, layers, s=dot, color=color, zorder=3)
        # away from the curve
        is_above = layers > optimal_depth(size)
        axis.annotate(
            name,
            (size, layers),
            xytext=(-7, 4) if is_above else (7, -4),
            textcoords="offset points",
            fontsize=9,
            fontweight="bold" if is_chosen else "normal",
            ha="right" if is_above else "left",
            va="bottom" if is_above else "top",
        )
    deepest = max([DEEP * float(depth[-1]), *(1.3 * layers for _, layers in points.values())])
    least = min([1.0, *(0.7 * layers for _, layers in points.values() if layers > 0)])
    axis.set(xscale="log", yscale="log", xlim=(start, end), ylim=(least, deepest))
    axis.set(xlabel="parameters without embeddings", ylabel="layers")
    ticks = [2**k for k in range(12) if least <= 2**k <= deepest]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    note = "dashed: outside the fitted 6 to 48 layers"
    axis.text(0.99, 0.02, note, transform=axis.transAxes, ha="right", fontsize=8, color=_SOFT)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", frameon=False)
    return figure
