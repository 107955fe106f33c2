"""Logs of events: every way in, and every way to be wrong."""

import warnings
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest

from primal_attention.datasets import EventSequences, IrregularSeries
from primal_attention.datasets.events.units import duration, moment


def frame(**changes):
    columns = {
        "user": ["u", "v", "u", "v", "u"],
        "when": pd.to_datetime(
            ["2024-01-01", "2024-01-01", "2024-01-02", "2024-01-05", "2024-01-04"]
        ),
        "what": ["view", "view", "buy", "view", "view"],
        "price": [1.0, 2.0, np.nan, 4.0, 5.0],
        "device": ["phone", None, "desk", "phone", "phone"],
        "country": ["de", "fr", "de", "fr", "de"],
    }
    return pd.DataFrame(columns | changes)


def read(table=None, **options):
    given = {"sequence": "user", "time": "when", "event": "what"} | options
    return EventSequences.from_frame(frame() if table is None else table, **given)


def test_a_frame_becomes_sequences_in_order_of_appearance():
    log = read(marks=["price", "device"], covariates=["country"])
    assert log.keys == ("u", "v")
    assert log.names == ("buy", "view")
    assert log.lengths.tolist() == [3, 2]
    assert log.types.tolist() == [1, 0, 1, 1, 1]
    np.testing.assert_allclose(log.gaps, [np.nan, 1, 2, np.nan, 4])
    assert log.unit == "days"
    np.testing.assert_array_equal(log.marks["price"].values, [1, np.nan, 5, 2, 4])
    assert log.marks["device"].levels == ("desk", "phone")
    assert log.marks["device"].values.tolist() == [1, 0, 1, -1, 1]
    assert log.covariates["country"].values.tolist() == [0, 1]
    assert log.dates[0] == np.datetime64("2024-01-01")


def test_usual_names_of_columns_are_recognised():
    table = frame().rename(columns={"user": "User_ID", "when": "Timestamp", "what": "action"})
    log = EventSequences.from_frame(table)
    assert (log.keys, log.names) == (("u", "v"), ("buy", "view"))


def test_without_a_column_of_sequences_all_events_are_one():
    log = EventSequences.from_frame(frame()[["when", "what"]].sort_values("when"))
    assert log.lengths.tolist() == [5]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_files_give_the_same_log(tmp_path, suffix):
    path = tmp_path / f"log.{suffix}"
    if suffix == "parquet":
        frame().to_parquet(path)
        log = EventSequences.from_parquet(path, sequence="user", time="when", event="what")
    else:
        frame().to_csv(path, index=False, sep="\t" if suffix == "tsv" else ",")
        log = EventSequences.from_csv(path, sequence="user", time="when", event="what")
    np.testing.assert_array_equal(log.times, read().times)
    assert log.names == read().names


def test_ratings_of_movielens_are_a_log_of_items(tmp_path):
    path = tmp_path / "ratings.dat"
    path.write_text("1::1193::5::978300760\n1::661::3::978387160\n22::1193::4::978298413\n")
    log = EventSequences.from_csv(path, marks=["rating"])
    assert (log.keys, log.names, log.unit) == (("1", "22"), ("661", "1193"), "days")
    assert log.gaps[1] == 1.0
    assert log.marks["rating"].values.tolist() == [5.0, 3.0, 4.0]
    for bad in ("1::2::3\n", "1::2::five::978300760\n", "a,b\n1,2\n", ""):
        path.write_text(bad)
        with pytest.raises(ValueError, match="user::item::rating::seconds"):
            EventSequences.from_csv(path)


def test_arrays_give_the_same_log_as_a_frame():
    whole = read()
    log = EventSequences.from_arrays(
        [whole.dates[part] for part in whole],
        [[whole.names[t] for t in whole.types[part]] for part in whole],
    )
    np.testing.assert_array_equal(log.times, whole.times)


def test_unsorted_events_are_sorted_with_a_warning():
    table = frame().iloc[::-1]
    with pytest.warns(UserWarning, match="2 of 2 sequences were not in order of time"):
        log = read(table)
    assert (log.gaps[~np.isnan(log.gaps)] >= 0).all()
    # marks move with their events
    with pytest.warns(UserWarning, match="sorted"):
        assert read(table, marks=["price"]).marks["price"].values[0] == 1.0


def test_interleaved_sequences_in_order_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read()


