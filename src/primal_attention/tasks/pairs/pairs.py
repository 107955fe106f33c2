"""Image-text pairs in memory and from tables.

Equal images and equal texts are stored once. So a search counts every image once, and a caption
that several images share is right for all of them.
"""

import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.support.command import UserError
from primal_attention.support.files.images import ImageError, Picture, is_file, read_images
from primal_attention.support.files.tables import read_table, take_column
from primal_attention.tasks.pairs.tokenizer import TextTokenizer, as_text

__all__ = ["PairData", "PairTable", "collate_pairs", "read_pair_table", "to_pixel_values"]


class PairTable(NamedTuple):
    """Pairs as they stand in a file."""

    images: list[Path]
    texts: list[str]
    rows: list[int]
    """Row of each pair in its file, counted from 1 without the header."""
    problems: tuple[str, ...] = ()
    """Why pairs were left out."""


class PairData(Dataset[dict[str, Tensor]]):
    """Image-text pairs, ready for a :class:`VisualParser`.

    Args:
        images: Paths, images of Pillow, or arrays, one for each text.
        texts: The texts; none may be empty.
        tokenizer: Turns them into ids.
        size: Height and width to which images are stretched.
        max_words: Most ids of a text.
        most: Searches that a measurement makes in each direction; evenly spaced.

    Example:
        >>> texts = ["a white square", "a black square", "a white square"]
        >>> images = np.stack([np.ones((8, 8)), np.zeros((8, 8)), np.full((8, 8), 0.9)])
        >>> data = PairData(images, texts, TextTokenizer.learn(texts), (16, 16), 8)
        >>> len(data), len(data.texts), data[0]["pixel_values"].shape
        (3, 2, torch.Size([16, 16, 3]))
        >>> data.is_relevant(np.array([[0], [1]]), np.array([[0, 1, 2]])).tolist()
        [[False, True, False], [True, False, True]]
    """

    def __init__(
        self,
        images: "Sequence[Picture]",
        texts: Sequence[str],
        tokenizer: TextTokenizer,
        size: tuple[int, int],
        max_words: int,
        *,
        most: int = 1000,
    ) -> None:
        images, texts = check_pairs(images, texts)
        pixels = read_images(images, size).pixels
        # equal images are one image
        digests = [blake2b(image.tobytes(), digest_size=16).digest() for image in pixels]
        places = {digest: i for i, digest in enumerate(dict.fromkeys(digests))}
        self.image_of: NDArray[np.int64] = np.array([places[digest] for digest in digests])
        first = np.unique(self.image_of, return_index=True)[1]
        self.pixels = torch.from_numpy(pixels[first])
        self.sources = [images[i] for i in first]
        """The distinct images as they were given."""
        names, self.text_of = np.unique(np.array(texts, dtype=object), return_inverse=True)
        self.text_of = self.text_of.reshape(-1)
        self.texts: list[str] = list(names)
        """The distinct texts."""
        self.ids, self.keep = tokenizer.batch(self.texts, max_words)
        self.vocab_size, self.special = tokenizer.vocab_size, tokenizer.special
        self.most = most
        self._codes = np.unique(self.text_of * len(first) + self.image_of)

    def __len__(self) -> int:
        return len(self.image_of)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = int(self.text_of[index])
        return {
            "pixel_values": self.pixels[int(self.image_of[index])],
            "input_ids": self.ids[text],
            "attention_mask": self.keep[text],
            "labels": torch.tensor(index),
        }

    def is_relevant(self, text: np.ndarray, image: np.ndarray) -> NDArray[np.bool_]:
        """Return whether texts belong to images; the arguments are indices and broadcast."""
        return np.isin(text * len(self.pixels) + image, self._codes)


def check_pairs(
    images: "Sequence[Picture]", texts: Sequence[str]
) -> "tuple[Sequence[Picture], list[str]]":
    """Return images and texts of equal number, the texts without surrounding space.

    Raises:
        ValueError: If the numbers differ, there are none, or a text is empty.
    """
    if isinstance(images, str | Path) or not hasattr(images, "__len__"):
        raise ImageError(
            f"images must be a list of images, got {type(images).__name__}; give a list even for "
            "a single one."
        )
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        raise ValueError(
            f"texts must be a list of texts, got {type(texts).__name__}; give a list even for a "
            "single one."
        )
    images, texts = list(images), list(texts)
    if len(images) != len(texts):
        raise ValueError(
            f"images and texts must have the same number, got {len(images)} and {len(texts)}."
        )
    if not images:
        raise ValueError("There are no pairs: images and texts are empty.")
    return images, [as_text(text, f"texts[{i}]") for i, text in enumerate(texts)]


