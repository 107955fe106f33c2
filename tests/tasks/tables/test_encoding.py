"""The encoder of tables: every kind of column, there and back."""

import json
from dataclasses import asdict
from datetime import datetime

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal_attention.support.settings import build
from primal_attention.tasks.tables import TableColumn, TableEncoder


@parametrize_with_checks([TableEncoder(), TableEncoder(categorical_features=[0])])
def test_scikit_learn_checks_pass(estimator, check):
    check(estimator)


def make_frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "price": [1.0, 3.0, np.nan, 4.0],
            "count": pd.array([1, pd.NA, 3, 4], "Int64"),
            "rank": np.array([7, 8, 9, 10], np.int32),
            "colour": ["red", None, "blue", "red"],
            "size": pd.Categorical(["S", "L", None, "S"], categories=["S", "M", "L"]),
            "code": pd.Categorical([10, 20, 10, None]),
            "sold": [True, False, True, True],
            "maybe": pd.array([True, pd.NA, False, True], "boolean"),
            "when": pd.to_datetime(["2024-01-01", "2024-01-03", None, "2024-01-02"]),
            "local": pd.to_datetime(["2024-01-01", None, "2024-03-31", "2024-04-01"]).tz_localize(
                "Europe/Rome"
            ),
            "wait": pd.to_timedelta(["1h", "2h", None, "90min"]),
            "mixed": [1, "1", "two", None],
        }
    )


def test_every_kind_of_column_comes_back_with_its_type():
    frame = make_frame()
    encoder = TableEncoder().fit(frame)
    table = encoder.encode(frame)
    assert table.values.dtype == np.float32
    np.testing.assert_array_equal(table.missing, frame.isna().to_numpy())
    assert not table.values[table.missing].any()
    back = encoder.decode(*table)
    expected = frame.copy()
    expected["size"] = frame["size"].cat.set_categories(["S", "L"])  # M was never seen
    expected["mixed"] = pd.Series(["1", "1", "two", None], dtype=object)
    for name in ("when", "local", "wait"):
        back[name] = back[name].dt.round("s")  # float32 keeps seven digits of the deviation
    pd.testing.assert_frame_equal(back, expected, rtol=1e-6)


def test_kinds_follow_the_types_of_the_columns():
    columns = TableEncoder().fit(make_frame()).columns_
    numeric = [c.name for c in columns if not c.is_categorical]
    assert numeric == ["price", "count", "rank", "when", "local", "wait"]
    assert [c.width for c in columns] == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 2]


def test_numbers_are_standardised_with_training_statistics_only():
    train = np.array([[1.0], [3.0], [np.nan]])
    encoder = TableEncoder().fit(train)
    new = np.array([[5.0], [np.nan], [2.0]])
    np.testing.assert_allclose(encoder.encode(new).values[:, 0], [3, 0, 0])
    # a row does not depend on the rows beside it
    np.testing.assert_array_equal(encoder.encode(new[:1]).values, encoder.encode(new).values[:1])


def test_dates_are_seconds_and_zones_are_respected():
    frame = pd.DataFrame({"t": pd.to_datetime(["2024-01-01", "2024-01-02"], utc=True)})
    encoder = TableEncoder().fit(frame)
    assert encoder.columns_[0].scale == pytest.approx(12 * 3600)
    elsewhere = frame.assign(t=frame["t"].dt.tz_convert("Asia/Tokyo"))
    np.testing.assert_array_equal(encoder.encode(elsewhere).values, encoder.encode(frame).values)
    naive = frame["t"].dt.tz_localize(None)
    for cells in (naive.to_numpy()[:, None], [[datetime(2024, 1, 1)], [datetime(2024, 1, 2)]]):
        found = TableEncoder().fit(cells)
        assert found.columns_[0].mean == encoder.columns_[0].mean
        np.testing.assert_array_equal(
            np.asarray(found.decode([[-1.0]]), "datetime64[D]").astype(str), [["2024-01-01"]]
        )


def test_unseen_categories_are_missing_and_rare_ones_share_a_bucket():
    words = np.array(["a"] * 4 + ["b"] * 3 + ["c"] * 2 + ["d"], object)[:, None]
    few = TableEncoder(max_categories=3).fit(words)
    column = few.columns_[0]
    assert (column.categories, column.has_other, column.width) == (("a", "b"), True, 3)
    found = few.encode([["a"], ["c"], ["d"], ["never seen"]])
    np.testing.assert_array_equal(found.values[:, 0], [0, 2, 2, 2])
    assert few.decode([[2.0]])[0, 0] is None
    every = TableEncoder(max_categories=4).fit(words)
    assert every.columns_[0].categories == ("a", "b", "c", "d")
    found = every.encode([["d"], ["never seen"]])
    np.testing.assert_array_equal(found.missing[:, 0], [False, True])
    np.testing.assert_array_equal(found.values[:, 0], [3, 0])


