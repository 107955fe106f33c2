"""``primal repro``: the published tables, computed here."""

from primal_attention.cli import studies

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run a reproduction."""
    return studies.main("repro", argv)