def test_events_at_the_same_time_keep_their_order_and_have_a_gap_of_zero():
    log = EventSequences.from_arrays([[1.0, 1.0, 1.0]], [["c", "a", "b"]])
    assert [log.names[t] for t in log.types] == ["c", "a", "b"]
    assert log.gaps[1:].tolist() == [0, 0]


def test_single_events_are_sequences():
    log = EventSequences.from_arrays([[3.0]], [["a"]])
    assert log.lengths.tolist() == [1]
    assert np.isnan(log.gaps).all()


def test_time_zones_are_converted_and_daylight_saving_is_right():
    # two hours pass between these clock times: the clocks go forward in between
    local = pd.to_datetime(["2024-03-31 01:00", "2024-03-31 04:00"]).tz_localize("Europe/Berlin")
    table = pd.DataFrame({"user": "u", "time": local, "event": ["a", "b"]})
    log = EventSequences.from_frame(table, unit="hours")
    assert log.gaps[1] == 2
    assert log.dates[0] == np.datetime64("2024-03-31T00:00")


def test_dates_of_several_time_zones_as_text_or_python_dates():
    table = pd.DataFrame(
        {"time": ["2024-01-01T00:00+02:00", "2024-01-01T00:00+00:00"], "event": ["a", "b"]}
    )
    assert EventSequences.from_frame(table, unit="hours").gaps[1] == 2
    east = timezone(timedelta(hours=2))
    when = [datetime(2024, 1, 1, tzinfo=east), datetime(2024, 1, 1, tzinfo=UTC)]
    assert EventSequences.from_arrays([when], ["ab"], unit="hours").gaps[1] == 2


def test_numbers_keep_their_unit_and_unix_seconds_their_digits():
    log = EventSequences.from_arrays([[1.7e9, 1.7e9 + 0.5]], ["ab"], unit="seconds")
    assert log.gaps[1] == 0.5
    assert "'seconds'" in repr(log)


def test_integer_types_are_sorted_by_value_and_floats_of_them_are_the_same():
    log = EventSequences.from_arrays([[0, 1, 2]], [[10, 9.0, 9]])
    assert log.names == ("9", "10")


def test_the_most_recent_events_are_kept():
    log = read(marks=["price"], covariates=["country"]).cut(2)
    assert log.lengths.tolist() == [2, 2]
    assert log.marks["price"].values.tolist()[1] == 5.0


def test_take_before_and_only_types_choose_events():
    log = read(marks=["price"], covariates=["country"])
    assert log.take([1]).keys == ("v",)
    assert log.take(np.array([False, True])).covariates["country"].values.tolist() == [1]
    assert log.before("2024-01-01").lengths.tolist() == [1, 1]
    only = log.only_types(["buy"])
    assert (only.keys, only.names, only.types.tolist()) == (("u",), ("buy",), [0])


def test_types_are_numbered_as_in_training_and_unseen_ones_are_named():
    log = read()
    assert log.with_names(("x", "view", "buy")).types.tolist() == [1, 2, 1, 1, 1]
    with pytest.raises(ValueError, match=r"1 events have types .* buy.*only_types"):
        log.with_names(("view",))


def test_levels_are_numbered_as_in_training_and_unseen_ones_count_as_missing():
    column = read(marks=["device"]).marks["device"].relevel(("phone", "watch"), "device")
    assert column.values.tolist() == [0, -1, 0, -1, 0]


