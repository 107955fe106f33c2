"""The parts of an experiment with vectors: sets of vectors and groups to train, choose and test.

The mixture ``"pictures"`` is what the model of the package learns from. Every set comes with
several descriptors, principal components of different numbers, so the model meets the same items
under many similarities. Test groups of the sets take no part in it.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.lists import (
    PICTURES,
    Pictures,
    describe,
    load_pictures,
    make_curves,
    split_groups,
)
from primal_attention.support.command import UserError
from primal_attention.support.files import take_arrays
from primal_attention.tasks.lists.gallery import as_vectors
from primal_attention.tasks.lists.settings import VectorSettings

__all__ = ["VectorParts", "VectorSet", "load_parts", "picture_search_part", "read_vectors"]

_WIDTHS = (15, 30, 60, 120)
"""Numbers of components of the descriptors of a training set."""
_CONCEPTS = 400
"""Emoji of a part; with all of them most training lists would be emoji."""
_CURVES = ((30, 40, 24, 0.08), (12, 100, 32, 0.2), (100, 10, 48, 0.25))
"""Curves, points, width and noise of generated sets."""


class VectorSet(NamedTuple):
    """Unit vectors and the group of each."""

    x: NDArray[np.float32]
    groups: NDArray[np.int64]

    def part(self, chosen: NDArray[np.bool_]) -> "VectorSet":
        """Return the chosen items."""
        return VectorSet(self.x[chosen], self.groups[chosen])


class VectorParts(NamedTuple):
    """Sets to train on, to choose the epoch by, and to test."""

    train: list[VectorSet]
    valid: list[VectorSet]
    test: list[VectorSet]


def load_parts(settings: VectorSettings) -> VectorParts:
    """Return the sets that settings describe.

    Example:
        >>> parts = load_parts(VectorSettings(name="curves"))
        >>> [len(part) for part in parts], parts.train[0].x.shape
        ([3, 3, 3], (1200, 24))
    """
    if settings.train is not None:
        return _from_files(settings)
    if settings.name is None:
        raise UserError(
            "which vectors? Give a file .npz with x and groups, or data.name pictures or curves."
        )
    seeds = ((settings.seed, 1), (settings.seed + 1000, 3), (settings.seed + 2000, 3))
    parts = VectorParts(*(_curves(seed, part) for seed, part in seeds))
    if settings.name == "curves":
        return parts
    for name in PICTURES:
        _add_pictures(parts, name, settings)
    return parts


def _curves(seed: int, part: int) -> list[VectorSet]:
    """Return sets of curves, one ``part``-th of the usual number."""
    return [
        VectorSet(*make_curves(groups // part, size, width, noise, seed + i))
        for i, (groups, size, width, noise) in enumerate(_CURVES)
    ]


def picture_search_part(name: str, seed: int = 0, data: Path | None = None) -> VectorSet:
    """Return descriptors and groups of the test part of a set of pictures.

    Args:
        name: Name of the set.
        seed: Seed of the split.
        data: Folder of the data; by default that of ``PRIMAL_DATA``.
    """
    pictures, train = _pictures(name, seed, data)
    return VectorSet(describe(pictures.images, train), pictures.groups).part(~train)


def _pictures(name: str, seed: int, data: Path | None = None) -> tuple[Pictures, NDArray[np.bool_]]:
    """Return a set, at most some concepts of a part, and which items are of the training part."""
    pictures = load_pictures(name, data)
    train = split_groups(pictures.groups, seed)
    names = [np.unique(pictures.groups[part])[:_CONCEPTS] for part in (train, ~train)]
    few = np.isin(pictures.groups, np.concatenate(names))
    return Pictures(pictures.images[few], pictures.groups[few]), train[few]


def _add_pictures(parts: VectorParts, name: str, settings: VectorSettings) -> None:
    pictures, train = _pictures(name, settings.seed)
    valid = train & ~_share(pictures.groups, train, 1 - settings.valid, settings.seed)
    wide = describe(pictures.images, train, max(_WIDTHS))
    for width in _WIDTHS:
        every = VectorSet(_unit(wide[:, :width]), pictures.groups)
        parts.train.append(every.part(train & ~valid))
        if width == 60:
            parts.valid.append(every.part(valid))
            parts.test.append(every.part(~train))


def _share(
    groups: NDArray[np.int64], of: NDArray[np.bool_], share: float, seed: int
) -> NDArray[np.bool_]:
    """Return the items of a random share of the groups of some items."""
    names = np.random.default_rng(seed).permutation(np.unique(groups[of]))
    return of & np.isin(groups, names[: round(share * len(names))])


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def read_vectors(path: Path) -> VectorSet:
    """Return the vectors ``x``, scaled to norm one, and the ``groups`` of an ``.npz`` file."""
    sorts = {"x": ("finite numbers", 2), "groups": ("whole numbers or words", 1)}
    x, groups = take_arrays(path, sorts).values()
    if groups.shape != x.shape[:1]:
        raise UserError(
            f"{path}: groups must hold one value for each of the {len(x)} rows of x, got "
            f"{len(groups)}."
        )
    if not x.shape[1]:
        raise UserError(f"{path}: x has the width 0; give vectors.")
    empty = np.flatnonzero(~x.any(1))
    if len(empty):
        raise UserError(
            f"{path}: x has {len(empty)} vectors of zeros, the first is row {empty[0]}, counted "
            "from 0; they have no direction. Remove them."
        )
    unit = as_vectors(x, "x", normalize=True).numpy()
    return VectorSet(unit, np.unique(groups, return_inverse=True)[1])


def _from_files(settings: VectorSettings) -> VectorParts:
    if settings.train is None:
        raise UserError("there is no file to train on.")
    given = read_vectors(settings.train)
    every = np.ones(len(given.x), dtype=bool)
    if settings.test is not None:
        test, rest = read_vectors(settings.test), every
    else:
        rest = _share(given.groups, every, 1 - settings.test_share, settings.seed)
        test = given.part(~rest)
    train = _share(given.groups, rest, 1 - settings.valid, settings.seed + 1)
    parts = VectorParts([given.part(train)], [given.part(rest & ~train)], [test])
    for name, (part,) in zip(parts._fields, parts, strict=True):
        if len(np.unique(part.groups)) < 2:
            raise UserError(
                f"{settings.train}: the {name} part has {len(np.unique(part.groups))} groups, "
                "relevance needs at least 2 in every part; give more groups or larger shares."
            )
    return parts
