"""``primal init``: a commented recipe, ready to train."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from primal_attention.cli.plans import make_plan
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.output import write_atomically
from primal_attention.support.settings import commented_yaml
from primal_attention.tasks.task import TASKS

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Write a recipe with every setting and its meaning."""
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(_help())
        return 0
    out, rest = Path(argv[0]), argv[1:]
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"a recipe ends in .yaml, got {argv[0]!r}; write primal init my.yaml DATA.")
    plan = make_plan(rest, prog=f"primal init {out}")
    if out.exists() and not plan.options.overwrite:
        raise UserError(f"{out} already exists; choose another name or add --overwrite.")
    recipe = plan.options.recipe
    data: Any = recipe.data
    # beside the recipe, so that both can be moved together
    near = {
        name: Path(os.path.relpath(value, out.resolve().parent))
        for name, value in vars(data).items()
        if isinstance(value, Path)
    }
    text = commented_yaml(replace(recipe, data=replace(data, **near)))
    head = [*plan.comment, "", f"primal train {out.name} trains it; a setting with # is a default."]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    with user_errors(""):
        write_atomically(out, f"{comment}\n{text}")
    print(f"Wrote {out}. Train with: primal train {out}")
    return 0


def _help() -> str:
    return (
        "usage: primal init FILE.yaml [DATA] [--target COLUMN] [--task TASK] [SETTINGS]\n\n"
        "Write a commented recipe with every setting: for a file or folder of data, from another\n"
        "recipe, or without either for the first example of a task.\n\n"
        f"tasks: {', '.join(TASKS)}"
    )
