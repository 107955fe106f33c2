"""``python -m primal_attention.bench.family``: every registered attention, its time and its error.

Time and memory of one layer at growing lengths, all mechanisms in one process and interleaved. The
error is that of the mechanism's output against the kernel it stands for, computed exactly on the
same queries, keys and values: softmax for FAVOR+, Nyströmformer and Linformer, the Gaussian kernel
for Skyformer, the series ``f(q·k)`` for SchoenbAt, the weighted exponential for kernelized
attention. Everything else computes its own definition and has none.

Rows are saved as they arrive; a second call with the same ``--out`` measures what is missing.
``--update docs/choosing.md`` writes the table of that page from what was saved.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from primal_attention.analysis.memory import PeakMemory, kept_for_backward
from primal_attention.attention import (
    Attention,
    Core,
    MultiHeadAttention,
    PrimalAttention,
    attention_entry,
    create_attention,
    ksvd_loss,
    list_attentions,
)
from primal_attention.attention.favor import FavorCore
from primal_attention.attention.features import slots
from primal_attention.attention.gaussian import GaussianCore
from primal_attention.attention.kernelized import KernelizedCore
from primal_attention.attention.linformer import LinformerCore
from primal_attention.attention.nystromformer import NystromformerCore
from primal_attention.attention.schoenbat import SchoenbatCore, center_l2
from primal_attention.attention.skyformer import SkyformerCore
from primal_attention.bench.allocator import keep_memory
from primal_attention.bench.layers import ProjectionFloor
from primal_attention.bench.options import checked, names, numbers, positive
from primal_attention.functional.nystrom import gaussian_attention, token_convolution
from primal_attention.output import hardware, markdown_table, to_csv, write_atomically

__all__ = [
    "BUDGETS",
    "Plan",
    "Row",
    "choice_table",
    "crossing",
    "exact_rows",
    "growth",
    "main",
    "measure",
    "output_error",
    "page_of",
    "plan_rows",
    "read_caption",
    "read_rows",
    "report",
    "run",
    "stands_for",
    "tokens",
    "update_choice",
    "verdict",
]

LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 65536)
MIDDLE = 4096
"""The length at which budgets, memory and error are compared."""
BUDGETS: dict[str, tuple[str, tuple[int, ...]]] = {
    "favor": ("num_features", (32, 128, 512)),
    "kernelized": ("num_features", (16, 32, 128)),
    "kernelized-log": ("num_features", (8, 32)),
    "linformer": ("num_projections", (32, 128, 512)),
    "nystromformer": ("num_landmarks", (16, 64, 256)),
    "schoenbat": ("num_features", (128, 256, 512)),
    "skyformer": ("num_landmarks", (32, 128, 512)),
    "skyformer-learned": ("num_landmarks", (32, 128, 512)),
}
"""The option that buys accuracy for time, and how much of it the plot shows."""
EXPLICIT_LIMIT = 4096
"""Tokens up to which a layer that forms its matrix is run."""
SAMPLED = 256
"""Queries whose exact outputs are computed."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    lengths: Sequence[int] = LENGTHS
    """Sequence lengths."""
    names: Sequence[str] = ()
    """Mechanisms; all registered ones by default."""
    dim: int = 256
    """Model width."""
    num_heads: int = 4
    """Heads."""
    repeats: int = 5
    """Timed repeats; fewer where one takes seconds."""
    limit: float = 40.0
    """Seconds that one step may be expected to take; what needs longer is left out."""
    seed: int = 0
    """Seed of parameters and tokens."""


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


class _Contestant(NamedTuple):
    name: str
    option: str
    layer: nn.Module


