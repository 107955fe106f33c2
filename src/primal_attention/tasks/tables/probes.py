"""Probes: what a model with attention between rows takes from the other rows.

Each probe changes the rows that a prediction attends to: one target (:func:`intervention`), or all
columns (:func:`corruption_by_row`). Kossen et al. (2021) describe them. The section of a report is
in ``probe_report.py``.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from primal_attention.tasks.tables.classifier import TableClassifier
from primal_attention.tasks.tables.columns import TableLike
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.influence import corrupt_rows
from primal_attention.tasks.tables.model import NPTModel
from primal_attention.tasks.tables.regressor import TableRegressor
from primal_attention.tasks.tables.supervised import CorruptionTest

__all__ = [
    "Intervention",
    "context_model",
    "corrupt_others",
    "corruption_by_row",
    "intervention",
    "row_distances",
]

Estimator = TableClassifier | TableRegressor
_SWEEP = 2.0
"""A target is overwritten by values up to so many standard deviations from the mean."""


def context_model(
    estimator: Estimator, rows: tuple[TableLike, ArrayLike] | None = None
) -> NPTModel:
    """Return the model of an estimator with single rows as its context.

    Args:
        estimator: Fitted.
        rows: Features and targets of the rows. Needed after a fit with ``attention="primal-dual"``,
            which keeps none.
    """
    model = estimator._with_rows(rows)
    if model.config.has_rows and not model.config.context_rows:
        raise ValueError(
            "The model keeps no training rows, so none of them can be changed; pass rows=(X, y), "
            "the training table."
        )
    return model


# one target


class Intervention(NamedTuple):
    """Predictions of a row while the target of its twin in the context is overwritten."""

    sweep: Float[Tensor, " k"]
    """Targets that were written, in standard deviations."""
    predictions: Float[Tensor, " k"]
    """What the model predicts with each."""
    slope: float
    """Least-squares slope: 1 if the model copies, 0 if it does not read the target."""
    correlation: float
    """Correlation of both; 0 if predictions are constant."""


@torch.no_grad()
def intervention(
    model: NPTModel,
    values: Float[Tensor, "m d"],
    missing: Bool[Tensor, "m d"],
    row: int,
    *,
    twin: Float[Tensor, " d"] | None = None,
    sweep: Float[Tensor, " k"] | None = None,
) -> Intervention:
    """Overwrite the target of one context row, and return what is predicted for its twin.

    Args:
        model: In eval mode, with a target of numbers.
        values: Context rows, targets last.
        missing: Their holes.
        row: The context row whose target is overwritten.
        twin: The row to predict; by default the context row with a hidden target.
        sweep: Targets to write; by default nine from -2 to 2 standard deviations.

    Example:
        >>> from primal_attention.tasks.tables import NPTConfig, NPTModel
        >>> alone = NPTModel(NPTConfig(categories=(0, 0, 0), has_rows=False)).eval()
        >>> rows, holes = torch.randn(6, 3), torch.zeros(6, 3, dtype=torch.bool)
        >>> intervention(alone, rows, holes, 0).slope
        0.0
    """
    if not model.config.num_targets or model.config.categories[-1]:
        raise ValueError("An intervention needs a model whose target is a number.")
    if sweep is None:
        sweep = torch.linspace(-_SWEEP, _SWEEP, 9)
    asked = (values[row] if twin is None else twin)[None]
    hidden = missing[row : row + 1].clone()
    hidden[:, -1] = True
    x = model.embedding(asked, hidden)
    found = []
    for value in sweep:
        changed, holes = values.clone(), missing.clone()
        changed[row, -1], holes[row, -1] = value, False
        memories = model.stream(changed, holes)
        found.append(model.predict_from(x, memories=memories).logits[0, 0])
    predictions = torch.stack(found)
    slope, correlation = _line(sweep.double(), predictions.double())
    return Intervention(sweep, predictions, slope, correlation)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the slope of the least-squares line, and the correlation."""
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    slope = float((x @ y) / (x @ x))
    return slope, float(x @ y) / size if size > 0 else 0.0


# all columns


