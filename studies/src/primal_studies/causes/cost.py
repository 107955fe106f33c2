"""``primal bench causal-cost``: a row of partial correlations, by hat matrix and by inverse.

Every token has ``s`` scores. The partial correlations of one token with all others, given the rest,
follow from the hat matrix of the scores in ``O(n s²)``, or from the inverse of the ``n × n``
covariance in ``O(n³)``. Both are computed from the same scores, in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, plot_lines, rows_table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CausalCostOptions", "CausalCostStudy", "dense_row"]

_RIDGE = 1e-3
_CAPTION = (
    "One row of partial correlations given all other tokens, {rank} scores a token, float64, "
    "processor time of one thread. 'hat': hat matrix and one row, with memory that earlier calls "
    "left; 'fresh': the same after all free memory went back to the system, as in a first call; "
    "'row': a further row of a hat matrix that exists. 'inverse': Cholesky factor of the "
    "covariance, its inverse, and the row. MiB: tensors made on the way."
)


@dataclass(frozen=True)
class CausalCostOptions:
    """Time and memory of partial correlations between tokens."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Numbers of tokens."""
    rank: int = 32
    """Scores of a token."""
    dense_up_to: int = 4096
    """Longest sequence whose covariance is inverted."""
    repeats: int = 5
    """Turns; the median counts."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "rank", "repeats")


class CausalCostStudy(Study[CausalCostOptions]):
    """One cell a length."""

    name = "causal-cost"
    Options = CausalCostOptions

    def cells(self, options: CausalCostOptions) -> Sequence[Cell]:
        """Return the cells, short sequences first."""
        return [
            {"n": n, "rank": options.rank, "dense": n <= options.dense_up_to}
            for n in options.lengths
        ]

    def run(self, cell: Cell, options: CausalCostOptions, scratch: Path) -> Row:
        """Return times, memory and the largest difference at one length."""
        import torch

        from primal_attention.analysis.causes.primal import HatMatrix
        from primal_attention.support.allocator import return_memory
        from primal_attention.training.cost import peak_mb, take_turns

        generator = torch.Generator().manual_seed(0)
        e = torch.randn(cell["n"], cell["rank"], generator=generator, dtype=torch.float64)
        hat, target = HatMatrix(e, ridge=_RIDGE), cell["n"] // 2
        runs: dict[str, Callable[[], Tensor]] = {
            "hat": lambda: HatMatrix(e, ridge=_RIDGE).row(target),
            "row": lambda: hat.row(target),
        }
        found = {"hat MiB": peak_mb(runs["hat"])}
        if cell["dense"]:
            runs["inverse"] = lambda: dense_row(e, target)
            found["inverse MiB"] = peak_mb(runs["inverse"])
            found["difference"] = float((dense_row(e, target) - hat.row(target)).abs().max())
        for run in runs.values():
            run()
        # inverses take long, so a slow one takes fewer turns
        times = take_turns(runs, options.repeats, seconds=20)

        def clear() -> None:
            return_memory()

        # new pages cost more than the arithmetic, so both states are measured
        times |= take_turns({"fresh": runs["hat"]}, options.repeats, before=clear)
        milliseconds = {f"{name} ms": 1e3 * median(times[name]) for name in times}
        return {name: float(f"{x:.3g}") for name, x in (milliseconds | found).items()}

    def tables(self, rows: Sequence[Row], options: CausalCostOptions) -> Mapping[str, str | bytes]:
        """Return one table, and a picture of time and memory."""
        columns = ["n", "hat ms", "fresh ms", "row ms", "inverse ms"]
        columns += ["hat MiB", "inverse MiB", "difference"]
        parts = [
            (panel, name, row["n"], row[f"{key} {unit}"])
            for panel, unit in (("time", "ms"), ("memory", "MiB"))
            for name, key in (
                ("hat matrix", "hat"),
                ("hat matrix, fresh memory", "fresh"),
                ("inverse", "inverse"),
            )
            for row in rows
            if f"{key} {unit}" in row
        ]
        return {
            "table.md": page(_CAPTION.format(**rows[0]), rows_table(rows, columns)),
            "picture.png": plot_lines(
                group_lines(parts), xlabel="tokens", ylabels=["ms, and MiB"], dashed=["fresh"]
            ),
        }


def dense_row(e: "Tensor", target: int) -> "Tensor":
    """Return partial correlations of one token by the inverse of the covariance of all.

    Example:
        >>> import torch
        >>> dense_row(torch.eye(3, dtype=torch.float64), 1).abs()
        tensor([0., 1., 0.], dtype=torch.float64)
    """
    import torch

    covariance = e @ e.T
    covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean())
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    scale = precision.diagonal().rsqrt()
    found = -precision[target] * scale[target] * scale
    found[target] = 1.0
    return found
