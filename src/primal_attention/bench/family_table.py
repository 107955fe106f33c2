"""The table of the family: its rows, what can be read from them, and how it is shown."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import linear_regression

from primal_attention.attention import attention_entry, list_attentions
from primal_attention.bench.exact import stands_for
from primal_attention.output import markdown_table

__all__ = [
    "MIDDLE",
    "Row",
    "choice_table",
    "crossing",
    "growth",
    "page_of",
    "read_caption",
    "read_rows",
    "report",
    "verdict",
]

MIDDLE = 4096
"""The length at which budgets, memory and error are compared."""


@dataclass
class Row:
    """One mechanism with one set of options at one length."""

    name: str
    option: str
    """What differs from the defaults, ``num_features=32`` say."""
    n: int
    forward_ms: float
    """Median time of one forward without gradients."""
    step_ms: float
    """Median time of one forward and backward."""
    peak_mb: float
    """Most that tensors took at once in such a step; zero where that was not measured."""
    kept_mb: float
    """What the forward kept for backward."""
    error: float
    """Error of the output against the exact kernel, relative; zero for what is exact."""
    average: float
    """Error of a plain average of the values in its place; zero likewise."""
    repeats: int


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a saved table, none if there is no file."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    kinds = {field.name: field.type for field in fields(Row)}
    return [
        Row(**{key: kinds[key](value) for key, value in record.items()})  # type: ignore[operator]
        for record in csv.DictReader(lines)
    ]


def read_caption(path: Path) -> str:
    """Return the first line of a saved table: where and how it was measured."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").rstrip()


def growth(rows: Sequence[Row], name: str, shortest: int = MIDDLE) -> float | None:
    """Return the slope of log time against log length from ``shortest`` on, none without two.

    Example:
        >>> rows = [Row("a", "", n, 0, n**2, 0, 0, 0, 0, 1) for n in (4096, 8192)]
        >>> growth(rows, "a")
        2.0
    """
    found = [r for r in rows if (r.name, r.option) == (name, "") and r.n >= shortest]
    if len(found) < 2:
        return None
    line = linear_regression([math.log(r.n) for r in found], [math.log(r.step_ms) for r in found])
    return round(line.slope, 3)


def verdict(slope: float | None, floor: float | None) -> str:
    """Return what a slope means, given that of the projections, which are linear by nature."""
    if slope is None:
        return "not measured"
    above = slope - max(floor or 1.0, 1.0)
    if above <= 0.08:
        return "linear"
    return "n log n" if above <= 0.25 else "more than n log n"


def crossing(rows: Sequence[Row], name: str, field: str = "step_ms") -> int | None:
    """Return the shortest length from which a mechanism is clearly faster than fused softmax.

    By a tenth at least, there and at every longer length: two that cost the same differ by less
    from run to run.

    Example:
        >>> def row(name, n, ms): return Row(name, "", n, ms, ms, 0, 0, 0, 0, 1)
        >>> softmax = [row("softmax", n, n * n) for n in (8, 16, 32)]
        >>> crossing([*softmax, *(row("a", n, 100 + n) for n in (8, 16, 32))], "a")
        16
    """
    times = {(r.name, r.n): getattr(r, field) for r in rows if not r.option}
    shared = sorted(n for other, n in times if other == name and ("softmax", n) in times)
    best = None
    for n in reversed(shared):
        if times[name, n] > 0.9 * times["softmax", n]:
            break
        best = n
    return best


