"""``primal bench``: time, memory and errors; ``layers`` unless a study is named."""

from primal_attention.cli import studies
from primal_attention.support.allocator import keep_memory

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run a benchmark."""
    keep_memory()
    return studies.main("bench", argv, default="layers")
