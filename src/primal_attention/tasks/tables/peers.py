"""Estimators that are compared on tables: those of scikit-learn, LightGBM, CatBoost, and ours.

Every method has the same settings on every table. Trees have the defaults of their packages.
Inner cross-validation on the training rows chooses the neighbours of k-NN, the penalty of linear
models, and whether an MLP stops early. Ours have their defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from primal_attention.datasets.tables import Table
from primal_attention.support.command import UserError, did_you_mean, needs

__all__ = ["METHODS", "Method", "make_method"]

_KNN: dict[str, Any] = {"n_neighbors": [1, 3, 5, 7, 10, 15, 20, 30]}
_ALPHAS = [10.0**power for power in range(-3, 5)]
_C: dict[str, Any] = {"C": [10.0**power for power in range(-3, 4)]}
_MLP: dict[str, Any] = {
    "hidden_layer_sizes": [128, 128],
    "batch_size": 32,
    "n_iter_no_change": 20,
    "max_iter": 1000,
}
"""Batches and patience suit hundreds of rows. With the defaults, a table of 120 rows has one step
an epoch, and early stopping ends the training before it begins to learn."""
_STOPPING: dict[str, Any] = {"early_stopping": [True, False]}
"""Rows held out for early stopping help noisy numbers and are missed by small classes."""


def _is_frame(table: Table) -> bool:
    return hasattr(table.X, "iloc")


def _by_kind(numbers: Any, words: Any) -> Any:
    """Return a transformer of frames: one for numeric columns, one for the others."""
    from sklearn.compose import make_column_selector, make_column_transformer

    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (words, make_column_selector(dtype_exclude="number")),
    )


def _scaled(table: Table, model: Any) -> Any:
    """Return a model of standardised numbers; categories are one-hot, holes are filled."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = [SimpleImputer(strategy="median", add_indicator=True), StandardScaler()]
    if not _is_frame(table):
        return make_pipeline(*numbers, model)
    words = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5)
    return make_pipeline(_by_kind(make_pipeline(*numbers), words), model)


def _is_classes(table: Table) -> bool:
    return table.kind == "classes"


def _searched(model: Any, grid: Mapping[str, Any], scoring: str, seed: int) -> Any:
    """Return a search over one setting by five folds of the training rows."""
    from sklearn.base import is_classifier
    from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold

    chosen = StratifiedKFold if is_classifier(model) else KFold
    folds = chosen(5, shuffle=True, random_state=seed)
    prefix = f"{model.steps[-1][0]}__"
    named = {prefix + key: values for key, values in grid.items()}
    return GridSearchCV(model, named, scoring=scoring, cv=folds)


def _knn(table: Table, seed: int) -> Any:
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

    if _is_classes(table):
        return _searched(_scaled(table, KNeighborsClassifier()), _KNN, "accuracy", seed)
    model = _scaled(table, KNeighborsRegressor())
    return _searched(model, _KNN, "neg_mean_squared_error", seed)


