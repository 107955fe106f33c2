"""Tables of rows, and pictures: what a study shows is a list of columns and a few marks."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any, Literal

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.tasks.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "GREY",
    "Files",
    "Picture",
    "bold",
    "bullets",
    "columns_table",
    "dots_picture",
    "exponent",
    "group_lines",
    "grouped",
    "mean_of",
    "number",
    "pivot",
    "plot_lines",
    "rows_table",
    "spread",
    "tables_by_name",
]

Files = dict[str, str | bytes]
"""Pages and pictures by name."""
Points = list[tuple[float, float]]
Panels = dict[str, dict[str, Points]]
Column = str | Callable[[Any], object]
"""Format of a cell, such as ``"{error:.3f}"``, or a function of the item of its line."""

GREY = "#5b6472"
"""Colour of what is only compared with, and of guide lines."""


# numbers


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Return rows by the values of some columns, in the order of the first of each.

    Args:
        rows: Rows.
        keys: One column, whose values are the keys; or several, and tuples are.

    Example:
        >>> list(grouped([{"n": 4, "k": 1}, {"n": 2, "k": 1}, {"n": 4, "k": 2}], "n"))
        [4, 2]
    """
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = row[keys[0]] if len(keys) == 1 else tuple(row[name] for name in keys)
        found.setdefault(key, []).append(row)
    return found


