"""The picture of the first page: a training step with primal and with fused softmax attention."""

from collections.abc import Sequence

from primal_attention.tasks.study import Row
from primal_studies.kit.tables import Picture, grouped

__all__ = ["overview_picture"]

_LINES = {
    "softmax": ("softmax (fused)", "#8a8f98", "s-"),
    "primal": ("primal", "#d1495b", "o-"),
    "floor": ("projections alone", "black", ":"),
}
_PANELS = {
    "step_ms": ("time of a training step", "seconds", 1e-3),
    "peak_mb": ("peak memory of a training step", "MiB", 1.0),
}


def overview_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG with two panels, time and memory against length, for the widest shape.

    The title of a panel compares primal with softmax at the longest length that has both.

    Args:
        rows: Rows of ``primal bench layers`` about lengths.
    """
    mine = max(grouped(rows, "heads", "head_dim").items())[1]
    picture = Picture(2, size=(11, 4), is_spaced=False)
    for panel, (field, (title, unit, factor)) in enumerate(_PANELS.items()):
        axis = picture.axes[panel]
        found = {
            name: {r["n"]: factor * r[field] for r in mine if r["name"] == name and r.get(field)}
            for name in _LINES
        }
        for name, (label, color, style) in _LINES.items():
            n, value = sorted(found[name]), [found[name][n] for n in sorted(found[name])]
            axis.plot(n, value, style, color=color, label=label, markersize=4)
        both = set(found["softmax"]) & set(found["primal"])
        if both:
            ratio = found["softmax"][max(both)] / found["primal"][max(both)]
            title += f": softmax takes {ratio:.2g} × at {max(both):,} tokens"
        axis.set_title(title, fontsize=10)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
        picture.ticks(panel, sorted(found["primal"]), fontsize=8)
    picture.axes[0].legend(frameon=False, fontsize=9)
    return picture.png(grid=0.25)
