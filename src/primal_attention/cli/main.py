"""Find the command, run it, and turn what goes wrong into an exit code.

0: done. 1: our fault, with a traceback. 2: a mistake in the arguments, the settings or a file, or a
file that cannot be read or written, told in one sentence. 130: interrupted.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from primal_attention.cli.mistakes import UserError, did_you_mean

__all__ = ["main"]

_COMMANDS = {
    "train": "train the models of a recipe; saves checkpoints, a table and report.html",
    "eval": "score a trained model on its test part or on a file",
    "predict": "read a file, write the predictions of a trained model to a file",
    "bench": "time and memory of the attentions beside softmax",
    "repro": "reproduce the published tables; can be stopped and continued",
    "list": "recipes and attentions",
    "info": "versions and what is installed",
}

_EXTRAS = {"tyro": "cli", "rich": "cli", "matplotlib": "analysis", "aeon": "timeseries"}
"""Which extra brings a package that only some commands need."""

_EXAMPLES = """examples:
  primal train japanese-vowels                       a table, spectra and report.html in a minute
  primal train japanese-vowels --training.epochs 5   any setting of a recipe, from the command line
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
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except UserError as mistake:
        print(f"primal: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader of our output has left, as in `primal list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"primal: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("primal: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        from primal_attention import __version__

        print(f"primal-attention {__version__}")
        return 0
    command = arguments[0]
    if command not in _COMMANDS:
        raise UserError(
            f"there is no command {command!r}.{did_you_mean(command, _COMMANDS)} "
            f"Commands: {', '.join(_COMMANDS)}."
        )
    module = import_module(f"primal_attention.cli.{command}")
    try:
        return int(module.main(arguments[1:]))
    except SystemExit as leaving:
        # argument parsers leave this way, after help (0) as after an error (2)
        return leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except ImportError as error:
        _tell_missing(error)
        raise


def _tell_missing(error: ImportError) -> None:
    """Raise a mistake if an optional package is not installed; other errors are ours."""
    if "primal-attention[" in str(error):
        raise UserError(" ".join(str(error).split())) from error
    package = (error.name or "primal_attention").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package == "primal_attention":
        return
    extra = _EXTRAS.get(package, "cli,train,analysis")
    raise UserError(
        f"this needs the package {package!r}, which is not installed: "
        f"pip install 'primal-attention[{extra}]'."
    ) from error


def _help() -> str:
    width = max(map(len, _COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, what in _COMMANDS.items())
    return (
        "usage: primal COMMAND [OPTIONS]\n\n"
        "Linear attention as an asymmetric kernel machine, from the command line.\n\n"
        f"commands:\n{rows}\n\n{_EXAMPLES}\n"
        "primal COMMAND --help tells more; primal train RECIPE --help shows every setting."
    )
