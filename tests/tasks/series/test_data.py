import numpy as np
import pytest
import torch

from primal_attention.tasks.series import (
    SeriesCollection,
    SeriesDataset,
    Standardizer,
    collate_series,
    list_series,
    load_series,
    read_npz,
    read_series,
    read_ts,
    series_from_arrays,
)
from primal_attention.tasks.series.data import jittered
from primal_attention.tasks.splits import stratified_sample, stratified_split

FULL = """#A comment
@problemName Toy
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true b a
@data
# a comment among the series
1,2,3:4,5,6:a
1.5,?:-2e1,NaN:b
7,8,9,10:1,?,?,4:a
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_ts_file_with_unequal_lengths_missing_values_and_comments(tmp_path):
    series = read_ts(write(tmp_path / "Toy.ts", FULL))
    assert series.classes == ("b", "a")
    assert series.y.tolist() == [1, 0, 1]
    # a last step that is missing everywhere is padding
    assert series.length.tolist() == [3, 1, 4]
    assert series.x.shape == (3, 4, 2)
    np.testing.assert_array_equal(series.x[0, :3], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(series.x[2, :, 1], np.float32([1, np.nan, np.nan, 4]))


@pytest.mark.parametrize("header", ["", "@data\n", "@univariate true\n@data\n"])
def test_ts_file_with_little_or_no_header(tmp_path, header):
    series = read_ts(write(tmp_path / "Toy.ts", header + "1,2,3:x\n4,5,6:w\n"))
    assert series.classes == ("w", "x")
    assert series.y.tolist() == [1, 0]


def test_ts_file_without_labels(tmp_path):
    series = read_ts(write(tmp_path / "Toy.ts", "@classLabel false\n@data\n1,2:3,4\n5,6:7,8\n"))
    assert series.y is None
    assert series.x.shape == (2, 2, 2)


@pytest.mark.raw
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@data\n", "no series"),
        ("@timeStamps true\n@classLabel true a\n@data\n(0,1):a\n", "time stamps"),
        ("@classLabel true a b\n@data\n1,2:a\n1,oops:b\n", "line 4: 'oops' is not a finite number"),
        (
            "@classLabel true a b\n@data\n1,2:a\n1,2:3,4:b\n",
            "line 4: 2 dimensions of 2 steps, expected 1;",
        ),
        ("@classLabel true a b\n@data\n1,2:a\n1,2:c\n", "Labels c are not among the classes a, b"),
        ("@classLabel true a\n@data\n:a\n", "line 3: a series without values"),
        ("@classLabel true a\n1,2:a\n@data\n", "after the first series"),
        ("@equalLength true\n@data\n1,2:3,4:a\n1,2:3:b\n", "line 4: .* of 1 to 2 steps, expected"),
        ("@equalLength true\n@data\n1,2:a\n1,2,3:b\n", "line 4: 1 dimensions of 3 steps, .* of 2;"),
        ("@equalLength true\n@seriesLength 3\n@data\n1,2:a\n", "line 4: .* expected 1 of 3;"),
        ("@classLabel true a\n@data\n1,2:a\n1,-inf:a\n", "line 4: '-inf' is not a finite number"),
        ("@classLabel false\n@data\n1,2:3,1e39\n", r"Toy\.ts: Case 0, counted from 0, holds"),
    ],
)
def test_a_broken_ts_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_ts(write(tmp_path / "Toy.ts", text))


def save_npz(folder, name="Toy", **also):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "X_train": np.arange(24, dtype=np.float32).reshape(3, 4, 2),
        "y_train": np.array([0, 1, 0]),
        "len_train": np.array([4, 2, 3], dtype=np.int32),
        "X_test": np.zeros((0, 4, 2), np.float32),
        "y_test": np.zeros(0, int),
        "len_test": np.zeros(0, np.int32),
        "classes": np.array(["p", "q"]),
    }
    np.savez(folder / f"{name}.npz", **(arrays | also))
    return folder / f"{name}.npz"


@pytest.mark.raw
def test_infinite_values_are_refused_wherever_series_are_made(tmp_path):
    x = np.zeros((3, 4, 2), np.float32)
    x[1, 3] = np.inf
    with pytest.raises(ValueError, match=r"Toy\.npz: Case 1, .* only NaN means missing"):
        read_npz(save_npz(tmp_path, X_train=x, len_train=np.array([4, 4, 4])))
    # behind its length a series may hold anything
    assert len(read_npz(save_npz(tmp_path, X_train=x, len_train=np.array([4, 3, 4])))) == 3
    with pytest.raises(ValueError, match="Case 0"):
        series_from_arrays([np.array([[1.0, np.inf]])])
    # a value that only the statistics of the training part make too large
    small = Standardizer(np.zeros(1), np.full(1, 1e-9))
    with pytest.raises(ValueError, match="infinite or too large"):
        small(series_from_arrays([np.array([[1.0, 3e38]])]))


def test_npz_file(tmp_path):
    series = read_npz(save_npz(tmp_path))
    assert series.length.tolist() == [4, 2, 3]
    assert series.classes == ("p", "q")
    assert series.keep.sum() == 9


@pytest.mark.raw
def test_broken_or_incomplete_npz_files_say_so(tmp_path):
    with pytest.raises(ValueError, match="has no test part"):
        read_npz(save_npz(tmp_path), "test")
    (tmp_path / "bad.npz").write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=r"bad\.npz is not an \.npz archive"):
        read_npz(tmp_path / "bad.npz")
    np.savez(tmp_path / "part.npz", X_train=np.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match="lacks the array X_test; it has X_train"):
        read_npz(tmp_path / "part.npz", "test")
    np.savez(tmp_path / "axes.npz", X=np.zeros((1, 1, 2)), axes="time,cases,channels")
    with pytest.raises(ValueError, match="axes must be cases,channels,time or"):
        read_npz(tmp_path / "axes.npz")
    np.savez(tmp_path / "four.npz", X=np.zeros((1, 1, 2, 2)))
    with pytest.raises(ValueError, match="two or three axes"):
        read_npz(tmp_path / "four.npz")
    with pytest.raises(ValueError, match="y must index the 2 classes"):
        read_npz(save_npz(tmp_path, y_train=np.array([0, -1, 0])))
    with pytest.raises(ValueError, match="Lengths must be from 1 to 4"):
        read_npz(save_npz(tmp_path, len_train=np.array([4, 5, 1])))
    pickled = np.array([{"a": 1}, 2, 3], dtype=object)
    with pytest.raises(ValueError, match=r"not a readable \.npz archive: array 'X_train'"):
        read_npz(save_npz(tmp_path, X_train=pickled))


def test_every_order_of_axes_gives_the_same_series(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 2, 6)).astype(np.float32)
    y, late = np.array(["b", "a", "b", "a"]), x.transpose(0, 2, 1)
    old = {"y_train": np.array([1, 0, 1, 0]), "classes": np.array(["a", "b"])}
    files = [
        {"X": x, "y": y},
        {"X": x, "y": y, "axes": "cases,channels,time"},
        {"X": late, "y": y, "axes": "cases, time, channels"},
        {"X": late, "y": y, "length": np.full(4, 6)},
        {"X_train": x, "y_train": y},
        {"X_train": late, **old},
        {"X_train": late, **old, "len_train": np.full(4, 6)},
    ]
    for arrays in files:
        np.savez(tmp_path / "f.npz", **arrays)
        found = read_npz(tmp_path / "f.npz")
        assert np.array_equal(found.x, late), arrays.keys()
        assert [found.classes[i] for i in found.y] == y.tolist()
        assert read_npz(tmp_path / "f.npz", labelled=False).y is None
    np.savez(tmp_path / "flat.npz", X=x[:, 0])
    assert np.array_equal(read_npz(tmp_path / "flat.npz").x, late[:, :, :1])


def test_more_channels_than_steps_warn_unless_the_file_says_so(tmp_path):
    x = np.zeros((4, 100, 6))
    np.savez(tmp_path / "f.npz", X=x)
    with pytest.warns(UserWarning, match="read as 100 channels of 6 time steps"):
        assert read_npz(tmp_path / "f.npz").num_channels == 100
    np.savez(tmp_path / "f.npz", X=x, axes="cases,channels,time")
    assert read_npz(tmp_path / "f.npz").num_channels == 100


def test_series_to_predict_need_no_labels(tmp_path):
    names = {"header": "a b", "bare": "1,2:3,4\n5,6:7,8\n", "with": "1,2:3,4:a\n5,6:7,8:zzz\n"}
    for key in ("bare", "with"):
        text = f"@classLabel true {names['header']}\n@data\n{names[key]}"
        series = read_ts(write(tmp_path / "Toy.ts", text), channels=2)
        assert series.y is None
        assert series.x[:, :, 1].tolist() == [[3, 4], [7, 8]]
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    assert read_series(tmp_path / "t.csv", channels=1).x.shape == (2, 2, 1)


def test_a_line_ends_at_a_line_feed_only(tmp_path):
    text = "# a comment\u2028@oops\n@classLabel true a\n@data\n1,2:a\x0c\r\n"
    assert len(read_ts(write(tmp_path / "Toy.ts", text))) == 1


def test_sets_are_found_by_exact_name_only(tmp_path):
    save_npz(tmp_path / "Toy")
    # a copy of equal lengths beside the real files, as archives ship it
    write(tmp_path / "Words" / "Words_eq_TRAIN.ts", FULL)
    write(tmp_path / "Words" / "Words_TRAIN.ts", "@data\n1,2:a\n3,4:b\n5,6:b\n")
    write(tmp_path / "Words" / "Words_TEST.ts", "@data\n7,8:b\n")
    write(tmp_path / "Other" / "Wrong_TRAIN.ts", FULL)
    assert list_series(tmp_path) == ["Toy", "Words"]
    assert len(load_series("Words", root=tmp_path)) == 3
    # the test file reads its labels with the classes of the training file
    assert load_series("Words", "test", root=tmp_path).y.tolist() == [1]
    for name in ("Word", "words", "Words_eq", "Other"):
        with pytest.raises(ValueError, match=rf"No set named '{name}'.* there are: Toy, Words"):
            load_series(name, root=tmp_path)
    save_npz(tmp_path / "Words", "Words")
    with pytest.raises(ValueError, match=r"Both .* exist"):
        load_series("Words", root=tmp_path)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    save_npz(tmp_path / "uea" / "Toy")
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    assert list_series() == ["Toy"]
    monkeypatch.delenv("PRIMAL_DATA")
    with pytest.raises(ValueError, match="set the environment variable PRIMAL_DATA"):
        list_series()


def test_arrays_of_every_common_shape():
    assert series_from_arrays(np.zeros((4, 3, 10))).x.shape == (4, 10, 3)
    assert series_from_arrays(np.zeros((4, 10))).x.shape == (4, 10, 1)
    uneven = series_from_arrays([np.ones((2, 5)), np.ones((2, 3))], [7, 5])
    assert uneven.length.tolist() == [5, 3]
    assert uneven.classes == ("5", "7")
    assert not uneven.x[1, 3:].any()


@pytest.mark.raw
def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="same channels"):
        series_from_arrays([np.ones((2, 5)), np.ones((3, 5))])
    with pytest.raises(ValueError, match="no series"):
        series_from_arrays([])
    with pytest.raises(ValueError, match="one label a case"):
        SeriesCollection(np.zeros((2, 3, 1), np.float32), np.array([3, 3]), np.array([0]), ("a",))


def test_standardisation_sees_neither_padding_nor_missing_values_nor_test_data():
    rng = np.random.default_rng(0)
    cases = [5 + 3 * rng.normal(size=(2, n)) for n in (30, 20, 40)]
    values = np.concatenate(cases, axis=1)
    with_gap = [case.copy() for case in cases]
    with_gap[0] = np.insert(with_gap[0], 3, np.nan, axis=1)
    train = series_from_arrays(with_gap)
    # whatever lies behind the length must not count
    train.x[~train.keep] = 1e6
    scaler = Standardizer.fit(train)
    np.testing.assert_allclose(scaler.mean, values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(scaler.std, values.std(1), rtol=1e-6)
    scaled = scaler(train)
    assert np.isfinite(scaled.x).all()
    assert not scaled.x[~scaled.keep].any()
    test = scaler(series_from_arrays([100 + np.zeros((2, 4))]))
    np.testing.assert_allclose(test.x[0, 0], (100 - scaler.mean) / scaler.std, rtol=1e-5)


def test_missing_values_are_interpolated_and_held_at_the_ends():
    nan = np.nan
    train = series_from_arrays([np.array([[nan, 0.0, nan, nan, 3.0, nan], [1, 1, 1, 1, 1, 1]])])
    unit = Standardizer(np.zeros(2), np.ones(2))
    np.testing.assert_allclose(unit(train).x[0, :, 0], [0, 0, 1, 2, 3, 3])
    empty = series_from_arrays([np.array([[nan, nan], [1.0, 2.0]])])
    assert unit(empty).x[0, :, 0].tolist() == [0, 0]


def test_a_constant_channel_becomes_zero():
    train = series_from_arrays(np.full((3, 1, 5), 0.1))
    assert np.abs(Standardizer.fit(train)(train).x).max() < 1e-6


def test_the_split_is_stratified_disjoint_and_the_same_for_a_seed():
    y = np.repeat([0, 1, 2, 3], [40, 10, 2, 1])
    first, again, other = (stratified_split(y, 0.2, seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.valid, again.valid)
    assert not np.array_equal(first.valid, other.valid)
    assert np.array_equal(np.sort(np.concatenate(first)), np.arange(len(y)))
    assert np.bincount(y[first.valid], minlength=4).tolist() == [8, 2, 1, 0]


def test_a_sample_has_its_size_and_the_shares_of_the_classes():
    y = np.repeat([0, 1, 2], [60, 30, 10])
    for size in (1, 3, 17, 18, 50, 100):
        chosen = stratified_sample(y, size)
        assert len(set(chosen.tolist())) == size
        counts = np.bincount(y[chosen], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.3, 0.1])).max() < 1.5
    assert np.bincount(y[stratified_sample(y, 3)]).tolist() == [1, 1, 1]
    assert stratified_sample(y, 200).tolist() == list(range(100))
    assert np.array_equal(stratified_sample(y, 9, seed=1), stratified_sample(y, 9, seed=1))


def test_batches_pad_to_their_longest_series():
    series = series_from_arrays([np.ones((2, 5)), np.ones((2, 3)), np.ones((2, 4))], "aba")
    data = SeriesDataset(series)
    batch = collate_series([data[1], data[2]])
    assert batch["x"].shape == (2, 4, 2)
    assert batch["key_mask"].sum(1).tolist() == [3, 4]
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))
    assert collate_series([data[0]])["key_mask"].tolist() == [[True] * 5]


def test_jitter_changes_a_series_anew_each_time_and_the_seed_decides_how():
    series = series_from_arrays(np.random.default_rng(0).normal(size=(2, 3, 40)), ["a", "b"])
    data = SeriesDataset(series, jitter=0.1)
    torch.manual_seed(0)
    first, second = data[0]["x"], data[0]["x"]
    assert first.shape == (40, 3)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    torch.testing.assert_close(data[0]["x"], first, atol=0, rtol=0)
    np.testing.assert_array_equal(SeriesDataset(series)[0]["x"], series.x[0])


@pytest.mark.parametrize("length", [1, 2, 60])
def test_jitter_moves_a_ramp_within_its_bounds(length):
    # so steep that noise and factors of single steps do not count
    ramp = torch.linspace(-1e3, 1e3, length)[:, None]
    for seed in range(10):
        torch.manual_seed(seed)
        moved = jittered(ramp, 0.1).flatten()
        assert torch.isfinite(moved).all()
        if length == 60:
            middle = moved[15:45]
            pace = float(middle.diff().mean() / ramp.diff(dim=0).mean())
            assert 0.5 < pace < 1.6
            assert (middle.diff() > 0).all()


def test_jitter_adds_noise_and_a_factor_a_channel():
    torch.manual_seed(0)
    zeros = jittered(torch.zeros(4000, 2), 0.1)
    assert abs(float(zeros.std()) - 0.2) < 0.01
    means = torch.stack([jittered(torch.ones(400, 2), 0.1).mean(0) for _ in range(500)])
    assert abs(float(means.std()) - 0.1) < 0.01


@pytest.mark.raw
@pytest.mark.parametrize("jitter", [-0.1, 1.0, float("nan")])
def test_jitter_out_of_bounds_is_refused(jitter):
    with pytest.raises(ValueError, match="jitter must be from 0"):
        SeriesDataset(series_from_arrays(np.zeros((1, 1, 4))), jitter=jitter)


def test_jitter_does_not_smooth_a_rough_series():
    noise = torch.randn(200, 200, 2)
    moved = torch.stack([jittered(case, 0.1) for case in noise])
    for measured in (lambda x: x.var(1), lambda x: x.diff(dim=1).square().mean(1)):
        # the added noise and the factors alone make 5 % more of both
        ratio = float(measured(moved).mean() / measured(noise).mean())
        assert 0.95 < ratio < 1.08


def test_values_of_a_jittered_rough_series_are_values_of_the_series():
    pattern = torch.tensor([-1.0, 1.0]).repeat(2000)[:, None]
    moved = jittered(pattern, 1e-3)
    assert float((moved.abs() - 1).abs().max()) < 0.02
