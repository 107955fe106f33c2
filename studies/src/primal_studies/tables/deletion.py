"""Data deletion: which context rows a prediction needs (Kossen et al. 2021)."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import wilcoxon
from torch import Tensor

from primal_attention.tasks.tables import NPTModel, TableClassifier
from primal_attention.tasks.tables.columns import TableLike
from primal_attention.tasks.tables.probes import Estimator, context_model, row_distances

__all__ = ["DataDeletion", "Deletion", "data_deletion"]

_STEP, _TOTAL = 0.01, 0.1
"""Relative change of a prediction that one deletion, and all of them together, may make."""
_PATIENCE, _GROWTH = 50, 1.1
"""Rejected deletions in a row after which the first of these grows, and its factor."""
_STOP = 0.02
"""Share of the rows at which deletion ends."""


class Deletion(NamedTuple):
    """Context rows that a prediction needs, and those that it does without."""

    kept: NDArray[np.int64]
    """Numbers of the rows that are left."""
    deleted: NDArray[np.int64]
    """Numbers of the deleted rows, in their order."""
    kept_distance: float
    """Mean distance of the kept rows from the predicted row, by features."""
    deleted_distance: float
    """The same of the deleted rows; NaN without any."""
    change: float
    """Relative change of the prediction in the end."""


class DataDeletion(NamedTuple):
    """Deletions for several predicted rows."""

    deletions: tuple[Deletion, ...]
    p_value: float
    """Wilcoxon signed-rank test of equal distances of kept and deleted rows, two-sided."""


@torch.no_grad()
def data_deletion(
    estimator: Estimator,
    X: TableLike,
    *,
    rows: tuple[TableLike, ArrayLike] | None = None,
    max_proposals: int = 5000,
    seed: int = 0,
) -> DataDeletion:
    """Delete context rows one by one while the prediction stays, and compare what is left.

    A random row is deleted if the prediction then changes by less than 1 %, and by less than 10 %
    since the start: the expected number, or the probability of the predicted class. The 1 % grows
    by a tenth after 50 rejections. Deletion ends at 2 % of the rows. A model that looks up its
    neighbours keeps near rows.

    Args:
        estimator: Fitted, with ``context="train"``.
        X: Rows to predict; each costs thousands of passes over the context.
        rows: Training rows as ``(X, y)``, if the estimator keeps none.
        max_proposals: Most deletions to try for a row.
        seed: Seed of the proposals.
    """
    model, table = context_model(estimator, rows), estimator._rows(X)
    generator = np.random.default_rng(seed)
    found = []
    for values, missing in zip(table.values, table.missing, strict=True):
        predict = _Prediction(estimator, model, model.embedding(values[None], missing[None]))
        kept, deleted, change = _delete(predict, generator, max_proposals)
        away = row_distances(model, values, missing).numpy()
        near, far = (float(away[k].mean()) if len(k) else np.nan for k in (kept, deleted))
        found.append(Deletion(kept, deleted, near, far, change))
    gaps = np.array([d.kept_distance - d.deleted_distance for d in found])
    gaps = gaps[np.isfinite(gaps) & (gaps != 0)]
    return DataDeletion(tuple(found), float(wilcoxon(gaps).pvalue) if len(gaps) else 1.0)


class _Prediction:
    """The prediction of one row as a function of the context rows that it sees."""

    def __init__(self, estimator: Estimator, model: NPTModel, x: Tensor) -> None:
        self.estimator, self.model, self.x = estimator, model, x
        self.count = len(model.context_values)
        self.label = int(self._logits(np.arange(self.count)).argmax())

    def _logits(self, kept: NDArray[np.int64]) -> Tensor:
        chosen = torch.from_numpy(kept)
        model = self.model
        memories = model.stream(model.context_values[chosen], model.context_missing[chosen])
        return model.predict_from(self.x, memories=memories).logits.double()

    def __call__(self, kept: NDArray[np.int64]) -> float:
        logits = self._logits(kept)
        if isinstance(self.estimator, TableClassifier):
            return float(logits.softmax(1)[0, self.label])
        return float(self.estimator._moments(logits)[0][0])


def _delete(
    predict: _Prediction, generator: np.random.Generator, max_proposals: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Return the kept rows, the deleted rows and the relative change of the prediction."""
    kept = np.arange(predict.count)
    first = now = predict(kept)
    deleted: list[int] = []
    step, rejections, least = _STEP, 0, max(1, int(np.ceil(_STOP * predict.count)))
    for _ in range(max_proposals):
        # a larger step than twice the total cannot be allowed, so nothing is left to try
        if len(kept) <= least or step > 2 * _TOTAL:
            break
        place = int(generator.integers(len(kept)))
        fewer = np.delete(kept, place)
        new = predict(fewer)
        if _relative(new, now) < step and _relative(new, first) < _TOTAL:
            deleted.append(int(kept[place]))
            kept, now, rejections = fewer, new, 0
            continue
        rejections += 1
        if rejections == _PATIENCE:
            step, rejections = step * _GROWTH, 0
    return kept, np.array(deleted, np.int64), _relative(now, first)


def _relative(new: float, old: float) -> float:
    return abs(new - old) / max(abs(old), 1e-12)
