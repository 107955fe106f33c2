"""``primal bench rerank-cost``: time and memory of re-ranking one list, over its length.

The dual-tied encoder reads the list in blocks; the softmax encoder reads it at once with fused
attention. Both have the shape of the model of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, plot_lines

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RerankCostOptions", "RerankCostStudy"]

WIDTH, BLOCK = 128, 4096
"""Width of the vectors; candidates that are read at once."""
_SOFTMAX, _DUAL = "softmax, fused", "dual-tied, streamed"


@dataclass(frozen=True)
class RerankCostOptions:
    """Time and memory of re-ranking one list, dual-tied and softmax, over its length."""

    lengths: tuple[int, ...] = (512, 2048, 10_000, 30_000, 100_000)
    """Candidates of a list."""
    softmax_up_to: int = 10_000
    """Longest list for softmax attention."""
    repeats: int = 3
    """Timed calls of each."""
    seed: int = 0
    """Seed of weights and vectors."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "repeats")


class RerankCostStudy(Study[RerankCostOptions]):
    """One cell a length and kind of affinity."""

    name = "rerank-cost"
    Options = RerankCostOptions

    def cells(self, options: RerankCostOptions) -> Sequence[Cell]:
        """Return the cells, short lists first."""
        return [
            {
                "n": n,
                "affinity": affinity,
                "softmax": n <= options.softmax_up_to,
                "seed": options.seed,
            }
            for n in sorted(options.lengths)
            for affinity in ("inner", "both")
        ]

    def run(self, cell: Cell, options: RerankCostOptions, scratch: Path) -> Sequence[Row]:
        """Measure both encoders on one list."""
        import statistics

        import torch

        from primal_attention.training.cost import peak_mb, take_turns
        from primal_studies.kit.timing import machine

        with torch.no_grad():
            runs = _runs(cell)
            # counting memory is also the warm-up
            peaks = {name: peak_mb(run) for name, run in runs.items()}
            times = take_turns(runs, options.repeats, seconds=30.0)
        return [
            {
                "encoder": name,
                "seconds": round(statistics.median(times[name]), 4),
                "peak_mb": peaks[name],
                "repeats": len(times[name]),
                "machine": machine(),
            }
            for name in runs
        ]

    def describe(self, row: Row) -> str:
        """Return a row in one line."""
        return f"{row['n']:,} candidates, {row['affinity']}, {row['encoder']}: {row['seconds']} s"

    def tables(self, rows: Sequence[Row], options: RerankCostOptions) -> Mapping[str, str | bytes]:
        """Return time, memory, ratios and slopes, and a picture."""
        sizes = sorted({row["n"] for row in rows})
        found = {(row["affinity"], row["encoder"], row["n"]): row for row in rows}
        lines = list(dict.fromkeys((row["affinity"], row["encoder"]) for row in rows))
        table = [
            [_name(*line), *(_cell(found.get((*line, n))) for n in sizes), _slope(found, line)]
            for line in sorted(lines)
        ]
        for affinity in sorted({row["affinity"] for row in rows}):
            pairs = [
                (found.get((affinity, _SOFTMAX, n)), found.get((affinity, _DUAL, n))) for n in sizes
            ]
            ratios = [f"{a['seconds'] / b['seconds']:.1f}" if a and b else "–" for a, b in pairs]
            table.append([f"{_KERNELS[affinity]}: softmax over dual-tied", *ratios, ""])
        caption = (
            f"{rows[0]['machine']}; one list, vectors of width {WIDTH}, an encoder of the shape in "
            f"the package (width 64, 2 blocks, 64 anchors), one thread, median of at most "
            f"{max(r['repeats'] for r in rows)} calls in turns. Seconds of processor time, and in "
            "brackets the peak of memory in MiB beside the vectors. The slope is that of log time "
            "against log length from 2,048 candidates on. With both kernels each encoder also "
            "builds the graph of the first 2,048 candidates and compares all others with it."
        )
        panels = group_lines(
            (f"{title}, {_KERNELS[row['affinity']]}", row["encoder"], row["n"], row[key])
            for title, key in (("seconds", "seconds"), ("MiB", "peak_mb"))
            for row in rows
        )
        header = ["encoder", *(f"{n:,}" for n in sizes), "slope"]
        return {
            "table.md": page(caption, markdown_table(header, table)),
            "picture.png": plot_lines(
                panels, xlabel="candidates", ylabels=["cost"], dashed=["softmax"]
            ),
        }


_KERNELS = {"inner": "cosines", "both": "both kernels"}


def _name(affinity: str, encoder: str) -> str:
    return f"{_KERNELS[affinity]}: {encoder}"


def _cell(row: Row | None) -> str:
    return "–" if row is None else f"{row['seconds']:.3g} ({row['peak_mb']:,.0f})"


def _slope(found: Mapping[tuple[str, str, int], Row], line: tuple[str, str]) -> str:
    import math
    from statistics import linear_regression

    points = [
        (math.log(n), math.log(row["seconds"]))
        for (affinity, encoder, n), row in sorted(found.items())
        if (affinity, encoder) == line and n >= 2048 and row["seconds"] > 0
    ]
    if len(points) < 2:
        return "–"
    return f"{linear_regression(*zip(*points, strict=True)).slope:.2f}"


def _runs(cell: Cell) -> "dict[str, Callable[[], Tensor]]":
    """Return a call of each encoder on the same list."""
    import torch
    from torch.nn.functional import normalize

    from primal_attention.tasks.lists import ContextConfig, ContextEncoder

    torch.manual_seed(cell["seed"])
    tokens = normalize(torch.randn(cell["n"] + 1, WIDTH), dim=-1)

    def encoder(attention: str) -> ContextEncoder:
        config = ContextConfig(attention=attention, affinity=cell["affinity"])
        return ContextEncoder(config).eval()

    dual, softmax = encoder("primal-dual"), encoder("softmax")
    runs: dict[str, Callable[[], Tensor]] = {_DUAL: lambda: dual.score_stream(tokens.split(BLOCK))}
    if cell["softmax"]:
        runs[_SOFTMAX] = lambda: softmax(tokens[None]).scores
    return runs
