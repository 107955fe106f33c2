"""Rows of a table as a data set for training."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.tasks.splits import stratified_sample
from primal_attention.tasks.tables.columns import EncodedTable
from primal_attention.training import pad_collate

__all__ = ["TableRows", "collate_rows"]

_STRATA = 10
"""Ranges of a target of numbers that a sample takes equal shares of."""


class TableRows(Dataset[Any]):
    """Encoded rows, targets in the last column.

    Args:
        values: Standardised numbers and codes of categories.
        missing: ``True`` where there is no value.
        labels: What to predict of every row, for scores; classes, or standardised numbers.
        weight: Weight of every row in the loss of its target.
    """

    def __init__(
        self,
        values: Float[Tensor, "n d"],
        missing: Bool[Tensor, "n d"],
        labels: Tensor,
        weight: Float[Tensor, " n"] | None = None,
    ) -> None:
        self.values, self.missing, self.labels, self.weight = values, missing, labels, weight

    @classmethod
    def join(
        cls,
        table: EncodedTable,
        target: NDArray[np.float64] | None,
        *,
        is_class: bool,
        weight: NDArray[np.float64] | None = None,
    ) -> "TableRows":
        """Return the rows of a table with a target; a missing target is NaN.

        Args:
            table: The features.
            target: Codes of classes, or standardised numbers; ``None`` for a table without.
            is_class: Whether the target is a class.
            weight: Weight of every row.
        """
        values, missing = torch.from_numpy(table.values), torch.from_numpy(table.missing)
        labels = torch.zeros(len(values))
        if target is not None:
            labels = torch.from_numpy(np.nan_to_num(target)).float()
            values = torch.cat([values, labels[:, None]], 1)
            missing = torch.cat([missing, torch.from_numpy(np.isnan(target))[:, None]], 1)
        given = None if weight is None else torch.from_numpy(weight).float()
        return cls(values, missing, labels.long() if is_class else labels, given)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns().items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return a whole batch at once, which a loader asks for."""
        chosen = torch.tensor(indices)
        return {name: column[chosen] for name, column in self._columns().items()}

    def _columns(self) -> dict[str, Tensor]:
        columns = {"values": self.values, "missing": self.missing, "labels": self.labels}
        return columns if self.weight is None else {**columns, "weight": self.weight}

    def take(self, rows: Any) -> "TableRows":
        """Return some of the rows."""
        chosen = torch.as_tensor(rows)
        weight = None if self.weight is None else self.weight[chosen]
        return TableRows(self.values[chosen], self.missing[chosen], self.labels[chosen], weight)

    def append(self, more: "TableRows") -> "TableRows":
        """Return the rows of two tables; a weight that one of them lacks is one."""
        pairs = zip((self, more), (self.weight, more.weight), strict=True)
        weights = [torch.ones(len(rows)) if w is None else w for rows, w in pairs]
        is_weighted = self.weight is not None or more.weight is not None
        return TableRows(
            torch.cat([self.values, more.values]),
            torch.cat([self.missing, more.missing]),
            torch.cat([self.labels, more.labels]),
            torch.cat(weights) if is_weighted else None,
        )

    def sample(self, size: int) -> Int[Tensor, " k"]:
        """Return the numbers of at most ``size`` rows, the same share of every class or range."""
        if size >= len(self):
            return torch.arange(len(self))
        strata = self.labels.numpy()
        if self.labels.is_floating_point():
            strata = np.digitize(strata, np.quantile(strata, np.linspace(0, 1, _STRATA + 1)[1:-1]))
        return torch.from_numpy(stratified_sample(strata, size))


def collate_rows(items: Any) -> dict[str, Tensor]:
    """Return a batch; rows that come as one batch stay as they are."""
    if isinstance(items, dict):
        return items
    rows: Sequence[dict[str, Tensor]] = items
    return pad_collate(rows)
