"""Damaged files of series: nothing is taken for another number, and each has its sentence."""

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.tasks.series import (
    SeriesClassifier,
    SeriesRegressor,
    read_npz,
    read_series,
    read_ts,
    series_from_arrays,
)

X = np.arange(24.0).reshape(3, 2, 4)
AB = ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1_0,2:a", "line 2: '1_0' is not a finite number"),
        ("1,infinity:a", "line 2: 'infinity' is not a finite number"),
        ("1,\u0663:a", "line 2: '\u0663' is not a finite number"),
        ("1,1e:a", "line 2: '1e' is not a finite number"),
        ("1,nana:a", "line 2: 'nana' is not a finite number"),
        ("1,\u20282:a", r"line 2: '\u20282' is not a finite number"),
        ("1,2:", "line 2: the class behind the last colon is missing"),
        ("@\n1,2:a", "line 2: @ has no name behind it"),
        ("@dimensions two\n1,2:a", "@dimensions must be followed by a whole number, got 'two'"),
        ("@dimensions 1_0\n1,2:a", "@dimensions must be followed by a whole number, got '1_0'"),
        ("@dimensions\n1,2:a", "@dimensions must be followed by a whole number, got ''"),
        ("@seriesLength 99999999999\n1,2:a", "@serieslength must be followed by a whole number"),
        ("@equalLength maybe\n1,2:a", "@equallength must be followed by true or false"),
        ("@timeStamps\n1,2:a", "@timestamps must be followed by true or false"),
        ("@classLabel true a a\n1,2:a", "@classLabel names a class twice"),
        ("@dimensions 1\n@dimensions 2\n1,2:a", "line 3: @dimensions is given twice"),
        ("@targetLabel true\n1,2:0.5", "@targetLabel, numbers to predict"),
    ],
)
def test_a_damaged_ts_file_is_a_sentence(tmp_path, text, words):
    path = tmp_path / "a.ts"
    path.write_text(f"# a comment\n{text}\n", "utf-8")
    with pytest.raises(UserError, match=r"a\.ts") as caught:
        read_ts(path)
    assert words in str(caught.value)


def test_numbers_and_missing_values_are_read_in_every_usual_form(tmp_path):
    (tmp_path / "a.ts").write_text(
        "@problemName A\n@problemName B\n1.,.5,-2e-1,+3E2,?,,NaN,nan,7:a\n"
    )
    expected = np.float32([1, 0.5, -0.2, 300, *[np.nan] * 4, 7])
    np.testing.assert_array_equal(read_ts(tmp_path / "a.ts").x[0, :, 0], expected)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": X.astype(complex)}, "real numbers in rows of equal length, got complex128"),
        ({"X": X.astype(str)}, "real numbers in rows of equal length, got str"),
        ({"X": X.astype("M8[s]")}, "real numbers in rows of equal length, got datetime64"),
        ({"X": np.float64(3)}, "two or three axes, got the shape ()"),
        ({"X": X, "y": np.array([0.9, 0, 1]), "classes": AB}, "y must hold whole numbers, got 0.9"),
        ({"X": X, "y": np.array([0, 1, 2]), "classes": AB}, "must index the 2 classes"),
        ({"X": X, "y": ["a", "b", "a"], "classes": AB}, "y must hold whole numbers, got the type"),
        ({"X": X, "y": np.array([0, 1j, 0])}, "words or numbers, got the type complex"),
        ({"X": X, "y": np.array([0, np.nan, 0])}, "case 1, counted from 0, has no label"),
        ({"X": X, "y": np.zeros((3, 2))}, "y has the shape (3, 2), and there are 3 cases"),
        ({"X": X, "y": np.zeros(4)}, "y has the shape (4,), and there are 3 cases"),
        ({"X": X, "y": np.float64(1)}, "y has the shape (), and there are 3 cases"),
        ({"X": X, "y": np.zeros(3, int), "classes": ["a", "a"]}, "different names, got a, a"),
        ({"X": X, "y": np.zeros(3, int), "classes": [AB]}, "different names, got (1, 2)"),
        ({"X": X, "length": np.array([1.5, 1, 1])}, "length must hold whole numbers, got 1.5"),
        ({"X": X, "length": np.array([np.nan, 1, 1])}, "length must hold whole numbers, got nan"),
        ({"X": X, "length": np.array([1e300, 1, 1])}, "length must hold whole numbers, got 1e+300"),
        ({"X": X, "length": np.array([1j, 1, 1])}, "whole numbers, got the type complex"),
        ({"X": X, "length": np.array([[1, 1, 1]])}, "length must hold one number a case"),
        ({"X": X, "length": np.array([1, 1, 9])}, "Lengths must be from 1 to 2"),
    ],
)  # fmt: skip
def test_a_damaged_npz_file_is_a_sentence(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=r"a\.npz") as caught:
        read_npz(tmp_path / "a.npz")
    assert words in str(caught.value)


