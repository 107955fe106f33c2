"""Classes of labelled data, and splits: the same share of every class, the same for a seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError
from primal_attention.support.files.tables import list_some

__all__ = [
    "Split",
    "check_classes",
    "choose",
    "class_indices",
    "hold_out",
    "stratified_sample",
    "stratified_split",
]


class Split(NamedTuple):
    """Indices of two disjoint sets of cases, both in their old order."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]


def stratified_split(y: np.ndarray, fraction: float = 0.2, *, seed: int = 0) -> Split:
    """Return a split that holds out the same fraction of every class.

    Each class gives ``round(fraction · size)`` cases, at least one if it has two or more; a class
    with a single case stays in training.

    Example:
        >>> stratified_split(np.array([0, 0, 0, 0, 0, 1, 1, 1]), 0.25).valid.shape
        (2,)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}.")
    rng = np.random.default_rng(seed)
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[:count]] = True
    return Split(np.flatnonzero(~held), np.flatnonzero(held))


def stratified_sample(y: np.ndarray, size: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the indices of ``size`` cases, the same share of every class, in their old order.

    Example:
        >>> stratified_sample(np.array([0, 0, 0, 0, 0, 0, 1, 1, 1]), 3).shape
        (3,)
    """
    rng = np.random.default_rng(seed)
    place = np.zeros(len(y))
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        place[members] = np.arange(len(members)) / len(members)
    return np.sort(np.argsort(place, kind="stable")[:size])


def choose(labels: np.ndarray, size: int | None) -> NDArray[np.int64]:
    """Return the indices of ``size`` cases, the same share of every class; all if ``None``."""
    return stratified_sample(labels, len(labels) if size is None else size)


def hold_out(labels: np.ndarray, share: float, seed: int) -> Split:
    """Return the cases to train on, and those that choose the epoch; both must exist."""
    split = stratified_split(labels, share, seed=seed)
    if not len(split.valid):
        raise UserError(
            "the validation part would be empty: no class has two training cases, one to learn "
            "from and one to choose the epoch."
        )
    return split


def check_classes(classes: Sequence[str]) -> None:
    """Raise unless there are at least two classes to tell apart."""
    if len(classes) < 2:
        told = f"all have the class {classes[0][:80]!r}" if classes else "there is no class"
        raise UserError(f"{told}; a model needs at least two classes to tell apart.")


def class_indices(labels: Sequence[str], classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the index of every label among the classes."""
    index = {name: i for i, name in enumerate(classes)}
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(
            f"Labels {list_some(unknown)} are not among the classes {list_some(classes)}; name "
            "every class, or correct the labels."
        )
    return np.array([index[label] for label in labels], dtype=np.int64)
