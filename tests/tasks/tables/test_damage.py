"""Tables that cannot be what was meant: refused in a sentence, or told in a note."""

import gzip

import numpy as np
import pytest

from primal_attention.datasets.tables import _read_masks, _read_poker, load_table
from primal_attention.support.command import UserError
from primal_attention.tasks.tables import (
    OTAlignedClassifier,
    TableClassifier,
    TableEncoder,
    TableImputer,
    TableSettings,
    TableTask,
)

ROWS = [[str(i), str(i % 7), "ab"[i % 2]] for i in range(40)]


def load(tmp_path, rows=ROWS, header="u,v,y"):
    path = tmp_path / "t.csv"
    lines = [header, *(",".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return TableTask.load(TableSettings(train=path, target="y"))


@pytest.mark.parametrize("word", ["x", "1_0", "1+2j", "?"])
def test_words_among_numbers_are_told(tmp_path, word):
    rows = [*ROWS[:5], [word, "1", "a"], *ROWS[5:]]
    _, parts = load(tmp_path, rows)
    assert f"Column 'u' holds words beside numbers, such as {word!r} in row 6" in parts.note
    assert "beside numbers" not in load(tmp_path)[1].note


def test_only_the_first_column_may_lack_a_name(tmp_path):
    assert load(tmp_path, header=",v,y")[0].summary.endswith("from 1 columns")
    with pytest.raises(UserError, match="column 2 has no name"):
        load(tmp_path, header="u,,y")
    empty = [[*row, ""] for row in ROWS]
    assert load(tmp_path, empty, header="u,v,y,")[0].summary.endswith("from 2 columns")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"X": np.zeros((4, 2), complex)}, "'X' must hold numbers"),
        ({"y": np.array([1, 2, 3, np.nan])}, "not finite"),
        ({"test_mask": np.full((1, 4), 0.9)}, "'test_mask' must hold truth values"),
        ({"test_mask": np.zeros((1, 3), bool)}, "differ in length"),
    ],
)
def test_arrays_of_a_known_table_are_checked(tmp_path, change, words):
    folder = tmp_path / "yacht"
    folder.mkdir()
    good = {"X": np.zeros((4, 2)), "y": np.arange(4.0), "test_mask": np.zeros((1, 4), bool)}
    np.savez(folder / "yacht.npz", **good)
    assert len(_read_masks("yacht", folder).y) == 4
    np.savez(folder / "yacht.npz", **{**good, **change})
    with pytest.raises(ValueError, match=words):
        _read_masks("yacht", folder)


def test_a_damaged_public_table_is_one_sentence(tmp_path):
    folder = tmp_path / "poker-hand"
    folder.mkdir()
    for content in (b"\x1f\x8bxx", gzip.compress("caf\xe9".encode("latin-1"))):
        (folder / "poker-hand-training-true.data.gz").write_bytes(content)
        with pytest.raises(UserError, match="poker-hand-training"):
            _read_poker("poker-hand", folder)
    with pytest.raises(UserError, match="there is no table"):
        load_table("none")


@pytest.mark.parametrize("make", [TableClassifier, TableImputer, OTAlignedClassifier, TableEncoder])
def test_equal_names_of_columns_are_told(make):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(np.zeros((20, 3)), columns=["a", "b", "a"])
    with pytest.raises(ValueError, match=r"^The table has two columns 'a'; give each its own name"):
        make().fit(frame, np.arange(20) % 2)
