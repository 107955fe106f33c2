"""Settings of long-sequence experiments: the data; the model is an encoder."""

from dataclasses import dataclass
from typing import Literal

from primal_attention.tasks.task import DataSettings

__all__ = ["IMAGES", "Kind", "TokenSettings"]

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
"""Endings of pictures in a folder."""
Kind = Literal["text", "listops", "retrieval", "image", "pathfinder"]


@dataclass(frozen=True, kw_only=True)
class TokenSettings(DataSettings):
    """Long token sequences: a task of Long Range Arena, or texts and pictures of your own.

    A folder has one folder of .txt files or pictures for each class; a table has a column of texts.
    """

    kind: Kind = "text"
    """What the sequences are, such as text (bytes), retrieval (pairs of texts) or image."""
    text: str = "text"
    """Tables: column of the texts."""
    target: str = "label"
    """Tables: column of the classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None:
            raise ValueError(f"name is not used here; the kind {self.kind} has no sets to name.")