BAD = {
    "a missing time": ({"when": [pd.NaT, *frame()["when"][1:]]}, {}, "have no time.*row 0"),
    "a missing type": ({"what": ["a", None, "b", "c", "d"]}, {}, "Row 1.*no event type"),
    "a missing sequence": ({"user": ["u", None, "u", "v", "u"]}, {}, "Row 1.*no 'user'"),
    "times that are words": ({"when": list("abcde")}, {}, "neither numbers nor ISO 8601"),
    "truth values as times": ({"when": [True] * 5}, {}, "truth values"),
    "a missing column": ({}, {"event": "kind"}, "no column 'kind'"),
    "a changing covariate": ({}, {"covariates": ["price"]}, "changes within a sequence"),
    "an infinite mark": ({"price": [np.inf] * 5}, {"marks": ["price"]}, "infinite"),
    "an unknown unit": ({}, {"unit": "fortnights"}, "unit must be one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_frame_is_an_error_that_says_what_is_wrong(case):
    changes, options, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        read(frame(**changes), **options)


def test_bad_arrays_are_errors():
    with pytest.raises(ValueError, match="Sequence '1' has no events"):
        EventSequences.from_arrays([[1.0], []], [["a"], []])
    with pytest.raises(ValueError, match="no sequence"):
        EventSequences.from_arrays([], [])
    with pytest.raises(ValueError, match="same number of events"):
        EventSequences.from_arrays([[1.0, 2.0]], [["a"]])
    with pytest.raises(ValueError, match="no time"):
        EventSequences.from_arrays([[1.0, np.nan]], ["ab"])
    with pytest.raises(ValueError, match="no rows"):
        EventSequences.from_frame(frame().iloc[:0])
    with pytest.raises(TypeError, match="pandas DataFrame"):
        EventSequences.from_frame({"time": [1]})
    with pytest.raises(ValueError, match="column of the events is not recognised"):
        EventSequences.from_frame(frame()[["when"]])


def test_negative_gaps_in_stored_events_are_an_error():
    with pytest.raises(ValueError, match=r"Event 1.*gap -1"):
        EventSequences(np.array([0, 2]), np.array([2.0, 1.0]), np.array([0, 0]), ("a",), ("u",))


def test_too_many_types_are_taken_for_a_wrong_column():
    count = 10_001
    with pytest.raises(ValueError, match="is it the right column"):
        EventSequences.from_arrays([np.arange(count)], [np.arange(count)])


def test_durations_and_moments():
    assert duration("90min", "hours") == 1.5
    assert duration(3, "units") == 3
    assert moment(np.datetime64("1970-01-02"), "hours", True) == 24
    assert moment(datetime(1970, 1, 2), "days", True) == 1
    for value, unit, words in (
        ("7X", "days", "not a duration"),
        ("7D", "units", "cannot be converted"),
        (-1, "days", "positive"),
    ):
        with pytest.raises(ValueError, match=words):
            duration(value, unit)
    with pytest.raises(ValueError, match="is a date"):
        moment("2024-01-01", "units", False)
    with pytest.raises(ValueError, match="not a date"):
        moment("soon", "days", True)


ALIKE = r"1 and the word '1', which would be one name.*rename one"


@pytest.mark.parametrize("types", [[1, "1"], [1.0, "1"], np.array([1, "1"], dtype=object)])
def test_a_number_and_the_same_word_are_no_one_type(types):
    with pytest.raises(ValueError, match=f"types of events hold {ALIKE}"):
        EventSequences.from_arrays([[0.0, 1.0]], [types])
    table = pd.DataFrame({"time": [0.0, 1.0], "event": pd.Series(list(types), dtype=object)})
    with pytest.raises(ValueError, match=ALIKE):
        EventSequences.from_frame(table)


def test_a_number_and_the_same_word_are_no_one_level_and_no_one_sequence():
    times, types = [[0.0], [1.0]], [["a"], ["a"]]
    with pytest.raises(ValueError, match=f"levels of 'm' hold {ALIKE}"):
        EventSequences.from_arrays(times, types, marks={"m": [[1], ["1"]]})
    with pytest.raises(ValueError, match=f"levels of 'c' hold {ALIKE}"):
        EventSequences.from_arrays(times, types, covariates={"c": [1, "1"]})
    with pytest.raises(ValueError, match=f"keys hold {ALIKE}"):
        EventSequences.from_arrays(times, types, keys=[1, "1"])
    with pytest.raises(ValueError, match="keys must differ, but 'x' is there twice; rename it"):
        EventSequences.from_arrays(times, types, keys=["x", "x"])
    table = pd.DataFrame({"time": [0.0, 1.0], "event": "a", "user": [1, "1"]})
    with pytest.raises(ValueError, match=f"names of sequences hold {ALIKE}"):
        EventSequences.from_frame(table)


def test_channels_have_names_of_their_own():
    values = [np.zeros((2, 2))]
    for channels in (["a", "a"], ["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match=r"a name of its own, got a.* for 2 channels"):
            IrregularSeries.from_arrays([[0.0, 1.0]], values, channels=channels)
    table = pd.DataFrame({"time": [0.0, 1.0], "observation": [1.0, 2.0]})
    with pytest.raises(ValueError, match="a name of its own"):
        IrregularSeries.from_frame(table, values=["observation", "observation"])
    # the name that events of series have inside is free for a channel
    assert IrregularSeries.from_frame(table, values=["observation"]).channels == ("observation",)


def test_no_series_and_lists_that_differ_are_one_sentence():
    for times, values in (([], []), ([[0.0]], []), ([[0.0]], [np.zeros((1, 1))] * 2)):
        with pytest.raises(ValueError, match="must hold the same series, one or more, got"):
            IrregularSeries.from_arrays(times, values)
