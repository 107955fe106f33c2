"""What the person at the keyboard can put right, told in one sentence."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["UserError", "did_you_mean", "told_as_mistake"]


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
