"""Data of a recipe: parts of the sizes asked for, and mistakes told in words."""

from dataclasses import replace

import numpy as np
import pytest

from primal_attention.cli.problems import load_problem
from primal_attention.cli.settings import DataSettings
from primal_attention.command import UserError


def test_parts_have_the_sizes_asked_for(series_recipe):
    train, test = (series_recipe.parent / f"{part}.ts" for part in ("train", "test"))
    for size in (3, 7, 8):
        found = load_problem(
            DataSettings(train=train, test=test, train_size=2 * size, test_size=size)
        )
        assert len(found.train) + len(found.valid) == 2 * size
        assert len(found.test) == size
    drawn = load_problem(DataSettings(task="listops", length=20, train_size=9, test_size=5))
    assert len(drawn.train) + len(drawn.valid) == 9
    assert len(drawn.test) == 5


@pytest.mark.parametrize("labels", [["a", "b"], ["a"]])
def test_a_class_needs_two_cases_to_choose_the_epoch(tmp_path, labels):
    x = np.random.default_rng(0).normal(size=(len(labels), 5, 2))
    np.savez(tmp_path / "few.npz", X=x, y=np.array(labels))
    with pytest.raises(UserError, match="validation part would be empty"):
        load_problem(DataSettings(train=tmp_path / "few.npz", test=tmp_path / "few.npz"))


def test_one_drawn_expression_cannot_be_trained_on():
    with pytest.raises(UserError, match="validation part would be empty"):
        load_problem(DataSettings(task="listops", length=20, train_size=1, test_size=2))


def test_only_time_series_have_names():
    with pytest.raises(ValueError, match="the task listops has no sets to name"):
        DataSettings(task="listops", name="JapaneseVowels")


def test_pairs_of_the_benchmark_are_found_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"new_aan_pairs\.train\.tsv: No such file"):
        load_problem(DataSettings(task="retrieval"))
    folder = tmp_path / "text" / "aan"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        rows = [f"{i % 2}.0\t1\t2\tone {i}\tother\n" for i in range(10)]
        (folder / f"new_aan_pairs.{part}.tsv").write_text("".join(rows))
    found = load_problem(DataSettings(task="retrieval", length=3, test_size=4))
    assert [len(part) for part in (found.train, found.valid, found.test)] == [8, 2, 4]
    assert {len(found.train[0][side]) for side in ("x", "other")} == {3}


def test_a_broken_case_keeps_the_number_it_has_in_its_file(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 5, 2))
    labels = np.array(["a", "b"] * 10)
    np.savez(tmp_path / "good.npz", X=x, y=labels)
    files = DataSettings(train=tmp_path / "bad.npz", test=tmp_path / "good.npz", valid=0.5)
    held_out = set(range(20)) - set(load_problem(replace(files, train=files.test)).rows)
    number = max(held_out)
    x[number] = 1e30
    np.savez(tmp_path / "bad.npz", X=x, y=labels)
    with pytest.raises(UserError, match=rf"bad\.npz: Case {number}, counted from 0"):
        load_problem(files)
