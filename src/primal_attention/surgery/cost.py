"""Time and memory of forward passes, compared in one process."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

from primal_attention.analysis.memory import PeakMemory

__all__ = ["ForwardCost", "compare_costs"]


class ForwardCost(NamedTuple):
    """Cost of one forward pass."""

    milliseconds: float
    """Median time in one thread."""
    megabytes: float
    """Peak memory of the tensors that the pass creates."""


@torch.no_grad()
def compare_costs(
    runs: Mapping[str, Callable[[], Any]], *, repeats: int = 3
) -> dict[str, ForwardCost]:
    """Return time and memory of each function.

    The functions take turns, so that a busy machine slows all of them down alike. The first turn
    measures memory and is not timed.

    Args:
        runs: Functions without arguments, by name.
        repeats: Number of timed turns.

    Example:
        >>> x = torch.ones(500, 500)
        >>> compare_costs({"add": lambda: x + 1})["add"].megabytes == 1e6 / 2**20
        True
    """
    peaks, times = {}, {name: [0.0] * repeats for name in runs}
    with _one_thread():
        for name, run in runs.items():
            with PeakMemory() as memory:
                run()
            peaks[name] = memory.peak / 2**20
        for turn in range(repeats):
            for name, run in runs.items():
                start = time.thread_time()
                run()
                times[name][turn] = time.thread_time() - start
    return {name: ForwardCost(1e3 * median(times[name]), peaks[name]) for name in runs}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