def test_equal_categories_of_another_type_are_recognised():
    frame = pd.DataFrame({"n": pd.Categorical([1, 2, 2]), "b": [True, True, False]})
    encoder = TableEncoder().fit(frame)
    codes = encoder.encode(frame).values
    np.testing.assert_array_equal(encoder.encode(frame.astype(float)).values, codes)
    np.testing.assert_array_equal(encoder.encode(frame.astype(object)).values, codes)


def test_large_identifiers_are_not_merged():
    ids = np.array([[2**60], [2**60 + 1], [2**60 + 1]])
    assert TableEncoder([0]).fit(ids).columns_[0].categories == (str(2**60 + 1), str(2**60))


@pytest.mark.parametrize("chosen", [["b"], [1], [-1], [False, True], np.array([1])])
def test_columns_of_numbers_can_be_called_categories(chosen):
    frame = pd.DataFrame({"a": [0.5, 1.5, 1.5], "b": [3, 4, 4]})
    encoder = TableEncoder(categorical_features=chosen).fit(frame)
    assert [c.kind for c in encoder.columns_] == ["numeric", "categorical"]
    assert encoder.columns_[1].categories == ("4", "3")
    assert encoder.decode([[0.0, 1.0]])["b"].tolist() == [3]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (["colr"], "Did you mean 'color'"),
        ([5], "indices of the 2 columns"),
        ([True], "1 booleans for 2 columns"),
        ("color", "must be 'auto' or a list"),
        ([0.5], "must hold names or indices"),
    ],
)
def test_a_wrong_choice_of_columns_is_explained(chosen, words):
    with pytest.raises(ValueError, match=words):
        TableEncoder(categorical_features=chosen).fit(pd.DataFrame({"color": [1], "b": [2]}))


def test_constant_and_empty_columns_are_harmless():
    train = pd.DataFrame({"same": [0.1] * 3, "none": [np.nan] * 3, "void": [None] * 3})
    encoder = TableEncoder().fit(train)
    assert all(c.quantiles == () and c.scale == 1 and c.width == 1 for c in encoder.columns_)
    # nothing was learned of a column without values, so later values change nothing
    later = pd.DataFrame({"same": [0.1, 0.6], "none": [7.0, 8.0], "void": ["a", "b"]})
    found = encoder.encode(later)
    np.testing.assert_allclose(found.values, [[0, 0, 0], [0.5, 0, 0]], rtol=1e-6)
    assert found.missing.tolist() == [[False, True, True]] * 2
    np.testing.assert_allclose(encoder.transform(later), [[0, 0, 0], [0.5, 0, 0]])


def test_one_row_and_one_feature_are_a_table():
    encoder = TableEncoder().fit([["a"]])
    assert encoder.encode([["a"]]).values.tolist() == [[0]]
    assert TableEncoder().fit([[3]]).transform([[4]]).tolist() == [[1]]


@pytest.mark.filterwarnings("error")
def test_huge_numbers_do_not_overflow():
    huge = np.array([[1e300], [-1e300], [1.5e308], [0.0]])
    encoder = TableEncoder().fit(huge)
    found = encoder.encode(huge).values
    np.testing.assert_allclose(found.mean(), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(), 1, rtol=1e-6)
    small = TableEncoder().fit([[0.0], [1.0]])
    assert small.encode([[1e300], [-1e300]]).values.tolist() == [[1e4], [-1e4]]
    assert np.isfinite(encoder.decode([[1e4]])).all()


@pytest.mark.parametrize("wrong", [np.inf, -np.inf])
def test_infinite_numbers_are_an_error_with_the_name_of_the_column(wrong):
    with pytest.raises(ValueError, match=r"column .b. holds infinity.*mark it as missing") as e:
        TableEncoder().fit(pd.DataFrame({"a": [1, 2], "b": [1.0, wrong]}))
    assert "\n" not in str(e.value)
    encoder = TableEncoder().fit(pd.DataFrame({"a": [1, 2], "b": [1.0, 2.0]}))
    with pytest.raises(ValueError, match="column 'b' holds infinity"):
        encoder.encode(pd.DataFrame({"a": [1, 2], "b": [1.0, wrong]}))


def test_text_in_a_column_of_numbers_is_an_error():
    encoder = TableEncoder().fit(pd.DataFrame({"a": [1, 2]}))
    with pytest.raises(ValueError, match="column 'a' held numbers in training, got 'x'"):
        encoder.encode(pd.DataFrame({"a": ["x"]}))


def test_a_cell_that_holds_a_list_is_an_error():
    with pytest.raises(TypeError, match="a cell holds"):
        TableEncoder().fit(pd.DataFrame({"a": [[1, 2], [3]]}))


