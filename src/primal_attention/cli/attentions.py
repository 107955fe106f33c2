"""The tables of attentions: made from the registry, and kept in a file that is quick to read."""

from pathlib import Path

from primal_attention.support.files import read_text
from primal_attention.support.output import replace_between, write_atomically

__all__ = ["attention_table", "renewed", "stored_table", "update_page"]

_LISTED = "attentions"
"""Marks around the table of the registry."""
_STORED = Path(__file__).with_name("attentions.md")


def attention_table() -> str:
    """Return the registry as a Markdown table.

    Example:
        >>> print(attention_table().splitlines()[0])
        | name | cost | causal | padding | cross | state | what it is |
    """
    from primal_attention.attention import attention_entry, list_attentions

    lines = ["| name | cost | causal | padding | cross | state | what it is |"]
    lines.append("|---|---|:-:|:-:|:-:|:-:|---|")
    for name in list_attentions():
        entry = attention_entry(name)
        can = entry.capabilities
        marks = ["✓" if b else "–" for b in (can.causal, can.padding, can.cross, can.stateful)]
        lines.append("| " + " | ".join([f"`{name}`", entry.cost, *marks, entry.summary]) + " |")
    return "\n".join(lines) + "\n"


def stored_table() -> list[list[str]]:
    """Return the rows of the stored table, header first, without waiting for torch."""
    lines = _STORED.read_text("utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def renewed(page: Path) -> str:
    """Return a page with the table that it has marks for as it should be."""
    return replace_between(read_text(page), _LISTED, attention_table())


def update_page(page: Path) -> None:
    """Rewrite the table of a page, and the stored one."""
    write_atomically(page, renewed(page))
    write_atomically(_STORED, attention_table())
