"""Messages about a file of data begin with its name, wherever the mistake is found."""

import numpy as np
import pytest

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.settings import build
from primal_attention.tasks.experiment import check_experiment, recipe_type
from primal_attention.tasks.longrange.settings import TokenSettings
from primal_attention.tasks.longrange.task import TokenTask
from primal_attention.tasks.series.settings import SeriesSettings
from primal_attention.tasks.series.task import SeriesTask


@pytest.mark.parametrize(
    ("labels", "words"),
    [("aaaa", "all have the class 'a'"), ("abcd", "the validation part would be empty")],
)
def test_labels_that_cannot_be_learned(labels, words, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"x y,{label}\n" for label in labels))
    with pytest.raises(UserError, match=f"^{path}: {words}"):
        TokenTask.load(TokenSettings(train=path, kind="text"))
    path.write_text("t0,t1,label\n" + "".join(f"1,2,{label}\n" for label in labels))
    with pytest.raises(UserError, match=f"^{path}: {words}"):
        SeriesTask.load(SeriesSettings(train=path))


def test_series_without_labels(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, X=np.zeros((4, 1, 5)))
    with pytest.raises(UserError, match=f"^{path}: the files to train on and to score need labels"):
        SeriesTask.load(SeriesSettings(train=path))


def test_a_model_that_no_memory_holds(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "x y,a\nx z,b\n" * 6)
    task, data = TokenTask.load(TokenSettings(train=path, kind="text"))
    recipe = {"task": "longrange", "data": {"train": str(path), "kind": "text"}}
    model = {"dim": 2**40, "num_heads": 1}
    large = build(recipe_type("longrange"), {**recipe, "model": model})
    with pytest.raises(UserError, match="model primal: its weights do not fit into memory; choose"):
        check_experiment(task, data, large)
    with pytest.raises(UserError, match=r"num_layers must be at most 10,000, got 1,000,000,000"):
        build(recipe_type("longrange"), {**recipe, "model": {"num_layers": 10**9}})


def test_a_name_is_said_once():
    inner, outer = (user_errors("a.csv", UserError) for _ in range(2))
    with pytest.raises(UserError, match=r"^a\.csv: b\.$"), outer, inner:
        raise UserError("b.")
    with pytest.raises(UserError, match=r"^b\.$"), user_errors("", UserError):
        raise UserError("b.")
