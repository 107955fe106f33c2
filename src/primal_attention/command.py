"""A command: its arguments from a dataclass, its mistakes in one sentence, its exit code."""

import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TypeVar

__all__ = [
    "UserError",
    "at_least_one",
    "did_you_mean",
    "exit_code",
    "parse",
    "progress",
    "told_as_mistake",
]

T = TypeVar("T")

_EXTRAS = {"tyro": "cli", "rich": "cli", "matplotlib": "analysis", "aeon": "timeseries"}
"""Which extra brings a package that only some commands need."""


class UserError(Exception):
    """A wrong argument, setting or file: the command prints the message and exits with code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the nearest known word; empty if none is near.

    Example:
        >>> did_you_mean("epoch", ["epochs", "lr"])
        " Did you mean 'epochs'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


@contextmanager
def told_as_mistake(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors about what a user gave into a :class:`UserError` that starts with ``where``.

    Only for code that reads or checks such input: elsewhere the same errors are ours, and keep
    their traceback.

    Args:
        where: What was being read, such as a file's name; may be empty.
        kinds: Errors to tell; by default those of values, types and files.
    """
    told = kinds or (ValueError, TypeError, OSError)
    try:
        yield
    except UserError as error:
        if UserError not in told:
            raise
        raise UserError(f"{where}: {error}") from error
    except told as error:
        words = _sentence(error)
        known = not where or words.startswith(where)
        raise UserError(words if known else f"{where}: {words}") from error


def _sentence(error: Exception) -> str:
    """Return an error's message on one line."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return f"{name}{error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


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
        raise UserError(f"{_from_box(errors.getvalue())} See {prog} --help.") from None


def _from_box(box: str) -> str:
    """Return the message of a tyro error box: its first part, and the options it suggests."""
    lines = [line.strip("│ \n") for line in box.splitlines() if line[:1] not in "╭╰"]
    parts = re.split(r"[-─]{8,}", "\n".join(lines))
    if not box.startswith("╭"):
        del parts[0]  # where boxes cannot be drawn, the title stands above a line of its own
    message = " ".join(parts[0].split()).rstrip(".")
    # what a dataclass refuses names its field; the name of the class is ours
    message = re.sub(r"^Error parsing \w+: ", "", message)
    for part in parts[1:]:
        names = re.findall(r"^--[\w.-]+", part, re.MULTILINE)
        asked = re.search(r"--[\w.-]+", message)
        if "Perhaps you meant" in part and names and asked:
            nearest = difflib.get_close_matches(asked[0], names, 1, cutoff=0)[0]
            return f"{message}. Did you mean {nearest}?"
    return f"{message}."


def at_least_one(options: object, *fields: str) -> None:
    """Refuse options with a number below one, or with none where there should be several.

    Example:
        >>> at_least_one(range(0, 8, 2), "step", "stop")
        >>> at_least_one(range(0, 8, 2), "start")
        Traceback (most recent call last):
        ValueError: start must be at least 1, got 0.
    """
    for field in fields:
        value = getattr(options, field)
        if not _numbers(value) or min(_numbers(value)) < 1:
            raise ValueError(f"{field} must be at least 1, got {value}.")


def _numbers(value: Any) -> list[int]:
    return [n for part in value for n in _numbers(part)] if isinstance(value, tuple) else [value]


def progress(line: str) -> None:
    """Tell what is being done, beside the output."""
    print(f"  … {line}", file=sys.stderr, flush=True)


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and turn what goes wrong into an exit code.

    0: done. 1: our fault, with a traceback. 2: a mistake in the arguments, the settings or a file,
    or a file that cannot be read or written, told in one sentence. 130: interrupted.
    """
    try:
        code = _found(command)
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


def _found(command: Callable[[], int]) -> int:
    try:
        return command()
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
