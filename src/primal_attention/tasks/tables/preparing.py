"""Training tables before they reach a model: equal rows, parts, known cells."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.tables.columns import ValidTable, is_frame
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.encoding import TableEncoder
from primal_attention.tasks.tables.task import TableTask

__all__ = ["Prepared", "keep_known", "merge_rows", "split_rows"]

_FEW = 20
"""Fewer rows than this give no validation part."""


class Prepared(NamedTuple):
    """A training table, ready for the model."""

    task: TableTask
    rows: TableRows
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    """Rows that choose the epoch and calibrate; perhaps none."""


def merge_rows(
    encoder: TableEncoder,
    X: ValidTable,
    y: NDArray[np.float64] | None,
    weights: NDArray[np.float64],
    kept: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return one row of every kind in an order of their content, and the sums of their weights."""
    table = encoder.encode(X)
    parts = [table.values, table.missing] + ([] if y is None else [y[:, None]])
    keys = np.concatenate(parts, 1, dtype=np.float64)[kept]
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    total = np.bincount(inverse.reshape(-1), weights[kept])
    return kept[first], total.astype(np.float64)


def split_rows(
    rows: TableRows, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows to train on, and those that choose the epoch; perhaps none.

    Args:
        rows: The training rows.
        share: Of the rows that choose the epoch, the same of every class.
        seed: Seed of the split.
    """
    count = len(rows)
    if share == 0 or count < _FEW:
        return np.arange(count), np.zeros(0, np.int64)
    if not rows.labels.is_floating_point():
        return stratified_split(rows.labels.numpy(), share, seed=seed)
    held = np.random.default_rng(seed).permutation(count)
    cut = max(1, round(share * count))
    return np.sort(held[cut:]), np.sort(held[:cut])


def keep_known(filled: ValidTable, X: ValidTable, missing: NDArray[np.bool_]) -> ValidTable:
    """Return a filled table with the known cells of the original, digit by digit."""
    if is_frame(filled) and is_frame(X):
        filled.index = X.index
        for j, name in enumerate(filled.columns):
            if not missing[:, j].any():
                filled[name] = X.iloc[:, j]
        return filled
    if filled.dtype != np.asarray(X).dtype:
        return filled
    return np.where(missing, filled, X)
