"""Tables to compare on: UCI sets of ``PRIMAL_DATA`` and those of scikit-learn, with fixed splits.

A table has its splits with it, so that every method and every run sees the same rows. Splits are
those of the publisher where there are some. EEG rows follow each other in time; they are split in
blocks, because neighbours on both sides of a random split are nearly equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.datasets.public import data_folder, find_set
from primal_attention.support.command import UserError, did_you_mean, needs, user_errors
from primal_attention.support.files import open_text, take_arrays
from primal_attention.support.files.tables import FILE_ERRORS

__all__ = ["TABLES", "Fold", "Table", "TableSource", "TrainTest", "load_table", "table_folder"]

Kind = Literal["classes", "number"]
FOLD_COUNT = 5
"""Folds of a table that comes without splits."""
FOLD_SEED = 0
"""Seed of these folds; another one would make the results of other runs incomparable."""


class Fold(NamedTuple):
    """Rows to train on and rows to test with."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


class TrainTest(NamedTuple):
    """The two parts of a table, in the order of scikit-learn's ``train_test_split``."""

    X_train: Any
    X_test: Any
    y_train: np.ndarray
    y_test: np.ndarray


@dataclass(frozen=True, eq=False)
class Table:
    """A table with a target and fixed splits.

    Example:
        >>> iris = load_table("iris")
        >>> iris.X.shape, iris.kind, len(iris.splits)
        ((150, 4), 'classes', 5)
        >>> [len(part) for part in iris.parts(0)]
        [120, 30, 120, 30]
    """

    name: str
    X: Any
    """Features: a numpy array, or a pandas frame if there are categories."""
    y: np.ndarray
    """Target."""
    kind: Kind
    """Whether the target is a class or a number."""
    splits: tuple[Fold, ...]

    @property
    def note(self) -> str:
        """Where the splits come from."""
        return TABLES[self.name].note

    def parts(self, split: int) -> TrainTest:
        """Return the training and the test part of a split."""
        train, test = self.splits[split]
        rows = self.X.iloc if hasattr(self.X, "iloc") else self.X
        return TrainTest(rows[train], rows[test], self.y[train], self.y[test])


def load_table(name: str, root: Path | None = None) -> Table:
    """Return a table by name; :data:`TABLES` has the names.

    Args:
        name: Name of the table.
        root: Folder of the data sets; by default that of ``PRIMAL_DATA``.

    Raises:
        UserError: If there is no such table or its files are missing or damaged. The message says
            which files belong where.
    """
    folder = table_folder(name, root)
    read = TABLES[name].read
    if folder is None or read is None:
        return _read_bundled(name)
    with user_errors(str(folder), *FILE_ERRORS):
        return read(name, folder)


def table_folder(name: str, root: Path | None = None) -> Path | None:
    """Return the folder that has the files of a table, ``None`` if scikit-learn has the table.

    Raises:
        UserError: If there is no such table, or a file is missing.
    """
    if name not in TABLES:
        raise UserError(
            f"there is no table {name!r}.{did_you_mean(name, TABLES)} Tables: {', '.join(TABLES)}."
        )
    if TABLES[name].read is None:
        return None
    root, found = data_folder(root), find_set(name)
    missing = [path.name for path in found.missing(root)]
    if missing:
        raise UserError(f"{name} lacks {', '.join(missing)}. {found.by_hand(root)}")
    return root / found.folder


def _folds(X: Any, y: np.ndarray, kind: Kind) -> tuple[Fold, ...]:
    """Return folds with a fixed seed; classes keep their shares."""
    from sklearn.model_selection import KFold, StratifiedKFold

    chosen = KFold if kind == "number" else StratifiedKFold
    folds = chosen(FOLD_COUNT, shuffle=True, random_state=FOLD_SEED)
    return tuple(Fold(train, test) for train, test in folds.split(X, y))


def _one_split(train: int, test: int) -> tuple[Fold, ...]:
    """Return one split: the first rows to train on, the others to test with."""
    return (Fold(np.arange(train), np.arange(train, train + test)),)


def _read_bundled(name: str) -> Table:
    """Return a table of scikit-learn."""
    with needs("sklearn", f"The table {name}"):
        from sklearn import datasets
    kind = TABLES[name].kind
    X, y = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    return Table(name, X, y, kind, _folds(X, y, kind))


def _arrays(folder: Path, **sorts: tuple[str, int]) -> list[np.ndarray]:
    """Return arrays of the one ``.npz`` file of a folder, which has the name of the folder."""
    found = take_arrays(folder / f"{folder.name}.npz", sorts)
    return [found[name] for name in sorts]


