"""The pictures of a sweep and of the family."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from primal_attention.analysis.report import to_png
from primal_attention.bench.layer_rows import Measurement

if TYPE_CHECKING:
    from primal_attention.bench.family_table import Row

__all__ = ["plot_family", "plot_sweep"]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib; install it with: pip install 'primal-attention[analysis]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def plot_sweep(rows: Sequence[Measurement]) -> bytes:
    """Return a PNG with one column per shape: step time, and memory kept for backward if known."""
    plt = _pyplot()
    rows = [r for r in rows if r.mode == rows[0].mode]
    shapes = sorted({(r.heads, r.head_dim) for r in rows})
    names = list(dict.fromkeys(r.name for r in rows))
    shown = {"step_ms": "forward + backward, ms", "kept_mb": "kept for backward, MiB"}
    shown = {field: title for field, title in shown.items() if any(getattr(r, field) for r in rows)}
    size = (5.5 * len(shapes), 0.5 + 3.5 * len(shown))
    figure, axes = plt.subplots(len(shown), len(shapes), figsize=size, sharex=True, squeeze=False)
    for column, (heads, head_dim) in enumerate(shapes):
        for color, name in zip(plt.get_cmap("tab10").colors * 3, names, strict=False):
            style = {"color": color, "marker": "o", "markersize": 3.5, "label": name}
            if name == "floor":
                style.update(linestyle="--", color="black", label="projections alone")
            found = [r for r in rows if (r.name, r.heads) == (name, heads)]
            for axis, field in zip(axes[:, column], shown, strict=True):
                points = [(r.n, value) for r in found if (value := getattr(r, field))]
                axis.loglog([n for n, _ in points], [value for _, value in points], **style)
        axes[0, column].set_title(f"{heads} heads of {head_dim}")
        axes[-1, column].set_xlabel("tokens")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    for axis, title in zip(axes[:, 0], shown.values(), strict=True):
        axis.set_ylabel(title)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return _finish(figure, plt)


def plot_family(rows: Sequence["Row"], n: int = 4096) -> bytes:
    """Return a PNG: error against time at one length, and time against length.

    Lines on the left join the sizes that a mechanism was measured with; what computes its own
    definition has no error and stands below them.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.2))
    names = [name for name in dict.fromkeys(r.name for r in rows) if name != "floor"]
    colors = plt.get_cmap("tab20").colors
    style = {
        name: {"color": colors[i % 20], "marker": "os^Dv"[i // 4 % 5], "markersize": 5}
        for i, name in enumerate(names)
    }
    here = [r for r in rows if r.n == n and r.name != "floor"]
    if not here:
        here = [r for r in rows if r.n == max(row.n for row in rows) and r.name != "floor"]
    errors = [r.error for r in here if r.error > 0]
    ground = min(errors, default=1e-3) / 5
    for name in names:
        inexact = sorted(
            (r for r in here if r.name == name and r.error > 0), key=lambda r: r.step_ms
        )
        if inexact:
            points = [r.step_ms for r in inexact], [r.error for r in inexact]
            left.loglog(*points, **style[name], label=name)
        line = sorted((r for r in rows if (r.name, r.option) == (name, "")), key=lambda r: r.n)
        right.loglog([r.n for r in line], [r.step_ms for r in line], **style[name], label=name)
    exact = sorted((r for r in here if not r.option and r.error == 0), key=lambda r: r.step_ms)
    for group in _neighbours([r.step_ms for r in exact]):
        for i in group:
            left.loglog([exact[i].step_ms], [ground], **style[exact[i].name], linestyle="none")
        left.annotate(
            ", ".join(exact[i].name for i in group),
            (exact[group[0]].step_ms, ground),
            rotation=55,
            fontsize=7.5,
            xytext=(2, 5),
            textcoords="offset points",
        )
    floor = sorted((r for r in rows if r.name == "floor"), key=lambda r: r.n)
    right.loglog([r.n for r in floor], [r.step_ms for r in floor], "k--", label="projections alone")
    left.set_ylim(bottom=ground / 1.5)
    left.set_xlim(right=1.5 * max(r.step_ms for r in here))
    left.set_title(f"error against time, {here[0].n:,} tokens; lowest row: exact")
    left.set_xlabel("forward + backward, ms")
    left.set_ylabel("relative error of the output")
    right.set_title("time against length")
    right.set_xlabel("tokens")
    right.set_ylabel("forward + backward, ms")
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=7.5, ncol=2)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    return _finish(figure, plt)


def _neighbours(times: Sequence[float]) -> list[list[int]]:
    """Return which of some growing times stand too close to have a label each."""
    groups: list[list[int]] = []
    for i, time in enumerate(times):
        if groups and time < 1.15 * times[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _finish(figure: Any, plt: Any) -> bytes:
    image = to_png(figure)
    plt.close(figure)
    return image
