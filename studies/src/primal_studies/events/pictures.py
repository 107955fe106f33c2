"""Pictures of the studies of events."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from primal_attention.support.command import needs
from primal_attention.tasks.study import Row

__all__ = ["codes_picture", "peers_picture", "planted_picture"]


def _pyplot() -> Any:
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def codes_picture(points: Sequence[tuple[str, str, Sequence[Row]]]) -> bytes:
    """Return a PNG: accuracy and NLL of every row, its seeds as dots.

    Args:
        points: Name of a row, its reference time, and its seeds.
    """
    plt = _pyplot()
    from primal_attention.report.page import to_png
    from primal_attention.report.plots import COLORS

    words = {
        "target": "the wait is known (t_ref=target)",
        "last_event": "the wait is not known (t_ref=last_event)",
        "–": "no time",
    }
    shade = dict(zip(words, COLORS, strict=False))
    figure, axes = plt.subplots(
        1, 2, figsize=(10, 0.4 * len(points) + 1.4), sharey=True, layout="constrained"
    )
    labels = {"accuracy": "test accuracy, %", "nll": "test NLL of the type, nats"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for place, (_, t_ref, group) in enumerate(points):
            values = [(100 if key == "accuracy" else 1) * row[key] for row in group]
            axis.plot(values, [place] * len(values), "o", ms=4, alpha=0.4, color=shade[t_ref])
            axis.plot(fmean(values), place, "D", ms=7, color=shade[t_ref])
        axis.grid(alpha=0.3)
        axis.set_xlabel(label)
    axes[0].set_yticks(range(len(points)), [name for name, _, _ in points])
    axes[0].invert_yaxis()
    handles = [plt.Line2D([], [], color=c, marker="D", ls="") for c in shade.values()]
    figure.legend(handles, words.values(), loc="outside upper center", ncols=3, frameon=False)
    return to_png(figure)


def peers_picture(trained: Mapping[str, Sequence[Row]], timed: Sequence[Row]) -> bytes:
    """Return a PNG: log-likelihood against the cost of an event, and a step over the length.

    Args:
        trained: Seeds of every model.
        timed: Seconds of a step by model and length.
    """
    plt = _pyplot()
    from primal_attention.report.page import to_png
    from primal_attention.report.plots import add_legend, model_colors, panel_layout

    color = model_colors([*trained, *(row["model"] for row in timed)])
    count = 2 if timed else 1
    figure, axes = plt.subplots(
        1, count, figsize=(5.5 * count, 4.2), squeeze=False, layout=panel_layout()
    )
    left, right = axes[0, 0], axes[0, -1]
    for model, group in trained.items():
        costs = [row["event_microseconds"] for row in group]
        values = [row["log_likelihood"] for row in group]
        left.plot(costs, values, "o", ms=4, alpha=0.4, color=color[model])
        left.plot(fmean(costs), fmean(values), "D", ms=8, color=color[model])
    left.set(
        xscale="log",
        xlabel="µs of training per event",
        ylabel="test log-likelihood, nats per event",
        title="StackOverflow badges",
    )
    if timed:
        for model in dict.fromkeys(row["model"] for row in timed):
            points = sorted((row["n"], row["seconds"]) for row in timed if row["model"] == model)
            right.plot(*zip(*points, strict=True), marker=".", color=color[model])
        right.set(
            xscale="log",
            yscale="log",
            xlabel="events of one sequence",
            ylabel="seconds of a training step",
            title="Cost over length",
        )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    add_legend(figure, color)
    return to_png(figure)


def planted_picture(panels: Sequence[tuple[str, Row]]) -> bytes:
    """Return a PNG: learned kernels over the planted ones.

    Args:
        panels: Title, and a row with its curves.
    """
    plt = _pyplot()
    from primal_attention.report.page import to_png
    from primal_attention.report.plots import COLORS

    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (title, row) in zip(axes[0], panels, strict=True):
        axis.plot(row["curve_gaps"], row["curve_planted"], color="0.6", lw=5, label="planted")
        axis.plot(row["curve_gaps"], row["curve"], color=COLORS[0], label="learned")
        axis.set(title=title, xlabel="gap Δ", ylabel="ψ(Δ)")
        axis.grid(alpha=0.3)
        axis.margins(y=0.15)
        axis.legend(frameon=False, ncols=2, loc="upper right")
    return to_png(figure)
