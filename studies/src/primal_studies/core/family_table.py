"""The tables of the family: what can be read from its rows, and how it is shown.

A row is one attention with one set of options at one length. It has ``name``, ``option`` (what
differs from the defaults, such as ``num_features=32``), ``n``, the costs of
:func:`~primal_studies.kit.timing.layer_costs`, ``error`` (relative error of the output against
the exact kernel; zero for what is exact) and ``average`` (that of a plain average of the values).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import linear_regression

from primal_attention.support.output import page
from primal_attention.tasks.study import Row
from primal_studies.kit.tables import Column, columns_table, group_lines, pivot, plot_lines

__all__ = [
    "MIDDLE",
    "choice_table",
    "crossing",
    "family_page",
    "family_picture",
    "growth",
    "growth_name",
    "page_of",
]

MIDDLE = 4096
"""Length at which options, memory and error are compared."""


def _by_length(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Return rows with default options by name and length; the first of several counts."""
    return {(r["name"], r["n"]): r for r in reversed(rows) if not r["option"]}


def growth(rows: Sequence[Row], name: str, shortest: int = MIDDLE) -> float | None:
    """Return the slope of log time against log length from ``shortest`` on, none without two.

    Example:
        >>> rows = [{"name": "a", "option": "", "n": n, "step_ms": n**2} for n in (4096, 8192)]
        >>> growth(rows, "a")
        2.0
    """
    found = {n: r for (a, n), r in _by_length(rows).items() if a == name and n >= shortest}
    if len(found) < 2:
        return None
    times = [math.log(r["step_ms"]) for r in found.values()]
    return round(linear_regression([math.log(n) for n in found], times).slope, 3)


def growth_name(slope: float | None, floor: float | None) -> str:
    """Return what a slope means, given that of the projections, which are linear by nature."""
    if slope is None:
        return "not measured"
    above = slope - max(floor or 1.0, 1.0)
    if above <= 0.08:
        return "linear"
    return "n log n" if above <= 0.25 else "more than n log n"


def crossing(rows: Sequence[Row], name: str) -> int | None:
    """Return the shortest length from which a mechanism is clearly faster than fused softmax.

    By a tenth at least, there and at every longer length: two that cost the same differ by less
    from run to run.

    Example:
        >>> def row(name, n, ms): return {"name": name, "option": "", "n": n, "step_ms": ms}
        >>> softmax = [row("softmax", n, n * n) for n in (8, 16, 32)]
        >>> crossing([*softmax, *(row("a", n, 100 + n) for n in (8, 16, 32))], "a")
        16
    """
    times = {key: r["step_ms"] for key, r in _by_length(rows).items()}
    shared = sorted(n for other, n in times if other == name and ("softmax", n) in times)
    best = None
    for n in reversed(shared):
        if times[name, n] > 0.9 * times["softmax", n]:
            break
        best = n
    return best


def family_page(rows: Sequence[Row]) -> str:
    """Return times by length, growth and errors, and what larger options buy."""
    table, floor = _by_length(rows), growth(rows, "floor")
    lengths = sorted({n for _, n in table})
    names = sorted(dict.fromkeys(name for name, _ in table), key=lambda a: _last(table, a, lengths))
    first, level = rows[0], "—" if floor is None else f"{floor:.2f}"
    by_length = [table[key] for name in names for key in table if key[0] == name]
    times = pivot(
        [{**row, "attention": f"`{row['name']}`"} for row in by_length],
        {"attention": "attention"},
        "n",
        "{step_ms:,.1f}",
    )
    parts = [
        f"{first['machine']}; width {first['dim']}, {first['num_heads']} heads, one sequence.",
        "Forward and backward, milliseconds, by number of tokens:",
        times,
        f"Slope of log time over log length from {MIDDLE:,} tokens on (the projections alone: "
        f"{level}); the length from which a step is at least a tenth faster than with fused "
        f"softmax; at {MIDDLE:,} tokens time and memory kept for backward as multiples of fused "
        "softmax, and the error of the output against the exact kernel. Where the error is above "
        "the last column, a plain average of the values is the better estimate:",
        _summary(rows, [name for name in names if name != "floor"]),
    ]
    larger = [row for row in rows if row["option"]]
    if larger:
        parts.append(f"More features, landmarks or projections at {MIDDLE:,} tokens:")
        parts.append(columns_table(larger, _LARGER))
    return page(*parts)


_LARGER = {
    "attention": "`{name}`",
    "option": "{option}",
    "step, ms": "{step_ms:,.1f}",
    "kept, MiB": "{kept_mb:,.0f}",
    "error": "{error:.3g}",
}


