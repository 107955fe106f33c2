"""Find the command of ``primal`` and run it."""

import sys
from collections.abc import Sequence
from importlib import import_module

from primal_attention.support.command import exit_code, named
from primal_attention.tasks.task import task_commands

__all__ = ["main"]

_COMMANDS = {
    "train": "train on a file of your own, or the models of a recipe; saves report.html",
    "init": "write a commented recipe, for a file of your own or as an example",
    "eval": "score a trained model on its test part or on a file",
    "predict": "read a file, write the predictions of a trained model to a file",
    "convert": "replace the softmax attention of a saved model; saves layers and report.html",
    "embed": "vectors of the texts of a file by any encoder, long documents whole; can be resumed",
    "analyze": "what a saved model learned, and tools of the analyses; saves JSON and HTML",
    "demo": "what it is for: a page with a verdict, in three minutes",
    "bench": "time and memory of the attentions beside softmax",
    "repro": "reproduce the published tables; can be stopped and continued",
    "data": "public data sets: where they come from and belong; download them",
    "list": "recipes, tasks and attentions",
    "info": "versions and what is installed",
}

_EXAMPLES = """examples:
  primal demo                                        what it is for: a page with a verdict
  primal train japanese-vowels                       a table, spectra and report.html in a minute
  primal train my_train.ts                           your own data: the kind is recognised
  primal train table.csv --target label --training.epochs 5     any setting, from the command line
  primal predict outputs/japanese-vowels/primal new.ts --out labels.csv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``primal`` with these arguments, by default those of the process; return the exit code.

    Example:
        >>> main(["--version"])
        primal-attention 0.1.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        from primal_attention import __version__

        print(f"primal-attention {__version__}")
        return 0
    _, module = named(arguments[0], _commands(), "command")
    return int(import_module(module).main(arguments[1:]))


def _commands() -> dict[str, tuple[str, str]]:
    """Return summary and module of every command: those of this folder and those of the tasks."""
    own = {name: (what, f"primal_attention.cli.{name}") for name, what in _COMMANDS.items()}
    return own | {name: (found.summary, found.module) for name, found in task_commands().items()}


def _help() -> str:
    commands = _commands()
    width = max(map(len, commands))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, (what, _) in commands.items())
    return (
        "usage: primal COMMAND [OPTIONS]\n\n"
        "Linear attention as an asymmetric kernel machine, from the command line.\n\n"
        f"commands:\n{rows}\n\n{_EXAMPLES}\n"
        "primal COMMAND --help tells more; primal train RECIPE --help shows every setting."
    )
