"""Tables of rows, and pictures with lines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page

__all__ = ["group_lines", "plot_lines", "rows_table", "tables_by_name"]

Points = list[tuple[float, float]]
Panels = dict[str, dict[str, Points]]


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return some columns of rows as a Markdown table; floats have three digits.

    Example:
        >>> print(rows_table([{"n": 4, "error": 0.12345}], ["n", "error"]))
        | n | error |
        |---|-------|
        | 4 | 0.123 |
    """
    return markdown_table(columns, [[_text(row.get(name)) for name in columns] for row in rows])


def _text(value: Any) -> str:
    if value is None:
        return "—"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tables_by_name(
    rows: Sequence[Mapping[str, Any]], captions: Mapping[str, str], hidden: Sequence[str] = ()
) -> dict[str, str | bytes]:
    """Return one page a table; the column ``table`` of a row names its table.

    Args:
        rows: Rows of all tables; a table without rows has no page.
        captions: Caption of each table; may use the columns of its first row, as ``{tokens}``.
        hidden: Columns that are not shown.
    """
    files: dict[str, str | bytes] = {}
    for name, caption in captions.items():
        mine = [row for row in rows if row["table"] == name]
        if mine:
            columns = [c for c in mine[0] if c not in ("table", *hidden)]
            files[f"{name}.md"] = page(caption.format(**mine[0]), rows_table(mine, columns))
    return files


def group_lines(points: Iterable[tuple[str, str, float, float]]) -> Panels:
    """Return points ``(panel, line, x, y)`` grouped as :func:`plot_lines` takes them.

    Example:
        >>> group_lines([("time", "primal", 128, 2.0), ("time", "primal", 256, 4.0)])
        {'time': {'primal': [(128, 2.0), (256, 4.0)]}}
    """
    panels: Panels = {}
    for panel, line, x, y in points:
        panels.setdefault(panel, {}).setdefault(line, []).append((x, y))
    return panels


def plot_lines(
    panels: Mapping[str, Mapping[str, Points]],
    *,
    xlabel: str,
    ylabels: Sequence[str],
    columns: int | None = None,
    dashed: Sequence[str] = (),
    is_log: bool = True,
) -> bytes:
    """Return a PNG: panels with one line a name over a logarithmic axis.

    Args:
        panels: Title, then name, then points ``(x, y)``; points without a ``y`` are left out.
        xlabel: What the horizontal axes show.
        ylabels: What the vertical axes show: one label for all, or one a row.
        columns: Panels in a row; by default all of them.
        dashed: Names, or parts of them, of lines to dash.
        is_log: Whether the vertical axes are logarithmic.
    """
    with needs("analysis", "A picture"):
        import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from primal_attention.report.page import to_png

    columns = columns or len(panels)
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colors = plt.get_cmap("tab20" if len(names) > 10 else "tab10")
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 3.8 * lines), squeeze=False, layout="constrained"
    )
    for number, (axis, (title, panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        for name, points in panel.items():
            place = names.index(name)
            style = "--" if any(part in name for part in dashed) else "-"
            known = sorted({(x, y) for x, y in points if y})
            axis.plot(
                [x for x, _ in known],
                [y for _, y in known],
                style,
                color="black" if name == "floor" else colors(place % 20),
                marker="os^Dv"[place // 4 % 5],
                markersize=3.5,
                label=name,
            )
        axis.set(xscale="log", yscale="log" if is_log else "linear", title=title, xlabel=xlabel)
        places = sorted({x for points in panel.values() for x, _ in points})
        if len(places) < 9:
            axis.set_xticks(places, [f"{x:,}" for x in places], fontsize=8)
            axis.minorticks_off()
        axis.set_ylabel(ylabels[min(number // columns, len(ylabels) - 1)])
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    return to_png(figure)
