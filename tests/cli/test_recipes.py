"""A recipe is what runs: strict keys, checked values, and a file that reads back."""

from pathlib import Path

import pytest
import yaml

from primal_attention.cli.recipes import find_recipe, recipe_paths, recipe_summary
from primal_attention.models import EncoderOptions
from primal_attention.support.command import UserError
from primal_attention.support.files import read_yaml
from primal_attention.support.settings import build, to_yaml
from primal_attention.tasks.experiment import recipe_type
from primal_attention.tasks.longrange import LRA, TokenTask, model_config, training_config
from primal_attention.tasks.task import DataSettings
from primal_attention.training import TrainingConfig


def read(path):
    tree = read_yaml(path)
    return build(recipe_type(tree["task"]), tree)


@pytest.mark.parametrize("name", recipe_paths())
def test_recipes_of_the_library_are_valid_commented_and_read_back(name):
    path = recipe_paths()[name]
    recipe = read(path)
    assert build(recipe_type(recipe.task), yaml.safe_load(to_yaml(recipe))) == recipe
    assert path.read_text("utf-8").startswith("# ")
    assert 10 < len(recipe_summary(path)) < 110


@pytest.mark.parametrize("task", LRA)
def test_recipes_of_the_long_range_arena_are_the_published_settings(task):
    recipe = read(recipe_paths()[f"lra-{task}"])
    found = TokenTask(task, tuple("0123456789")[: LRA[task].num_classes])
    assert found.build(recipe.model).config == model_config(task, "primal")
    assert recipe.training == training_config(task, "primal")
    assert recipe.data.kind == task


def test_another_attention_takes_its_default_options():
    tree = {"task": "longrange", "model": {"dim": 32, "attention_options": {"rank": 4}}}
    recipe = build(recipe_type("longrange"), tree)
    twin = recipe.options("softmax")
    assert (twin.attention, twin.attention_options, twin.dim) == ("softmax", {}, 32)
    assert recipe.options("primal") is recipe.model


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"data": {"train": "x.ts", "test": "y.ts", "name": "a"}}, "name or the files"),
        ({"data": {}, "trainning": {}}, "no setting trainning. Did you mean 'training'"),
        ({"data": {"knid": "text"}}, "no setting data.knid. Did you mean 'kind'"),
        ({"data": {}, "model": {"num_classes": 3}}, "no setting model.num_classes"),
        ({"data": {}, "training": {"epochs": "many"}}, "training.epochs must be a whole number"),
        ({"data": {}, "training": {"epochs": True}}, "training.epochs must be a whole number"),
        ({"data": {}, "training": {"lr": "fast"}}, "training.lr must be a number, got 'fast'"),
        ({"data": {}, "training": {"epochs": 0}}, "training: epochs must be at least 1"),
        ({"data": {}, "training": {"clip": "x"}}, "training.clip must be a number or null"),
        ({"data": {"kind": "music"}}, "data.kind must be one of text, listops"),
        ({"data": 3}, "data must hold `key: value` settings, got 3"),
        ({"data": {}, "model": {"attention": "primel"}}, "Did you mean 'primal'"),
        ({"data": {}, "compare": ["sofmax"]}, "Did you mean 'softmax'"),
        ({"data": {}, "compare": "softmax"}, "compare must be a list of a word"),
        (
            {"data": {}, "model": {"attention_options": {"rnk": 3}}},
            "model: the attention primal has no option 'rnk'. Did you mean",
        ),
        (
            {"data": {}, "model": {"attention_options": {"rank": "x"}}},
            "model: the option rank of the attention primal must be a whole number or null",
        ),
        (
            {"data": {}, "model": {"primal_layers": "last:1", "other_options": {"rank": 3}}},
            "model: the attention softmax has no option 'rank'",
        ),
        ({"data": {"test": "x.ts"}}, "test needs train: a file to learn from"),
        ({"data": {"valid": 1.5}}, "valid must be a share between 0 and 1"),
    ],
)
def test_wrong_settings_name_themselves(tree, message):
    with pytest.raises(UserError) as caught:
        build(recipe_type("longrange"), {"task": "longrange", **tree})
    assert message in str(caught.value)


def test_values_arrive_as_the_dataclass_wants_them():
    tree = {"epochs": 3, "lr": 1, "clip": None, "optimizer": "radam"}
    assert build(TrainingConfig, tree) == TrainingConfig(
        epochs=3, lr=1.0, clip=None, optimizer="radam"
    )
    data = build(DataSettings, {"train": "a.ts", "test": "b.ts"})
    assert data.train == Path("a.ts")
    model = build(EncoderOptions, {"primal_layers": [0, 1], "num_layers": 3})
    assert model.primal_layers == (0, 1)


@pytest.mark.parametrize("text", ["1e-3", "-1E+2", "2.e3", ".5e1", "1.0e-05"])
def test_numbers_with_an_exponent_are_numbers(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {{options: {{eps: {text}}}}}\nword: '{text}'\nname: x{text}\n")
    expected = {"model": {"options": {"eps": float(text)}}, "word": text, "name": f"x{text}"}
    assert read_yaml(path) == expected
    for name in (text, f"{text}a0"):  # a hash may begin like a number
        path.write_text(to_yaml(DataSettings(name=name)))
        assert build(DataSettings, read_yaml(path)).name == name
    path.write_text(f"hash: {text}a0\n")
    assert read_yaml(path) == {"hash": f"{text}a0"}


def test_paths_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = to_yaml(DataSettings(train=Path("a.ts"), test=Path("/b.ts")))
    found = build(DataSettings, yaml.safe_load(text))
    assert (found.train, found.test) == (tmp_path / "a.ts", Path("/b.ts"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "key 'a' is given twice, last in line"),
        ("a: [1\n", "is not readable as YAML"),
        ("- 1\n", "must hold settings"),
        ("", "must hold settings"),
        ("\x00", "is not readable as YAML"),
        ("a: &x [1]\nb: *x\n", "line 2 uses an alias"),
        ("a: " + "[" * 5000, "nested deeper"),
        ("a: " + "x" * 250_001, "has more than 250,000 bytes"),
    ],
)
def test_broken_files_are_told(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_yaml(path)


def test_recipes_are_found_by_name_by_file_and_by_run(tmp_path):
    assert find_recipe("japanese-vowels").name == "japanese-vowels.yaml"
    file = tmp_path / "config.yaml"
    file.write_text("data: {}\n")
    assert find_recipe(str(file)) == file
    with pytest.raises(UserError, match="holds no run"):
        find_recipe(str(tmp_path))
    (tmp_path / "primal").mkdir()
    for name in ("config.yaml", "task.json"):
        (tmp_path / "primal" / name).write_text("")
    assert find_recipe(str(tmp_path)) == file
    with pytest.raises(UserError, match=f"one model; its run is {tmp_path}"):
        find_recipe(str(tmp_path / "primal"))
    for name, message in (
        ("japanese-vowel", "Did you mean 'japanese-vowels'"),
        (str(tmp_path / "none.yaml"), "there is no file"),
    ):
        with pytest.raises(UserError, match=message):
            find_recipe(name)
