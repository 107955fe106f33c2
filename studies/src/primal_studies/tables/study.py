"""Study of small tables: attention between rows beside what a practitioner would use.

Every method trains on the same rows and is scored on the same test rows. Settings are the same on
every table. Whatever is chosen is chosen on training rows.
"""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.support.command import needs
from primal_attention.support.settings import at_least_one, fingerprint, one_of
from primal_attention.tasks.study import Cell, Row, Study

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ComparisonOptions", "Tables", "score_classes", "score_numbers"]

_SETS = (
    "boston-housing",
    "concrete",
    "yacht",
    "diabetes",
    "breast-cancer",
    "wine",
    "iris",
    "digits",
)
"""The small tables: at most 2,000 rows."""
_BASELINES = ("k-nn", "linear", "random-forest", "boosting", "lightgbm", "catboost", "mlp")
_OURS = ("npt-softmax", "npt-primal", "npt-hybrid", "npt-none", "ot-aligned")


@dataclass(frozen=True)
class ComparisonOptions:
    """NPT and transport beside k-NN, linear models, trees, boosting and an MLP on small tables."""

    sets: tuple[str, ...] = _SETS
    """Names of tables."""
    methods: tuple[str, ...] = _BASELINES + _OURS
    """Names of methods."""
    splits: int = 10
    """Most splits of a table; tables of scikit-learn have five."""
    steps: int | None = None
    """Steps of training of NPT; by default those of the estimator."""
    seed: int = 0
    """Seed of the methods. Splits are fixed."""
    data: Path | None = None
    """Folder of the data sets; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        from primal_attention.datasets.tables import TABLES

        at_least_one(self, "splits", *(["steps"] if self.steps is not None else []))
        one_of(self, "sets", TABLES)
        one_of(self, "methods", _BASELINES + _OURS)
        for name in ("sets", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty; leave it out to run all.")

    def mark(self, method: str) -> str:
        """Return a fingerprint of what decides a row besides table, split and method."""
        from primal_studies.tables.methods import METHODS

        found = METHODS[method]
        steps = self.steps if found.is_stepwise else None
        return fingerprint({"seed": self.seed, "steps": steps}, found.settings)


class Tables(Study[ComparisonOptions]):
    """Fit every method on every split of every table."""

    name = "tables"
    Options = ComparisonOptions

    def cells(self, options: ComparisonOptions) -> list[Cell]:
        """Return all methods on the first split of every table before the second split."""
        from primal_attention.datasets.tables import TABLES, table_folder

        for name in options.sets:
            table_folder(name, options.data)  # raises if files are missing
        return [
            {"split": split, "set": name, "method": method, "settings": options.mark(method)}
            for split in range(options.splits)
            for name in options.sets
            if split < TABLES[name].splits
            for method in options.methods
        ]

    def run(self, cell: Cell, options: ComparisonOptions, scratch: Path) -> Row:
        """Fit one method on one split and score its test rows."""
        with needs("sklearn", "A comparison of methods"):
            from threadpoolctl import threadpool_limits

        from primal_attention.datasets.tables import load_table
        from primal_studies.tables.methods import make_method

        table = load_table(cell["set"], options.data)
        X_train, X_test, y_train, y_test = table.parts(cell["split"])
        model = make_method(cell["method"], table, seed=options.seed, steps=options.steps)
        with threadpool_limits(self.threads):
            began = time.process_time()
            model.fit(X_train, y_train)
            fitted = time.process_time()
            if table.kind == "number":
                guess, deviation = _predict_number(model, X_test)
                predicted = time.process_time()
                scores = score_numbers(y_test, guess, deviation, float(y_train.std()))
            else:
                guess, chances = model.predict(X_test).ravel(), model.predict_proba(X_test)
                predicted = time.process_time()
                scores = score_classes(y_test, guess, chances, model.classes_)
        return {
            "kind": table.kind,
            **scores,
            "fit_seconds": fitted - began,
            "predict_seconds": predicted - fitted,
            "rows": len(table.y),
            "columns": table.X.shape[1],
        }

    def describe(self, row: Row) -> str:
        """Return method, table and main score of a row."""
        from primal_studies.tables.pages import main_score

        score = main_score(row)
        return (
            f"{row['method']} on {row['set']}, split {row['split']}: {score} {row[score]:.4g}, "
            f"{row['fit_seconds']:.1f} s"
        )

    def tables(self, rows: Sequence[Row], options: ComparisonOptions) -> Mapping[str, str | bytes]:
        """Return tables of scores, ranks and costs, and pictures of the first two."""
        from primal_studies.tables import pages as show
        from primal_studies.tables.methods import METHODS

        kept = [
            row for row in rows if row["method"] in METHODS
            and row["settings"] == options.mark(row["method"])
        ]  # fmt: skip
        order = {name: place for place, name in enumerate(METHODS)}
        kept.sort(key=lambda row: order[row["method"]])
        if not kept:
            return {}
        return {
            "scores.md": show.score_page(kept),
            "ranks.md": show.rank_page(kept),
            "more.md": show.more_page(kept),
            "cost.md": show.cost_page(kept),
            "ranks.png": show.rank_picture(kept),
            "scores.png": show.score_picture(kept),
        }


def _predict_number(model: Any, X: Any) -> "tuple[NDArray[Any], NDArray[Any] | None]":
    """Return predicted means, and deviations if the model has them."""
    if "return_std" not in inspect.signature(model.predict).parameters:
        return model.predict(X), None
    mean, deviation = model.predict(X, return_std=True)
    return mean, deviation


def score_numbers(
    y: "NDArray[Any]", mean: "NDArray[Any]", deviation: "NDArray[Any] | None", scale: float
) -> dict[str, Any]:
    """Return RMSE in units of the target and of its deviation, R², and NLL with deviations.

    Args:
        y: True numbers.
        mean: Predicted numbers.
        deviation: Predicted standard deviations of normal distributions, if there are any.
        scale: Standard deviation of the target in the training rows.

    Example:
        >>> import numpy as np
        >>> score_numbers(np.array([1.0, 3.0]), np.array([2.0, 2.0]), None, 2.0)
        {'rmse': 1.0, 'rmse_scaled': 0.5, 'r2': 0.0}
    """
    import numpy as np

    squares = (y - mean) ** 2
    rmse = float(np.sqrt(squares.mean()))
    r2 = 1 - float(squares.sum() / ((y - y.mean()) ** 2).sum())
    scores = {"rmse": rmse, "rmse_scaled": rmse / scale, "r2": r2}
    if deviation is None:
        return scores
    nll = 0.5 * (np.log(2 * np.pi * deviation**2) + squares / deviation**2)
    return scores | {"nll": float(nll.mean())}


def score_classes(
    y: "NDArray[Any]", guess: "NDArray[Any]", chances: "NDArray[Any]", classes: "NDArray[Any]"
) -> dict[str, Any]:
    """Return accuracy, AUROC (one class against the others, mean over classes) and log-loss.

    Args:
        y: True classes.
        guess: Predicted classes.
        chances: Predicted probabilities, a column for every class.
        classes: Names of the columns.
    """
    from sklearn.metrics import log_loss, roc_auc_score

    is_binary = len(classes) == 2
    auroc = roc_auc_score(
        y, chances[:, 1] if is_binary else chances, multi_class="ovr", labels=classes
    )
    return {
        "classes": len(classes),
        "accuracy": float((y == guess).mean()),
        "auroc": float(auroc),
        "log_loss": float(log_loss(y, chances, labels=classes)),
    }
