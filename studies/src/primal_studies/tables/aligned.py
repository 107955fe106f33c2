"""Study of the classifier of aligned classes: what transport changes, and what it does not.

Every method sees the same folds. Methods that differ in one thing are compared in pairs: optimal
transport against random matching and against the centre as target, simplex against circle, and all
against the same network with cross-entropy.
"""

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from primal_attention.support.command import needs
from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import GREY, Column, Picture, columns_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["AlignedAccuracy", "AlignedOptions", "load_rows", "make_clouds"]

_CLOUDS = {"2 clouds ±1": (2, 1.0), "2 clouds ±2": (2, 2.0), "3 clouds": (3, 1.0)}
_BUNDLED = ("iris", "wine", "breast-cancer", "digits")
_EEG = {"EEG random": True, "EEG blocked": False}
_SETS = (*_CLOUDS, *_BUNDLED, *_EEG)
_OURS: dict[str, dict[str, Any]] = {
    "OT circle": {"geometry": "circle"},
    "random circle": {"geometry": "circle", "options": {"match": "random"}},
    "centre circle": {"geometry": "circle", "options": {"match": "centre"}},
    "OT simplex": {"geometry": "simplex"},
    "random simplex": {"geometry": "simplex", "options": {"match": "random"}},
    "OT aligned": {},
    "random aligned": {"options": {"match": "random"}},
    "centre aligned": {"options": {"match": "centre"}},
}
_OTHERS = ("MLP", "logistic", "1-NN", "random forest")
_PAIRS = (
    ("OT circle", "random circle"),
    ("OT circle", "centre circle"),
    ("OT aligned", "random aligned"),
    ("OT aligned", "centre aligned"),
    ("OT aligned", "OT simplex"),
    ("OT simplex", "OT circle"),
    ("OT aligned", "MLP"),
)
_FOLDS = 5
_ARROWS = 90
"""Rows in the picture of learned maps."""
_ROWS = 1200
"""Rows of clouds and digits."""


@dataclass(frozen=True)
class AlignedOptions:
    """Accuracy and geometry of classes aligned by transport, beside the same network alone."""

    sets: tuple[str, ...] = _SETS
    """Names of tables."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of clouds, random folds and networks."""
    epochs: int = 60
    """Most epochs of a training."""
    data: Path | None = None
    """Folder of the data sets; by default that of PRIMAL_DATA."""

    def __post_init__(self) -> None:
        at_least_one(self, "epochs")
        one_of(self, "sets", _SETS)
        if not self.seeds or not self.sets:
            raise ValueError("seeds and sets must not be empty; leave them out to run all.")


class Rows(NamedTuple):
    """A table with folds."""

    X: "NDArray[np.float64]"
    y: "NDArray[np.int64]"
    folds: "list[tuple[NDArray[np.int64], NDArray[np.int64]]]"


def make_clouds(
    count: int, separation: float, *, rows: int = 1200, seed: int = 0
) -> "tuple[NDArray[np.float64], NDArray[np.int64]]":
    """Return points of two or three Gaussian clouds with covariance ``2 I``, and their classes.

    Args:
        count: Two clouds at ``±separation`` on one axis, or three on a triangle.
        separation: How far apart they are.
        rows: Number of points, equally many of each class.
        seed: Seed of the points.

    Example:
        >>> points, classes = make_clouds(3, 1.0, rows=6)
        >>> points.shape, classes.tolist()
        ((6, 2), [0, 1, 2, 0, 1, 2])
    """
    import numpy as np

    x = 3 * separation / (1 + math.sqrt(2))
    places = {2: [(-separation, 0.0), (separation, 0.0)], 3: [(-x, 0.0), (x, 0.0), (0.0, x)]}
    if count not in places:
        raise ValueError(f"count must be 2 or 3, got {count}.")
    classes = np.arange(rows) % count
    noise = math.sqrt(2) * np.random.default_rng(seed).normal(size=(rows, 2))
    return np.array(places[count])[classes] + noise, classes


def load_rows(name: str, seed: int, root: Path | None = None) -> Rows:
    """Return a table of the study with its folds.

    Args:
        name: One of the sets of :class:`AlignedOptions`.
        seed: Seed of random folds and of clouds.
        root: Folder of the data sets; by default that of ``PRIMAL_DATA``.
    """
    from sklearn.model_selection import StratifiedKFold

    from primal_attention.datasets.tables import load_table

    if name in _CLOUDS:
        X, y = make_clouds(*_CLOUDS[name], rows=_ROWS, seed=seed)
    else:
        table = load_table("eeg-epilepsy" if name in _EEG else name, root)
        X, y = table.X, table.y
        if name in _EEG and not _EEG[name]:
            return Rows(X, y, list(table.splits))
        if name == "digits":
            X, y = X[:_ROWS], y[:_ROWS]
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    return Rows(X, y, list(folds.split(X, y)))


