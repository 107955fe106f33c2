"""Methods that are compared on tables: those of scikit-learn, LightGBM, CatBoost, and ours.

Every method has the same settings on every table. Trees have the defaults of their packages, and
ours have their defaults. Inner cross-validation on the training rows chooses the neighbours of
k-NN, the penalty of linear models, and whether an MLP stops early.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from primal_attention.datasets.tables import Table
from primal_attention.support.command import UserError, did_you_mean, needs
from primal_attention.tasks.tables.baselines import BASELINES, scale, search
from primal_attention.tasks.tables.columns import is_frame

__all__ = ["METHODS", "ROW_ATTENTIONS", "TableMethod", "make_method", "row_settings"]

ROW_ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "primal": {"attention": "primal-dual"},
    "hybrid": {
        "attention": "primal-sparse",
        "primal_layers": "last:1",
        "other_attention": "primal-dual",
    },
    "none": {"has_rows": False},
}
"""Row attentions by the names that measured rows have, as fields of ``NPTOptions``."""
_EPOCHS = 20
"""Times that the validation rows are scored in a training of a given number of steps."""


def row_settings(row_attention: str, *, steps: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of an estimator of tables.

    Args:
        row_attention: One of :data:`ROW_ATTENTIONS`.
        steps: Training steps; by default those of the estimator.
        **options: Further options of the estimator.

    Example:
        >>> row_settings("primal", steps=40)
        {'attention': 'primal-dual', 'max_epochs': 20, 'options': {'epoch_steps': 2}}
    """
    options = {**ROW_ATTENTIONS[row_attention], **options}
    found = {name: options.pop(name) for name in ("attention",) if name in options}
    if steps is not None:
        found["max_epochs"] = min(_EPOCHS, steps)
        options["epoch_steps"] = -(-steps // found["max_epochs"])
    return {**found, "options": options} if options else found


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


def _mlp(table: Table, seed: int) -> Any:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.preprocessing import StandardScaler

    if table.kind == "classes":
        model = scale(table, MLPClassifier(**_MLP, random_state=seed))
        return search(model, _STOPPING, "neg_log_loss", seed)
    model = scale(table, MLPRegressor(**_MLP, random_state=seed))
    found = search(model, _STOPPING, "neg_mean_squared_error", seed)
    return TransformedTargetRegressor(found, transformer=StandardScaler())


def _lightgbm(table: Table, seed: int) -> Any:
    with needs("studies[tables]", "LightGBM"):
        from lightgbm import LGBMClassifier, LGBMRegressor

    kind = LGBMClassifier if table.kind == "classes" else LGBMRegressor
    return kind(random_state=seed, n_jobs=1, verbosity=-1)


def _catboost(table: Table, seed: int) -> Any:
    with needs("studies[tables]", "CatBoost"):
        from catboost import CatBoostClassifier, CatBoostRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    kind = CatBoostClassifier if table.kind == "classes" else CatBoostRegressor
    quiet = {"random_seed": seed, "thread_count": 1, "verbose": False, "allow_writing_files": False}
    if not is_frame(table.X):
        return kind(**quiet)
    words = list(table.X.select_dtypes(exclude="number").columns)
    return make_pipeline(FunctionTransformer(_to_words), kind(**quiet, cat_features=words))


def _to_words(frame: Any) -> Any:
    """Return a frame whose categories are words; CatBoost takes no other kind, and no holes."""
    names = frame.select_dtypes(exclude="number").columns
    return frame.astype(dict.fromkeys(names, object)).fillna(dict.fromkeys(names, "missing"))


def _npt(row_attention: str) -> "TableMethod":
    def make(table: Table, seed: int, steps: int | None = None) -> Any:
        from primal_attention.tasks.tables import TableClassifier, TableRegressor

        kind = TableClassifier if table.kind == "classes" else TableRegressor
        return kind(**row_settings(row_attention, steps=steps), random_state=seed)

    # the fingerprint of measured rows holds this name
    settings = {"row_attention": row_attention}
    return TableMethod(f"NPT {row_attention}", make, settings, is_ours=True, is_stepwise=True)


def _aligned(table: Table, seed: int) -> Any:
    from primal_attention.tasks.tables import OTAlignedClassifier, OTAlignedRegressor

    kind = OTAlignedClassifier if table.kind == "classes" else OTAlignedRegressor
    return kind(random_state=seed)


class TableMethod(NamedTuple):
    """A method to compare."""

    title: str
    """Its name in tables."""
    make: Callable[..., Any]
    """From a table and a seed to a fresh estimator."""
    settings: Mapping[str, Any] = {}
    """What was chosen beside the defaults of the package."""
    is_ours: bool = False
    is_stepwise: bool = False
    """Whether it takes the number of steps."""


METHODS = {
    **{name: TableMethod(*method) for name, method in BASELINES.items()},
    "lightgbm": TableMethod("LightGBM", _lightgbm),
    "catboost": TableMethod("CatBoost", _catboost),
    "mlp": TableMethod("MLP", _mlp, {**_MLP, **_STOPPING}),
    **{f"npt-{name}": _npt(name) for name in ROW_ATTENTIONS},
    "ot-aligned": TableMethod("OT aligned", _aligned, is_ours=True),
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
    return method.make(table, seed, **options)
