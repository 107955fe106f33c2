"""Time and memory of functions that take turns in one process.

A busy machine slows all of them down alike, so ratios within one run are reliable.
"""

import math
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from primal_attention.analysis.memory import PeakMemory

__all__ = ["Cost", "compare_costs", "peak_mb", "take_turns"]

K = TypeVar("K")


def take_turns(
    runs: Mapping[K, Callable[[], Any]],
    repeats: int,
    *,
    seconds: float = math.inf,
    before: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Return the seconds of each call of some functions, which are called in turns.

    With one thread this is the processor time of that thread, which a busy machine does not
    distort; with more threads it is wall time.

    Args:
        runs: Functions by name; call each once before, to warm up.
        repeats: Turns.
        seconds: A function that has used this time takes no further turn.
        before: Called before each function; its time does not count.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if sum(times[name]) < seconds:
                before()
                start = clock()
                run()
                times[name].append(clock() - start)
    return times


def peak_mb(run: Callable[[], Any]) -> float:
    """Return the most MiB that tensors of one call took at once."""
    with PeakMemory() as memory:
        run()
    return round(memory.peak / 2**20, 2)


class Cost(NamedTuple):
    """Cost of one call."""

    milliseconds: float
    """Median time in one thread."""
    megabytes: float
    """Peak memory of the tensors that the call creates, in MiB."""


@torch.no_grad()
def compare_costs(runs: Mapping[str, Callable[[], Any]]) -> dict[str, Cost]:
    """Return time and memory of functions without gradients, in one thread, median of three turns.

    Example:
        >>> x = torch.ones(500, 500)
        >>> compare_costs({"add": lambda: x + 1})["add"].megabytes
        0.95
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peaks = {name: peak_mb(run) for name, run in runs.items()}  # also warms up
        times = take_turns(runs, 3)
    finally:
        torch.set_num_threads(threads)
    return {name: Cost(1e3 * median(times[name]), peaks[name]) for name in runs}
