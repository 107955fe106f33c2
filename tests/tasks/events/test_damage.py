"""Logs that cannot be what was meant are refused in a sentence, and nothing is converted."""

import numpy as np
import pandas as pd
import pytest

from primal_attention.datasets.events.log import EventSequences, LogColumn
from primal_attention.support.command import UserError
from primal_attention.tasks.events.task import STACKOVERFLOW, load_stackoverflow

GOOD = {
    "offsets": np.array([0, 2, 3]),
    "times": np.array([1.0, 2.0, 3.0]),
    "types": np.array([0, 1, 0]),
    "names": ("a", "b"),
    "keys": ("u", "v"),
}


@pytest.mark.raw
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": np.array([0, 1.5, 3])}, "offsets must hold whole numbers"),
        ({"offsets": np.array([[0, 2, 3]])}, "offsets must hold whole numbers"),
        ({"offsets": np.array([0, 4, 3])}, "offsets must increase"),
        ({"offsets": np.array([0, -1, 3])}, "offsets must increase"),
        ({"types": np.array([0.9, 1, 0])}, "types must hold whole numbers"),
        ({"types": np.array([True, False, True])}, "types must hold whole numbers"),
        ({"times": np.array([1j, 2, 3])}, "times must hold real numbers"),
        ({"times": np.ones((3, 1))}, "times must hold real numbers"),
        ({"times": [1.0, 2.0, 3.0]}, "times must hold real numbers"),
        ({"times": np.array([-1e308, 1e308, 1.0])}, "differ by more"),
        ({"names": ("a", "a")}, "'a' is there twice"),
        ({"marks": {"m": LogColumn(np.array([0, 5, 1]), ("x",))}}, "index its 1 levels"),
        ({"marks": {"m": LogColumn(np.array([0.5, 0, 0]), ("x",))}}, "index its 1 levels"),
    ],
)
def test_columns_of_the_wrong_sort_are_refused(change, words):
    EventSequences(**GOOD)
    with pytest.raises(ValueError, match=words):
        EventSequences(**{**GOOD, **change})


@pytest.mark.raw
@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        ({"time": [1 + 2j, 3]}, {}, "complex"),
        ({"m": [1 + 2j, 3]}, {"marks": ["m"]}, "complex"),
        ({"event": [[1], {}]}, {}, "is a list"),
        ({"user": [[1], [2]]}, {}, "cannot tell sequences apart"),
        ({"time": ["2024-01-01", "2024-02-31"]}, {}, "row 1, counted from 0, holds '2024-02-31'"),
        ({"time": ["1", "1_0"]}, {}, "row 0, counted from 0, holds '1'"),
    ],
)
def test_frames_of_the_wrong_sort_are_refused(frame, options, words):
    usual = {"user": ["u", "u"], "time": [1, 2], "event": ["a", "b"]}
    with pytest.raises(ValueError, match=words) as caught:
        EventSequences.from_frame(pd.DataFrame({**usual, **frame}), **options)
    assert "You might want to try" not in str(caught.value)


@pytest.mark.raw
def test_two_columns_of_one_name_are_refused():
    frame = pd.DataFrame([[1, 2, "x"], [2, 3, "y"]], columns=["time", "time", "event"])
    with pytest.raises(ValueError, match="two columns 'time'"):
        EventSequences.from_frame(frame)


@pytest.mark.raw
@pytest.mark.parametrize(
    ("times", "options", "words"),
    [
        ([[[1.0], [2.0]]], {}, "one list of times"),
        ([[np.datetime64("2024-01-01"), np.datetime64("2024-01-02")], [1.0, 2.0]], {}, "both"),
        ([[1.0, 2.0]], {"marks": {"m": [[1]]}}, "'m' must hold"),
        ([[1.0, 2.0]], {"marks": {"m": 3}}, "'m' must hold"),
        (3, {}, "lists"),
    ],
)
def test_arrays_of_the_wrong_shape_are_refused(times, options, words):
    types = [["a", "b"]] * (len(times) if isinstance(times, list) else 1)
    with pytest.raises(ValueError, match=words):
        EventSequences.from_arrays(times, types, **options)


@pytest.mark.raw
@pytest.mark.parametrize("time", ["1.5", "1e30", "nan", "x"])
def test_seconds_of_ratings_are_whole_numbers(tmp_path, time):
    path = tmp_path / "ratings.dat"
    path.write_text(f"1::2::5::100\n1::3::5::{time}\n")
    with pytest.raises(ValueError, match=r"must have lines user::item::rating::seconds"):
        EventSequences.from_csv(path)


def test_a_compressed_log_is_read(tmp_path):
    pd.DataFrame({"time": [1, 2], "event": ["a", "b"]}).to_csv(tmp_path / "log.csv.gz")
    assert len(EventSequences.from_csv(tmp_path / "log.csv.gz").times) == 2


@pytest.mark.raw
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": np.array([0, 1.5, 4])}, "'offsets' must hold whole numbers"),
        ({"offsets": np.array([0, 5, 4])}, "offsets must increase"),
        ({"event": np.array([1, 2, 0.9, 2])}, "'event' must hold whole numbers"),
        ({"event": np.array(["a"] * 4)}, "'event' must hold whole numbers"),
        ({"event": np.zeros(0, int)}, "offsets"),
        ({"time_ms": np.array([1j, 2, 3, 4])}, "'time_ms' must hold finite numbers"),
        ({"time_ms": np.array([np.nan, 2, 3, 4])}, "not finite"),
        ({"in_test": np.full((2, 5), 0.9)}, "'in_test' must hold truth values"),
        ({"in_test": np.zeros((3, 5), bool)}, "in_test must have a row for each"),
        ({"badge_names": np.zeros((2, 2))}, "'badge_names' must hold words"),
    ],
)
def test_a_damaged_file_of_badges_is_one_sentence(tmp_path, change, words):
    good = {
        "time_ms": np.array([1, 2, 3, 5]),
        "event": np.array([1, 2, 1, 2]),
        "offsets": np.array([0, 2, 4]),
        "badge_names": np.array(["x", "y"]),
        "in_test": np.zeros((2, 5), bool),
    }
    path = tmp_path / STACKOVERFLOW
    path.parent.mkdir(parents=True)
    np.savez(path, **good)
    assert len(load_stackoverflow(0, root=tmp_path)[0]) == 2
    for fold in (7, -1):
        with pytest.raises(UserError, match="folds 0 to 4"):
            load_stackoverflow(fold, root=tmp_path)
    np.savez(path, **{**good, **change})
    with pytest.raises(UserError, match=r"stackoverflow\.npz") as caught:
        load_stackoverflow(0, root=tmp_path)
    assert words in str(caught.value)
    path.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"save arrays with numpy\.savez"):
        load_stackoverflow(0, root=tmp_path)
