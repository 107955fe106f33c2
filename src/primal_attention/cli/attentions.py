"""The tables of attentions: made from the registry, and kept in a file that is quick to read."""

from pathlib import Path

from primal_attention.files import read_text
from primal_attention.output import replace_between, write_atomically

__all__ = ["attention_table", "renewed", "stored_table", "update_page"]

_LISTED, _MEASURED = "attentions", "family"
"""Marks around the table of the registry, and around that of the measurement."""
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
    """Return a page with the tables that it has marks for as they should be."""
    from primal_attention.bench.family_table import choice_table
    from primal_attention.tasks.study import read_rows

    text = read_text(page)
    if f"<!-- {_MEASURED}: start -->" in text:
        folder = page.parent.parent / "results" / "family"
        rows = read_rows(folder)
        if not rows:
            raise ValueError(f"Nothing was measured yet; run primal bench family --out {folder}.")
        text = replace_between(text, _MEASURED, choice_table(rows))
        if f"<!-- {_LISTED}: start -->" not in text:
            return text
    return replace_between(text, _LISTED, attention_table())


def update_page(page: Path) -> None:
    """Rewrite the tables of a page, and the stored one."""
    write_atomically(page, renewed(page))
    write_atomically(_STORED, attention_table())
