"""Data of a recipe: parts of the sizes asked for, and errors in words."""

from dataclasses import replace

import numpy as np
import pandas
import pytest

from primal_attention.support.command import UserError
from primal_attention.tasks.longrange import TokenSettings, TokenTask
from primal_attention.tasks.series import SeriesSettings, SeriesTask, read_series


def test_parts_have_the_sizes_asked_for(tmp_path):
    train, test = (tmp_path / f"{part}.npz" for part in ("train", "test"))
    for path, cases in ((train, 24), (test, 10)):
        np.savez(path, X=np.zeros((cases, 2, 5)), y=np.arange(cases) % 2)
    for size in (3, 7, 8):
        settings = SeriesSettings(train=train, test=test, train_size=2 * size, test_size=size)
        _, found = SeriesTask.load(settings)
        assert len(found.train) + len(found.valid) == 2 * size
        assert len(found.test) == size
    settings = TokenSettings(kind="listops", length=20, train_size=9, test_size=5)
    _, drawn = TokenTask.load(settings)
    assert len(drawn.train) + len(drawn.valid) == 9
    assert len(drawn.test) == 5


@pytest.mark.parametrize(
    ("labels", "words"),
    [(["a", "b"], "validation part would be empty"), (["a"], "at least two classes")],
)
def test_a_class_needs_two_cases_to_choose_the_epoch(tmp_path, labels, words):
    x = np.random.default_rng(0).normal(size=(len(labels), 2, 5))
    np.savez(tmp_path / "few.npz", X=x, y=np.array(labels))
    with pytest.raises(UserError, match=words):
        SeriesTask.load(SeriesSettings(train=tmp_path / "few.npz", test=tmp_path / "few.npz"))


def test_one_drawn_expression_cannot_be_trained_on():
    with pytest.raises(UserError, match="validation part would be empty"):
        TokenTask.load(TokenSettings(kind="listops", length=20, train_size=1, test_size=2))


def test_only_time_series_have_names():
    with pytest.raises(ValueError, match="the kind listops has no sets to name"):
        TokenSettings(kind="listops", name="JapaneseVowels")


def test_pairs_of_the_benchmark_are_found_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"new_aan_pairs\.train\.tsv: No such file"):
        TokenTask.load(TokenSettings(kind="retrieval"))
    folder = tmp_path / "text" / "aan"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        rows = [f"{i % 2}.0\t1\t2\tone {i}\tother\n" for i in range(10)]
        (folder / f"new_aan_pairs.{part}.tsv").write_text("".join(rows))
    _, found = TokenTask.load(TokenSettings(kind="retrieval", length=3, test_size=4))
    assert [len(part) for part in (found.train, found.valid, found.test)] == [8, 2, 4]
    assert {len(found.train[0][side]) for side in ("x", "other")} == {3}


def test_a_broken_case_keeps_the_number_it_has_in_its_file(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 2, 5))
    labels = np.array(["a", "b"] * 10)
    np.savez(tmp_path / "good.npz", X=x, y=labels)
    files = SeriesSettings(train=tmp_path / "bad.npz", test=tmp_path / "good.npz", valid=0.5)
    held_out = set(range(20)) - set(SeriesTask.load(replace(files, train=files.test))[1].rows)
    number = max(held_out)
    x[number] = 1e30
    np.savez(tmp_path / "bad.npz", X=x, y=labels)
    with pytest.raises(UserError, match=rf"bad\.npz: Case {number}, counted from 0"):
        SeriesTask.load(files)


def test_series_are_read_from_tables(tmp_path):
    rows = ["case,label,a,b"]
    for case in range(8):
        label = "up" if case % 2 else "down"
        rows += [f"s{case},{label},{t * (1 if case % 2 else -1)},{case}" for t in range(4 + case)]
    (tmp_path / "long.csv").write_text("\n".join(rows) + "\n")
    pandas.read_csv(tmp_path / "long.csv").to_parquet(tmp_path / "long.parquet")
    wide = ["x0,x1,x2,label", *(f"{i},{i + 1},,{'ab'[i % 2]}" for i in range(8))]
    (tmp_path / "wide.csv").write_text("\n".join(wide) + "\n")
    for name in ("long.csv", "long.parquet"):
        path = tmp_path / name
        task, parts = SeriesTask.load(SeriesSettings(train=path, test=path))
        assert task.classes == ("down", "up")
        assert sorted(parts.test.lengths.tolist()) == list(range(4, 12))
        assert parts.test.series.num_channels == 2
    path = tmp_path / "wide.csv"
    task, parts = SeriesTask.load(SeriesSettings(train=path, test=path))
    assert task.classes == ("a", "b")
    # the last step is missing in every channel, so it is padding
    assert parts.test.series.x.shape == (8, 2, 1)


def test_a_missing_column_says_how_to_name_another(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("x0,x1,kind\n1,2,a\n3,4,b\n")
    named = SeriesSettings(train=path, test=path, target="lable")
    with pytest.raises(UserError, match="the columns kind hold no numbers"):
        SeriesTask.load(named)
    path.write_text("words,label\nhello,0\nbye,1\n")
    settings = TokenSettings(kind="text", train=path, test=path)
    with pytest.raises(UserError, match="no column 'text'; its columns are words, label"):
        TokenTask.load(settings)
    rows = "".join(f"hello {i},{i % 2}\n" for i in range(6))
    path.write_text(f"words,label\n{rows}")
    _, parts = TokenTask.load(replace(settings, text="words"))
    assert len(parts.test) == 6


def test_without_a_test_file_a_part_is_held_out_and_said(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2, 5)), np.array(["a", "b"] * 10)
    np.savez(tmp_path / "all.npz", X=x, y=y)
    settings = SeriesSettings(train=tmp_path / "all.npz", test_share=0.3, seed=2)
    task, parts = SeriesTask.load(settings)
    assert [len(part) for part in parts[:3]] == [12, 2, 6]
    assert parts.note.startswith("There is no test file: 30% of all.npz were held out")
    assert np.bincount(parts.test.series.y).tolist() == [3, 3]
    # rows are those of the file, and none of them is scored
    whole = task.prepare(read_series(settings.train)).series
    assert np.array_equal(parts.train.series.x, whole.x[list(parts.rows)])
    scored = {row.tobytes() for row in parts.test.series.x}
    assert not scored & {row.tobytes() for part in parts[:2] for row in part.series.x}
    rows = "".join(f"text {i},{i % 2}\n" for i in range(20))
    (tmp_path / "all.csv").write_text(f"text,label\n{rows}")
    _, parts = TokenTask.load(TokenSettings(kind="text", train=tmp_path / "all.csv"))
    assert [len(part) for part in parts[:3]] == [12, 4, 4]
