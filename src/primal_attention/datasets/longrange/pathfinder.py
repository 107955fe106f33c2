"""Pathfinder: do the two dots lie at the ends of one dashed path, or of two different ones?

A picture of 32 × 32 grey values, read row by row as 1,024 tokens (Linsley et al. 2018; Tay et al.
2021). Every picture has two long dashed paths, short distractors, and a dot at two ends: both
ends of one long path (class 1) or one end of each (class 0). The two classes agree in everything
that can be counted, paths, dashes and dots, and in the distance of the dots.

The pictures are drawn anew from this description, not with the released program. A path never
comes nearer than ``margin`` to another one, and every picture is looked at again without knowing
how it was made (:func:`dots_are_joined`): where the pixels do not show the label, it is drawn
again. Each has a generator of its own, seeded by (seed, split, index), so that the number of
processes does not matter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
from jaxtyping import Float, UInt8

from primal_attention.datasets.longrange.sequences import TokenSequences, in_processes

__all__ = ["PathfinderConfig", "dots_are_joined", "generate_pathfinder"]

_DASH, _GAP = 1.8, 0.9
_HALF_WIDTH = 0.45
_DOT_RADIUS = 1.4
_DASH_GREY, _DOT_GREY = 180, 255
_TURN = 0.55
"""Greatest change of direction from one dash to the next, in radians."""
_OWN_MARGIN = 2.6
"""Distance a path keeps from its own earlier dashes."""
_SAME_DISTANCE = 2.0
"""Pixels by which the distances of joined and of separate dots may differ."""
_ATTEMPTS = 20
"""Starts tried for a path before the whole picture is given up."""
_STEPS_PER_DASH = 10
"""Dashes tried per dash needed, before a start is given up."""

Segment = tuple[float, float, float, float]


@dataclass(frozen=True)
class PathfinderConfig:
    """Which pictures to draw; the defaults are the hard level of Long Range Arena."""

    size: int = 32
    """Rows and columns."""
    path_dashes: int = 14
    """Dashes of each of the two long paths."""
    distractor_dashes: int = 4
    """Dashes of a distractor."""
    distractors: int = 6
    """Distractors, at most: they are left out where there is no room."""
    margin: float = 3.0
    """Distance in pixels between the dashes of different paths."""

    def __post_init__(self) -> None:
        if self.size < 16 or self.path_dashes < 2 or self.distractor_dashes < 1:
            raise ValueError(
                f"A picture needs 16 rows, two dashes a path and one a distractor at least, got "
                f"{self.size}, {self.path_dashes} and {self.distractor_dashes}."
            )
        if not 2.5 <= self.margin <= 6 or self.distractors < 0:
            raise ValueError(
                f"margin must be from 2.5 to 6 and distractors not negative, got {self.margin} and "
                f"{self.distractors}."
            )


def generate_pathfinder(
    count: int,
    *,
    split: str = "train",
    seed: int = 0,
    config: PathfinderConfig | None = None,
    workers: int = 1,
) -> TokenSequences:
    """Return pictures as sequences of grey values; the same whatever the number of processes.

    Args:
        count: How many. Long Range Arena has 160,000 to train, 20,000 to select, 20,000 to test.
        split: A word; different words give different pictures.
        seed: Seed of all splits.
        config: Size, dashes and distractors.
        workers: Processes that share the work.

    Example:
        >>> data = generate_pathfinder(3)
        >>> picture = data.row(0).reshape(32, 32)
        >>> dots_are_joined(picture) == bool(data.labels[0])
        True
    """
    draw = partial(_draw, f"{seed}/{split}", config or PathfinderConfig())
    rows = in_processes(draw, count, workers)
    pixels = (np.frombuffer(row, np.uint8) for row, _ in rows)
    return TokenSequences.pack(pixels, (label for _, label in rows))


def _draw(key: str, config: PathfinderConfig, index: int) -> tuple[bytes, int]:
    # of Random, only random() is promised to stay the same in later versions of Python
    uniform = Random(f"pathfinder/{key}/{index}").random
    is_joined = uniform() < 0.5
    while True:
        paths = _add_paths([], 2, config.path_dashes, uniform, config)
        if len(paths) < 2:
            continue
        (start, *_, end), (near, *_, far) = paths
        joined = (start[:2], end[2:])
        apart = [(a, b) for a in joined for b in (near[:2], far[2:])]
        # as far from each other as the joined ones, so that the distance tells nothing
        length = math.dist(*joined)
        pair = min(apart, key=lambda dots: abs(math.dist(*dots) - length))
        if abs(math.dist(*pair) - length) > _SAME_DISTANCE:
            continue
        _add_paths(paths, config.distractors, config.distractor_dashes, uniform, config)
        pictures = [_render(paths, dots, config.size) for dots in (pair, joined)]
        # both must be readable, so that the paths themselves tell nothing about the class
        if [dots_are_joined(picture) for picture in pictures] == [False, True]:
            return pictures[is_joined].tobytes(), int(is_joined)


def _add_paths(
    paths: list[list[Segment]],
    count: int,
    dashes: int,
    uniform: Callable[[], float],
    config: PathfinderConfig,
) -> list[list[Segment]]:
    """Add up to ``count`` paths to those there are, as long as there is room."""
    for _ in range(count):
        taken = [segment for path in paths for segment in path]
        grown = (_grow(uniform, config, dashes, taken) for _ in range(_ATTEMPTS))
        path = next((path for path in grown if path is not None), None)
        if path is None:
            break
        paths.append(path)
    return paths


def _grow(
    uniform: Callable[[], float], config: PathfinderConfig, dashes: int, taken: list[Segment]
) -> list[Segment] | None:
    """Return a path that turns smoothly and keeps its distance, or ``None`` if it gets stuck."""
    border, room = 1.5, config.size - 4.0
    start = (border + room * uniform(), border + room * uniform())
    heading = 2 * math.pi * uniform()
    path: list[Segment] = []
    angles: list[float] = []
    low, high = border, border + room
    for _ in range(_STEPS_PER_DASH * dashes):
        angle = angles[-1] + _TURN * (2 * uniform() - 1) if path else heading
        dx, dy = math.cos(angle), math.sin(angle)
        x, y = start if not path else (path[-1][2] + _GAP * dx, path[-1][3] + _GAP * dy)
        segment = (x, y, x + _DASH * dx, y + _DASH * dy)
        # the start is the end of a dash inside, a short gap away
        inside = low <= segment[2] <= high and low <= segment[3] <= high
        if inside and _is_free(segment, taken, path, config.margin):
            path.append(segment)
            angles.append(angle)
            if len(path) == dashes:
                return path
        elif not path:
            return None
        elif uniform() < 0.3:
            # a dead end: take back a few dashes and turn elsewhere
            keep = max(1, len(path) - 3)
            del path[keep:], angles[keep:]
    return None


def _is_free(segment: Segment, taken: list[Segment], own: list[Segment], margin: float) -> bool:
    """Say whether a dash keeps its distance from other paths and from its own path's past."""
    x0, y0, x1, y1 = segment
    # the ends and three points between them
    points = [(x0 + (x1 - x0) * t / 4, y0 + (y1 - y0) * t / 4) for t in range(5)]
    x_twice, y_twice = x0 + x1, y0 + y1
    for others, least in ((taken, margin), (own[:-2], _OWN_MARGIN)):
        # two dashes are at least as far apart as their middles less both half lengths
        reach = 2 * (least + _DASH)
        for other in others:
            if abs(other[0] + other[2] - x_twice) > reach:
                continue
            if abs(other[1] + other[3] - y_twice) > reach:
                continue
            if any(_distance(px, py, other) < least for px, py in points):
                return False
    return True