def spread(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Return the mean over seeds and, of several, their standard deviation.

    Example:
        >>> spread([0.5, 0.7], 1, 100), spread([0.5], 2), spread([], 2)
        ('60.0 ± 14.1', '0.50', '–')
    """
    if not values:
        return "–"
    shown = f"{factor * mean(values):.{digits}f}"
    return shown if len(values) < 2 else f"{shown} ± {factor * stdev(values):.{digits}f}"


def mean_of(key: str, digits: int = 1, factor: float = 1.0) -> Callable[[Sequence[Row]], str]:
    """Return a column of groups of rows: the mean of a key over seeds, and its deviation.

    Example:
        >>> mean_of("error", 2)([{"error": 0.5}, {"error": 0.7}])
        '0.60 ± 0.14'
    """
    return lambda rows: spread([row[key] for row in rows if key in row], digits, factor)


def number(value: object, digits: int = 3) -> str:
    """Return a float with a number of digits, anything else as it is, and a dash for nothing.

    Example:
        >>> number(0.12345), number(12), number(None)
        ('0.123', '12', '—')
    """
    if value is None:
        return "—"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def exponent(points: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the logarithm of a cost over that of the length.

    Example:
        >>> round(exponent([(1, 3), (2, 6), (4, 12)]), 6)
        1.0
    """
    import numpy as np

    x, y = np.log(np.array(list(points), dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


# tables


def bold(text: str, best: str) -> str:
    """Return a number as it is shown, in bold if it is the best."""
    return f"**{text}**" if text == best else text


def bullets(lines: Sequence[str]) -> str:
    """Return a Markdown list, wrapped at 120 columns."""
    return "\n".join(
        textwrap.fill(
            f"- {line}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
        for line in lines
    )


def columns_table(
    items: Iterable[Any], columns: Mapping[str, Column] | Sequence[tuple[str, Column]]
) -> str:
    """Return a Markdown table with one line an item.

    Args:
        items: Rows, groups of rows, or whatever the functions of the columns take. The first row
            of a group stands for what its rows share, so a format shows that one.
        columns: Title and content of every column; pairs if titles are repeated.

    Example:
        >>> print(columns_table([{"n": 4096}], {"tokens": "{n:,}", "twice": lambda r: 2 * r["n"]}))
        | tokens | twice |
        |--------|-------|
        | 4,096  | 8192  |
    """
    pairs = list(columns.items() if isinstance(columns, Mapping) else columns)
    body = [[_cell(item, content) for _, content in pairs] for item in items]
    return markdown_table([name for name, _ in pairs], body)


def _cell(item: Any, content: Column) -> object:
    if not isinstance(content, str):
        return content(item)
    return content.format_map(item[0] if isinstance(item, list) else item)


def pivot(
    rows: Iterable[Row],
    lines: Mapping[str, str],
    across: str,
    cell: Column,
    *,
    title: str = "{:,}",
    values: Iterable[Any] | None = None,
    missing: str = "—",
    last: Mapping[str, Callable[[list[Row]], object]] | None = None,
) -> str:
    """Return a Markdown table with a column for every value of one key.

    Args:
        rows: Rows.
        lines: Title and key of the columns at the left, whose values make the lines.
        across: Key whose values are the other columns.
        cell: What is shown of the first row of a cell.
        title: How a value is written in the head.
        values: Values of ``across``; by default all of them, sorted.
        missing: What is shown where there is no row.
        last: Columns at the right, computed from all rows of a line.

    Example:
        >>> rows = [{"name": "a", "n": 1, "ms": 2.0}, {"name": "a", "n": 1000, "ms": 4.0}]
        >>> print(pivot(rows, {"layer": "name"}, "n", "{ms:.1f}"))
        | layer | 1   | 1,000 |
        |-------|-----|-------|
        | a     | 2.0 | 4.0   |
    """
    rows = list(rows)
    values = sorted({row[across] for row in rows}) if values is None else list(values)
    show = cell.format_map if isinstance(cell, str) else cell
    body = []
    for group in grouped(rows, *lines.values()).values():
        found = {row[across]: row for row in reversed(group)}
        cells = [show(found[value]) if value in found else missing for value in values]
        ends = [end(group) for end in (last or {}).values()]
        body.append([*(group[0][key] for key in lines.values()), *cells, *ends])
    return markdown_table([*lines, *(title.format(value) for value in values), *(last or {})], body)


def rows_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return some columns of rows as a Markdown table; floats have three digits.

    Example:
        >>> print(rows_table([{"n": 4, "error": 0.12345}], ["n", "error"]))
        | n | error |
        |---|-------|
        | 4 | 0.123 |
    """
    return markdown_table(columns, [[_text(row.get(name)) for name in columns] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return "—"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tables_by_name(
    rows: Sequence[Row], captions: Mapping[str, str], hidden: Sequence[str] = ()
) -> Files:
    """Return one page a table; the column ``table`` of a row names its table.

    Args:
        rows: Rows of all tables; a table without rows has no page.
        captions: Caption of each table; may use the columns of its first row, as ``{tokens}``.
        hidden: Columns that are not shown.
    """
    files: Files = {}
    for name, caption in captions.items():
        mine = [row for row in rows if row["table"] == name]
        if mine:
            columns = [c for c in mine[0] if c not in ("table", *hidden)]
            files[f"{name}.md"] = page(caption.format(**mine[0]), rows_table(mine, columns))
    return files


# pictures


class Picture:
    """A figure with its panels, which is finished as a PNG.

    Args:
        columns: Panels in a row.
        rows: Rows of panels.
        size: Width and height in inches.
        share: Axes that all panels share: none, the vertical, or both.
        is_spaced: Whether there is room between the panels.
    """

    def __init__(
        self,
        columns: int = 1,
        rows: int = 1,
        *,
        size: tuple[float, float],
        share: Literal["", "y", "xy"] = "",
        is_spaced: bool = True,
    ) -> None:
        with needs("analysis", "A picture"):
            import matplotlib
        matplotlib.use("agg")
        from matplotlib import pyplot as plt

        from primal_attention.report.plots import COLORS, panel_layout

        self.figure, axes = plt.subplots(
            rows,
            columns,
            figsize=size,
            sharex="x" in share,
            sharey="y" in share,
            squeeze=False,
            layout=panel_layout() if is_spaced else "constrained",
        )
        self.axes: list[Axes] = list(axes.flat)
        """Panels, row by row."""
        self.colors: tuple[str, ...] = COLORS
        """Colours in the order in which they are used."""

    def legend(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        where: Literal["outside upper center", "outside lower center"] = "outside upper center",
        columns: int = 4,
        marker: str = "",
    ) -> None:
        """Add a legend outside of the panels.

        Args:
            labels: Colours by label; by default the labels of the first panel.
            where: Place.
            columns: Labels in a row.
            marker: Shape of the dots that stand for colours; lines by default.
        """
        from matplotlib.lines import Line2D

        handles, names = self.axes[0].get_legend_handles_labels()
        if labels is not None:
            line = "" if marker else "-"
            handles = [Line2D([], [], color=c, marker=marker, ls=line) for c in labels.values()]
            names = list(labels)
        self.figure.legend(handles, names, loc=where, ncols=columns, frameon=False)

    def name_lines(self, names: Sequence[str], panel: int = 0) -> None:
        """Name the places 0, 1, … at the left of a panel, from the top down."""
        self.axes[panel].set_yticks(range(len(names)), names)
        self.axes[panel].invert_yaxis()

    def ticks(self, panel: int, places: Sequence[float], title: str = "{:,}", **style: Any) -> None:
        """Mark some places of a horizontal axis, and no others."""
        self.axes[panel].set_xticks(places, [title.format(x) for x in places], **style)
        self.axes[panel].minorticks_off()

    def seeds(
        self,
        panel: int,
        x: Sequence[float],
        y: float | Sequence[float],
        color: str,
        sizes: tuple[float, float] = (4, 7),
        alpha: float = 0.4,
    ) -> None:
        """Draw seeds as dots and their mean as a diamond, at one height or at several."""
        heights = [y] * len(x) if isinstance(y, int | float) else y
        self.axes[panel].plot(x, heights, "o", ms=sizes[0], alpha=alpha, color=color)
        if x:
            self.axes[panel].plot(fmean(x), fmean(heights), "D", ms=sizes[1], color=color)

    def png(
        self,
        *,
        grid: float = 0.3,
        along: Literal["both", "x", "y"] = "both",
        is_open: bool = True,
        models: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the picture as PNG.

        Args:
            grid: How dark the grid is; none by zero.
            along: Directions of the grid.
            is_open: Whether panels have no line above and at the right.
            models: Colours by name, for a legend above all panels.
        """
        from primal_attention.report import to_png
        from primal_attention.report.plots import add_legend

        for axis in self.axes:
            if grid:
                axis.grid(alpha=grid, axis=along)
            if is_open:
                axis.spines[["top", "right"]].set_visible(False)
        if models:
            add_legend(self.figure, models)
        return to_png(self.figure)


def dots_picture(
    points: Iterable[tuple[str, str, float]], xlabel: str, *, is_log: bool = False
) -> bytes:
    """Return a PNG with one line a row and one dot a name, from points ``(row, name, x)``."""
    from primal_attention.report import plot_dots, to_png

    values: dict[str, dict[str, float]] = {}
    for row, name, x in points:
        values.setdefault(row, {})[name] = x
    return to_png(plot_dots(values, xlabel=xlabel, log=is_log))


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
    columns = columns or len(panels)
    lines = -(-len(panels) // columns)
    picture = Picture(columns, lines, size=(5 * columns, 3.8 * lines), is_spaced=False)
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colors = plt.get_cmap("tab20" if len(names) > 10 else "tab10")
    handles = {}
    for number, (title, panel) in enumerate(panels.items()):
        axis = picture.axes[number]
        for name, points in panel.items():
            place = names.index(name)
            known = sorted({(x, y) for x, y in points if y})
            (handles[name],) = axis.plot(
                [x for x, _ in known],
                [y for _, y in known],
                "--" if any(part in name for part in dashed) else "-",
                color="black" if name == "floor" else colors(place % 20),
                marker="os^Dv"[place // 4 % 5],
                markersize=3.5,
            )
        axis.set(xscale="log", yscale="log" if is_log else "linear", title=title, xlabel=xlabel)
        places = sorted({x for points in panel.values() for x, _ in points})
        if len(places) < 9:
            picture.ticks(number, places, fontsize=8)
        axis.set_ylabel(ylabels[min(number // columns, len(ylabels) - 1)])
    for axis in picture.axes[len(panels) :]:
        axis.set_axis_off()
    picture.figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", fontsize=8, frameon=False
    )
    return picture.png(is_open=False)
