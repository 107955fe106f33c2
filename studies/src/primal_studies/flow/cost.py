"""``primal bench flow-cost``: what it costs to read flow between modalities in a primal layer.

Energy, contribution and singular directions come from scores. The same energy from the explicit
``n × n`` kernel, at once and by blocks of rows, stands beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, pivot, plot_lines

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.hosts import CapturedScores

__all__ = ["FlowCostOptions", "FlowCostStudy"]

DIM, HEADS, RANK, WORDS, BLOCK = 64, 4, 16, 64, 512
_EXPLICIT = ("explicit matrix", "explicit, row blocks")


@dataclass(frozen=True)
class FlowCostOptions:
    """Time and memory of flow between modalities in a primal layer, over length."""

    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384)
    """Tokens of a sequence; 64 of them are words."""
    quadratic_up_to: int = 16_384
    """Longest sequence for the explicit matrix."""
    repeats: int = 5
    """Timed calls of each reading."""
    seed: int = 0
    """Seed of parameters and tokens."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "repeats")


class FlowCostStudy(Study[FlowCostOptions]):
    """One cell a length."""

    name = "flow-cost"
    Options = FlowCostOptions

    def cells(self, options: FlowCostOptions) -> Sequence[Cell]:
        """Return the cells, short lengths first."""
        return [
            {"n": n, "explicit": n <= options.quadratic_up_to, "seed": options.seed}
            for n in sorted(options.lengths)
        ]

    def run(self, cell: Cell, options: FlowCostOptions, scratch: Path) -> Sequence[Row]:
        """Measure all readings at one length."""
        import statistics

        import torch

        from primal_attention.training.cost import peak_mb, take_turns
        from primal_studies.kit.timing import machine

        with torch.no_grad():
            runs = _readings(cell)
            energy = runs["energy"]()
            errors = {
                name: float((runs[name]() - energy).norm() / energy.norm())
                for name in _EXPLICIT
                if name in runs
            }
            peaks = {name: peak_mb(run) for name, run in runs.items()}
            times = take_turns(runs, options.repeats, seconds=60.0)
        return [
            {
                "reading": name,
                "ms": round(1e3 * statistics.median(times[name]), 2),
                "peak_mb": peaks[name],
                "difference": errors.get(name),
                "repeats": len(times[name]),
                "machine": machine(),
            }
            for name in runs
        ]

    def tables(self, rows: Sequence[Row], options: FlowCostOptions) -> Mapping[str, str | bytes]:
        """Return time and memory by length, and a picture of both."""
        worst = max((row["difference"] or 0.0 for row in rows), default=0.0)
        first = rows[0]
        caption = (
            f"{first['machine']}; one sequence of {WORDS} words and image tokens, a dual-tied "
            f"primal layer of width {DIM} with {HEADS} heads of rank {RANK}, float64, one thread, "
            f"median of {first['repeats']} calls in turns, fewer where a reading took a minute, "
            f"seed {first['seed']}. Milliseconds, and in brackets the peak of memory in MiB. The "
            "explicit matrix is formed head by head. "
            f"Energies from scores and from the matrix differ by at most {worst:.0e}."
        )
        panels = group_lines(
            (panel, row["reading"], row["n"], row[key])
            for panel, key in (("time, ms", "ms"), ("peak of memory, MiB", "peak_mb"))
            for row in rows
        )
        return {
            "table.md": page(caption, pivot(rows, {"reading": "reading"}, "n", _COSTS)),
            "picture.png": plot_lines(
                panels, xlabel="tokens", ylabels=["cost"], dashed=list(_EXPLICIT)
            ),
        }


_COSTS = "{ms:,.1f} ({peak_mb:,.1f})"


def _readings(cell: Cell) -> "dict[str, Callable[[], Tensor]]":
    """Return the readings by name; each returns numbers by modality."""
    import torch

    from primal_attention.analysis.flow import (
        block_energy,
        contribution_shares,
        direction_shares,
        membership,
        split_scores,
    )
    from primal_attention.attention import create_attention
    from primal_attention.hosts import capture

    torch.manual_seed(cell["seed"])
    module: Any = create_attention("primal-dual", DIM, HEADS, rank=RANK).eval()
    layer = capture(module, torch.randn(1, cell["n"], DIM))[0]
    members = membership((torch.arange(cell["n"]) >= WORDS).long(), 2)

    def contribution() -> "Tensor":
        parts = split_scores(module, layer.real_inputs(0), members)
        shares = [contribution_shares(side) for side in parts]
        return torch.stack([torch.einsum("na,hnc->hac", members, s) for s in shares])

    runs: "dict[str, Callable[[], Tensor]]" = {
        "energy": lambda: block_energy(layer.scores(), members, members),
        "contribution": contribution,
        "directions": lambda: direction_shares(layer.scores(), members, members).alignment,
    }
    if cell["explicit"]:
        n = cell["n"]
        runs["explicit matrix"] = lambda: _dense_energy(layer.scores(), members, n)
        runs["explicit, row blocks"] = lambda: _dense_energy(layer.scores(), members, BLOCK)
    return runs


def _dense_energy(scores: "CapturedScores", members: "Tensor", size: int) -> "Tensor":
    """Return the energy of every block of the kernel, head by head and by blocks of rows."""
    import torch

    found = torch.zeros(len(scores.e), members.shape[1], members.shape[1], dtype=torch.float64)
    for head, (e, r, lam) in enumerate(zip(*scores, strict=True)):
        for start in range(0, len(e), size):
            rows = slice(start, start + size)
            kernel = (e[rows] * lam) @ r.T
            found[head] += members[rows].T @ (kernel.square_() @ members)
            del kernel  # before the next one is made
    return found
