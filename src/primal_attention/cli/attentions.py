"""The table of attentions: made from the registry, and kept in a file that is quick to read."""

from pathlib import Path

from primal_attention.output import write_atomically

__all__ = ["attention_table", "stored_table", "update_table"]

_START, _END = "<!-- attentions: start -->\n", "<!-- attentions: end -->\n"
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


def update_table(text: str) -> str:
    """Return a Markdown text with the table between its two marks replaced.

    Example:
        >>> page = update_table("<!-- attentions: start -->\\n<!-- attentions: end -->\\n")
        >>> update_table(page) == page
        True
    """
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError(
            f"The text has no place for the table; put the lines {_START.strip()!r} and "
            f"{_END.strip()!r} where it belongs."
        )
    return before + _START + attention_table() + _END + after


def update_files(page: Path) -> None:
    """Rewrite the table in a Markdown file, and the stored one."""
    write_atomically(page, update_table(page.read_text("utf-8")))
    write_atomically(_STORED, attention_table())
