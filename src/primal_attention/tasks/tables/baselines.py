"""Scores of scikit-learn's methods on the parts of a table, for its report."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.datasets.tables import Table
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.peers import METHODS, make_method
from primal_attention.training.scores import Scores, class_scores, value_scores

if TYPE_CHECKING:
    from primal_attention.tasks.tables.task import TableTask
    from primal_attention.tasks.task import Parts

__all__ = ["baseline_scores"]

_METHODS = ("k-nn", "linear", "random-forest", "boosting")
_SEARCHED, _MOST = ("k-nn", "linear"), 5_000
"""Methods that cross-validation tunes, and the most rows that they train on."""
_TITLES = {True: "logistic regression", False: "ridge regression"}


def baseline_scores(task: "TableTask", data: "Parts") -> dict[str, Scores]:
    """Return the test scores of simple methods, by name; the first is a constant.

    They train on the training and the validation part. A method that cannot be fitted, such as one
    that is cross-validated on too few rows, is left out.

    Args:
        task: Columns and target.
        data: The parts of a table.
    """
    parts: Any = data
    train, test = parts.train.append(parts.valid), parts.test
    found = {"a constant": _score(task, _constant(task), train, test)}
    for name in _METHODS:
        title = _TITLES[task.is_class] if name == "linear" else METHODS[name].title
        rows = train
        if name in _SEARCHED and len(train) > _MOST:
            rows, title = train.take(train.sample(_MOST)), f"{title} ({_MOST:,} rows)"
        table = Table(name, _features(task, rows), np.zeros(0), _kind(task), ())
        try:
            found[title] = _score(task, make_method(name, table), rows, test)
        except ValueError:
            continue
    return found


def _kind(task: "TableTask") -> Any:
    return "classes" if task.is_class else "number"


def _constant(task: "TableTask") -> Any:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    return DummyClassifier() if task.is_class else DummyRegressor()


def _features(task: "TableTask", rows: TableRows) -> Any:
    """Return the features with NaN where missing: an array, or a frame if there are categories."""
    values = np.where(rows.missing, np.nan, rows.values)[:, : len(task.columns)]
    kept = [j for j, c in enumerate(task.columns) if c.missing_share < 1]
    if not any(task.columns[j].is_categorical for j in kept):
        return values[:, kept]
    import pandas as pd

    return pd.DataFrame({f"x{j}": _column(pd, task.columns[j], values[:, j]) for j in kept})


def _column(pd: Any, column: Any, values: NDArray[np.float64]) -> Any:
    if not column.is_categorical:
        return values
    codes = np.where(np.isnan(values), -1, values).astype(np.int64)
    return pd.Categorical.from_codes(codes, categories=range(column.width))


def _score(task: "TableTask", method: Any, train: TableRows, test: TableRows) -> Scores:
    labels = train.labels.numpy()
    with warnings.catch_warnings():
        # of solvers that stop early and classes with few rows
        warnings.simplefilter("ignore")
        method.fit(_features(task, train), labels)
        X = _features(task, test)
        if task.is_class:
            shares = np.zeros((len(test), len(task.classes)))
            shares[:, method.classes_] = method.predict_proba(X)
            return class_scores({"logits": torch.from_numpy(shares), "labels": test.labels})
        column = task._numeric_target
        values, true = (
            column.mean + column.scale * torch.as_tensor(v).double()
            for v in (method.predict(X), test.labels)
        )
    return value_scores({"values": values, "labels": true})
