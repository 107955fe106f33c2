"""Recipes: commented YAML files, found by name or as a path, or made for a file of data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import tyro

from primal_attention.command import UserError, did_you_mean, user_errors
from primal_attention.settings import build, parse, read_yaml, unchecked
from primal_attention.tasks.experiment import DataT, ModelT, Recipe, recipe_type
from primal_attention.tasks.sources import Recognition, Source, existing, look_at
from primal_attention.tasks.task import TASKS, find_task
from primal_attention.training.config import TrainingConfig

__all__ = [
    "Plan",
    "TrainOptions",
    "find_recipe",
    "is_run",
    "make_plan",
    "read_recipe",
    "recipe_comment",
    "recipe_paths",
    "recipe_summary",
]


def recipe_paths() -> dict[str, Path]:
    """Return the files of all recipes that come with the library, by name.

    Example:
        >>> "japanese-vowels" in recipe_paths()
        True
    """
    package = Path(__file__).parents[1]
    # beside src in a checkout, inside the package once installed
    folders = [package / "configs", package.parents[1] / "configs"]
    folder = next((f for f in folders if f.is_dir()), folders[0])
    paths = {path.stem: path for path in folder.glob("*.yaml")}
    return dict(sorted(paths.items()))


def recipe_comment(path: Path) -> list[str]:
    """Return the lines of the comment that a recipe begins with, without their marks."""
    lines = []
    for line in path.read_text("utf-8").split("\n"):
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return lines


def recipe_summary(path: Path) -> str:
    """Return the first line of a recipe's comment."""
    return next(iter(recipe_comment(path)), "")


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the settings of a recipe; its paths are relative to the file."""
    tree = read_yaml(path)
    if not isinstance(tree.get("task"), str):
        raise UserError(f"{path}: the setting task is missing; primal list tasks shows them.")
    data = tree.get("data")
    if isinstance(data, dict):
        for name, hint in get_type_hints(find_task(tree["task"]).Settings).items():
            if hint == Path | None and isinstance(data.get(name), str):
                data[name] = str(path.parent / data[name])
    return tree


def find_recipe(name: str) -> Path | None:
    """Return the file of a recipe, given by its name, as a file, or as the folder of a run.

    ``None`` if the name is that of another file or folder, which may hold data.
    """
    known = recipe_paths()
    if name in known:
        return known[name]
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name == "config.yaml") and (folder / "task.json").is_file():
        raise UserError(
            f"{folder} is the folder of one model; its run is {folder.absolute().parent}."
        )
    if path.is_dir() and is_run(path):
        return path / "config.yaml"
    if path.is_dir() and (path / "config.yaml").is_file():
        raise UserError(
            f"{name} holds no run; a recipe is given as a file: {path / 'config.yaml'}."
        )
    if path.suffix in (".yaml", ".yml"):
        return existing(path)
    if path.exists() or path.suffix or len(path.parts) > 1:
        existing(path)
        return None
    raise UserError(
        f"there is no recipe and no file {name!r}."
        f"{did_you_mean(name, [*known, *(p.name for p in Path.cwd().iterdir())])} Recipes: "
        f"{', '.join(known)}; or give a YAML file, or a file or folder of data."
    )


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: settings, and models with their ``task.json``.

    A ``config.yaml`` alone may belong to another program.
    """
    models = (path.parent for path in folder.glob("*/task.json"))
    return (folder / "config.yaml").is_file() and any((m / "config.yaml").is_file() for m in models)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Recipe[DataT, ModelT]):
    """Train the models of a recipe, or on a file of data; any setting can be changed here."""

    task: tyro.conf.Suppress[str]
    out: Path
    """Folder for models, checkpoints, table and report."""
    resume: bool = False
    """Continue the run in that folder, to the same weights as a run without a break."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run."""
    show_settings: bool = False
    """Print all settings before the training."""

    @property
    def recipe(self) -> Recipe[DataT, ModelT]:
        """The settings without the folder."""
        return Recipe(**{f.name: getattr(self, f.name) for f in fields(Recipe)})


class Plan(NamedTuple):
    """What to train."""

    name: str
    """Name of the run."""
    options: TrainOptions[Any, Any]
    comment: list[str]
    """What the recipe says of itself, or what a file of data was recognised as."""


