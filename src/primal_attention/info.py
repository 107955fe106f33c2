"""What is installed and what it offers: ``python -m primal_attention.info``.

python -m primal_attention.info                     # versions, threads, table of attentions
python -m primal_attention.info --update README.md  # rewrite the table in a Markdown file
"""

import argparse
import os
import platform
from pathlib import Path

__all__ = ["attention_table", "update_table"]

_START, _END = "<!-- attentions: start -->\n", "<!-- attentions: end -->\n"


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


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m primal_attention.info", description="Show versions and attentions."
    )
    parser.add_argument("--update", type=Path, metavar="FILE", help="rewrite the table in FILE")
    file = parser.parse_args().update
    if file is None:
        import torch

        from primal_attention import __version__

        print(f"primal-attention {__version__}")
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        print(f"python {platform.python_version()}, {os.cpu_count()} cores\n")
        print(attention_table(), end="")
        return
    part = file.with_name(file.name + ".part")
    part.write_text(update_table(file.read_text("utf-8")), "utf-8")
    os.replace(part, file)


if __name__ == "__main__":
    _main()
