"""``python -m primal_attention.bench.ksvd``: time, memory and accuracy of the kernel SVD solvers.

The kernel is ``(⟨x, y⟩ + 1)²`` between two different data sets of ``n`` rows. It has 231 explicit
features, so that thin QR gives its exact spectrum at any size; the other solvers do not know them.
Every measurement runs once, in a process of its own; its peak memory includes the interpreter.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from primal_attention.bench.options import numbers, positive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Measurement", "main", "measure"]

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
    command = [sys.executable, "-m", "primal_attention.bench.ksvd", "--rank", str(rank)]
    done = subprocess.run(
        [*command, "--measure", solver, str(n)], check=True, stdout=subprocess.PIPE, text=True
    )
    return Measurement(*json.loads(done.stdout))


def _error(found: Measurement, exact: Measurement) -> float:
    pairs = zip(found.singular_values, exact.singular_values, strict=True)
    return max(abs(ours - truth) / truth for ours, truth in pairs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m primal_attention.bench.ksvd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=numbers, default=(5000, 20000, 50000), help="numbers of rows")
    parser.add_argument("--rank", type=positive, default=16, help="singular triplets")
    parser.add_argument("--dense-up-to", type=int, default=5000, help="largest n for dense")
    parser.add_argument("--out", type=Path, default=Path("outputs/ksvd"), help="where to save")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure every solver at every size, print a table, save CSV and JSON."""
    options = _parser().parse_args(argv)
    if options.measure:
        solver, n = options.measure
        print(json.dumps(measure(solver, int(n), options.rank)))
        return 0

    from primal_attention.output import (
        hardware,
        markdown_table,
        to_csv,
        to_json,
        write_atomically,
    )

    records = []
    for n in options.n:
        solvers = [s for s in _SOLVERS if s != "dense" or n <= options.dense_up_to]
        runs = {}
        for solver in solvers:
            print(f"  … {solver}, {n} rows", file=sys.stderr, flush=True)
            runs[solver] = _measure_apart(solver, n, options.rank)
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
    lengths = ",".join(map(str, options.n))
    command = f"python -m primal_attention.bench.ksvd --n {lengths} --rank {options.rank}"
    comment = f"{command}; {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    write_atomically(options.out.with_suffix(".csv"), to_csv(records, comment))
    write_atomically(
        options.out.with_suffix(".json"),
        to_json({"command": command, "hardware": machine, "records": records}),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
