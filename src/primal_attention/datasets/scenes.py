"""Drawn scenes with captions that are known to be true or false.

A scene has two objects that differ in color and shape. A caption is about the first of them:

- ``sides``: "a red circle left"; the other object is on the opposite side of the image;
- ``relations``: "a red circle left of a blue square"; the pair is anywhere in the image;
- ``sizes``: "a small red circle left of a large blue square".

A hard negative differs from a true caption in one respect, and is false: nouns are exchanged,
attributes are exchanged, or the relation is reversed. In captions of two objects the first two have
exactly the words of the true caption, so that a bag of words cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.support.command import did_you_mean

__all__ = [
    "COLORS",
    "SCENE_WORDS",
    "SHAPES",
    "SIDES",
    "Scene",
    "SceneItem",
    "Scenes",
    "draw_scenes",
    "encode_captions",
    "holds",
    "sample_scenes",
]

CaptionStyle = Literal["sides", "relations", "sizes"]
NegativeKind = Literal["nouns", "attributes", "relation"]

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 90, 230),
    "yellow": (240, 220, 50),
}
"""Colors of objects, as RGB."""
SHAPES = ("circle", "square", "triangle", "cross")
"""Shapes of objects."""
SIDES = ("left", "right", "above", "below")
"""Sides of the image, and relations between objects; neighbours are opposites."""
SIZES = {"small": 3.0, "large": 4.0}
"""Half the width of an object in an image of 24 pixels."""
SCENE_WORDS = ("a", "of", *SIDES, *COLORS, *SHAPES, *SIZES)
"""All words of captions."""

_UNIT = 24
"""Image size in which positions are drawn; other sizes are scaled."""
_BACKGROUND = 30
_SPECIAL = 5
"""Ids of padding, [CLS], [SEP], [MASK] and unknown come first, as in ``MultimodalConfig``."""
_GAP = 1.0
"""Least difference of the two offsets of a pair, in units; smaller ones would be ambiguous."""


class SceneItem(NamedTuple):
    """An object of a scene; the image has sides of 24 units, and y points down."""

    color: str
    shape: str
    size: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """Two objects, and what their captions say.

    Example:
        >>> first = SceneItem("red", "circle", "small", x=5, y=12)
        >>> second = SceneItem("blue", "cross", "large", x=19, y=11)
        >>> scene = Scene((first, second), "relations")
        >>> scene.caption
        'a red circle left of a blue cross'
        >>> scene.negative("nouns")
        'a red cross left of a blue circle'
        >>> scene.negative("relation")
        'a red circle right of a blue cross'
    """

    items: tuple[SceneItem, SceneItem]
    """The object that the caption is about, and the other."""
    style: CaptionStyle = "sides"
    """What captions say."""

    @property
    def side(self) -> str:
        """Where the first object is: in the image (``sides``), or beside the second object."""
        first, second = self.items
        if self.style == "sides":
            return _side(first.x - _UNIT / 2, first.y - _UNIT / 2)
        return _side(first.x - second.x, first.y - second.y)

    @property
    def caption(self) -> str:
        """A true caption."""
        return self._say(*self.items, self.side)

    def negative(self, kind: str) -> str:
        """Return a caption that is false and differs from the true one in one respect.

        Args:
            kind: ``"nouns"`` exchanges the shapes of the two objects, ``"attributes"`` their colors
                (and sizes), ``"relation"`` takes the opposite side.
        """
        first, second = self.items
        if kind == "relation":
            return self._say(first, second, _opposite(self.side))
        if kind == "nouns":
            changed = first._replace(shape=second.shape), second._replace(shape=first.shape)
        elif kind == "attributes":
            changed = (
                first._replace(color=second.color, size=second.size),
                second._replace(color=first.color, size=first.size),
            )
        else:
            _check("kind", kind, get_args(NegativeKind))
        return self._say(*changed, self.side)

    def _say(self, first: SceneItem, second: SceneItem, side: str) -> str:
        if self.style == "sides":
            return f"a {first.color} {first.shape} {side}"
        names = [f"{item.color} {item.shape}" for item in (first, second)]
        if self.style == "sizes":
            names = [
                f"{item.size} {name}" for item, name in zip((first, second), names, strict=True)
            ]
        return f"a {names[0]} {side}{' of' * (side in SIDES[:2])} a {names[1]}"


def _side(dx: float, dy: float) -> str:
    """Return the side of an offset: that of its larger part."""
    if abs(dx) >= abs(dy):
        return "left" if dx < 0 else "right"
    return "above" if dy < 0 else "below"


def _opposite(side: str) -> str:
    return SIDES[SIDES.index(side) ^ 1]


def holds(scene: Scene, caption: str) -> bool:
    """Return whether a caption is true of a scene, by reading its words.

    Args:
        scene: The scene.
        caption: A caption in any of the styles.

    Example:
        >>> first = SceneItem("red", "circle", "small", x=5, y=12)
        >>> second = SceneItem("blue", "cross", "large", x=19, y=11)
        >>> scene = Scene((first, second))
        >>> holds(scene, "a blue cross right"), holds(scene, "a blue cross left")
        (True, False)
    """
    words = [word for word in caption.split() if word != "of"]
    side = next((word for word in words if word in SIDES), None)
    if side is None or (unknown := set(words) - set(SCENE_WORDS)):
        what = "no side" if side is None else f"the unknown word {min(unknown)!r}"
        raise ValueError(f"The caption {caption!r} has {what}; words are {', '.join(SCENE_WORDS)}.")
    place = words.index(side)
    first, second = set(words[:place]) - {"a"}, set(words[place + 1 :]) - {"a"}
    for item in scene.items:
        if first <= set(item[:3]):
            if not second and _side(item.x - _UNIT / 2, item.y - _UNIT / 2) == side:
                return True
            for other in scene.items:
                is_named = bool(second) and other is not item and second <= set(other[:3])
                if is_named and _side(item.x - other.x, item.y - other.y) == side:
                    return True
    return False


class Scenes(NamedTuple):
    """Images with true captions and hard negatives."""

    images: NDArray[np.uint8]
    """Images ``[b H W 3]``."""
    captions: list[str]
    """A true caption of each image."""
    negatives: list[str]
    """A false caption of each image."""
    kinds: list[str]
    """How the false captions were made: nouns, attributes or relation."""
    scenes: list[Scene]
    """What was drawn."""

    @property
    def pixel_values(self) -> Float[Tensor, "b 3 H W"]:
        """The images as a model takes them, between -1 and 1."""
        return torch.from_numpy(self.images).permute(0, 3, 1, 2).float() / 127.5 - 1


def sample_scenes(
    count: int,
    style: CaptionStyle = "sides",
    *,
    image_size: int = 24,
    negatives: Sequence[str] = get_args(NegativeKind),
    seed: int | np.random.Generator = 0,
) -> Scenes:
    """Return scenes with captions and hard negatives.

    Args:
        count: Number of scenes.
        style: What captions say: ``"sides"``, ``"relations"`` or ``"sizes"``.
        image_size: Pixels of a side.
        negatives: Kinds of hard negatives; each scene gets one of them at random.
        seed: Seed, or a generator, which goes on.

    Example:
        >>> scenes = sample_scenes(3, "relations", seed=1)
        >>> scenes.images.shape, scenes.captions[0], scenes.negatives[0]
        ((3, 24, 24, 3), 'a red square above a blue circle', 'a red square below a blue circle')
    """
    _check("style", style, get_args(CaptionStyle))
    for kind in negatives:
        _check("negatives", kind, get_args(NegativeKind))
    if count < 1 or image_size < 8 or not negatives:
        raise ValueError(
            "sample_scenes needs count >= 1, image_size >= 8 and one kind of negatives or more, "
            f"got {count}, {image_size} and {list(negatives)}."
        )
    rng = np.random.default_rng(seed)
    places = _sides(rng, count) if style == "sides" else _pairs(rng, count)
    colors, shapes = (_two_of(rng, count, names) for names in (tuple(COLORS), SHAPES))
    sizes = rng.choice(np.array(list(SIZES)), (count, 2))
    scenes = [
        Scene(
            tuple(  # type: ignore[arg-type]
                SceneItem(str(c), str(f), str(s), float(x), float(y))
                for c, f, s, (x, y) in zip(*parts, strict=True)
            ),
            style,
        )
        for parts in zip(colors, shapes, sizes, places, strict=True)
    ]
    kinds = [str(kind) for kind in rng.choice(np.array(negatives), count)]
    return Scenes(
        draw_scenes(scenes, image_size),
        [scene.caption for scene in scenes],
        [scene.negative(kind) for scene, kind in zip(scenes, kinds, strict=True)],
        kinds,
        scenes,
    )


def _two_of(rng: np.random.Generator, count: int, names: Sequence[str]) -> np.ndarray:
    """Return two different names for every scene."""
    order = rng.random((count, len(names))).argsort(1)[:, :2]
    return np.array(names)[order]


def _sides(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return two places ``[count 2 2]`` on opposite sides, near the middle of the other axis."""
    far, near = rng.uniform(4.5, 7.5, (count, 2)), rng.uniform(-3.0, 3.0, (count, 2))
    far *= np.array([1, -1]) * rng.choice([-1, 1], (count, 1))
    offset = np.stack([far, near], -1)
    offset = np.where(rng.random((count, 1, 1)) < 0.5, offset, offset[..., ::-1])
    return offset + _UNIT / 2


