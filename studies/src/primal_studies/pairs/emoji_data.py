"""Emoji in three styles, with names and tags: real pairs of image and text.

Models learn from two styles, OpenMoji in color and in outlines, and find the names of drawings in
the third, Twemoji. Some concepts are held out in every style.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.public import data_folder, find_set
from primal_attention.support.command import UserError
from primal_attention.support.files import take_arrays

__all__ = [
    "STYLES",
    "Emoji",
    "EmojiSplit",
    "crop_to_content",
    "emoji_words",
    "load_emoji",
    "split_emoji",
]

STYLES = ("color", "black", "twemoji")
"""Styles of drawing; the last one is for tests."""


@dataclass(frozen=True, eq=False)
class Emoji:
    """Concepts, each drawn in several styles.

    Example:
        >>> images = np.zeros((3, 2, 4, 4, 3), np.uint8)
        >>> emoji = Emoji(images, ["red apple", "cat"], [["fruit"], []])
        >>> len(emoji), emoji.texts(0), emoji.texts(1)
        (2, ['red apple', 'fruit'], ['cat'])
    """

    images: NDArray[np.uint8]
    """Images ``[styles concepts H W 3]``."""
    names: list[str]
    """Names of the concepts in lower case."""
    tags: list[list[str]]
    """Words that also fit, without those of the name."""

    def __len__(self) -> int:
        return len(self.names)

    def texts(self, concept: int) -> list[str]:
        """Return the texts of a concept: its name, and all its tags together if it has some."""
        tags = " ".join(self.tags[concept])
        return [self.names[concept], *([tags] if tags else [])]


@dataclass(frozen=True, eq=False)
class EmojiSplit:
    """Which concepts are learned from, and which are held out."""

    seen: NDArray[np.int64]
    """Concepts of training; they are tested in a style that training never shows."""
    unseen: NDArray[np.int64]
    """Concepts that training never shows in any style."""


def emoji_words(text: str) -> str:
    """Return a text in lower case with nothing but words between spaces.

    Example:
        >>> emoji_words("Face with Open Mouth & Cold-Sweat")
        'face with open mouth cold sweat'
    """
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def crop_to_content(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images in which what is drawn fills the frame; styles have borders of their own.

    The frame is the smallest square with everything that is not white, and is scaled bilinearly.

    Args:
        images: Images ``[b H W 3]`` on white.

    Example:
        >>> image = np.full((1, 8, 8, 3), 255, np.uint8)
        >>> image[0, 2:6, 3:7] = 0
        >>> int((crop_to_content(image)[..., 0] < 128).sum())
        64
    """
    import torch
    from torch.nn.functional import grid_sample

    b, height, width, _ = images.shape
    drawn: NDArray[np.bool_] = np.any(images < 250, axis=-1)
    boxes = np.tile(np.array([0.0, height, 0.0, width]), (b, 1))
    for i in np.nonzero(drawn.any((1, 2)))[0]:
        for j, axis in ((0, 1), (2, 0)):
            places = np.nonzero(drawn[i].any(axis))[0]
            boxes[i, j], boxes[i, j + 1] = places[0], places[-1] + 1
    middle = (boxes[:, 0::2] + boxes[:, 1::2]) / 2  # rows, columns
    half = (boxes[:, 1::2] - boxes[:, 0::2]).max(1, keepdims=True) / 2
    steps = (2 * np.arange(height) + 1) / height - 1, (2 * np.arange(width) + 1) / width - 1
    rows, columns = (
        2 * (middle[:, [k]] + half * steps[k]) / (height, width)[k] - 1 for k in range(2)
    )
    grid = np.stack(np.broadcast_arrays(columns[:, None], rows[:, :, None]), -1)
    ink = torch.from_numpy(255 - images).permute(0, 3, 1, 2).double()
    found = grid_sample(ink, torch.from_numpy(grid), align_corners=False)  # white outside
    return 255 - found.permute(0, 2, 3, 1).round().byte().numpy()


def load_emoji(data: Path | None = None) -> Emoji:
    """Return the emoji of the public set.

    Concepts with the same name are one: the first of them is kept. Drawings fill the frame.

    Args:
        data: Folder of the data; by default that of ``PRIMAL_DATA``.

    Raises:
        UserError: If the file is missing or damaged.
    """
    found = find_set("emoji")
    path = data_folder(data) / found.folder / next(iter(found.files))
    if not path.is_file():
        raise UserError(f"{path} is missing. {found.by_hand(data_folder(data))}")
    sorts = {**dict.fromkeys(STYLES, ("bytes", 4)), "text": ("words", 1), "tags": ("words", 1)}
    arrays = take_arrays(path, sorts)
    shapes = {arrays[style].shape for style in STYLES}
    if len(shapes) > 1 or {len(array) for array in arrays.values()} != {len(arrays["text"])}:
        raise UserError(f"{path} is damaged: its styles, names and tags differ in number or size.")
    images = np.stack([arrays[style] for style in STYLES])
    names = [emoji_words(str(name)) for name in arrays["text"]]
    tags = [[emoji_words(tag) for tag in str(one).split(",")] for one in arrays["tags"]]
    first = {name: i for i, name in reversed(list(enumerate(names))) if name}
    kept = sorted(first.values())
    return Emoji(
        np.stack([crop_to_content(style[kept]) for style in images]),
        [names[i] for i in kept],
        [_other_words(tags[i], names[i]) for i in kept],
    )


def _other_words(tags: list[str], name: str) -> list[str]:
    """Return the words of tags that are not in the name, each once."""
    words = [word for tag in tags for word in tag.split()]
    return [word for word in dict.fromkeys(words) if word not in name.split()]


def split_emoji(emoji: Emoji, *, unseen: int = 200, seed: int = 0) -> EmojiSplit:
    """Return a random split of the concepts.

    Only concepts whose words all occur in names of other concepts are held out: nobody can name a
    drawing by a word that was never learned.

    Args:
        emoji: The concepts.
        unseen: Concepts to hold out.
        seed: Seed.

    Example:
        >>> names = ["red apple", "red hat", "green hat", "green apple", "cat"]
        >>> emoji = Emoji(np.zeros((3, 5, 4, 4, 3), np.uint8), names, [[]] * 5)
        >>> split_emoji(emoji, unseen=1).unseen
        array([2])
    """
    if not 0 < unseen < len(emoji):
        raise ValueError(f"unseen must be between 1 and {len(emoji) - 1}, got {unseen}.")
    words = [set(name.split()) for name in emoji.names]
    counts: dict[str, int] = {}
    for own in words:
        for word in own:
            counts[word] = counts.get(word, 0) + 1
    held: list[int] = []
    for concept in np.random.default_rng(seed).permutation(len(emoji)):
        if len(held) == unseen:
            break
        if all(counts[word] > 1 for word in words[concept]):
            held.append(int(concept))
            for word in words[concept]:
                counts[word] -= 1
    if len(held) < unseen:
        raise ValueError(
            f"Only {len(held)} concepts have no word of their own, so that unseen={unseen} cannot "
            "be held out; ask for fewer."
        )
    chosen = np.sort(np.array(held, dtype=np.int64))
    return EmojiSplit(np.setdiff1d(np.arange(len(emoji)), chosen), chosen)