def to_pixel_values(pixels: Tensor) -> Float[Tensor, "b 3 H W"]:
    """Return bytes ``[b H W 3]`` as a model takes them, between -1 and 1.

    Example:
        >>> to_pixel_values(torch.tensor([[[[0, 255, 255]]]], dtype=torch.uint8)).flatten()
        tensor([-1.,  1.,  1.])
    """
    return pixels.movedim(-1, 1).float() / 127.5 - 1


def collate_pairs(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of pairs, without columns that hold padding only."""
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    longest = int(batch["attention_mask"].sum(1).max())
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch[name][:, :longest]
    batch["pixel_values"] = to_pixel_values(batch["pixel_values"])
    return batch


def take_pairs(table: PairTable, rows: Int[Tensor, " n"] | np.ndarray) -> PairTable:
    """Return some pairs of a table."""
    chosen = [int(i) for i in rows]
    return PairTable(
        [table.images[i] for i in chosen],
        [table.texts[i] for i in chosen],
        [table.rows[i] for i in chosen],
    )


def read_pair_table(
    path: Path,
    *,
    images: Sequence[Path | None] = (),
    image: str = "image",
    caption: str = "caption",
    skip_broken: bool = False,
) -> PairTable:
    """Return the pairs of a table.

    Args:
        path: The file: CSV, TSV or Parquet.
        images: Folders in which image files are looked for, before that of the table. All images
            lie in these folders; a link may lead elsewhere.
        image: Column of the image files.
        caption: Column of the captions.
        skip_broken: Leave out pairs whose image cannot be read.

    Raises:
        UserError: If a column is missing, a caption is empty, or an image cannot be read or lies
            outside the folders.
    """
    # a caption such as "none" is no missing value
    frame = read_table(path, words=(image, caption))
    files, texts = (
        [
            "" if is_missing else str(value).strip()
            for value, is_missing in zip(column, column.isna(), strict=True)
        ]
        for column in (
            take_column(frame, image, path, "image"),
            take_column(frame, caption, path, "caption"),
        )
    )
    folders = [Path(folder) for folder in images if folder is not None]
    for folder in folders[:1]:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; --images names the folder of images.")
    for column, values in ((image, files), (caption, texts)):
        empty = [i for i, value in enumerate(values) if not value]
        if empty:
            raise UserError(
                f"{path}: {len(empty)} of {len(values)} rows have no {column!r}, the first is row "
                f"{empty[0] + 1}; fill it in, or remove the row."
            )
    outside = [i for i, name in enumerate(files) if not _is_inside(name, [*folders, path.parent])]
    if outside:
        raise UserError(
            f"{path}, row {outside[0] + 1}: the image {files[outside[0]][:80]!r} lies outside the "
            "folder of images; give --images a folder that holds all of them."
        )
    found = [_find(name, [*folders, path.parent]) for name in files]
    if not skip_broken:
        return PairTable(found, texts, list(range(1, len(found) + 1)))
    try:
        read = read_images(found, (1, 1), skip_broken=True)
    except ImageError as error:
        raise UserError(f"{path}: no image can be read. {error}") from error
    table = PairTable(found, texts, list(range(1, len(found) + 1)))
    return take_pairs(table, read.kept)._replace(problems=read.problems)


def _find(name: str, folders: Sequence[Path]) -> Path:
    """Return where an image file is; if it is nowhere, where it should be."""
    for folder in folders:
        if is_file(folder / name):
            return folder / name
    return folders[0] / name


def _is_inside(name: str, folders: Sequence[Path]) -> bool:
    """Return whether a name leads to a place below one of the folders."""
    whole = [(Path(os.path.abspath(f / name)), Path(os.path.abspath(f))) for f in folders]
    return any(place.is_relative_to(root) for place, _ in whole for _, root in whole)
