"""Settings of image-text pairs: data and model of an experiment, and the estimator.

Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from primal_attention.tasks.pairs.config import MultimodalConfig, Negatives, Objective
from primal_attention.tasks.task import DataSettings

__all__ = ["PairFitOptions", "PairOptions", "PairSettings"]


@dataclass(frozen=True, kw_only=True)
class PairSettings(DataSettings):
    """Image-text pairs: scenes (generated), or a .csv, .tsv or .parquet file.

    A file has one row for each pair. An image may have several captions, in rows of their own.
    """

    name: Literal["scenes"] | None = None
    """Generated scenes: two objects with colors and shapes, and where they are."""
    images: Path | None = None
    """Folder of the image files; by default the folder of the table."""
    image: str = "image"
    """Column of the image files, as paths below that folder."""
    caption: str = "caption"
    """Column of the captions."""
    size: int = 32
    """Pixels of a side to which images are stretched; a multiple of ``model.patch_size``."""
    length: int | None = 16
    """Longest caption in tokens, with [CLS] and [SEP]; further words are left out."""
    skip_broken: bool = False
    """Leave out pairs whose image is missing or broken; otherwise they are an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}.")
        if self.length is None or self.length < 3:
            raise ValueError(f"length must be at least 3 tokens, got {self.length}.")


@dataclass(frozen=True, kw_only=True)
class PairOptions(MultimodalConfig):
    """A model of pairs without what the data decide: the vocabulary."""

    objectives: tuple[Objective, ...] = ("itc", "itm")
    """Losses: contrast of texts and images, and matching. Masked words (mlm) and masked features
    (mfr) cost time that a short training for search does not get back."""
    negatives: Negatives = "in-batch-hard"
    """Where mismatched texts come from: ``"in-batch-hard"`` draws similar ones more often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("itc", "itm"):
            if name not in self.objectives:
                raise ValueError(
                    f"objectives must have 'itc' and 'itm', without which there is no search; got "
                    f"{self.objectives}."
                )


@dataclass(frozen=True, kw_only=True)
class PairFitOptions:
    """What is rarely changed in ``ImageTextMatcher``.

    Example:
        >>> PairFitOptions(image_size=24).objectives
        ('itc', 'itm')
    """

    image_size: int = 32
    """Pixels of a side to which images are stretched; a multiple of 8."""
    max_words: int = 16
    """Longest text in tokens, with [CLS] and [SEP]; further words are left out."""
    objectives: tuple[Objective, ...] = ("itc", "itm")
    """Losses: contrast (itc) and matching (itm), which a search needs; masked words (mlm) and
    masked features (mfr), which a short training does not pay back."""
    tokenizer: object = None
    """A tokenizer of ``tokenizers`` or a fast one of ``transformers``; by default the words of the
    training texts."""
    attention_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Options of the attention's constructor, such as ``{"rank": 16}``."""
    validation: float = 0.1
    """Share of the images that chooses the epoch and fits the probabilities; none if there are
    fewer than 20 pairs, which then have no honest probabilities."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"validation must be a share from 0 to below 1, got {self.validation}."
            )
