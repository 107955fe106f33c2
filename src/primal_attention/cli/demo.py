"""``primal demo``: what primal attention is for, measured on this machine, as a page."""

from primal_attention.cli import studies
from primal_attention.support.allocator import keep_memory

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the demo."""
    keep_memory()
    return studies.main("demo", argv, default="demo")
