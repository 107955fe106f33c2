"""Pictures of a run: curves over epochs, and which classes are taken for which."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from primal_attention.analysis.spectrum import model_colors, name_models, spaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_confusion", "plot_curves", "plot_values"]

Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Panel, then line, then one number an epoch."""


def plot_curves(
    curves: Curves,
    *,
    dashed: Sequence[str] = (),
    log: Sequence[str] = (),
    chosen: Mapping[str, int] | None = None,
    xlabel: str = "epoch",
    start: int = 1,
) -> "Figure":
    """Draw one panel a quantity, with one line a name, over the epochs.

    Lines whose names share the part before the first comma share a colour, so that the training
    and the validation loss of one model belong together; the colours are named above the panels.

    Args:
        curves: Panel, line, numbers; a ``nan`` leaves a gap.
        dashed: Names of lines to dash.
        log: Panels with a logarithmic axis.
        chosen: Epoch to mark for a model.
        xlabel: What the horizontal axis counts.
        start: Number of the first epoch.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    color = model_colors(_model(name) for lines in curves.values() for name in lines)
    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(12 if columns > 1 else 6, 3.4 * rows + 0.4),
        squeeze=False,
        layout=spaced(),
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (panel, lines) in zip(axes.flat, curves.items(), strict=False):
        for name, values in lines.items():
            epochs = range(start, start + len(values))
            style = "--" if name in dashed else "-"
            marker = "o" if len(values) == 1 else None
            axis.plot(epochs, values, style, marker=marker, color=color[_model(name)])
        for name, epoch in (chosen or {}).items():
            if any(_model(line) == name for line in lines):
                axis.axvline(epoch, color=color[name], lw=1, ls=":", alpha=0.8)
        axis.set(title=panel, xlabel=xlabel)
        if panel in log:
            axis.set_yscale("log")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    name_models(figure, color)
    return figure


def _model(line: str) -> str:
    return line.split(",")[0]


def plot_confusion(
    counts: Mapping[str, Int[Tensor, "classes classes"]], labels: Sequence[str]
) -> "Figure":
    """Draw which class (row) was taken for which (column), one panel a model, two in a row.

    Shades are shares of the row; numbers are cases, written where they fit.

    Args:
        counts: Confusion matrix of each model, by its name.
        labels: Names of the classes, in their order.
    """
    from matplotlib import pyplot as plt

    columns = min(len(counts), 2)
    rows = -(-len(counts) // columns)
    size = min(max(0.36 * len(labels) + 1.6, 3.4), 6.0)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout=spaced()
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
        names = [labels[i] for i in ticks]
        turned = 90 if max(map(len, labels)) > 3 else 0
        axis.set_xticks(ticks, names, rotation=turned, fontsize=8)
        axis.set_yticks(ticks, names, fontsize=8)
        axis.set(title=name, xlabel="predicted", ylabel="true")
    return figure


def plot_values(pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> "Figure":
    """Draw predicted against true numbers, one panel a model.

    Args:
        pairs: True and predicted numbers of each model, by its name.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(pairs), figsize=(4 * len(pairs), 4), squeeze=False, layout=spaced()
    )
    for axis, (name, (true, predicted)) in zip(axes.flat, pairs.items(), strict=True):
        ends = min(true), max(true)
        axis.plot(ends, ends, color="#5b6472", lw=1, ls=":")
        axis.scatter(true, predicted, s=12, alpha=0.6, color="#c2410c")
        axis.set(title=name, xlabel="true", ylabel="predicted")
        axis.grid(alpha=0.25)
    return figure