def _pairs(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return two places ``[count 2 2]`` anywhere, apart by more on one axis than on the other."""
    found = np.empty((0, 2, 2))
    while len(found) < count:
        places = rng.uniform(4.5, _UNIT - 4.5, (2 * count, 2, 2))
        apart = np.abs(places[:, 0] - places[:, 1])
        is_clear = (apart.max(1) >= 8.5) & (apart.max(1) - apart.min(1) >= _GAP)
        found = np.concatenate([found, places[is_clear]])
    return found[:count]


def draw_scenes(scenes: Sequence[Scene], image_size: int = 24) -> NDArray[np.uint8]:
    """Return images ``[b H W 3]`` of scenes on a dark background.

    Example:
        >>> first = SceneItem("red", "square", "small", x=5, y=12)
        >>> second = SceneItem("blue", "cross", "large", x=19, y=11)
        >>> draw_scenes([Scene((first, second))])[0, 12, 5]
        array([220,  40,  40], dtype=uint8)
    """
    images = np.full((len(scenes), image_size, image_size, 3), _BACKGROUND, np.uint8)
    axis = (np.arange(image_size) + 0.5) * _UNIT / image_size
    for which in range(2):
        items = [scene.items[which] for scene in scenes]
        x, y = (np.array([getattr(item, name) for item in items]) for name in "xy")
        r = np.array([SIZES[item.size] for item in items])[:, None, None]
        dx, dy = axis[None, None] - x[:, None, None], axis[None, :, None] - y[:, None, None]
        shapes = np.array([SHAPES.index(item.shape) for item in items])
        inside = np.stack(np.broadcast_arrays(*_insides(dx, dy, r)))[shapes, np.arange(len(items))]
        colors = np.array([COLORS[item.color] for item in items], np.uint8)
        images = np.where(inside[..., None], colors[:, None, None], images)
    return images


def _insides(
    dx: NDArray[np.float64], dy: NDArray[np.float64], r: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], ...]:
    """Return which points belong to each of ``SHAPES`` around the origin."""
    box = np.maximum(abs(dx), abs(dy))
    circle = dx**2 + dy**2 <= r**2
    square = box <= 0.9 * r
    triangle = (abs(dx) <= (dy + r) / 2) & (abs(dy) <= r)
    cross = (np.minimum(abs(dx), abs(dy)) <= r / 3) & (box <= r)
    return circle, square, triangle, cross


def encode_captions(
    captions: Sequence[str], *, words: Sequence[str] = SCENE_WORDS
) -> Int[Tensor, "b n"]:
    """Return ids of captions, with [CLS] and [SEP], padded to one length.

    Ids 0 to 4 are padding, [CLS], [SEP], [MASK] and unknown, as in ``MultimodalConfig``.

    Args:
        captions: Words with spaces between them.
        words: The vocabulary, from id 5 on.

    Example:
        >>> encode_captions(["a red circle left"])
        tensor([[ 1,  5, 11, 15,  7,  2]])
    """
    ids = {word: i for i, word in enumerate(words, _SPECIAL)}
    rows = [[1, *(ids.get(word, 4) for word in caption.split()), 2] for caption in captions]
    longest = max(map(len, rows), default=0)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.long)


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}, got {value!r}.{did_you_mean(value, known)}"
        )
