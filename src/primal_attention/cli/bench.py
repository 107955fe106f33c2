"""``primal bench``: time, memory and errors; ``layers`` unless a study is named."""

from primal_attention.bench.allocator import keep_memory
from primal_attention.cli import studies

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run a benchmark."""
    keep_memory()
    return studies.main("bench", argv, default="layers")