def tokens(n: int, dim: int, seed: int = 0) -> Float[Tensor, "1 n c"]:
    """Return one sequence whose neighbours are alike and whose contents recur.

    A chain over 64 normal centres that moves on at every eighth token, plus noise of a third; the
    entries have variance one.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(64, dim, generator=generator)
    moves = torch.rand(n, generator=generator) < 1 / 8
    visited = torch.randint(64, (n + 1,), generator=generator)
    noise = torch.randn(n, dim, generator=generator)
    return ((centres[visited[moves.cumsum(0)]] + noise / 3) / (10 / 9) ** 0.5)[None]


def stands_for(name: str) -> str | None:
    """Return the kernel that a mechanism approximates, or ``None`` if it is its own definition.

    Example:
        >>> stands_for("favor"), stands_for("linear")
        ('softmax', None)
    """
    layer = create_attention(name, 16, 2, device="meta")
    core = layer.core if isinstance(layer, MultiHeadAttention) else None
    return next((kernel for kind, kernel, _ in _EXACT if isinstance(core, kind)), None)


def exact_rows(
    core: Core,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    rows: Int[Tensor, " r"],
) -> Float[Tensor, "b h r v"] | None:
    """Return the outputs at some queries by the kernel that ``core`` stands for, none if exact."""
    for kind, _, compute in _EXACT:
        if isinstance(core, kind):
            return compute(core, q, k, v, rows)
    return None


def _softmax(core: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return scaled_dot_product_attention(q[:, :, rows], k, v)


def _gaussian(core: GaussianCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    points = core.points(q[:, :, rows]), core.points(k)
    return gaussian_attention(*points, v, normalize=core.normalize)


def _series(core: SchoenbatCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    root = core.temperature.sqrt()[:, None, None]
    weights = core.features.gram(center_l2(q[:, :, rows]) * root, center_l2(k) * root)
    return core.finish(weights @ v / weights.sum(-1, keepdim=True))


def _lagged(core: KernelizedCore, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    q, k = core.units(q[:, :, rows]), core.units(k)
    at = core.position.places(slots(k)[0])
    weights = (q @ k.mT).exp() * core.position.weight(at - at[rows][:, None])
    return weights @ v / weights.sum(-1, keepdim=True)


_EXACT: tuple[tuple[type[Core], str, Callable[..., Tensor]], ...] = (
    (FavorCore, "softmax", _softmax),
    (NystromformerCore, "softmax", _softmax),
    (LinformerCore, "softmax", _softmax),
    (SkyformerCore, "Gaussian kernel", _gaussian),
    (SchoenbatCore, "series f(q·k)", _series),
    (KernelizedCore, "c(j−i) exp(q̂·k̂)", _lagged),
)


@torch.no_grad()
def output_error(
    layer: nn.Module, x: Float[Tensor, "1 n c"], sharpness: float = 1.0
) -> tuple[float, float]:
    """Return the relative error of the heads' outputs, and that of a plain average in their place.

    Args:
        layer: Any attention; the error of one that is exact is zero.
        x: Tokens.
        sharpness: Factor on the scores: queries and keys are multiplied by its root.

    Example:
        >>> output_error(create_attention("linear", 16, 2), torch.randn(1, 9, 16))
        (0.0, 0.0)
    """
    if not isinstance(layer, MultiHeadAttention):
        return 0.0, 0.0
    q, k, v = (layer._split(p(x)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = q * sharpness**0.5, k * sharpness**0.5
    rows = torch.linspace(0, x.shape[1] - 1, min(SAMPLED, x.shape[1])).round().long()
    exact = exact_rows(layer.core, q, k, v, rows)
    if exact is None:
        return 0.0, 0.0
    got = layer.core(q, k, v)[:, :, rows]
    if isinstance(layer.core, NystromformerCore) and layer.core.conv is not None:
        # the convolution that Nyströmformer adds is no part of the kernel
        got = got - token_convolution(v, layer.core.conv)[:, :, rows]
    average = v.mean(2, keepdim=True)
    size = exact.norm()
    return float((got - exact).norm() / size), float((average - exact).norm() / size)


def plan_rows(plan: Plan) -> dict[int, list[tuple[str, str]]]:
    """Return the pairs of name and option to measure at each length."""
    names = list(plan.names) or ["floor", *list_attentions()]
    for name in names:
        if name != "floor":
            attention_entry(name)
    table: dict[int, list[tuple[str, str]]] = {}
    for n in sorted(plan.lengths):
        table[n] = [(name, "") for name in names if n <= EXPLICIT_LIMIT or "explicit" not in name]
        if n == MIDDLE:
            for name in names:
                option, sizes = BUDGETS.get(name, ("", ()))
                table[n] += [(name, f"{option}={size}") for size in sizes]
    return table


def _build(name: str, option: str, plan: Plan) -> nn.Module:
    torch.manual_seed(plan.seed)
    if name == "floor":
        return ProjectionFloor(plan.dim)
    key, _, value = option.partition("=")
    return create_attention(name, plan.dim, plan.num_heads, **({key: int(value)} if key else {}))


def _run(layer: nn.Module, x: Tensor) -> Any:
    # static weights mix tokens in causal order only
    is_static = isinstance(layer, PrimalAttention) and layer.weights == "static"
    return layer(x, is_causal=True) if is_static else layer(x)


def _step(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    outputs = _run(layer, x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seeds = [torch.ones_like(y) for y in outputs]
    if isinstance(layer, Attention) and layer.capabilities.aux_loss:
        outputs.append(0.1 * ksvd_loss(layer))
        seeds.append(torch.ones(()))
    torch.autograd.backward(outputs, seeds)


def _infer(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        _run(layer.eval(), x)
    layer.train()


def _milliseconds(
    run: Callable[[nn.Module, Tensor], None],
    layer: nn.Module,
    x: Tensor,
    clock: Callable[[], float],
) -> float:
    start = clock()
    run(layer, x)
    return (clock() - start) * 1e3


def measure(
    wanted: Sequence[tuple[str, str]],
    n: int,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Return one row for each pair of name and option at one length, timed in turns.

    Example:
        >>> row = measure([("favor", "num_features=8")], 20, Plan(dim=16, num_heads=2, repeats=1))
        >>> row[0].n, row[0].error > 0
        (20, True)
    """
    contestants = [_Contestant(a, b, _build(a, b, plan)) for a, b in wanted]
    x = tokens(n, plan.dim, plan.seed).requires_grad_()
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for name, option, layer in contestants:
        _infer(layer, x)
        _step(layer, x)
        times[name, option] = [], []
    for turn in range(plan.repeats):
        for name, option, layer in contestants:
            forward, step = times[name, option]
            if not turn or sum(step) < 1e3 * plan.limit / 20:
                forward.append(_milliseconds(_infer, layer, x, clock))
                step.append(_milliseconds(_step, layer, x, clock))
    rows = []
    for name, option, layer in contestants:
        forward, step = times[name, option]
        peak, kept = _memory(layer, x)
        error, average = output_error(layer, x.detach())
        rows.append(
            Row(
                name=name,
                option=option,
                n=n,
                forward_ms=round(median(forward), 3),
                step_ms=round(median(step), 3),
                peak_mb=round(peak / 2**20, 2),
                kept_mb=round(kept / 2**20, 2),
                error=float(f"{error:.3g}"),
                average=float(f"{average:.3g}"),
                repeats=len(step),
            )
        )
    return rows


