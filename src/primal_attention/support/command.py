"""What every command shares: errors in one sentence, exit codes, progress lines."""

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

__all__ = [
    "MissingPackageError",
    "UserError",
    "did_you_mean",
    "exit_code",
    "install_hint",
    "named",
    "needs",
    "progress",
    "user_errors",
]

T = TypeVar("T")

_EXTRAS = {"tyro": "cli", "rich": "cli", "matplotlib": "analysis", "aeon": "series"}
"""The extra that installs a package which only some commands need."""

_LONGEST = 1000
"""Characters of a message that is printed whole."""


class UserError(ValueError):
    """A wrong argument, setting or file: the command prints the message and exits with code 2."""


class MissingPackageError(ModuleNotFoundError):
    """A package of an optional extra is not installed; the message says how to install it."""


def install_hint(extra: str) -> str:
    """Return the sentence that says how to install an extra; the package is on no index.

    Args:
        extra: Name of an extra of this package, or ``studies[NAME]`` for one of the studies.

    Example:
        >>> install_hint("cli")
        "Run pip install -e '.[cli]' in the checkout of primal-attention."
    """
    where = f"./{extra}" if extra.startswith("studies") else f".[{extra}]"
    return f"Run pip install -e '{where}' in the checkout of primal-attention."


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Name the extra to install if an import inside the context finds no package.

    A package that is installed but broken keeps its own error.

    Args:
        extra: Name of the extra that has the package.
        what: What the package is for; begins the message.

    Raises:
        MissingPackageError: Instead of ``ModuleNotFoundError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingPackageError(
            f"{what} needs the package {package!r}, which is not installed. {install_hint(extra)}",
            name=package,
        ) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the nearest known word; empty if none is near.

    Example:
        >>> did_you_mean("epoch", ["epochs", "lr"])
        " Did you mean 'epochs'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def named(name: str, known: Mapping[str, T], kind: str) -> T:
    """Return the entry of a table that a user named, or raise with the nearest name.

    Args:
        name: What the user wrote.
        known: The entries by name.
        kind: What an entry is, in one word, for the message.

    Raises:
        UserError: If there is no such entry; the message lists all.

    Example:
        >>> named("train", {"train": 1, "eval": 2}, "command")
        1
    """
    if name not in known:
        raise UserError(
            f"there is no {kind} {name!r}.{did_you_mean(name, known)} "
            f"{kind.capitalize()}s: {', '.join(known)}."
        )
    return known[name]


@contextmanager
def user_errors(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors inside the context into a :class:`UserError` that starts with ``where``.

    Only for code that reads or checks input of a user. Elsewhere the same errors are bugs, and
    keep their traceback.

    Args:
        where: What is read or checked, such as a file's name; may be empty.
        kinds: Errors to turn; by default those of values, types and files.
    """
    turned = kinds or (ValueError, TypeError, OSError)
    try:
        yield
    except UserError as error:
        if UserError not in turned:
            raise
        raise UserError(_named(str(error), where)) from error
    except turned as error:
        raise UserError(_named(_sentence(error), where)) from error


def _named(words: str, where: str) -> str:
    """Return a message that starts with ``where``."""
    return words if not where or words.startswith(where) else f"{where}: {words}"


def _sentence(error: Exception) -> str:
    """Return an error's message on one line."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return f"{name}{error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


def progress(line: str) -> None:
    """Print a line about work in progress to the standard error stream."""
    print(f"  … {line}", file=sys.stderr, flush=True)


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors become messages.

    0: done. 1: a bug, with a traceback. 2: a mistake in the arguments, the settings or a file, or a
    file that cannot be read or written, in one sentence. 130: interrupted.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run(command)
        sys.stdout.flush()
        return code
    except UserError as mistake:
        print(f"primal: {_shorten(str(mistake))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader of our output has closed it, as in `primal list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"primal: {_shorten(f'{error.filename}: {error.strerror}.')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(": ".join(["primal: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return 130


def _shorten(words: str) -> str:
    """Return a message without its middle if it repeats a long value of the user."""
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 300]} … {words[-290:]}"


def _show_warning(message: Warning | str, *where: object, **options: object) -> None:
    """Print a warning without the line of code that raised it."""
    print(f"primal: warning: {message}", file=sys.stderr)


def _run(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as leaving:
        # argument parsers exit this way, after help (0) as after an error (2)
        return leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except ImportError as error:
        _check_missing_package(error)
        raise


def _check_missing_package(error: ImportError) -> None:
    """Raise a :class:`UserError` if an optional package is not installed; other errors are bugs."""
    if isinstance(error, MissingPackageError):
        raise UserError(str(error)) from error
    package = (error.name or "primal_attention").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package == "primal_attention":
        return
    extra = _EXTRAS.get(package, "cli,train,analysis")
    raise UserError(
        f"this needs the package {package!r}, which is not installed. {install_hint(extra)}"
    ) from error