def _make(name: str, count: int, epochs: int, seed: int) -> Any:
    """Return a fresh estimator for a number of training rows."""
    with needs("sklearn", "A comparison of methods"):
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.neural_network import MLPClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

    if name in _OURS:
        from primal_attention.tasks.tables import OTAlignedClassifier

        return OTAlignedClassifier(
            **_OURS[name], max_epochs=epochs, random_state=seed, verbose=False
        )
    mlp = MLPClassifier(
        (32, 32),
        learning_rate_init=0.01,
        batch_size=max(1, count * 8 // 100),
        max_iter=epochs,
        early_stopping=True,
        validation_fraction=0.2,
        n_iter_no_change=15,
        random_state=seed,
    )
    models = {
        "MLP": mlp,
        "logistic": LogisticRegression(max_iter=2000),
        "1-NN": KNeighborsClassifier(1),
        "random forest": RandomForestClassifier(random_state=seed),
    }
    return make_pipeline(StandardScaler(), models[name])


class AlignedAccuracy(Study[AlignedOptions]):
    """Fit every method on every fold of every table."""

    name = "ot-accuracy"
    Options = AlignedOptions

    def cells(self, options: AlignedOptions) -> list[Cell]:
        """Return all tables with the first seed before those with the second."""
        return [
            {"set": name, "seed": seed, "epochs": options.epochs}
            for seed in options.seeds
            for name in options.sets
        ]

    def run(self, cell: Cell, options: AlignedOptions, scratch: Path) -> list[Row]:
        """Fit all methods on the folds of one table."""
        with needs("sklearn", "A comparison of methods"):
            from sklearn.exceptions import ConvergenceWarning
            from threadpoolctl import threadpool_limits

        rows = load_rows(cell["set"], cell["seed"], options.data)
        with threadpool_limits(self.threads), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed
            return [
                {"method": name, **_score(name, rows, cell["epochs"], cell["seed"])}
                for name in (*_OURS, *_OTHERS)
            ]

    def describe(self, row: Row) -> str:
        """Return method, table and accuracy."""
        accuracy = fmean(row["accuracy"])
        return f"{row['method']} on {row['set']}, seed {row['seed']}: {accuracy:.3f}"

    def tables(self, rows: Sequence[Row], options: AlignedOptions) -> Mapping[str, str | bytes]:
        """Return accuracies, paired differences, geometry and a picture."""
        kept = [row for row in rows if row["epochs"] == options.epochs]
        if not kept:
            return {}
        return {
            "accuracy.md": accuracy_page(kept),
            "differences.md": difference_page(kept),
            "geometry.md": geometry_page(kept),
            "picture.png": accuracy_picture(kept),
            **({"maps.png": map_picture(kept)} if any("arrows" in row for row in kept) else {}),
        }


def _score(name: str, rows: Rows, epochs: int, seed: int) -> dict[str, Any]:
    """Return what a method measures on every fold."""
    import numpy as np

    found: dict[str, list[float]] = {
        key: [] for key in ("accuracy", "log_loss", "optimality", "pooled", "cost", "seconds")
    }
    for train, test in rows.folds:
        model = _make(name, len(train), epochs, seed)
        started = time.process_time()
        model.fit(rows.X[train], rows.y[train])
        found["seconds"].append(round(time.process_time() - started, 3))
        shares = model.predict_proba(rows.X[test])
        codes = np.searchsorted(model.classes_, rows.y[test])
        found["accuracy"].append(round(float((shares.argmax(1) == codes).mean()), 5))
        right = shares[np.arange(len(codes)), codes]
        found["log_loss"].append(round(float(-np.log(right.clip(1e-12)).mean()), 5))
        if name in _OURS:
            within = model.score_map(rows.X[test], rows.y[test])
            found["optimality"].append(round(within.optimality, 5))
            found["cost"].append(round(within.cost, 4))
            found["pooled"].append(round(model.score_map(rows.X[test]).optimality, 5))
    scores: dict[str, Any] = {key: values for key, values in found.items() if values}
    if name in _OURS and rows.X.shape[1] == 2 and seed == 0:
        scores["arrows"] = _arrows(model, rows.X[test][:_ARROWS], codes[:_ARROWS])
    return scores


def _arrows(model: Any, X: Any, codes: Any) -> list[list[float]]:
    """Return start, end and class of some rows in two coordinates."""
    start = model.encoder_.transform(X)
    ends = model.transform(X)
    return [
        [round(float(v), 2) for v in (*a, *b)] + [int(c)]
        for a, b, c in zip(start, ends, codes, strict=True)
    ]


def _values(rows: Sequence[Row], name: str, method: str, key: str) -> list[float]:
    """Return a score on all folds of all seeds."""
    group = [r for r in rows if r["set"] == name and r["method"] == method and key in r]
    return [value for row in sorted(group, key=lambda r: r["seed"]) for value in row[key]]


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean over folds, which share most of their training rows.

    Nadeau and Bengio (2003): the variance of the mean is ``(1/J + test/train)`` that of a fold.
    """
    if len(values) < 2:
        return math.nan
    return stdev(values) * math.sqrt(1 / len(values) + 1 / (_FOLDS - 1))


def _sets(rows: Sequence[Row]) -> list[str]:
    there = {row["set"] for row in rows}
    return [name for name in _SETS if name in there]


def accuracy_page(rows: Sequence[Row]) -> str:
    """Return the accuracy of every method on every table."""
    names, methods = _sets(rows), (*_OURS, *_OTHERS)
    found = {name: {m: _values(rows, name, m, "accuracy") for m in methods} for name in names}
    largest = "*largest error*"

    def of(name: str) -> Column:
        worst = max(_error(values) for values in found[name].values())
        return lambda m: f"{100 * (worst if m == largest else fmean(found[name][m])):.1f}"

    columns: dict[str, Column] = {"method": str, **{name: of(name) for name in names}}
    caption = (
        "Accuracy on test rows in per cent: mean over five folds and all seeds. The last line is "
        "the largest standard error of a column, corrected for the training rows that folds share "
        "(Nadeau and Bengio 2003)."
    )
    return page(caption, columns_table((*methods, largest), columns))


def _points(difference: float) -> str:
    return f"{round(difference, 1) + 0.0:+.1f}"  # adding zero turns -0.0 into 0.0


def difference_page(rows: Sequence[Row]) -> str:
    """Return paired differences of accuracy."""
    names, lines = _sets(rows), []
    for first, second in _PAIRS:
        shown, means = [], []
        for name in names:
            a, b = (_values(rows, name, method, "accuracy") for method in (first, second))
            gaps = [x - y for x, y in zip(a, b, strict=True)]
            means.append(100 * fmean(gaps))
            shown.append(f"{_points(means[-1])} ± {196 * _error(gaps):.1f}")
        lines.append([f"{first} − {second}", *shown, _points(fmean(means))])
    caption = (
        "Differences of accuracy in points on the same folds, with 95 % intervals from the same "
        "corrected error; the last column is the mean over tables."
    )
    return page(caption, markdown_table(["difference", *names, "mean"], lines))


def geometry_page(rows: Sequence[Row]) -> str:
    """Return how near the learned maps are to optimal ones."""

    def of(name: str) -> Column:
        def cell(method: str) -> str:
            keys = ("optimality", "pooled", "cost")
            within, pooled, cost = (fmean(_values(rows, name, method, key)) for key in keys)
            return f"{within:.3f} / {pooled:.3f} / {cost:.0f}"

        return cell

    columns: dict[str, Column] = {"method": str, **{name: of(name) for name in _sets(rows)}}
    caption = (
        "Learned maps on test rows: optimality within classes / optimality of all rows / mean "
        "squared distance travelled. An optimality of one is a map without detours."
    )
    return page(caption, columns_table(_OURS, columns))


def map_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: where three methods carry the rows of the same clouds."""
    name = "3 clouds" if any(r["set"] == "3 clouds" for r in rows) else rows[0]["set"]
    shown = ("OT circle", "random circle", "random aligned", "OT aligned")
    picture = Picture(len(shown), size=(12, 3.4), share="xy")
    for axis, method in zip(picture.axes, shown, strict=True):
        row = next(r for r in rows if (r["set"], r["method"]) == (name, method) and "arrows" in r)
        for x, y, to_x, to_y, code in row["arrows"]:
            color = picture.colors[int(code)]
            axis.plot([x, to_x], [y, to_y], lw=0.4, alpha=0.5, color=color)
            axis.plot(to_x, to_y, ".", ms=4, color=color)
        within = fmean(_values(rows, name, method, "optimality"))
        axis.set(title=f"{method}: optimality {within:.2f}", aspect="equal")
    return picture.png(grid=0)


def accuracy_picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG: accuracy and optimality within classes of every method and table."""
    picture = Picture(2, size=(10, 4.2), share="y")
    names, (ours, theirs, *_) = _sets(rows), picture.colors
    shown = {
        "OT circle": (theirs, "o"),
        "random circle": (theirs, "x"),
        "OT aligned": (ours, "o"),
        "random aligned": (ours, "x"),
        "MLP": (GREY, "s"),
    }
    titles = {"accuracy": "accuracy", "optimality": "optimality within classes"}
    for axis, (key, title) in zip(picture.axes, titles.items(), strict=True):
        for shift, (method, (color, marker)) in enumerate(shown.items()):
            found = [(_values(rows, name, method, key), i) for i, name in enumerate(names)]
            found = [(values, i) for values, i in found if values]
            axis.errorbar(
                [fmean(values) for values, _ in found],
                [i + 0.14 * (shift - 2) for _, i in found],
                xerr=[1.96 * _error(values) for values, _ in found],
                fmt=marker,
                ms=5,
                lw=1,
                color=color,
                label=method,
            )
        axis.set(xlabel=title)
    picture.name_lines(names)
    labels = picture.axes[0].get_legend_handles_labels()
    picture.axes[1].legend(*labels, frameon=False, loc="lower left")
    return picture.png()