def _linear(table: Table, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression, RidgeCV

    if not _is_classes(table):
        return _scaled(table, RidgeCV(_ALPHAS))
    model = _scaled(table, LogisticRegression(max_iter=2000))
    return _searched(model, _C, "neg_log_loss", seed)


def _forest(table: Table, seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder

    kind = RandomForestClassifier if _is_classes(table) else RandomForestRegressor
    model = kind(random_state=seed)
    if not _is_frame(table):
        return model
    words = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1
    )
    return make_pipeline(_by_kind("passthrough", words), model)


def _boosting(table: Table, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if _is_classes(table):
        return HistGradientBoostingClassifier(random_state=seed)
    return HistGradientBoostingRegressor(random_state=seed)


def _mlp(table: Table, seed: int) -> Any:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.preprocessing import StandardScaler

    if _is_classes(table):
        model = _scaled(table, MLPClassifier(**_MLP, random_state=seed))
        return _searched(model, _STOPPING, "neg_log_loss", seed)
    model = _scaled(table, MLPRegressor(**_MLP, random_state=seed))
    search = _searched(model, _STOPPING, "neg_mean_squared_error", seed)
    return TransformedTargetRegressor(search, transformer=StandardScaler())


def _lightgbm(table: Table, seed: int) -> Any:
    with needs("studies[tables]", "LightGBM"):
        from lightgbm import LGBMClassifier, LGBMRegressor

    kind = LGBMClassifier if _is_classes(table) else LGBMRegressor
    return kind(random_state=seed, n_jobs=1, verbosity=-1)


def _catboost(table: Table, seed: int) -> Any:
    with needs("studies[tables]", "CatBoost"):
        from catboost import CatBoostClassifier, CatBoostRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    kind = CatBoostClassifier if _is_classes(table) else CatBoostRegressor
    quiet = {"random_seed": seed, "thread_count": 1, "verbose": False, "allow_writing_files": False}
    if not _is_frame(table):
        return kind(**quiet)
    words = list(table.X.select_dtypes(exclude="number").columns)
    return make_pipeline(FunctionTransformer(_to_words), kind(**quiet, cat_features=words))


def _to_words(frame: Any) -> Any:
    """Return a frame whose categories are words; CatBoost takes no other kind, and no holes."""
    names = frame.select_dtypes(exclude="number").columns
    return frame.astype(dict.fromkeys(names, object)).fillna(dict.fromkeys(names, "missing"))


def _ours(family: str, table: Table, seed: int, **settings: Any) -> Any:
    """Return one of our estimators for the target of a table."""
    kind = "Classifier" if _is_classes(table) else "Regressor"
    package = import_module("primal_attention.tasks.tables")
    return getattr(package, family + kind)(**settings, random_state=seed)


@dataclass(frozen=True)
class Method:
    """A method to compare."""

    title: str
    """Its name in tables."""
    make: Callable[..., Any]
    """From a table and a seed to a fresh estimator."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was chosen beside the defaults of the package."""
    is_ours: bool = False
    is_stepwise: bool = False
    """Whether it takes the number of steps."""


def _npt(row_attention: str) -> Method:
    make = partial(_ours, "NPT", row_attention=row_attention)
    settings = {"row_attention": row_attention}
    return Method(f"NPT {row_attention}", make, settings, is_ours=True, is_stepwise=True)


METHODS = {
    "k-nn": Method("k-NN", _knn, _KNN),
    "linear": Method("ridge / logistic", _linear, {"alpha": _ALPHAS, **_C}),
    "random-forest": Method("random forest", _forest),
    "boosting": Method("histogram boosting", _boosting),
    "lightgbm": Method("LightGBM", _lightgbm),
    "catboost": Method("CatBoost", _catboost),
    "mlp": Method("MLP", _mlp, {**_MLP, **_STOPPING}),
    "npt-softmax": _npt("softmax"),
    "npt-primal": _npt("primal"),
    "npt-hybrid": _npt("hybrid"),
    "npt-none": _npt("none"),
    "ot-aligned": Method("OT aligned", partial(_ours, "OTAligned"), is_ours=True),
}
"""All methods by name, in the order of the tables."""


def make_method(name: str, table: Table, *, seed: int = 0, steps: int | None = None) -> Any:
    """Return a fresh estimator for a table, with scikit-learn's ``fit`` and ``predict``.

    Args:
        name: One of :data:`METHODS`.
        table: The table; its kind of target and its columns decide the pipeline.
        seed: Seed of everything random.
        steps: Steps of training of an NPT; by default its own.

    Raises:
        UserError: If there is no such method.
        MissingPackageError: If it needs an extra that is not installed.

    Example:
        >>> from primal_attention.datasets.tables import load_table
        >>> iris = load_table("iris")
        >>> X_train, X_test, y_train, y_test = iris.parts(0)
        >>> round(make_method("random-forest", iris).fit(X_train, y_train).score(X_test, y_test), 2)
        0.97
    """
    if name not in METHODS:
        raise UserError(
            f"there is no method {name!r}.{did_you_mean(name, METHODS)} "
            f"Methods: {', '.join(METHODS)}."
        )
    method = METHODS[name]
    options = {"steps": steps} if method.is_stepwise and steps is not None else {}
    with needs("sklearn", "A comparison of methods"):
        return method.make(table, seed, **options)
