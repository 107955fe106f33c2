"""Scores of scikit-learn's methods on the parts of a table, for its report.

Trees have the defaults of the package. Inner cross-validation on the training rows chooses the
neighbours of k-NN and the penalty of linear models.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.datasets.tables import Table
from primal_attention.support.command import needs
from primal_attention.tasks.tables.columns import TableColumn, ValidTable, is_frame
from primal_attention.tasks.tables.data import TableRows
from primal_attention.training.scores import Scores, class_scores, value_scores

with needs("sklearn", "A comparison of methods"):
    from sklearn.base import BaseEstimator

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline

    from primal_attention.tasks.tables.task import TableTask
    from primal_attention.tasks.task import Parts

__all__ = ["BASELINES", "Baseline", "baseline_scores", "scale", "search"]

_KNN = {"n_neighbors": [1, 3, 5, 7, 10, 15, 20, 30]}
_ALPHAS = [10.0**power for power in range(-3, 5)]
_C = {"C": [10.0**power for power in range(-3, 4)]}
_SEARCHED, _MOST = ("k-nn", "linear"), 5_000
"""Methods that cross-validation tunes, and the most rows that they train on."""
_TITLES = {True: "logistic regression", False: "ridge regression"}


def _by_kind(numbers: "BaseEstimator | str", words: "BaseEstimator") -> "ColumnTransformer":
    """Return a transformer of frames: one for numeric columns, one for the others."""
    from sklearn.compose import make_column_selector, make_column_transformer

    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (words, make_column_selector(dtype_exclude="number")),
    )


def scale(table: Table, model: "BaseEstimator") -> "BaseEstimator":
    """Return a model of standardised numbers; categories are one-hot, holes are filled."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = [SimpleImputer(strategy="median", add_indicator=True), StandardScaler()]
    if not is_frame(table.X):
        return make_pipeline(*numbers, model)
    words = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5)
    return make_pipeline(_by_kind(make_pipeline(*numbers), words), model)


def search(
    model: "Pipeline", grid: Mapping[str, Sequence[object]], scoring: str, seed: int
) -> "GridSearchCV":
    """Return a search over one setting by five folds of the training rows."""
    from sklearn.base import is_classifier
    from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold

    chosen = StratifiedKFold if is_classifier(model) else KFold
    folds = chosen(5, shuffle=True, random_state=seed)
    prefix = f"{model.steps[-1][0]}__"
    named = {prefix + key: values for key, values in grid.items()}
    return GridSearchCV(model, named, scoring=scoring, cv=folds)


def _knn(table: Table, seed: int) -> "BaseEstimator":
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

    if table.kind == "classes":
        return search(scale(table, KNeighborsClassifier()), _KNN, "accuracy", seed)
    model = scale(table, KNeighborsRegressor())
    return search(model, _KNN, "neg_mean_squared_error", seed)


def _linear(table: Table, seed: int) -> "BaseEstimator":
    from sklearn.linear_model import LogisticRegression, RidgeCV

    if table.kind != "classes":
        return scale(table, RidgeCV(_ALPHAS))
    model = scale(table, LogisticRegression(max_iter=2000))
    return search(model, _C, "neg_log_loss", seed)


def _forest(table: Table, seed: int) -> "BaseEstimator":
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder

    kind = RandomForestClassifier if table.kind == "classes" else RandomForestRegressor
    model = kind(random_state=seed)
    if not is_frame(table.X):
        return model
    words = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1
    )
    return make_pipeline(_by_kind("passthrough", words), model)


def _boosting(table: Table, seed: int) -> "BaseEstimator":
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if table.kind == "classes":
        return HistGradientBoostingClassifier(random_state=seed)
    return HistGradientBoostingRegressor(random_state=seed)


class Baseline(NamedTuple):
    """A method to compare with."""

    title: str
    """Its name in tables."""
    make: Callable[[Table, int], BaseEstimator]
    """From a table and a seed to a fresh estimator."""
    settings: Mapping[str, Sequence[object]] = {}
    """What was chosen beside the defaults of the package."""


BASELINES = {
    "k-nn": Baseline("k-NN", _knn, _KNN),
    "linear": Baseline("ridge / logistic", _linear, {"alpha": _ALPHAS, **_C}),
    "random-forest": Baseline("random forest", _forest),
    "boosting": Baseline("histogram boosting", _boosting),
}
"""Methods by name, in the order of the tables."""


def baseline_scores(task: "TableTask", data: "Parts") -> dict[str, Scores]:
    """Return the test scores of simple methods, by name; the first is a constant.

    They train on the training and the validation part. A method that cannot be fitted, such as one
    that is cross-validated on too few rows, is left out.

    Args:
        task: Columns and target.
        data: The parts of a table.
    """
    from sklearn.dummy import DummyClassifier, DummyRegressor

    parts: Any = data
    train, test = parts.train.append(parts.valid), parts.test
    constant = DummyClassifier() if task.is_class else DummyRegressor()
    found = {"a constant": _score(task, constant, train, test)}
    kind: Literal["classes", "number"] = "classes" if task.is_class else "number"
    for name, method in BASELINES.items():
        title = _TITLES[task.is_class] if name == "linear" else method.title
        rows = train
        if name in _SEARCHED and len(train) > _MOST:
            rows, title = train.take(train.sample(_MOST)), f"{title} ({_MOST:,} rows)"
        table = Table(name, _features(task, rows), np.zeros(0), kind, ())
        try:
            found[title] = _score(task, method.make(table, 0), rows, test)
        except ValueError:
            continue
    return found


def _features(task: "TableTask", rows: TableRows) -> ValidTable:
    """Return the features with NaN where missing: an array, or a frame if there are categories."""
    values = np.where(rows.missing, np.nan, rows.values)[:, : len(task.columns)]
    kept = [j for j, c in enumerate(task.columns) if c.missing_share < 1]
    if not any(task.columns[j].is_categorical for j in kept):
        return values[:, kept]
    import pandas as pd

    return pd.DataFrame({f"x{j}": _column(task.columns[j], values[:, j]) for j in kept})


def _column(
    column: TableColumn, values: NDArray[np.float64]
) -> "NDArray[np.float64] | pd.Categorical":
    import pandas as pd

    if not column.is_categorical:
        return values
    codes = np.where(np.isnan(values), -1, values).astype(np.int64)
    return pd.Categorical.from_codes(codes, categories=range(column.width))


def _score(task: "TableTask", method: BaseEstimator, train: TableRows, test: TableRows) -> Scores:
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
