"""``primal bench``: the benchmarks, by name."""

from primal_attention.bench.__main__ import main

__all__ = ["main"]