def _memory(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with PeakMemory() as memory:
        _step(layer, x)
    return memory.peak, kept_for_backward(lambda: _run(layer, x), [x, *layer.parameters()])


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


def _expected(rows: Iterable[Row], name: str, n: int) -> float:
    """Return how many seconds a step should take, from the last length measured."""
    shorter = [row for row in rows if (row.name, row.option) == (name, "") and row.n < n]
    if not shorter:
        return 0.0
    last = max(shorter, key=lambda row: row.n)
    power = 2 if name != "floor" and "²" in attention_entry(name).cost else 1.2
    return last.step_ms / 1e3 * (n / last.n) ** power


def run(
    plan: Plan, path: Path, *, seconds: float = math.inf, clock: Callable[[], float]
) -> list[Row]:
    """Measure what a saved table lacks, and save after every length; stop when time is up.

    Rows that were measured elsewhere or otherwise are not mixed with new ones.
    """
    facts = {**hardware(), "width": plan.dim, "heads": plan.num_heads, "batch": 1}
    caption = ", ".join(f"{key}: {value}" for key, value in facts.items())
    start, same = time.perf_counter(), path.exists() and caption == read_caption(path)
    rows = read_rows(path) if same else []
    for n, wanted in plan_rows(plan).items():
        found = {(row.name, row.option) for row in rows if row.n == n}
        missing = [
            pair
            for pair in wanted
            if pair not in found and _expected(rows, pair[0], n) < plan.limit
        ]
        if not missing:
            continue
        needed = sum(_expected(rows, name, n) for name, _ in missing) * 4
        if time.perf_counter() - start + needed > seconds:
            print(f"  … no time left for {n} tokens; call again", file=sys.stderr, flush=True)
            break
        print(f"  … {n} tokens, {len(missing)} layers", file=sys.stderr, flush=True)
        rows += measure(missing, n, plan, clock=clock)
        write_atomically(path, to_csv([asdict(row) for row in rows], caption))
    return rows


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


_START, _END = "<!-- family: start -->\n", "<!-- family: end -->\n"


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


def update_choice(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table between its two marks replaced."""
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError(
            f"The page has no place for the table; put the lines {_START.strip()!r} and "
            f"{_END.strip()!r} where it belongs."
        )
    return before + _START + choice_table(rows) + _END + after


def _last(
    table: dict[tuple[str, int], Row], name: str, lengths: Sequence[int]
) -> tuple[int, float]:
    """Return a key that puts the fastest at the longest length first, the unmeasured last."""
    for late, n in enumerate(reversed(lengths)):
        if (name, n) in table:
            return late, table[name, n].step_ms
    return len(lengths), 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m primal_attention.bench.family",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=numbers, help="lengths")
    parser.add_argument("--names", type=names, help="mechanisms")
    parser.add_argument("--dim", type=positive, help="model width")
    parser.add_argument("--num-heads", type=positive, help="heads")
    parser.add_argument("--repeats", type=positive, help="timed repeats")
    parser.add_argument("--limit", type=float, help="seconds that one step may take")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before this is up")
    parser.add_argument("--threads", type=positive, default=2, help="torch threads")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of this thread, for busy machines; --threads 1",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was saved")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="where to save")
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="measure nothing; renew the table in a page"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, then write the table and the plot."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    threads, out, minutes, own, fresh, page = (
        options.pop(key) for key in ("threads", "out", "minutes", "cpu_time", "fresh", "update")
    )
    if page is not None:
        rows = read_rows(out / "family.csv")
        write_atomically(page, update_choice(page.read_text("utf-8"), rows))
        return 0
    options["lengths"] = options.pop("n")
    keep_memory()
    torch.set_num_threads(threads)
    clock = time.thread_time if own else time.perf_counter
    plan = checked(
        parser, lambda: Plan(**{key: value for key, value in options.items() if value is not None})
    )
    checked(parser, lambda: plan_rows(plan))
    if fresh:
        (out / "family.csv").unlink(missing_ok=True)
    rows = run(plan, out / "family.csv", seconds=60 * minutes, clock=clock)
    text = report(rows, read_caption(out / "family.csv"))
    print(text)
    write_atomically(out / "family.md", text)

    from primal_attention.bench.plot import plot_family

    write_atomically(out / "family.png", plot_family(rows))
    print(f"Saved family.csv, family.md and family.png in {out}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