def report(rows: Sequence[Row], caption: str) -> str:
    """Return the tables of a run as Markdown."""
    default = [r for r in rows if not r.option]
    lengths = sorted({r.n for r in default})
    table = {(r.name, r.n): r for r in default}
    names = list(dict.fromkeys(r.name for r in default))
    floor = growth(rows, "floor")
    ranked = sorted(names, key=lambda a: _last(table, a, lengths))

    def cell(name: str, n: int) -> str:
        return f"{table[name, n].step_ms:,.1f}" if (name, n) in table else "—"

    times = [[f"`{a}`", *(cell(a, n) for n in lengths)] for a in ranked]
    summary = []
    for name in ranked:
        if name == "floor":
            continue
        slope, middle = growth(rows, name), table.get((name, MIDDLE))
        since, kernel = crossing(rows, name), stands_for(name)
        fused = table.get(("softmax", MIDDLE))
        shares = ["—"] * 2
        if middle and fused:
            shares = [
                f"{middle.step_ms / fused.step_ms:.2f}",
                f"{middle.kept_mb / fused.kept_mb:.2f}",
            ]
        summary.append(
            [
                f"`{name}`",
                attention_entry(name).cost,
                "—" if slope is None else f"{slope:.2f}",
                "quadratic" if "²" in attention_entry(name).cost else verdict(slope, floor),
                "—" if name == "softmax" or since is None else f"{since:,}",
                *shares,
                kernel or "its own",
                "exact" if kernel is None else f"{middle.error:.3g}" if middle else "—",
                "" if kernel is None or middle is None else f"{middle.average:.3g}",
            ]
        )
    budgets = [
        [f"`{r.name}`", r.option, f"{r.step_ms:,.1f}", f"{r.kept_mb:,.0f}", f"{r.error:.3g}"]
        for r in rows
        if r.option
    ]
    parts = [
        caption,
        "Forward and backward, milliseconds, by number of tokens:",
        markdown_table(["attention", *(f"{n:,}" for n in lengths)], times),
        f"Slope of log time over log length from {MIDDLE:,} tokens on (the projections alone: "
        f"{'—' if floor is None else f'{floor:.2f}'}), the length from which a step is a "
        f"tenth faster than with fused softmax, or more, and at {MIDDLE:,} tokens time and memory "
        "kept for backward as multiples of fused softmax and the error of the output against the "
        "exact kernel. An error above the last column is that of an estimate worse than a plain "
        "average:",
        markdown_table(
            [
                "attention",
                "cost",
                "slope",
                "growth",
                "faster from",
                "time",
                "memory",
                "stands for",
                "error",
                "average",
            ],
            summary,
        ),
    ]
    if budgets:
        parts += [
            f"What more features, landmarks or projections buy at {MIDDLE:,} tokens:",
            markdown_table(["attention", "option", "step, ms", "kept, MiB", "error"], budgets),
        ]
    return "\n\n".join(parts) + "\n"


def choice_table(rows: Sequence[Row]) -> str:
    """Return capabilities, cost, and what was measured, of every registered attention."""
    table = {(r.name, r.n): r for r in rows if not r.option}
    fused, marks = table.get(("softmax", MIDDLE)), {True: "✓", False: "–"}
    cells = []
    for name in list_attentions():
        entry, row = attention_entry(name), table.get((name, MIDDLE))
        can, kernel, since = entry.capabilities, stands_for(name), crossing(rows, name)
        flags = (can.causal, can.cross, can.stateful, can.relative_position)
        cells.append(
            [
                f"[`{name}`](attention/{page_of(name)})",
                entry.cost,
                *(marks[flag] for flag in flags),
                f"{row.step_ms / fused.step_ms:.2f}" if row and fused else "—",
                f"{row.kept_mb / fused.kept_mb:.2f}" if row and fused else "—",
                "—" if since is None or name == "softmax" else f"{since:,}",
                "exact" if kernel is None else f"{row.error:.2g} of {kernel}" if row else "—",
            ]
        )
    header = ["attention", "cost", "causal", "cross", "state", "positions"]
    header += ["time", "memory", "faster from", "error"]
    return markdown_table(header, cells) + "\n"


def page_of(name: str) -> str:
    """Return the file of ``docs/attention`` that describes a mechanism.

    Example:
        >>> page_of("kernelized-log"), page_of("primal-relative")
        ('kernelized.md', 'primal_relative.md')
    """
    stem = name if name == "primal-relative" else name.partition("-")[0]
    return f"{stem.replace('-', '_')}.md"


def _last(
    table: dict[tuple[str, int], Row], name: str, lengths: Sequence[int]
) -> tuple[int, float]:
    """Return a key that puts the fastest at the longest length first, the unmeasured last."""
    for late, n in enumerate(reversed(lengths)):
        if (name, n) in table:
            return late, table[name, n].step_ms
    return len(lengths), 0.0