def corrupt_others(
    values: Float[Tensor, "n d"], missing: Bool[Tensor, "n d"], row: int, seed: int
) -> tuple[Float[Tensor, "n d"], Bool[Tensor, "n d"]]:
    """Return a table in which every column of all other rows is shuffled by itself.

    Args:
        values: The table.
        missing: Its holes, which move with the values.
        row: The row that stays.
        seed: Seed of the shuffles.

    Example:
        >>> table = torch.arange(8.0).view(4, 2)
        >>> shuffled, _ = corrupt_others(table, table < 0, 1, seed=0)
        >>> shuffled[1].tolist(), sorted(shuffled[:, 0].tolist())
        ([2.0, 3.0], [0.0, 2.0, 4.0, 6.0])
    """
    others = torch.arange(len(values)) != row
    values, missing = values.clone(), missing.clone()
    values[others], missing[others] = corrupt_rows(values[others], missing[others], seed)
    return values, missing


@torch.no_grad()
def corruption_by_row(
    estimator: Estimator,
    X: TableLike,
    y: ArrayLike,
    *,
    rows: tuple[TableLike, ArrayLike] | None = None,
    limit: int = 100,
    seed: int = 0,
) -> CorruptionTest:
    """Return the scores of an estimator with whole and with shuffled other rows.

    This is the published form: each evaluated row has its own shuffle of all other rows, which for
    a transductive estimator are the context and the other rows of ``X``.

    Args:
        estimator: Fitted.
        X: Rows to predict.
        y: Their targets.
        rows: Training rows as ``(X, y)``, if the estimator keeps none.
        limit: Most rows to evaluate, since each costs a pass over the table.
        seed: Seed of the evaluated rows and of the shuffles.
    """
    model, table = context_model(estimator, rows), estimator._rows(X)
    generator = np.random.default_rng(seed)
    count = min(limit, len(table))
    chosen = np.sort(generator.choice(len(table), count, replace=False))
    seeds = generator.integers(2**31, size=count)
    found = [
        _predict_corrupted(model, table, int(i), int(own))
        for i, own in zip(chosen, seeds, strict=True)
    ]
    truth = np.asarray(y)[chosen]
    whole = estimator._rate(estimator._logits(X, model)[torch.from_numpy(chosen)], truth)
    return CorruptionTest(whole, estimator._rate(torch.cat(found).double(), truth))


def _predict_corrupted(model: NPTModel, table: TableRows, i: int, seed: int) -> Tensor:
    """Return the prediction of one row whose other rows are shuffled."""
    sees_all = model.config.context == "transductive"
    beside = slice(None) if sees_all else slice(i, i + 1)
    place = len(model.context_values) + (i if sees_all else 0)
    every = torch.cat([model.context_values, table.values[beside]])
    holes = torch.cat([model.context_missing, table.missing[beside]])
    every, holes = corrupt_others(every, holes, place, seed)
    x = model.embedding(every[place : place + 1], holes[place : place + 1])
    seen = slice(None) if sees_all else slice(place)
    return model.predict_from(x, memories=model.stream(every[seen], holes[seen])).logits


# distances


def row_distances(
    model: NPTModel,
    values: Float[Tensor, " d"],
    missing: Bool[Tensor, " d"],
    table: tuple[Float[Tensor, "m d"], Bool[Tensor, "m d"]] | None = None,
) -> Float[Tensor, " m"]:
    """Return the distances of other rows from a row: root mean square over the features.

    Numbers are in standard deviations. Two different categories have the distance 1, and so has a
    cell that one of the rows lacks.

    Args:
        model: Decides which columns are categories, and has the context.
        values: Encoded row, target last; the target is not compared.
        missing: Its holes.
        table: The other rows and their holes; by default the context.
    """
    every, holes = (model.context_values, model.context_missing) if table is None else table
    f = model.config.num_features
    gaps = (every[:, :f] - values[:f]).square()
    is_category = torch.tensor(model.config.categories[:f]) > 0
    gaps = torch.where(is_category, (gaps > 0).to(gaps.dtype), gaps)
    return torch.where(holes[:, :f] | missing[:f], 1.0, gaps).mean(1).sqrt()
