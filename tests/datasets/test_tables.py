"""Tables are read as their publishers made them, and their splits are fixed and disjoint."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from primal_attention.datasets.tables import TABLES, block_folds, load_table
from primal_attention.support.command import UserError

FILES = sorted(name for name, source in TABLES.items() if source.read)
SHAPES = {
    "boston-housing": (506, 13),
    "concrete": (1030, 8),
    "yacht": (308, 6),
    "protein": (45_730, 9),
    "diabetes": (442, 10),
    "breast-cancer": (569, 30),
    "wine": (178, 13),
    "iris": (150, 4),
    "digits": (1797, 64),
    "adult": (32_561 + 16_281, 14),
    "higgs-small": (7_500, 28),
    "poker-hand": (25_010, 10),
    "eeg-epilepsy": (8_000, 16),
}
"""Rows and columns that the publishers state."""
CLASSES = {"breast-cancer": 2, "wine": 3, "iris": 3, "digits": 10, "adult": 2, "higgs-small": 2,
           "poker-hand": 10, "eeg-epilepsy": 4}  # fmt: skip
TESTS = {"boston-housing": 51, "concrete": 103, "yacht": 31, "protein": 4573, "adult": 16_281,
         "higgs-small": 500, "eeg-epilepsy": 1600}  # fmt: skip
ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male,"
    " 2174, 0, 40, United-States, {}\n"
    "50, ?, 83311, 11th, 7, Divorced, ?, Husband, Black, Female, 0, 0, 13, Cuba, {}\n\n"
)


def zipped(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def root(tmp_path):
    """A folder with small files in the form of the public ones."""
    rng = np.random.default_rng(0)
    for name in FILES:
        (tmp_path / "tabular" / name).mkdir(parents=True)
    tables = tmp_path / "tabular"
    for name in ("boston-housing", "concrete", "yacht", "protein"):
        columns = SHAPES[name][1]
        masks = np.arange(20) % 10 == np.arange(TABLES[name].splits)[:, None] % 10
        np.savez(tables / name / f"{name}.npz", X=rng.normal(size=(20, columns)),
                 y=np.arange(20.0), test_mask=masks)  # fmt: skip
    parts = {"X_train": np.zeros((7, 28)), "y_train": np.arange(7) % 2}
    parts |= {"X_test": np.ones((3, 28)), "y_test": np.arange(3) % 2}
    np.savez(tables / "higgs-small" / "higgs-small.npz", **parts)
    zipped(tables / "adult" / "adult.data.gz", ADULT.format("<=50K", ">50K"))
    zipped(tables / "adult" / "adult.test.gz", ADULT.format(">50K.", "<=50K."))
    zipped(tables / "adult" / "adult.names.gz", "names\n")
    hands = "".join(f"1,10,2,11,3,13,4,12,1,{i % 13 + 1},{i // 5}\n" for i in range(50))
    zipped(tables / "poker-hand" / "poker-hand-training-true.data.gz", hands)
    header = ",".join([*(f"X{i}" for i in range(1, 17)), "y"])
    rows = [",".join([str(i - 20)] * 16 + [str(i // 10)]) for i in range(40)]
    zipped(tables / "eeg-epilepsy" / "BEED_Data.csv.gz", "\n".join([header, *rows, ""]))
    return tmp_path


def check_splits(table):
    assert len(table.splits) == TABLES[table.name].splits
    for number, fold in enumerate(table.splits):
        assert not set(fold.train.tolist()) & set(fold.test.tolist())
        assert len(fold.train) + len(fold.test) == len(table.y)
        parts = table.parts(number)
        assert [len(part) for part in parts] == 2 * [len(fold.train), len(fold.test)]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_its_columns_kind_and_disjoint_splits(name, root):
    table = load_table(name, root)
    assert table.X.shape == (len(table.y), SHAPES[name][1])
    assert table.kind == TABLES[name].kind
    check_splits(table)


@pytest.mark.skipif("PRIMAL_DATA" not in os.environ, reason="needs PRIMAL_DATA")
@pytest.mark.parametrize("name", TABLES)
def test_a_published_table_has_the_stated_size(name):
    table = load_table(name)
    assert table.X.shape == SHAPES[name]
    if name in CLASSES:
        assert len(np.unique(table.y)) == CLASSES[name]
    if name in TESTS:
        assert {len(fold.test) for fold in table.splits} == {TESTS[name]}
    check_splits(table)


def test_folds_of_scikit_learn_sets_keep_the_shares_and_are_the_same_each_time():
    first, again = load_table("wine"), load_table("wine")
    for a, b in zip(first.splits, again.splits, strict=True):
        np.testing.assert_array_equal(a.test, b.test)
        counts = np.bincount(first.y[a.test])
        assert np.abs(counts - np.bincount(first.y) / 5).max() < 1
    everything = np.concatenate([fold.test for fold in first.splits])
    assert sorted(everything) == list(range(178))
    assert "stratified" in first.note


def test_masks_of_the_file_are_the_test_rows(root):
    table = load_table("yacht", root)
    assert [fold.test.tolist() for fold in table.splits[:3]] == [[0, 10], [1, 11], [2, 12]]
    assert table.parts(1).y_test.tolist() == [1.0, 11.0]


def test_adult_has_categories_holes_and_the_same_labels_in_both_parts(root):
    pd = pytest.importorskip("pandas")
    table = load_table("adult", root)
    assert sorted(set(table.y)) == ["<=50K", ">50K"]
    assert table.y.tolist() == ["<=50K", ">50K", ">50K", "<=50K"]
    assert (table.X.dtypes == "category").sum() == 8
    assert table.X["workclass"].isna().tolist() == [False, True, False, True]
    assert isinstance(table.parts(0).X_train, pd.DataFrame)
    assert table.parts(0).X_test["age"].tolist() == [39, 50]


def test_higgs_trains_on_the_training_part(root):
    parts = load_table("higgs-small", root).parts(0)
    assert parts.X_train.max() == 0
    assert parts.X_test.min() == 1


def test_eeg_rows_are_tested_in_blocks_and_the_last_fifth_comes_first(root):
    table = load_table("eeg-epilepsy", root)
    assert table.splits[0].test.tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    assert table.splits[-1].test.tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
    # classes of unequal sizes, not in order
    last, first = block_folds(np.array([1, 0, 1, 0, 0, 0, 1]), 2)
    assert last.test.tolist() == first.train.tolist() == [4, 5, 6]


def test_what_is_missing_is_named_with_its_place(root, monkeypatch):
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    with pytest.raises(UserError, match="set the environment variable PRIMAL_DATA"):
        load_table("yacht")
    (root / "tabular/adult/adult.test.gz").unlink()
    with pytest.raises(UserError, match=r"adult lacks adult.test.gz. Put .* into .*tabular/adult"):
        load_table("adult", root)
    with pytest.raises(UserError, match=r"there is no table 'yaht'. Did you mean 'yacht'"):
        load_table("yaht")
    (root / "tabular/yacht/yacht.npz").write_bytes(b"no arrays")
    with pytest.raises(UserError, match=r"tabular/yacht/yacht\.npz"):
        load_table("yacht", root)
