"""A bound of the memory of embedding, from two short runs of the model."""

from collections.abc import Callable
from typing import NamedTuple

from primal_attention.training.memory import PeakMemory

__all__ = ["MemoryBound", "fit_bound", "free_bytes", "peak_bytes"]

_LONGEST_TRIAL = 1024
"""Tokens of the longer of the two runs; the time of a longer one would be noticed."""
_SPARE = 2.0
"""Factor for what is not counted: scratch space inside operators, and holes between tensors.

With adaptive layers, whose tensors have many sizes, a process was seen to grow by twice the bytes
of its tensors."""


class MemoryBound(NamedTuple):
    """Most bytes of the tensors of a batch, for at most quadratic attention.

    Example:
        >>> MemoryBound(1000.0, 2.0).batch(longest=100, budget=400)
        960000
    """

    per_token: float
    per_pair: float

    def batch(self, longest: int, budget: int) -> int:
        """Return the bytes of the largest batch.

        Args:
            longest: Tokens of the longest text.
            budget: Most tokens of a batch with several texts, padding included.
        """
        # a batch of k texts of n tokens has k·n ≤ max(budget, longest) tokens and n pairs for each
        tokens = max(budget, longest)
        return int(_SPARE * tokens * (self.per_token + self.per_pair * longest))


def fit_bound(run: Callable[[int], object], longest: int) -> MemoryBound:
    """Return the bound of a model.

    Memory of a text is ``per_token · n + per_pair · n²``. Both are measured on two lengths; a cost
    that grows slower than this polynomial between them and beyond stays below it.

    Args:
        run: Runs the model on two rows of so many tokens, one of them padded.
        longest: Most tokens of a text.
    """
    long = max(min(longest, _LONGEST_TRIAL), 2)
    short = long // 2
    per_token = {}
    for n in (short, long):
        with PeakMemory() as memory:
            run(n)
        per_token[n] = memory.peak / (2 * n)
    slope = max((per_token[long] - per_token[short]) / (long - short), 0.0)
    return MemoryBound(per_token[long] - slope * long, slope)


def free_bytes() -> int | None:
    """Return the memory that the machine has free, if it says so."""
    try:
        import psutil  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    return int(psutil.virtual_memory().available)


def peak_bytes() -> int | None:
    """Return the most memory that this process has had, if the system says so."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