def test_whole_numbers_may_be_stored_as_floats(tmp_path):
    arrays = {
        "X": X.transpose(0, 2, 1),
        "length": np.array([4.0, 2, 3]),
        "y": np.array([1.0, 0, 1]),
    }
    np.savez(tmp_path / "a.npz", **arrays, classes=["p", "q"])
    series = read_npz(tmp_path / "a.npz")
    assert series.length.tolist() == [4, 2, 3]
    assert series.y.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("case,x,label\na,1,p\na,2,q\n", "the series 'a' has the labels p, q"),
        ("case,x,label\na,1,p\n,2,p\n", "some rows have no 'case'"),
        ("case,x,label\na,1_0,p\na,2,p\n", "the columns x hold no numbers"),
        ("label\np\nq\n", "no column is left"),
        ("t0,t1,label\n1,2,p\n3,inf,q\n", "Case 1, counted from 0, holds a value"),
    ],
)
def test_a_damaged_table_of_series_is_a_sentence(tmp_path, text, words):
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=r"a\.csv") as caught:
        read_series(tmp_path / "a.csv")
    assert words in str(caught.value)


@pytest.mark.raw
@pytest.mark.parametrize("data", [[["a", "b"]], [[1, [2]]], [[1j]], [None], [{}], [3.0]])
def test_what_is_no_series_in_memory_is_a_sentence(data):
    with pytest.raises(ValueError, match=r"series need real numbers|got a single value"):
        series_from_arrays(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@targetLabel true\n1,2:0.5\n1,2:", "line 4: the number behind the last colon is miss"),
        ("@targetLabel true\n1,2:0.5\n1,2:?", "line 4: '?' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:NaN", "line 3: 'NaN' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:inf", "line 3: 'inf' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:1e400", "line 3: '1e400' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:1_0", "line 3: '1_0' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:1,2", "line 3: '1,2' behind the last colon is not a finite"),
        ("@targetLabel true\n1,2:5\n1,2:1e39", "Case 1, counted from 0, has the target 1e+39"),
        ("@targetLabel yes\n1,2:5", "@targetlabel must be followed by true or false, got 'yes'"),
        ("@targetLabel true\n@targetLabel false\n1,2:5", "line 3: @targetlabel is given twice"),
        ("@classLabel true a b\n1,2:a\n1,2:b", "line 3: 'a' behind the last colon is not a finite"),
    ],
)
def test_a_ts_file_with_damaged_numbers_to_predict_is_a_sentence(tmp_path, text, words):
    path = tmp_path / "a.ts"
    path.write_text(f"# a comment\n{text}\n", "utf-8")
    with pytest.raises(UserError, match=r"a\.ts") as caught:
        read_ts(path, numbers=True)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.array([0.5, np.nan, 1])}, "case 1, counted from 0, has no label"),
        ({"y": np.array([0.5, 1, np.inf])}, "case 2, counted from 0, has the label 'inf', not a"),
        ({"y": np.array(["0.5", "1", "b"])}, "case 2, counted from 0, has the label 'b', not a"),
        ({"y": np.array([True, False, True])}, "case 0, counted from 0, has the label 'True'"),
        ({"y": np.array([0.5, 1j, 0])}, "words or numbers, got the type complex"),
        ({"y": np.array([0, 1, 0]), "classes": AB}, "case 0, counted from 0, has the label 'a'"),
        ({"y": np.array([0.5, 1e39, 0])}, "Case 1, counted from 0, has the target 1e+39"),
        ({"y": np.zeros((3, 1))}, "y has the shape (3, 1), and there are 3 cases"),
    ],
)
def test_arrays_with_damaged_numbers_to_predict_are_a_sentence(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", X=X, **arrays)
    with pytest.raises(UserError, match=r"a\.npz") as caught:
        read_npz(tmp_path / "a.npz", numbers=True)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("case,x,label\na,1,1.5\na,2,2\n", "the series 'a' has the labels 1.5, 2.0"),
        ("t0,t1,label\n1,2,0.5\n3,4,\n", "the 'label' of row 2 is '', not a finite number"),
        ("t0,t1,label\n1,2,0.5\n3,4,NA\n", "the 'label' of row 2 is 'NA', not a finite number"),
        ("t0,t1,label\n1,2,inf\n3,4,1\n", "the 'label' of row 1 is 'inf', not a finite number"),
        ("t0,t1,price\n1,2,3\n", "no column 'label'; its columns are t0, t1, price"),
    ],
)
def test_a_table_with_damaged_numbers_to_predict_is_a_sentence(tmp_path, text, words):
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=r"a\.csv") as caught:
        read_series(tmp_path / "a.csv", numbers=True)
    assert words in str(caught.value)


EMPTY = [[np.zeros((1, 4)), np.zeros((1, 0))], np.zeros((2, 1, 0)), np.zeros((2, 0, 4))]


@pytest.mark.parametrize("X", [[], np.zeros((0, 1, 5)), *EMPTY], ids=["list", "array", *"abc"])
def test_no_series_and_series_without_a_time_step_are_a_sentence(X):
    y = np.arange(len(X), dtype=float)
    words = (
        "has no channel or no time step.*Leave empty series out" if len(X) else "holds no series"
    )
    for call in (
        lambda: series_from_arrays(X),
        lambda: SeriesClassifier().fit(X, y.astype(str)),
        lambda: SeriesRegressor().fit(X, y),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_number_and_the_same_word_are_no_one_class():
    with pytest.raises(ValueError, match="labels hold 1 and the word '1', which would be one name"):
        series_from_arrays(X, [1, "1", "b"])