def _summary(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return growth, costs and error of each attention."""
    from primal_attention.attention import attention_entry
    from primal_studies.core.exact import stands_for

    table, floor = _by_length(rows), growth(rows, "floor")

    def grows(name: str) -> str:
        is_quadratic = "²" in attention_entry(name).cost
        return "quadratic" if is_quadratic else growth_name(growth(rows, name), floor)

    def error(name: str) -> str:
        middle = table.get((name, MIDDLE))
        if stands_for(name) is None:
            return "exact"
        return "—" if middle is None else f"{middle['error']:.3g}"

    def average(name: str) -> str:
        middle = table.get((name, MIDDLE))
        return "" if stands_for(name) is None or middle is None else f"{middle['average']:.3g}"

    columns: dict[str, Column] = {
        "attention": lambda name: f"`{name}`",
        "cost": lambda name: attention_entry(name).cost,
        "slope": lambda name: "—" if (g := growth(rows, name)) is None else f"{g:.2f}",
        "growth": grows,
        "faster from": lambda name: _since(rows, name),
        "time": lambda name: _share(table, name, "step_ms"),
        "memory": lambda name: _share(table, name, "kept_mb"),
        "stands for": lambda name: stands_for(name) or "its own",
        "error": error,
        "average": average,
    }
    return columns_table(names, columns)


def _since(rows: Sequence[Row], name: str) -> str:
    n = crossing(rows, name)
    return "—" if n is None or name == "softmax" else f"{n:,}"


def _share(table: Mapping[tuple[str, int], Row], name: str, key: str) -> str:
    """Return time or memory as a multiple of fused softmax."""
    row, fused = (table.get((a, MIDDLE)) for a in (name, "softmax"))
    return "—" if row is None or fused is None else f"{row[key] / fused[key]:.2f}"


def family_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: time against length, and error against time at one length.

    Lines of the second panel join the options that an attention was measured with. Attentions that
    compute their own definition have no error and are not in it.
    """
    times = (
        ("forward + backward in ms, by tokens", name, n, row["step_ms"])
        for (name, n), row in sorted(_by_length(rows).items())
    )
    errors = (
        (f"error by the same, {MIDDLE:,} tokens", r["name"], r["step_ms"], r["error"])
        for r in sorted(rows, key=lambda r: r["step_ms"])
        if r["n"] == MIDDLE and r["error"]
    )
    panels = group_lines([*times, *errors])
    return plot_lines(panels, xlabel="", ylabels=[""], dashed=["floor"])


def choice_table(rows: Sequence[Row]) -> str:
    """Return capabilities, cost, and what was measured, of every registered attention."""
    from primal_attention.attention import attention_entry, list_attentions
    from primal_studies.core.exact import stands_for

    table = _by_length(rows)

    def can(capability: str) -> Column:
        return lambda name: "✓" if getattr(attention_entry(name).capabilities, capability) else "–"

    def error(name: str) -> str:
        kernel, row = stands_for(name), table.get((name, MIDDLE))
        if kernel is None:
            return "exact"
        return f"{row['error']:.2g} of {kernel}" if row else "—"

    columns: dict[str, Column] = {
        "attention": lambda name: f"[`{name}`](../reference/attention/{page_of(name)})",
        "cost": lambda name: attention_entry(name).cost,
        "causal": can("causal"),
        "cross": can("cross"),
        "state": can("stateful"),
        "positions": can("relative_position"),
        "time": lambda name: _share(table, name, "step_ms"),
        "memory": lambda name: _share(table, name, "kept_mb"),
        "faster from": lambda name: _since(rows, name),
        "error": error,
    }
    return columns_table(list_attentions(), columns) + "\n"


def page_of(name: str) -> str:
    """Return the file of ``docs/reference/attention`` that describes a mechanism.

    Example:
        >>> page_of("kernelized-log"), page_of("primal-relative")
        ('kernelized.md', 'primal_relative.md')
    """
    own = ("primal-relative", "primal-sparse")
    stem = name if name in own else name.partition("-")[0]
    return f"{stem.replace('-', '_')}.md"


def _last(
    table: dict[tuple[str, int], Row], name: str, lengths: Sequence[int]
) -> tuple[int, float]:
    """Return a key that puts the fastest at the longest length first, the unmeasured last."""
    for late, n in enumerate(reversed(lengths)):
        if (name, n) in table:
            return late, table[name, n]["step_ms"]
    return len(lengths), 0.0
