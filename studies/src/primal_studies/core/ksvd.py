"""``primal bench ksvd``: time, memory and accuracy of the kernel SVD solvers.

The kernel is ``(⟨x, y⟩ + 1)²`` between two different data sets of ``n`` rows. It has 231 explicit
features, so that thin QR gives its exact spectrum at any size; the other solvers do not know them.
Every solver runs once, in a process of its own; its peak memory includes the interpreter.

The peer of ``KernelSVD`` is scikit-learn's ``KernelPCA(eigen_solver="arpack")``: both fit the same
rows in turns, in one process with one thread.
"""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import group_lines, plot_lines, rows_table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Solved",
    "SolverOptions",
    "SolverStudy",
    "compare_with_peer",
    "solve",
    "solve_apart",
    "spectrum_error",
]

T = TypeVar("T")

_SOLVERS = ("dense", "qr", "matrix_free", "nystrom")
_COLUMNS = 20
# kernels and numbers of features of the comparison with scikit-learn
_PEER_KERNELS = (("rbf", 20), ("cosine", 300), ("linear", 100))


@dataclass(frozen=True)
class SolverOptions:
    """Time, memory and accuracy of the solvers of the asymmetric kernel SVD."""

    lengths: tuple[int, ...] = (5000, 20000, 50000)
    """Numbers of rows."""
    rank: int = 16
    """Singular triplets."""
    dense_up_to: int = 5000
    """Most rows of the dense solver."""
    peer_lengths: tuple[int, ...] = (1000, 2000, 5000)
    """Numbers of rows of the comparison with scikit-learn."""
    peer_ranks: tuple[int, ...] = (2, 10, 50)
    """Components of the comparison with scikit-learn."""
    repeats: int = 7
    """Turns of the comparison with scikit-learn."""

    def __post_init__(self) -> None:
        at_least_one(self, "lengths", "rank", "peer_lengths", "peer_ranks", "repeats")


class SolverStudy(Study[SolverOptions]):
    """One cell a number of rows."""

    name = "ksvd"
    Options = SolverOptions
    threads = 2

    def cells(self, options: SolverOptions) -> Sequence[Cell]:
        """Return the cells, small ones first."""
        return [
            {
                "n": n,
                "rank": options.rank,
                "solvers": [s for s in _SOLVERS if s != "dense" or n <= options.dense_up_to],
            }
            for n in sorted(options.lengths)
        ] + [
            {
                "peer": "KernelPCA",
                "n": n,
                "ranks": list(options.peer_ranks),
                "repeats": options.repeats,
            }
            for n in sorted(options.peer_lengths)
        ]

    def run(self, cell: Cell, options: SolverOptions, scratch: Path) -> Sequence[Row]:
        """Run all solvers; thin QR is the reference, and is itself compared with the dense one."""
        from primal_studies.kit.timing import machine

        if "peer" in cell:
            return _apart(compare_with_peer, cell["n"], cell["ranks"], cell["repeats"])
        runs = {s: solve_apart(s, cell["n"], cell["rank"]) for s in cell["solvers"]}
        rows = []
        for solver, run in runs.items():
            exact = runs.get("dense") if solver == "qr" else runs["qr"]
            error = None if exact is None else float(f"{spectrum_error(run, exact):.1e}")
            rows.append(
                {
                    "solver": solver,
                    "seconds": float(f"{run.seconds:.3g}"),
                    "peak_mb": round(run.peak_mb),
                    "relative_error": error,
                    "machine": machine(),
                }
            )
        return rows

    def tables(self, rows: Sequence[Row], options: SolverOptions) -> Mapping[str, str | bytes]:
        """Return a table and its picture, and the table of the peer."""
        peers = [row for row in rows if "peer" in row]
        rows = [row for row in rows if "peer" not in row]
        files = _solver_tables(rows) if rows else {}
        if peers:
            columns = ["n", "kernel", "features", "components", "solver"]
            columns += ["KernelPCA, ms", "KernelSVD, ms", "ratio", "difference"]
            files["peer.md"] = page(
                f"Time of `fit`, median of {peers[0]['repeats']} turns, and of the ratios of the "
                f"turns; largest relative difference of a singular value. {peers[0]['machine']}.",
                rows_table(peers, columns),
            )
        return files