def _read_masks(name: str, folder: Path) -> Table:
    """Return a regression table with the splits of Hernandez-Lobato and Adams (2015)."""
    X, y, masks = _arrays(
        folder, X=("numbers", 2), y=("finite numbers", 1), test_mask=("truth values", 2)
    )
    if len(X) != len(y) or masks.shape[1] != len(y):
        raise ValueError(f"X, y and test_mask differ in length: {len(X)}, {len(y)}, {masks.shape}.")
    splits = tuple(Fold(np.flatnonzero(~mask), np.flatnonzero(mask)) for mask in masks)
    return Table(name, X, y, "number", splits)


def _read_higgs(name: str, folder: Path) -> Table:
    """Return rows of HIGGS with the split of LightGBM's example."""
    X, y, X_test, y_test = _arrays(
        folder,
        X_train=("numbers", 2),
        y_train=("whole numbers", 1),
        X_test=("numbers", 2),
        y_test=("whole numbers", 1),
    )
    if len(X) != len(y) or len(X_test) != len(y_test):
        raise ValueError("X and y differ in length.")
    both = np.concatenate([X, X_test]), np.concatenate([y, y_test])
    return Table(name, *both, "classes", _one_split(len(y), len(y_test)))


def _read_poker(name: str, folder: Path) -> Table:
    """Return the training part of poker hands: suit and rank of five cards."""
    path = folder / "poker-hand-training-true.data.gz"
    with open_text(path) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64, ndmin=2)
    X, y = rows[:, :-1], rows[:, -1]
    return Table(name, X, y, "classes", _folds(X, y, "classes"))


_ADULT = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)


def _read_adult(name: str, folder: Path) -> Table:
    """Return census incomes as a frame; words are categories, unknown values are missing."""
    with needs("tables", f"The table {name}"):
        import pandas as pd
    frames = []
    for part in ("adult.data.gz", "adult.test.gz"):
        with open_text(folder / part) as file:
            frames.append(pd.read_csv(file, names=_ADULT, skipinitialspace=True, na_values="?"))
    frame = pd.concat(frames, ignore_index=True)
    # labels of the test part end in a full stop
    y = frame.pop("income").str.rstrip(".").to_numpy(dtype=str)
    words = frame.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]]
    frame = frame.astype(dict.fromkeys(words, "category"))
    return Table(name, frame, y, "classes", _one_split(*map(len, frames)))


def _read_eeg(name: str, folder: Path) -> Table:
    """Return EEG rows with blocked splits."""
    with open_text(folder / "BEED_Data.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.float64, ndmin=2)
    X, y = rows[:, :-1], rows[:, -1].astype(np.int64)
    return Table(name, X, y, "classes", block_folds(y))


def block_folds(y: np.ndarray, count: int = FOLD_COUNT) -> tuple[Fold, ...]:
    """Return splits whose test part is a contiguous block of every class, the last block first.

    Example:
        >>> block_folds(np.array([0, 0, 0, 0, 1, 1]), 2)[0].test.tolist()
        [2, 3, 5]
    """
    blocks = [np.array_split(np.flatnonzero(y == label), count) for label in np.unique(y)]
    tests = [np.sort(np.concatenate([block[i] for block in blocks])) for i in range(count)]
    return tuple(Fold(np.setdiff1d(np.arange(len(y)), test), test) for test in reversed(tests))


@dataclass(frozen=True)
class TableSource:
    """What is known of a table before it is read."""

    kind: Kind
    """Whether its target is a class or a number."""
    splits: int
    """How many splits it has."""
    note: str
    """Where the splits come from."""
    read: Callable[[str, Path], Table] | None = None
    """From the name and the folder of the files to the table; scikit-learn has the others."""


_MASKS = "random splits of Hernandez-Lobato and Adams (2015)"
_FOLDS = f"{FOLD_COUNT} random folds, seed {FOLD_SEED}"
_STRATIFIED = f"{FOLD_COUNT} stratified folds, seed {FOLD_SEED}"
_BLOCKS = "contiguous fifths of each class, the last one first"

TABLES = {
    "boston-housing": TableSource("number", 20, _MASKS, _read_masks),
    "concrete": TableSource("number", 20, _MASKS, _read_masks),
    "yacht": TableSource("number", 20, _MASKS, _read_masks),
    "diabetes": TableSource("number", FOLD_COUNT, _FOLDS),
    "breast-cancer": TableSource("classes", FOLD_COUNT, _STRATIFIED),
    "wine": TableSource("classes", FOLD_COUNT, _STRATIFIED),
    "iris": TableSource("classes", FOLD_COUNT, _STRATIFIED),
    "digits": TableSource("classes", FOLD_COUNT, _STRATIFIED),
    "protein": TableSource("number", 5, _MASKS, _read_masks),
    "adult": TableSource("classes", 1, "official split", _read_adult),
    "higgs-small": TableSource("classes", 1, "split of LightGBM's example", _read_higgs),
    "poker-hand": TableSource("classes", FOLD_COUNT, _STRATIFIED, _read_poker),
    "eeg-epilepsy": TableSource("classes", FOLD_COUNT, _BLOCKS, _read_eeg),
}
"""All tables by name, the small ones first."""
