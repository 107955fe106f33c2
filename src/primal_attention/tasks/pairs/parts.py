"""The parts of an experiment with pairs: to train, to choose the epoch, and to score."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files.tables import FILE_ERRORS
from primal_attention.tasks.pairs.pairs import PairTable, read_pair_table, take_pairs
from primal_attention.tasks.pairs.settings import PairSettings

__all__ = ["check_learnable", "load_tables", "split_images"]

_SCENES = 2000
"""Generated pairs, if no number is given."""


def load_tables(settings: PairSettings) -> tuple[dict[str, PairTable], str]:
    """Return the pairs of every part, and what a reader of the report must know of them.

    Example:
        >>> tables, note = load_tables(PairSettings(name="scenes", train_size=50, test_size=10))
        >>> {name: len(table.texts) for name, table in tables.items()}
        {'train': 40, 'valid': 10, 'test': 10}
    """
    notes = ["An image is in one part only. Each part is searched in itself."]
    test: PairTable | None = None
    if settings.train is not None:
        whole = _read(settings, settings.train)
        test = None if settings.test is None else _read(settings, settings.test)
        if settings.test is None:
            notes.append(
                f"There is no test file: {settings.test_share:.0%} of the images of "
                f"{settings.train.name} were held out and scored once."
            )
        lost = [p for table in (whole, test) if table for p in table.problems]
        if lost:
            notes.append(f"{len(lost)} pairs were left out, such as: {lost[0]}")
    elif settings.name == "scenes":
        count = settings.train_size or _SCENES
        whole = _draw(count, settings.size, settings.seed)
        test = _draw(settings.test_size or 500, settings.size, settings.seed + 1_000_003)
    else:
        raise UserError(
            "which pairs? Give a table with columns image and caption, or data.name scenes."
        )
    rng = np.random.default_rng(settings.seed)
    rest = np.arange(len(whole.texts))
    if test is None:
        rest, held = split_images(whole.images, rest, settings.test_share, rng)
        test = take_pairs(whole, held)
    if settings.train is not None:
        rest = np.sort(rng.permutation(rest)[: settings.train_size])
        chosen = rng.permutation(len(test.texts))[: settings.test_size]
        test = take_pairs(test, np.sort(chosen))
    train, valid = split_images(whole.images, rest, settings.valid, rng)
    tables = {"train": take_pairs(whole, train), "valid": take_pairs(whole, valid), "test": test}
    check_learnable(tables["train"].texts, str(settings.train or settings.name))
    for name, table in tables.items():
        if not table.texts:
            raise UserError(
                f"{settings.train}: the {name} part has no pair; give more pairs, at least five."
            )
    return tables, " ".join(notes)


def check_learnable(texts: Sequence[str], where: str) -> None:
    """Raise unless there are two different texts to tell apart."""
    if len({text.lower() for text in texts}) < 2:
        raise UserError(
            f"{where}: there are {len(texts)} pairs to train on, with fewer than two different "
            "texts; matching needs at least two pairs whose texts differ."
        )


def split_images(
    images: Sequence[object], rows: NDArray[np.int64], share: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that stay and those held out; all rows of an image go the same way.

    Args:
        images: The image of every row; files are compared by path.
        rows: Rows to split.
        share: Share of the images to hold out, at least one if there are two.
        rng: Source of random numbers.
    """
    _, group = np.unique(np.array([str(images[i]) for i in rows]), return_inverse=True)
    count = int(group.max()) + 1 if len(rows) else 0
    held = min(max(1, round(share * count)), max(count - 1, 0))
    is_held = np.isin(group, rng.permutation(count)[:held])
    return rows[~is_held], rows[is_held]


def _read(settings: PairSettings, path: Path) -> PairTable:
    with user_errors(str(path), *FILE_ERRORS):
        if not path.is_file():
            raise UserError(f"there is no file {path}.")
        return read_pair_table(
            path,
            images=[settings.images],
            image=settings.image,
            caption=settings.caption,
            skip_broken=settings.skip_broken,
        )


def _draw(count: int, size: int, seed: int) -> PairTable:
    from primal_attention.datasets.scenes import sample_scenes

    drawn = sample_scenes(count, "sides", image_size=max(size, 8), seed=seed)
    images: Any = [Drawn(image, i) for i, image in enumerate(drawn.images)]
    return PairTable(images, drawn.captions, list(range(1, count + 1)))


class Drawn:
    """A generated image with a name of its own.

    Example:
        >>> str(Drawn(np.zeros((2, 2, 3), np.uint8), 7))
        'scene 7'
    """

    def __init__(self, pixels: NDArray[np.uint8], number: int) -> None:
        self.pixels, self.number = pixels, number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.pixels, dtype=dtype)

    def __str__(self) -> str:
        return f"scene {self.number}"
