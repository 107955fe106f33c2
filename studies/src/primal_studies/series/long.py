"""Study of long series: peak memory and seconds of a fit and a prediction.

Each measurement runs in a process of its own, so that its peak of memory is not that of another.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Column, columns_table
from primal_studies.series.contenders import METHODS, MINIROCKET, OURS

__all__ = ["SeriesLong", "SeriesLongOptions"]

_METHODS = (OURS, MINIROCKET)
_GOAL_GB = 2.0


@dataclass(frozen=True)
class SeriesLongOptions:
    """Peak memory and seconds to fit and predict long series, ours and MiniRocket."""

    shapes: tuple[tuple[int, int], ...] = ((20, 100_000), (100, 100_000), (200, 10_000))
    """Pairs of a number of series and their length."""
    methods: tuple[str, ...] = _METHODS
    """Names of methods."""
    seed: int = 0
    """Seed of series and methods."""

    def __post_init__(self) -> None:
        at_least_one(self, "shapes")
        one_of(self, "methods", _METHODS)


class SeriesLong(Study[SeriesLongOptions]):
    """One cell a method and shape."""

    name = "series-long"
    Options = SeriesLongOptions

    def cells(self, options: SeriesLongOptions) -> list[Cell]:
        """Return every method on every shape."""
        from primal_studies.peers.series import mark

        return [
            {
                "cases": cases,
                "steps": steps,
                "method": method,
                "seed": options.seed,
                "settings": mark(method),
            }
            for cases, steps in options.shapes
            for method in options.methods
        ]

    def run(self, cell: Cell, options: SeriesLongOptions, scratch: Path) -> Row:
        """Fit and predict in a new process."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            given = (cell["method"], cell["cases"], cell["steps"], cell["seed"])
            return process.submit(_measure, *given).result()

    def describe(self, row: Row) -> str:
        """Return what was measured."""
        return (
            f"{row['method']}, {row['cases']:,} series of {row['steps']:,} steps: "
            f"{row['peak_mb'] / 1000:.2f} GB, {row['fit_seconds']:.0f} s to fit"
        )

    def tables(self, rows: Sequence[Row], options: SeriesLongOptions) -> Mapping[str, str | bytes]:
        """Return one line a shape and method, and whether the goal is reached."""
        from primal_studies.peers.series import mark

        marks = {method: mark(method) for method in _METHODS}
        kept = [row for row in rows if row["settings"] == marks.get(row["method"])]
        if not kept:
            return {}
        largest = max(
            (r for r in kept if r["method"] == OURS), key=lambda r: r["peak_mb"], default=None
        )
        told = ""
        if largest is not None:
            word = "below" if largest["peak_mb"] < 1000 * _GOAL_GB else "not below"
            told = (
                f" The largest peak of ours is {largest['peak_mb'] / 1000:.2f} GB, {word} the "
                f"goal of {_GOAL_GB:g} GB."
            )
        caption = (
            "Random walks of one channel, one thread, each line in a new process. Their two "
            "classes tell nothing of them, so that no part of ours is left out as not needed; with "
            "fewer than 100 series it has no attention part. *Before*: memory of the process with "
            "all packages loaded and the series generated. *Peak*: its largest memory up to the "
            "end of the prediction of the same series. GB are 10⁹ bytes. Seconds are wall clock "
            f"after a warm-up.{told}"
        )
        return {"table.md": page(caption, columns_table(kept, _COLUMNS))}


_COLUMNS: dict[str, Column] = {
    "series × steps": "{cases:,} × {steps:,}",
    "method": lambda row: METHODS[row["method"]].title,
    "before, GB": lambda row: f"{row['before_mb'] / 1000:.2f}",
    "peak, GB": lambda row: f"{row['peak_mb'] / 1000:.2f}",
    "fit, s": "{fit_seconds:.1f}",
    "predict, s": "{predict_seconds:.1f}",
}


def _measure(method: str, cases: int, steps: int, seed: int) -> Row:
    """Fit and predict generated series; runs in a process of its own."""
    import numpy as np

    from primal_studies.peers.series import (
        make_classifier,
        one_thread,
        warm_up,
    )

    rng = np.random.default_rng(seed)
    y = np.arange(cases) % 2  # tells nothing of the series: no part is left out as not needed
    X = rng.normal(size=(cases, 1, steps)).cumsum(2)
    with one_thread():
        warm_up(method, 1)
        before = _memory_mb("VmRSS")
        model = make_classifier(method, seed)
        began = time.perf_counter()
        model.fit(X, y)
        fitted = time.perf_counter()
        model.predict(X)
        predicted = time.perf_counter()
    return {
        "before_mb": before,
        "peak_mb": _memory_mb("VmHWM"),
        "fit_seconds": fitted - began,
        "predict_seconds": predicted - fitted,
    }


def _memory_mb(field: str) -> float:
    """Return the memory of this process in units of 10⁶ bytes: now, or its peak."""
    status = Path("/proc/self/status")
    if status.exists():
        # unlike the maximum of getrusage, this does not remember the parent process
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
