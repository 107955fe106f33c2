"""``primal list``: recipes, tasks and attentions, without importing torch."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from primal_attention.cli.attentions import stored_table
from primal_attention.cli.recipes import recipe_paths, recipe_summary
from primal_attention.support.settings import parse
from primal_attention.tasks.task import TASKS

__all__ = ["aligned", "main"]


@dataclass(frozen=True)
class Listing:
    """List the recipes, the tasks, and the attentions with what they can do."""

    what: Annotated[Literal["all", "recipes", "tasks", "attentions"], tyro.conf.Positional] = "all"
    """What to list."""
    names: bool = False
    """Print names only, one a line."""


def main(argv: list[str]) -> int:
    """Print the lists."""
    options = parse(Listing, argv, prog="primal list")
    sections = []
    if options.what in ("all", "recipes"):
        paths = recipe_paths()
        rows = [[name, recipe_summary(path)] for name, path in paths.items()]
        sections.append([["recipe", "what it is"], *rows])
    if options.what in ("all", "tasks"):
        tasks = [[name, entry.summary] for name, entry in TASKS.items()]
        sections.append([["task", "what it does"], *tasks])
    if options.what in ("all", "attentions"):
        sections.append(stored_table())
    if options.names:
        print("\n".join(row[0] for section in sections for row in section[1:]))
    else:
        print("\n\n".join(aligned(section) for section in sections))
    return 0


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns of text; the last column wraps."""
    widths = [max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]]
    starts = ("".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) for row in rows)
    return "\n".join(
        textwrap.fill(row[-1], 100, initial_indent=start, subsequent_indent=" " * len(start))
        for row, start in zip(rows, starts, strict=True)
    )