def _distance(px: float, py: float, segment: Segment) -> float:
    x0, y0, x1, y1 = segment
    dx, dy = x1 - x0, y1 - y0
    along = ((px - x0) * dx + (py - y0) * dy) / (dx * dx + dy * dy)
    along = min(1.0, max(0.0, along))
    return math.hypot(px - x0 - along * dx, py - y0 - along * dy)


def _render(
    paths: list[list[Segment]], dots: tuple[tuple[float, float], ...], size: int
) -> UInt8[np.ndarray, "n n"]:
    """Return the picture; a pixel is as bright as it is covered, to first order."""
    x, y = np.meshgrid(np.arange(size), np.arange(size))
    segments = np.array([segment for path in paths for segment in path])[:, :, None, None]
    x0, y0, dx, dy = segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3]
    dx, dy = dx - x0, dy - y0
    along = ((x - x0) * dx + (y - y0) * dy) / (dx**2 + dy**2)
    along = along.clip(0, 1)
    away = np.hypot(x - x0 - along * dx, y - y0 - along * dy).min(0)
    picture = _DASH_GREY * _covered(_HALF_WIDTH - away)
    for cx, cy in dots:
        disc = _DOT_GREY * _covered(_DOT_RADIUS - np.hypot(x - cx, y - cy))
        picture = np.maximum(picture, disc)
    return picture.round().astype(np.uint8)


def _covered(inside: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    return (inside + 0.5).clip(0, 1)


def dots_are_joined(picture: UInt8[np.ndarray, "n n"]) -> bool | None:
    """Say from the pixels alone whether one path joins the two dots.

    Lit pixels that touch, also at a corner, belong together; dots are brighter than any dash.

    Returns:
        The answer, or ``None`` if the picture does not show two separate dots.

    Example:
        >>> picture = np.zeros((16, 16), np.uint8)
        >>> picture[2, 2:14] = 180
        >>> picture[2, [2, 13]] = 255
        >>> dots_are_joined(picture)
        True
    """
    dots = _components(picture > _DASH_GREY)
    if len(dots) != 2:
        return None
    parts = _components(picture >= 0.3 * _DASH_GREY)
    first, second = (next(part for part in parts if dot <= part) for dot in dots)
    return first is second


def _components(lit: np.ndarray) -> list[set[tuple[int, int]]]:
    """Return the groups of lit pixels that hang together."""
    steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
    left = set(zip(*(axis.tolist() for axis in np.nonzero(lit)), strict=True))
    found = []
    while left:
        group = {left.pop()}
        edge = list(group)
        while edge:
            i, j = edge.pop()
            near = {(i + a, j + b) for a, b in steps} & left
            left -= near
            group |= near
            edge.extend(near)
        found.append(group)
    return found
