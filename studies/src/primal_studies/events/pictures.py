"""Pictures of the studies of events."""

from collections.abc import Mapping, Sequence

from primal_attention.tasks.study import Row
from primal_studies.kit.tables import Picture, grouped

__all__ = ["codes_picture", "peers_picture", "planted_picture"]


def codes_picture(points: Sequence[tuple[str, str, Sequence[Row]]]) -> bytes:
    """Return a PNG: accuracy and NLL of every row, its seeds as dots.

    Args:
        points: Name of a row, its reference time, and its seeds.
    """
    size = (10, 0.4 * len(points) + 1.4)
    picture = Picture(2, size=size, share="y", is_spaced=False)
    words = {
        "target": "the wait is known (t_ref=target)",
        "last_event": "the wait is not known (t_ref=last_event)",
        "–": "no time",
    }
    shade = dict(zip(words, picture.colors, strict=False))
    columns = (("accuracy", 100, "test accuracy, %"), ("nll", 1, "test NLL of the type, nats"))
    for panel, (key, factor, label) in enumerate(columns):
        for place, (_, t_ref, group) in enumerate(points):
            picture.seeds(panel, [factor * row[key] for row in group], place, shade[t_ref])
        picture.axes[panel].set_xlabel(label)
    picture.name_lines([name for name, _, _ in points])
    picture.legend({words[key]: shade[key] for key in words}, columns=3, marker="D")
    return picture.png(is_open=False)


def peers_picture(trained: Mapping[str, Sequence[Row]], timed: Sequence[Row]) -> bytes:
    """Return a PNG: log-likelihood against the cost of an event, and a step over the length.

    Args:
        trained: Seeds of every model.
        timed: Seconds of a step by model and length.
    """
    count = 2 if timed else 1
    picture = Picture(count, size=(5.5 * count, 4.2))
    from primal_attention.report.plots import model_colors

    by_model = grouped(timed, "model")
    color = model_colors([*trained, *by_model])
    for model, group in trained.items():
        costs = [row["event_microseconds"] for row in group]
        picture.seeds(0, costs, [row["log_likelihood"] for row in group], color[model], (4, 8))
    picture.axes[0].set(
        xscale="log",
        xlabel="µs of training per event",
        ylabel="test log-likelihood, nats per event",
        title="StackOverflow badges",
    )
    for model, group in by_model.items():
        points = sorted((row["n"], row["seconds"]) for row in group)
        picture.axes[1].plot(*zip(*points, strict=True), marker=".", color=color[model])
    if timed:
        picture.axes[1].set(
            xscale="log",
            yscale="log",
            xlabel="events of one sequence",
            ylabel="seconds of a training step",
            title="Cost over length",
        )
    return picture.png(is_open=False, models=color)


def planted_picture(panels: Sequence[tuple[str, Row]]) -> bytes:
    """Return a PNG: learned kernels over the planted ones.

    Args:
        panels: Title, and a row with its curves.
    """
    picture = Picture(len(panels), size=(5 * len(panels), 3.6), is_spaced=False)
    for axis, (title, row) in zip(picture.axes, panels, strict=True):
        axis.plot(row["curve_gaps"], row["curve_planted"], color="0.6", lw=5, label="planted")
        axis.plot(row["curve_gaps"], row["curve"], color=picture.colors[0], label="learned")
        axis.set(title=title, xlabel="gap Δ", ylabel="ψ(Δ)")
        axis.margins(y=0.15)
        axis.legend(frameon=False, ncols=2, loc="upper right")
    return picture.png(is_open=False)
