"""Arguments from dataclasses, by tyro; its boxes become one sentence."""

import difflib
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TypeVar

from primal_attention.cli.mistakes import UserError

__all__ = ["parse"]

T = TypeVar("T")


def parse(kind: type[T], argv: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Return an instance of a dataclass, its fields taken from the arguments.

    Args:
        kind: The dataclass; its docstring and those below its fields are the help.
        argv: The arguments.
        prog: What the user typed before them.
        default: Values of everything that no argument changes; by default those of the dataclass.
    """
    import tyro

    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            if default is None:
                return tyro.cli(kind, args=list(argv), prog=prog)
            return tyro.cli(kind, args=list(argv), prog=prog, default=default)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(f"{_sentence(errors.getvalue())} See {prog} --help.") from None


def _sentence(box: str) -> str:
    """Return the message of a tyro error box: its first part, and the options it suggests."""
    lines = [line.strip("│ \n") for line in box.splitlines() if line[:1] not in "╭╰"]
    parts = re.split(r"[-─]{8,}", "\n".join(lines))
    if not box.startswith("╭"):
        del parts[0]  # where boxes cannot be drawn, the title stands above a line of its own
    message = " ".join(parts[0].split()).rstrip(".")
    for part in parts[1:]:
        names = re.findall(r"^--[\w.-]+", part, re.MULTILINE)
        asked = re.search(r"--[\w.-]+", message)
        if "Perhaps you meant" in part and names and asked:
            nearest = difflib.get_close_matches(asked[0], names, 1, cutoff=0)[0]
            return f"{message}. Did you mean {nearest}?"
    return f"{message}."
