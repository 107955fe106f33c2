"""``primal bench adaptive-cost``: adaptive attention beside the fused softmax of torch.

One sequence, eight heads of 64, random tokens. Forward, forward and backward, the peak memory of
a layer's forward, and the time of a decoding step. Both take turns in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files, pivot, plot_lines

__all__ = ["AdaptiveCostOptions", "AdaptiveCostStudy"]

HEADS, WIDTH = 8, 64
PARTS = ("forward", "memory", "decode", "step")
SETTINGS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "adaptive, wide blocks": {"block": 64, "window": 1, "top": 4, "rank": 2},
}
"""The default options, and options that are faster and lose more."""
_STEPS = 64
"""Decoding steps of one turn."""


@dataclass(frozen=True)
class AdaptiveCostOptions:
    """Time and memory of adaptive attention over length, beside fused softmax."""

    parts: tuple[str, ...] = PARTS
    """Parts: forward, memory, decode, step."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768)
    """Tokens."""
    step_up_to: int = 8192
    """Longest sequence of a forward and backward."""
    decode: tuple[int, ...] = (2048, 32_768)
    """Tokens before the decoded ones."""
    repeats: int = 3
    """Turns."""
    threads: int = 1
    """Threads of torch; one thread is measured by its processor time, more by wall time."""

    def __post_init__(self) -> None:
        one_of(self, "parts", PARTS)
        at_least_one(self, "lengths", "decode", "repeats", "threads")


class AdaptiveCostStudy(Study[AdaptiveCostOptions]):
    """One cell a part, length and order; the decoding steps of all lengths are one cell."""

    name = "adaptive-cost"
    Options = AdaptiveCostOptions

    def cells(self, options: AdaptiveCostOptions) -> Sequence[Cell]:
        """Return the cells, short sequences first."""
        fixed = {"repeats": options.repeats, "threads": options.threads}
        cells: list[Cell] = []
        for part in (part for part in options.parts if part in ("forward", "step")):
            for n in sorted(options.lengths):
                if part == "forward" or n <= options.step_up_to:
                    cells += [{"part": part, "n": n, "causal": c, **fixed} for c in (True, False)]
        if "memory" in options.parts:
            cells += [{"part": "memory", "n": n} for n in sorted(options.lengths)]
        if "decode" in options.parts:
            cells.append({"part": "decode", "lengths": list(options.decode), **fixed})
        return cells

    def run(self, cell: Cell, options: AdaptiveCostOptions, scratch: Path) -> Row | Sequence[Row]:
        """Measure one part."""
        import torch

        torch.manual_seed(0)
        if cell["part"] == "memory":
            return _memory(cell["n"])
        return _decode(cell) if cell["part"] == "decode" else _time(cell)

    def tables(
        self, rows: Sequence[Row], options: AdaptiveCostOptions
    ) -> Mapping[str, str | bytes]:
        """Return the tables of all parts, and a picture of the speed."""
        parts = [
            *_speed_page([row for row in rows if row["part"] == "forward"], "Forward"),
            *_speed_page([row for row in rows if row["part"] == "step"], "Forward and backward"),
            *_memory_page([row for row in rows if row["part"] == "memory"]),
            *_decode_page([row for row in rows if row["part"] == "decode"]),
        ]
        files: Files = {"table.md": page(*parts)}
        timed = [row for row in rows if row["part"] == "forward"]
        if timed:
            files["picture.png"] = _picture(timed)
        return files


def _time(cell: Cell) -> list[Row]:
    """Return the time of softmax and of an adaptive sum, in turns."""
    import torch
    from torch import Tensor
    from torch.nn.functional import scaled_dot_product_attention

    from primal_attention.attention.adaptive import AdaptiveCore
    from primal_studies.kit.timing import machine, take_turns

    is_step, is_causal = cell["part"] == "step", cell["causal"]
    q, k, v = torch.randn(3, 1, HEADS, cell["n"], WIDTH).requires_grad_(is_step)
    cores = {name: AdaptiveCore(**settings) for name, settings in SETTINGS.items()}

    def run(attend: Callable[..., Tensor]) -> None:
        if is_step:
            attend(q, k, v, is_causal=is_causal).sum().backward()
            return
        with torch.no_grad():
            attend(q, k, v, is_causal=is_causal)

    rivals: dict[str, Callable[..., Tensor]] = {"softmax": scaled_dot_product_attention, **cores}
    runs = {name: partial(run, attend) for name, attend in rivals.items()}
    for once in runs.values():
        once()
    times = take_turns(runs, cell["repeats"], seconds=30)
    return [
        {
            "name": name,
            "best_ms": float(f"{1e3 * min(found):.4g}"),
            "median_ms": float(f"{1e3 * median(found):.4g}"),
            "machine": machine(),
        }
        for name, found in times.items()
    ]


