"""Sets of small pictures with groups, their descriptors, and searches with known answers.

Groups of training and test parts are disjoint: a re-ranker is always tested on groups that it never
saw. Descriptors are principal components, half whitened, of norm one; they are fitted on the
training part.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.public import data_folder, find_set
from primal_attention.support.command import UserError, did_you_mean, needs
from primal_attention.support.files import take_arrays

__all__ = [
    "PICTURES",
    "Pictures",
    "Search",
    "describe",
    "load_pictures",
    "make_curves",
    "search_all",
    "split_groups",
]

PICTURES = ("coil20", "palm", "emoji")
"""Sets of pictures with groups."""


class Pictures(NamedTuple):
    """Pictures and the group of each."""

    images: NDArray[np.float32]
    """Grey or colour pictures [n height width (channels)], from 0 to 1."""
    groups: NDArray[np.int64]


class Search(NamedTuple):
    """Queries, a gallery, the first results, and the right answers."""

    xq: NDArray[np.float32]
    xb: NDArray[np.float32]
    ids: NDArray[np.int64]
    """Results of exact search, best first; the query itself is left out."""
    relevant: list[NDArray[np.int64]]
    """Ids of the same group as each query, without the query."""


def load_pictures(name: str, data: Path | None = None) -> Pictures:
    """Return a set of pictures: ``"coil20"``, ``"palm"`` or ``"emoji"``.

    A group is an object of COIL-20, a palm, or an emoji in three styles of drawing.

    Args:
        name: Name of the set.
        data: Folder of the data; by default that of ``PRIMAL_DATA``.
    """
    if name not in PICTURES:
        raise UserError(
            f"there is no set of pictures {name!r}.{did_you_mean(name, PICTURES)} "
            f"Sets: {', '.join(PICTURES)}."
        )
    found = find_set(name)
    path = data_folder(data) / found.folder / next(iter(found.files))
    if not path.is_file():
        raise UserError(f"{path} is missing. {found.by_hand(data_folder(data))}")
    return _emoji(path) if name == "emoji" else _matlab(path)


def _matlab(path: Path) -> Pictures:
    with needs("sklearn", "A file of MATLAB"):
        from scipy.io import loadmat
    try:
        content = loadmat(path, variable_names=["X", "Y", "im_height", "im_width"])
        height, width = (int(content[key].item()) for key in ("im_height", "im_width"))
        images = content["X"].astype(np.float32).reshape(-1, width, height).transpose(0, 2, 1)
        return Pictures((images / 255).clip(0, 1), content["Y"].ravel().astype(np.int64))
    except Exception as error:  # scipy has many exceptions of its own
        raise UserError(
            f"{path} is damaged, or no MATLAB file with X, Y, im_height and im_width; copy it "
            "again. primal data shows its checksum."
        ) from error


def _emoji(path: Path) -> Pictures:
    found = take_arrays(path, dict.fromkeys(("color", "black", "twemoji"), ("bytes", 4)))
    styles = list(found.values())
    images = np.concatenate(styles).astype(np.float32) / 255
    return Pictures(images, np.tile(np.arange(len(styles[0])), len(styles)))


def split_groups(groups: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Return ``True`` for the items of a random half of the groups, the training part.

    Example:
        >>> split_groups(np.array([0, 0, 1, 1]), 0)
        array([ True,  True, False, False])
    """
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    return np.isin(groups, names[: len(names) // 2])


def describe(
    images: NDArray[np.float32], train: NDArray[np.bool_], width: int = 60
) -> NDArray[np.float32]:
    """Return descriptors of norm one: half-whitened principal components of the training part.

    Args:
        images: Pictures, or any features of each item.
        train: Items to fit the components on.
        width: Number of components.

    Example:
        >>> x = describe(np.random.default_rng(0).random((20, 4, 4)), np.arange(20) < 10, 5)
        >>> x.shape, bool(np.allclose((x**2).sum(1), 1))
        ((20, 5), True)
    """
    x = images.reshape(len(images), -1).astype(np.float64)
    centred = x - x[train].mean(0)
    _, sigma, components = np.linalg.svd(centred[train], full_matrices=False)
    used = min(width, int((sigma > 1e-9 * sigma[0]).sum()))
    z = centred @ components[:used].T / np.sqrt(sigma[:used])
    return (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def make_curves(
    groups: int = 30, size: int = 40, width: int = 24, noise: float = 0.08, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return noisy closed curves on a sphere, one for each group.

    Neighbours on a curve are alike, opposite points are not: only the context of other points
    shows that they belong together.

    Args:
        groups: Number of curves.
        size: Points of each curve.
        width: Width of the vectors.
        noise: Size of the noise of each point.
        seed: Seed.

    Returns:
        Vectors and groups.

    Example:
        >>> x, y = make_curves(3, 10)
        >>> x.shape, np.bincount(y).tolist()
        ((30, 24), [10, 10, 10])
    """
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * (np.arange(size) / size)[None, :, None]
    centre, first, second = rng.standard_normal((3, groups, 1, width))
    x = centre + first * np.cos(angle) + second * np.sin(angle)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    x = (x + noise * rng.standard_normal(x.shape)).reshape(-1, width)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), np.repeat(np.arange(groups), size)


def search_all(x: NDArray[np.float32], groups: NDArray[np.int64], results: int) -> Search:
    """Return the exact search of every item among all others.

    Example:
        >>> found = search_all(np.eye(4, dtype="float32"), np.array([0, 0, 1, 1]), 3)
        >>> found.ids.shape, found.relevant[0]
        ((4, 3), array([1]))
    """
    cosines = x @ x.T
    np.fill_diagonal(cosines, -np.inf)
    ids = np.argsort(-cosines, axis=1, kind="stable")[:, : min(results, len(x) - 1)]
    relevant = [
        np.setdiff1d(np.flatnonzero(groups == group), [i]) for i, group in enumerate(groups)
    ]
    return Search(x, x, ids, relevant)