def test_quantiles_are_distinct_and_enclose_the_training_rows():
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=500), rng.integers(0, 3, 500), rng.exponential(size=500)], 1)
    encoder = TableEncoder().fit(x)
    values = encoder.encode(x).values
    for column, found in zip(encoder.columns_, values.T, strict=True):
        q = np.float32(column.quantiles)
        assert (np.diff(q) > 0).all()
        assert (q[0], q[-1]) == (found.min(), found.max())
    assert [len(c.quantiles) for c in encoder.columns_] == [17, 3, 17]
    # sixteenths of the rows lie between them
    counts = np.histogram(values[:, 0], encoder.columns_[0].quantiles)[0]
    assert counts.min() >= 500 / 16 - 2
    assert counts.max() <= 500 / 16 + 2


def test_saved_columns_make_the_same_encoder():
    frame = make_frame()
    encoder = TableEncoder().fit(frame)
    text = json.dumps([asdict(c) for c in encoder.columns_])
    again = TableEncoder.from_columns(
        [build(TableColumn, c) for c in json.loads(text)], is_frame=True
    )
    assert again.columns_ == encoder.columns_
    np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))
    pd.testing.assert_frame_equal(
        again.decode(*again.encode(frame)), encoder.decode(*encoder.encode(frame))
    )
    assert again.get_feature_names_out().tolist() == encoder.get_feature_names_out().tolist()


def test_dense_matrix_has_indicators_and_one_hot_codes():
    frame = pd.DataFrame({"a": [1.0, np.nan, 3.0], "c": ["u", "v", "u"]})
    encoder = TableEncoder().fit(frame).set_output(transform="pandas")
    dense = encoder.transform(frame)
    assert list(dense.columns) == ["a", "missingindicator_a", "c_u", "c_v"]
    np.testing.assert_allclose(dense["a"], [-1, 0, 1])
    np.testing.assert_allclose(dense["missingindicator_a"], [0, 1, 0])
    codes = dense[["c_u", "c_v"]].to_numpy()
    assert np.linalg.norm(codes[0] - codes[1]) == pytest.approx(1)
    unseen = encoder.transform(pd.DataFrame({"a": [2.0], "c": ["w"]}))
    assert not unseen.to_numpy().any()


def test_arrays_come_back_as_arrays():
    whole = np.array([[1, 2], [3, 4]])
    encoder = TableEncoder().fit(whole)
    back = encoder.decode(encoder.encode(whole).values)
    assert back.dtype == whole.dtype
    np.testing.assert_array_equal(back, whole)
    holes = encoder.decode(encoder.encode(whole).values, [[True, False], [False, False]])
    np.testing.assert_array_equal(holes, [[np.nan, 2], [3, 4]])
    mixed = [[1, "a", True], [2, "b", None]]
    again = TableEncoder().fit(mixed)
    assert again.decode(*again.encode(mixed)).tolist() == mixed
    text = np.array([["u", "v"], ["w", "v"]])
    again = TableEncoder().fit(text)
    assert again.decode(*again.encode(text)).tolist() == text.tolist()


def test_weights_count_as_repeated_rows_and_zero_leaves_a_row_out():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": rng.normal(size=30), "b": rng.choice(list("uvw"), 30), "c": [np.nan, 1, 2] * 10}
    )
    weights = rng.integers(0, 4, 30)
    repeated = frame.iloc[np.repeat(np.arange(30), weights)]
    found = TableEncoder().fit(frame, sample_weight=weights).columns_
    for a, b in zip(found, TableEncoder().fit(repeated).columns_, strict=True):
        assert a.categories == b.categories
        np.testing.assert_allclose(
            [a.mean, a.scale, a.missing_share, *a.quantiles],
            [b.mean, b.scale, b.missing_share, *b.quantiles],
            rtol=1e-6,
        )


def test_it_works_inside_pipelines_and_column_transformers():
    frame = make_frame()[["price", "colour", "when"]]
    y = np.arange(4.0)
    pipe = make_pipeline(TableEncoder(), LinearRegression()).fit(frame, y)
    assert pipe.predict(frame).shape == (4,)
    part = make_column_transformer((TableEncoder(), ["price", "colour"])).fit(frame)
    assert part.transform(frame).shape == (4, 5)
    assert clone(TableEncoder([0], 5)).get_params() == {
        "categorical_features": [0],
        "max_categories": 5,
    }


def test_wrong_shapes_and_settings_are_explained():
    encoder = TableEncoder().fit([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"must be \(rows, 2\)"):
        encoder.decode([[1.0]])
    with pytest.raises(ValueError, match="max_categories must be at least 2"):
        TableEncoder(max_categories=1).fit([[1.0]])
    with pytest.raises(ValueError, match="0 sample"):
        TableEncoder().fit(pd.DataFrame({"a": []}))
    with pytest.raises(ValueError, match="Complex data not supported"):
        TableEncoder().fit(pd.DataFrame({"a": [1j]}))
