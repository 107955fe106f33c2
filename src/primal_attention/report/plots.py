"""Figures of a run: curves over epochs and confusion matrices."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

__all__ = [
    "add_legend",
    "model_colors",
    "panel_layout",
    "plain",
    "plot_confusion",
    "plot_curves",
    "plot_dots",
    "plot_values",
]

Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Panel, then line, then one number per epoch."""

COLORS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309", "#0e7490")
"""Line colours, in the order of the models."""


def plain(words: str, most: int = 40) -> str:
    r"""Return words of a user as a label: one line, not too long, and never a formula.

    Every word that is not written by this library, such as the name of a class, goes through here:
    matplotlib reads text between dollars as mathematics, and fails if it is none.

    Args:
        words: The words.
        most: Most characters; the rest is cut off.

    Example:
        >>> print(plain("costs $5 or\n$6"))
        costs \$5 or \$6
    """
    line = "".join(c if c.isprintable() else " " for c in words[: 2 * most])
    line = " ".join(line.split())
    is_long = len(line) > most or len(words) > 2 * most
    return (f"{line[: most - 1]}…" if is_long else line).replace("$", r"\$")


def plot_curves(
    curves: Curves,
    *,
    dashed: Sequence[str] = (),
    log: Sequence[str] = (),
    chosen: Mapping[str, int] | None = None,
    xlabel: str = "epoch",
    start: int = 1,
) -> "Figure":
    """Return a figure with one panel per quantity and one line per name, over the epochs.

    The part of a line's name before the first comma is its model. Lines of one model share a
    colour. A legend above the panels names the models.

    Args:
        curves: Numbers by panel and line; a ``nan`` leaves a gap.
        dashed: Names of lines to dash.
        log: Panels with a logarithmic axis.
        chosen: Epoch to mark, by model.
        xlabel: Label of the horizontal axis.
        start: Number of the first epoch.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    color = model_colors(_model_of(name) for lines in curves.values() for name in lines)
    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(12 if columns > 1 else 6, 3.4 * rows + 0.4),
        squeeze=False,
        layout=panel_layout(),
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (panel, lines) in zip(axes.flat, curves.items(), strict=False):
        for name, values in lines.items():
            epochs = range(start, start + len(values))
            style = "--" if name in dashed else "-"
            marker = "o" if len(values) == 1 else None
            axis.plot(epochs, values, style, marker=marker, color=color[_model_of(name)])
        for name, epoch in (chosen or {}).items():
            if any(_model_of(line) == name for line in lines):
                axis.axvline(epoch, color=color[name], lw=1, ls=":", alpha=0.8)
        axis.set(title=plain(panel), xlabel=xlabel)
        if panel in log:
            axis.set_yscale("log")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    add_legend(figure, color)
    return figure


def _model_of(line: str) -> str:
    return line.split(",")[0]


def plot_confusion(
    counts: Mapping[str, Int[Tensor, "classes classes"]], labels: Sequence[str]
) -> "Figure":
    """Return a figure of confusion matrices (rows: true class), one panel per model.

    A shade is the share of its row. Counts are written in the cells for up to twelve classes.

    Args:
        counts: Confusion matrix of each model, by the name of the model.
        labels: Names of the classes, in the order of the rows.
    """
    from matplotlib import pyplot as plt

    columns = min(len(counts), 2)
    rows = -(-len(counts) // columns)
    size = min(max(0.36 * len(labels) + 1.6, 3.4), 6.0)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout=panel_layout()
    )
    for axis in axes.flat[len(counts) :]:
        axis.set_axis_off()
    for axis, (name, matrix) in zip(axes.flat, counts.items(), strict=False):
        share = matrix / matrix.sum(1, keepdim=True).clamp_min(1)
        axis.imshow(share.numpy(), cmap="Oranges", vmin=0, vmax=1)
        if len(labels) <= 12:
            for i, row in enumerate(matrix.tolist()):
                for j, count in enumerate(row):
                    shade = "white" if share[i, j] > 0.6 else "#1c2330"
                    if count:
                        axis.text(j, i, count, ha="center", va="center", color=shade, fontsize=8)
        ticks = range(0, len(labels), max(1, len(labels) // 26))
        names = [plain(labels[i]) for i in ticks]
        rotation = 90 if max(map(len, names)) > 3 else 0
        axis.set_xticks(ticks, names, rotation=rotation, fontsize=8)
        axis.set_yticks(ticks, names, fontsize=8)
        axis.set(title=plain(name), xlabel="predicted", ylabel="true")
    return figure


def plot_values(pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> "Figure":
    """Draw predicted against true numbers, one panel a model.

    Args:
        pairs: True and predicted numbers of each model, by its name.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(pairs), figsize=(4 * len(pairs), 4), squeeze=False, layout=panel_layout()
    )
    for axis, (name, (true, predicted)) in zip(axes.flat, pairs.items(), strict=True):
        ends = min(true), max(true)
        axis.plot(ends, ends, color="#5b6472", lw=1, ls=":")
        axis.scatter(true, predicted, s=12, alpha=0.6, color="#c2410c")
        axis.set(title=plain(name), xlabel="true", ylabel="predicted")
        axis.grid(alpha=0.25)
    return figure


def plot_dots(
    values: Mapping[str, Mapping[str, float]], *, xlabel: str, log: bool = False
) -> "Figure":
    """Return a figure with one line per row and one dot per name.

    Args:
        values: Numbers by row and name; rows may lack names.
        xlabel: What the numbers are.
        log: Whether the axis is logarithmic.
    """
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for row in values.values() for name in row))
    color = model_colors(names)
    figure, axis = plt.subplots(
        figsize=(8, 0.27 * len(values) + 1.3), layout=panel_layout(), squeeze=True
    )
    for name, marker in zip(names, cycle("osD^vP")):
        dots = [(row[name], place) for place, row in enumerate(values.values()) if name in row]
        x, y = zip(*dots, strict=True)
        axis.scatter(x, y, color=color[name], marker=marker, s=26, alpha=0.85, label=plain(name))
    axis.set(xlabel=xlabel, xscale="log" if log else "linear")
    if log:
        axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(values)), [plain(row) for row in values], fontsize=8)
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=min(len(names), 6), frameon=False)
    return figure


def model_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for every model, in the order of the names."""
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}


def panel_layout() -> "LayoutEngine":
    """Return a layout with space between the panels."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)


def add_legend(figure: "Figure", colors: Mapping[str, str]) -> None:
    """Add a legend of the models above all panels."""
    from matplotlib.lines import Line2D

    legend = figure.legend(
        [Line2D([], [], color=color) for color in colors.values()],
        [" "] * len(colors),
        loc="outside upper center",
        ncols=min(len(colors), 6),
        frameon=False,
    )
    # set afterwards: a legend leaves out names that begin with an underscore
    for text, name in zip(legend.get_texts(), colors, strict=True):
        text.set_text(plain(name))
