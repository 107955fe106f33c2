"""Names of anything as words: types of events, levels, classes."""

from collections.abc import Iterable

__all__ = ["as_words"]


def as_words(values: Iterable[object], what: str) -> list[str]:
    """Return values as words; ``1`` and ``"1"`` would become one name, which is an error.

    Args:
        values: Words, numbers or anything else that is one value.
        what: What they are, for the message.

    Example:
        >>> as_words([1, 2, 1], "types of events")
        ['1', '2', '1']
    """
    words, is_text = [], dict[str, bool]()
    for value in values:
        word = str(value)
        if is_text.setdefault(word, isinstance(value, str)) != isinstance(value, str):
            raise ValueError(
                f"The {what} hold {word} and the word {word!r}, which would be one name; names "
                "must differ as words. Write them all as words or all as numbers, or rename one."
            )
        words.append(word)
    return words
