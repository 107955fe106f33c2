"""``primal bench ksvd``: time, memory and accuracy of the kernel SVD solvers.

The kernel is ``(⟨x, y⟩ + 1)²`` between two different data sets of ``n`` rows. It has 231 explicit
features, so that thin QR gives its exact spectrum at any size; the other solvers do not know them.
Every measurement runs once, in a process of its own; its peak memory includes the interpreter.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from primal_attention.command import progress
from primal_attention.settings import at_least_one

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Measurement", "Plan", "main", "measure"]

_SOLVERS = ("dense", "qr", "matrix_free", "nystrom")
_COLUMNS = 20


class Measurement(NamedTuple):
    """One solver on one size."""

    solver: str
    n: int
    seconds: float
    peak_mb: float
    """Most resident memory of the process, interpreter and libraries included."""
    singular_values: list[float]


def _data(n: int) -> "tuple[Tensor, Tensor]":
    import torch

    generator = torch.Generator().manual_seed(n)
    scale = torch.linspace(1.0, 0.1, _COLUMNS, dtype=torch.float64)
    x, y = (
        torch.randn(n, _COLUMNS, generator=generator, dtype=torch.float64) * scale for _ in range(2)
    )
    return x, y + 0.3


def _quadratic_features(x: "Tensor") -> "Tensor":
    """Return ``φ`` with ``⟨φ(x), φ(y)⟩ = (⟨x, y⟩ + 1)²``."""
    import torch

    extended = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    i, j = torch.triu_indices(extended.shape[1], extended.shape[1])
    weight = torch.sqrt(2 - (i == j).to(x.dtype))
    return extended[:, i] * extended[:, j] * weight


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        # unlike the maximum of getrusage, this does not remember the parent process
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(solver: str, n: int, rank: int = 16) -> Measurement:
    """Run one solver in this process and return what it took."""
    import torch
    from torch import Tensor

    from primal_attention.ksvd import (
        KernelTriplets,
        dense_svd,
        feature_svd,
        matrix_free_svd,
        named_kernel,
        nystrom_svd,
    )

    kernel = named_kernel("polynomial", gamma=1.0, degree=2, coef0=1.0)
    generator = torch.Generator().manual_seed(0)
    solvers: dict[str, Callable[[Tensor, Tensor], KernelTriplets]] = {
        "dense": lambda x, y: dense_svd(kernel(x, y), rank),
        "qr": lambda x, y: feature_svd(_quadratic_features(x), _quadratic_features(y), rank),
        "matrix_free": lambda x, y: matrix_free_svd(kernel, x, y, rank, generator=generator),
        "nystrom": lambda x, y: nystrom_svd(kernel, x, y, rank, generator=generator),
    }
    solve = solvers[solver]
    x, y = _data(n)
    solve(x[:300], y[:300])  # warm-up
    start = time.perf_counter()
    found = solve(x, y)
    seconds = time.perf_counter() - start
    return Measurement(solver, n, seconds, _peak_mb(), found.singular_values.tolist())


def _measure_apart(solver: str, n: int, rank: int) -> Measurement:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(measure, solver, n, rank).result()


def _error(found: Measurement, exact: Measurement) -> float:
    pairs = zip(found.singular_values, exact.singular_values, strict=True)
    return max(abs(ours - truth) / truth for ours, truth in pairs)


@dataclass(frozen=True)
class Plan:
    """Time, memory and accuracy of the solvers of the asymmetric kernel SVD."""

    lengths: tuple[int, ...] = (5000, 20000, 50000)
    """Numbers of rows."""
    rank: int = 16
    """Singular triplets."""
    dense_up_to: int = 5000
    """Most rows of the dense solver."""
    out: Path = Path("outputs/ksvd")
    """Folder of the results."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "rank")


def main(plan: Plan) -> None:
    """Measure every solver at every size, print a table, save CSV and JSON."""
    from primal_attention.output import (
        hardware,
        markdown_table,
        to_csv,
        to_json,
        write_atomically,
    )

    records = []
    for n in plan.lengths:
        solvers = [s for s in _SOLVERS if s != "dense" or n <= plan.dense_up_to]
        runs = {}
        for solver in solvers:
            progress(f"{solver}, {n} rows")
            runs[solver] = _measure_apart(solver, n, plan.rank)
        for solver, run in runs.items():
            # thin QR is the reference; it is itself held against the dense result
            exact = runs.get("dense") if solver == "qr" else runs["qr"]
            records.append(
                {
                    "n": n,
                    "solver": solver,
                    "seconds": f"{run.seconds:.3g}",
                    "peak_mb": f"{run.peak_mb:.0f}",
                    "relative_error": "reference" if exact is None else f"{_error(run, exact):.1e}",
                }
            )
    machine = hardware()
    print(markdown_table(list(records[0]), [list(r.values()) for r in records]))
    lengths = " ".join(map(str, plan.lengths))
    command = f"primal bench ksvd --lengths {lengths} --rank {plan.rank}"
    comment = f"{command}; {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    write_atomically(plan.out / "ksvd.csv", to_csv(records, comment))
    write_atomically(
        plan.out / "ksvd.json",
        to_json({"command": command, "hardware": machine, "records": records}),
    )