def _memory(n: int) -> list[Row]:
    """Return the most memory of a layer's forward, and that of the outputs of its projections."""
    import torch

    from primal_attention.attention import create_attention
    from primal_studies.kit.timing import peak_mb

    outputs = 4 * n * HEADS * WIDTH * 4 / 2**20
    rows: list[Row] = []
    for name, settings in {"softmax": {}, **SETTINGS}.items():
        kind = name.partition(",")[0]
        layer = create_attention(kind, HEADS * WIDTH, HEADS, **settings).eval()
        x, peaks = torch.randn(1, n, HEADS * WIDTH), []
        for causal in (True, False):
            with torch.no_grad():
                peaks.append(peak_mb(partial(layer, x, is_causal=causal)))
        rows.append({"name": name, "outputs_mb": outputs, "peak_mb": max(peaks)})
    return rows


def _decode(cell: Cell) -> list[Row]:
    """Return the time of a decoding step after contexts of some lengths, in turns."""
    import torch

    from primal_attention.attention.adaptive import AdaptiveCore
    from primal_studies.kit.timing import machine, take_turns

    cores = {name: AdaptiveCore(**settings) for name, settings in SETTINGS.items()}
    states = {}
    with torch.no_grad():
        for n in cell["lengths"]:
            q, k, v = torch.randn(3, 1, HEADS, n, WIDTH)
            for name, core in cores.items():
                empty = core.init_state(k[:, :, :0], v[:, :, :0])
                states[name, n] = core.step(q, k, v, empty)[1]

    def run(name: str, n: int) -> None:
        with torch.no_grad():
            for q, k, v in torch.randn(_STEPS, 3, 1, HEADS, 1, WIDTH):
                _, states[name, n] = cores[name].step(q, k, v, states[name, n])

    times = take_turns({at: partial(run, *at) for at in states}, cell["repeats"])
    return [
        {
            "name": name,
            "n": n,
            "best_ms": float(f"{1e3 * min(found) / _STEPS:.4g}"),
            "median_ms": float(f"{1e3 * median(found) / _STEPS:.4g}"),
            "machine": machine(),
        }
        for (name, n), found in times.items()
    ]


def _options() -> str:
    return ", ".join(f"{key}={value}" for key, value in SETTINGS["adaptive, wide blocks"].items())


def _speed_page(rows: Sequence[Row], title: str) -> list[str]:
    if not rows:
        return []
    order = [{**row, "order": "causal" if row["causal"] else "all"} for row in rows]
    softmax = {(r["n"], r["causal"]): r for r in rows if r["name"] == "softmax"}

    def cell(row: Row) -> str:
        if row["name"] == "softmax":
            return f"{row['best_ms']:,.1f}"
        other = softmax[row["n"], row["causal"]]
        ratios = (other[key] / row[key] for key in ("best_ms", "median_ms"))
        return f"{row['best_ms']:,.1f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)} ×)"

    words = (
        f"{title} in ms, one sequence, {HEADS} heads of {WIDTH}; best of "
        f"{rows[0]['repeats']} turns in one process. *adaptive* has its default options, *wide "
        f"blocks* {_options()}. In brackets: how many times as fast as fused "
        f"softmax, by the best and by the median turn. {rows[0]['machine']}."
    )
    return [words, pivot(order, {"attention": "name", "order": "order"}, "n", cell)]


def _memory_page(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    words = (
        "Peak memory of the tensors of a layer's forward in MB, input and weights not counted; in "
        "brackets as a multiple of the outputs of its four projections."
    )
    lines = {"attention": "name"}

    def cell(row: Row) -> str:
        return f"{row['peak_mb']:,.0f} ({row['peak_mb'] / row['outputs_mb']:.2f})"

    return [words, pivot(rows, lines, "n", cell)]


def _decode_page(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    words = (
        f"A decoding step of {HEADS} heads of {WIDTH} after so many tokens, in ms; best of "
        f"{rows[0]['repeats']} turns of {_STEPS} steps. In brackets as a multiple of the step "
        f"after the fewest tokens, by the best and by the median turn. {rows[0]['machine']}."
    )
    fewest = min(row["n"] for row in rows)
    first = {row["name"]: row for row in rows if row["n"] == fewest}

    def cell(row: Row) -> str:
        ratios = (row[key] / first[row["name"]][key] for key in ("best_ms", "median_ms"))
        return f"{row['best_ms']:.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"

    return [words, pivot(rows, {"attention": "name"}, "n", cell)]


def _picture(rows: Sequence[Row]) -> bytes:
    """Return the time of a forward over length."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        title = "causal" if row["causal"] else "all tokens"
        points = panels.setdefault(title, {}).setdefault(row["name"], [])
        points.append((row["n"], row["best_ms"]))
    return plot_lines(panels, xlabel="tokens", ylabels=["forward, ms"])