def _solver_tables(rows: Sequence[Row]) -> dict[str, str | bytes]:
    shown = [
        {
            **row,
            "peak, MB": row["peak_mb"],
            "relative error": "reference"
            if row["relative_error"] is None
            else f"{row['relative_error']:.1e}",
        }
        for row in rows
    ]
    columns = ["n", "solver", "seconds", "peak, MB", "relative error"]
    caption = f"{rows[0]['rank']} singular triplets, double precision. {rows[0]['machine']}."
    panels = group_lines(
        (title, row["solver"], row["n"], row[title])
        for title in ("seconds", "peak, MB")
        for row in shown
    )
    picture = plot_lines(panels, xlabel="rows", ylabels=[""])
    return {"table.md": page(caption, rows_table(shown, columns)), "picture.png": picture}


class Solved(NamedTuple):
    """One solver on one size."""

    seconds: float
    peak_mb: float
    """Most resident memory of the process, interpreter and libraries included."""
    singular_values: list[float]


def solve(solver: str, n: int, rank: int = 16) -> Solved:
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
    x, y = _data(n)
    solvers[solver](x[:300], y[:300])  # warm-up
    # one run, and the process has nothing else to do: this needs no turns
    start = time.perf_counter()
    found = solvers[solver](x, y)
    seconds = time.perf_counter() - start
    return Solved(seconds, _peak_mb(), found.singular_values.tolist())


def solve_apart(solver: str, n: int, rank: int) -> Solved:
    """Run one solver in a new process."""
    return _apart(solve, solver, n, rank)


def _apart(function: Callable[..., T], *args: Any) -> T:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(function, *args).result()


def compare_with_peer(n: int, ranks: Sequence[int], repeats: int) -> list[Row]:
    """Fit ``KernelSVD`` and ``KernelPCA`` to the same rows in turns, with one thread."""
    import numpy as np
    import torch
    from sklearn.decomposition import KernelPCA
    from threadpoolctl import threadpool_limits

    from primal_attention.ksvd import KernelSVD
    from primal_studies.kit.timing import machine, take_turns

    torch.set_num_threads(1)
    rows: list[Row] = []
    with threadpool_limits(1):
        for (kernel, width), rank in itertools.product(_PEER_KERNELS, ranks):
            data = np.random.default_rng(n).normal(size=(n, width)) * np.linspace(2, 0.3, width)
            ours = KernelSVD(rank, kernel=kernel, center=True, random_state=0)
            theirs = KernelPCA(rank, kernel=kernel, eigen_solver="arpack", random_state=0)
            models = {"KernelPCA": theirs, "KernelSVD": ours}
            runs = {name: partial(model.fit, data) for name, model in models.items()}
            for run in runs.values():
                run()
            times = take_turns(runs, repeats)
            pairs = zip(times["KernelSVD"], times["KernelPCA"], strict=True)
            error = np.abs(ours.singular_values_ / theirs.eigenvalues_ - 1).max()
            rows.append(
                {
                    "kernel": kernel,
                    "features": width,
                    "components": rank,
                    "solver": ours.solver_,
                    **{f"{name}, ms": float(f"{1e3 * median(times[name]):.3g}") for name in models},
                    "ratio": float(f"{median(a / b for a, b in pairs):.2g}"),
                    "difference": f"{error:.0e}",
                    "machine": machine(),
                }
            )
    return rows


def spectrum_error(found: Solved, exact: Solved) -> float:
    """Return the largest relative error of a singular value."""
    pairs = zip(found.singular_values, exact.singular_values, strict=True)
    return max(abs(ours - truth) / truth for ours, truth in pairs)


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
