"""``primal bench rerank-cost``: time and memory of re-ranking one list, over its length.

The dual-tied encoder reads the list in blocks; the softmax encoder reads it at once with fused
attention. Both have the shape of the model of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import exponent, group_lines, grouped, pivot, plot_lines

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
        order = (_DUAL, _SOFTMAX)
        ordered = sorted(rows, key=lambda r: (r["affinity"], order.index(r["encoder"])))
        lines = [{**row, "line": _name(row), "cell": _COSTS.format_map(row)} for row in ordered]
        both = grouped(ordered, "affinity", "n").values()
        slow = [{**pair[0], "line": _ratio_name(pair[0]), "cell": _ratio(pair)} for pair in both]
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
        table = pivot(
            [*lines, *slow], {"encoder": "line"}, "n", "{cell}", missing="–", last={"slope": _slope}
        )
        return {
            "table.md": page(caption, table),
            "picture.png": plot_lines(
                panels, xlabel="candidates", ylabels=["cost"], dashed=["softmax"]
            ),
        }


_KERNELS = {"inner": "cosines", "both": "both kernels"}


def _name(row: Row) -> str:
    return f"{_KERNELS[row['affinity']]}: {row['encoder']}"


def _ratio_name(row: Row) -> str:
    return f"{_KERNELS[row['affinity']]}: softmax over dual-tied"


def _ratio(pair: Sequence[Row]) -> str:
    seconds = {row["encoder"]: row["seconds"] for row in pair}
    return f"{seconds[_SOFTMAX] / seconds[_DUAL]:.1f}" if len(seconds) == 2 else "–"


_COSTS = "{seconds:.3g} ({peak_mb:,.0f})"


def _slope(rows: Sequence[Row]) -> str:
    if "over" in rows[0]["line"]:
        return ""
    long = [(r["n"], r["seconds"]) for r in rows if r["n"] >= 2048 and r["seconds"] > 0]
    return f"{exponent(long):.2f}" if len(long) > 1 else "–"


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