def make_plan(argv: Sequence[str], *, prog: str) -> Plan:
    """Return what the arguments of ``primal train`` ask for.

    Args:
        argv: A recipe or a file of data, then options. With no name at the front, the starter
            recipe of a task.
        prog: What the user typed before them.
    """
    is_named = bool(argv) and not argv[0].startswith("-")
    first, words = (argv[0], list(argv[1:])) if is_named else ("", list(argv))
    given = _given(words)
    path = find_recipe(first) if is_named else None
    tree: dict[str, Any]
    if path is not None:
        tree, comment, name = read_recipe(path), recipe_comment(path), path.stem
        if given.get("task", tree["task"]) != tree["task"]:
            raise UserError(f"{path} is a recipe of the task {tree['task']}; --task is for data.")
        if {"train", "name"} & given.keys():
            # files replace a known set, and the other way round
            other = ("name",) if "train" in given else ("train", "test")
            tree["data"] = {k: v for k, v in tree.get("data", {}).items() if k not in other}
            comment = [f"The recipe {path.stem} with other data."]
    elif is_named:
        tree, comment = _recognize(Path(first), given)
        name = Path(first).resolve().name.partition(".")[0]
    else:
        name = given.get("task", next(iter(TASKS)))
        tree, comment = (
            {"task": name, **find_task(name).starter},
            [f"A recipe to start from: {name}."],
        )
    # the settings saved beside a run are a recipe too, and belong to its folder
    is_saved = path is not None and path.name == "config.yaml" and is_run(path.parent)
    out = Path("outputs") / name
    if path is not None and is_saved:
        name, out = path.resolve().parent.name, path.parent
    kind = find_task(tree["task"])
    options_type: Any = TrainOptions[kind.Settings, kind.Model]  # type: ignore[name-defined]
    if {"-h", "--help"} & set(words):
        default = unchecked(options_type, {**tree, "out": str(out)})
    else:
        with user_errors(str(path or first), ValueError, TypeError, UserError):
            recipe = build(recipe_type(tree["task"]), tree)
        values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
        default = options_type(**values, out=out)
    with user_errors(""):
        options = parse(
            options_type, _full_names(words, kind), prog=f"{prog} {first}".strip(), default=default
        )
    return Plan(name, options, comment)


def _given(words: Sequence[str]) -> dict[str, str]:
    """Return the options on a command line by name, without ``data.``."""
    found = {}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            found[key.removeprefix("data.").replace("-", "_")] = value or after
    return found


def _full_names(words: Sequence[str], kind: Any) -> list[str]:
    """Return options with ``data.`` before those that only the data have; without ``--task``."""
    other = {f.name for part in (TrainOptions, TrainingConfig, kind.Model) for f in fields(part)}
    short = {f.name for f in fields(kind.Settings)} - other
    full: list[str] = []
    skip = False
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if skip or (word.startswith("--") and key == "task"):
            skip = not skip and not equals
        elif word.startswith("--") and key.replace("-", "_") in short:
            full.append(f"--data.{key}{equals}{value}")
        else:
            full.append(word)
    return full


def _recognize(path: Path, given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe for a file or folder of data, and what it was recognised as.

    Raises:
        UserError: If no task reads it, or several do and ``--task`` does not choose.
    """
    source = look_at(path)
    names = [given["task"]] if "task" in given else list(TASKS)
    found: dict[str, Recognition] = {}
    reasons = []
    for name in names:
        try:
            answer = find_task(name).recognize(source, given)
        except UserError as error:
            if len(names) == 1 and name in TASKS:
                raise UserError(f"{path}: {error}") from error
            reasons.append(f"{name}: {error}")
        else:
            if answer is None and "task" in given:
                answer = Recognition(f"data of the task {name}")  # the user knows better
            if answer is not None:
                found[name] = answer
    if not found:
        raise UserError(f"{path}: {' '.join(reasons) or _nobody(source)}")
    if len(found) > 1:
        readings = " and ".join(f"{name} ({answer.words})" for name, answer in found.items())
        choices = " or ".join(f"--task {name}" for name in found)
        raise UserError(f"{path} can be read by {readings}; choose with {choices}.")
    name, answer = next(iter(found.items()))
    settings = {key: dict(part) for key, part in answer.settings.items()}
    settings["data"] = {"train": str(path), **settings.get("data", {})}
    return {"task": name, **settings}, [f"{path.name}: {answer.words} (task {name})."]


def _nobody(source: Source) -> str:
    """Return why no task knows a source."""
    known = sorted({end for entry in TASKS.values() for end in entry.kind.endings})
    words = f"Files end in {', '.join(known)}; a folder holds one folder of files for each class."
    if source.is_folder:
        kinds = ", ".join(f"{n} {end or 'without ending'}" for end, n in source.endings.items())
        return f"no task recognises this folder, which holds the files {kinds or 'none'}. {words}"
    held = ", ".join(source.columns or source.arrays)
    what = f"what is in it ({held})" if held else f"the ending {source.suffix or 'of its name'!r}"
    return f"no task recognises {what}. {words} --task names the kind of data."
