"""What the commands of the benchmarks read: lists, sizes, and mistakes told in one sentence."""

import argparse
from collections.abc import Callable
from typing import TypeVar

__all__ = ["checked", "names", "numbers", "positive", "shapes"]

T = TypeVar("T")


def names(text: str) -> tuple[str, ...]:
    """Return the words between commas.

    Example:
        >>> names("primal,softmax")
        ('primal', 'softmax')
    """
    return tuple(text.split(","))


def positive(text: str) -> int:
    """Return a whole number of at least one.

    Example:
        >>> positive("65_536")
        65536
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers between commas.

    Example:
        >>> numbers("128,4096")
        (128, 4096)
    """
    return tuple(positive(part) for part in text.split(","))


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of heads and head width.

    Example:
        >>> shapes("2x32,8x64")
        ((2, 32), (8, 64))
    """
    pairs = []
    for part in text.split(","):
        heads, cross, width = part.partition("x")
        if not cross:
            raise argparse.ArgumentTypeError(f"{part!r} is not heads x head width, such as 2x32")
        pairs.append((positive(heads), positive(width)))
    return tuple(pairs)


def checked(parser: argparse.ArgumentParser, make: Callable[[], T]) -> T:
    """Return what ``make`` returns; tell a value or file it refuses as a mistake of the command."""
    try:
        return make()
    except (OSError, ValueError) as error:
        parser.error(str(error))
