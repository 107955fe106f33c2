"""``primal repro``: the published tables, computed here."""

from primal_attention.cli import studies

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run a reproduction, or tell how old the results are."""
    if argv[:1] == ["status"]:
        return studies.status(argv[1:])
    return studies.main("repro", argv)
