"""Public texts that several studies read."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from primal_attention.datasets.public import data_folder
from primal_attention.support.command import UserError
from primal_attention.support.files import read_json_lines, read_text

__all__ = ["Labelled", "imdb_reviews", "wikitext_lines"]


class Labelled(NamedTuple):
    """A text and the class of the review that it comes from."""

    text: str
    label: int
    """1 if the review is positive."""


def imdb_reviews(split: str, data: Path | None = None) -> Iterator[Labelled]:
    """Yield the reviews of a split of IMDb in the order of the file.

    Args:
        split: ``"train"`` or ``"test"``.
        data: Folder of the data; by default that of ``PRIMAL_DATA``.
    """
    path = data_folder(data) / "text" / "imdb" / f"{split}.jsonl.xz"
    if not path.exists():
        raise UserError(f"{path} is missing; `primal data fetch imdb` gets it.")
    for _, item in read_json_lines(path):
        yield Labelled(item["text"], item["label"])


def wikitext_lines(split: str, data: Path | None = None) -> list[str]:
    """Return the lines of a split of WikiText-2 without their ends."""
    path = data_folder(data) / "text" / "wikitext-2" / f"{split}.txt.gz"
    return read_text(path).split("\n")
