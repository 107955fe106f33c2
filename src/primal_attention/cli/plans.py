"""What to train: a recipe, or a file of data whose kind is recognised, with changed settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from primal_attention.cli.recipes import find_recipe, is_run, read_recipe, recipe_comment
from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.files.tables import list_some
from primal_attention.support.settings import build, parse, unchecked
from primal_attention.tasks.experiment import DataT, ModelT, Recipe, recipe_type
from primal_attention.tasks.sources import Recognition, Source, look_at
from primal_attention.tasks.task import TASKS, Task, find_task
from primal_attention.training.config import TrainingConfig

__all__ = ["Plan", "TrainOptions", "make_plan"]


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
    if path is not None:
        found = _from_recipe(path, given)
    else:
        found = _recognize(Path(first), given) if is_named else _starter(given)
    kind = find_task(found.tree["task"])
    options_type: Any = TrainOptions[kind.Settings, kind.Model]  # type: ignore[name-defined]
    if {"-h", "--help"} & set(words):
        default = unchecked(options_type, {**found.tree, "out": str(found.out)})
    else:
        with user_errors(str(path or first), ValueError, TypeError, UserError):
            recipe = build(recipe_type(found.tree["task"]), found.tree)
        values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
        default = options_type(**values, out=found.out)
    with user_errors(""):
        options = parse(
            options_type, _full_names(words, kind), prog=f"{prog} {first}".strip(), default=default
        )
    return Plan(found.out.resolve().name, options, found.comment)


class _Found(NamedTuple):
    """Settings as YAML has them, what they say of themselves, and the folder of the run."""

    tree: dict[str, Any]
    comment: list[str]
    out: Path


def _from_recipe(path: Path, given: Mapping[str, str]) -> _Found:
    """Return a recipe; files on the command line replace its known set, and the other way round."""
    tree, comment = read_recipe(path), recipe_comment(path)
    if given.get("task", tree["task"]) != tree["task"]:
        raise UserError(f"{path} is a recipe of the task {tree['task']}; --task is for data.")
    if {"train", "name"} & given.keys():
        other = ("name",) if "train" in given else ("train", "test")
        tree["data"] = {k: v for k, v in tree.get("data", {}).items() if k not in other}
        comment = [f"The recipe {path.stem} with other data."]
    # the settings saved beside a run are a recipe too, and belong to its folder
    is_saved = path.name == "config.yaml" and is_run(path.parent)
    return _Found(tree, comment, path.parent if is_saved else Path("outputs") / path.stem)


def _starter(given: Mapping[str, str]) -> _Found:
    """Return the starter recipe of a task, by default of the first one."""
    name = given.get("task", next(iter(TASKS)))
    tree = {"task": name, **find_task(name).starter}
    return _Found(tree, [f"An example of the task {name}."], Path("outputs") / name)


def _given(words: Sequence[str]) -> dict[str, str]:
    """Return the options on a command line by name, without ``data.``."""
    found = {}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            found[key.removeprefix("data.").replace("-", "_")] = value or after
    return found


def _full_names(words: Sequence[str], kind: type[Task]) -> list[str]:
    """Return options with ``data.`` before those that only the data have; without ``--task``.

    Raises:
        UserError: If there is no option of a name without a dot.
    """
    own = {f.name for f in fields(TrainOptions)}
    other = {f.name for part in (TrainingConfig, kind.Model) for f in fields(part)}
    short = {f.name for f in fields(kind.Settings)} - own - other
    known = [f"--{name.replace('_', '-')}" for name in (*own, *short, "help")]
    full: list[str] = []
    skip = False
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        option = f"--{key.removeprefix('no-').replace('_', '-')}"
        if word.startswith("--") and "." not in key and option not in known:
            raise UserError(f"there is no option --{key}.{did_you_mean(option, known)}")
        if skip or (word.startswith("--") and key == "task"):
            skip = not skip and not equals
        elif word.startswith("--") and key.replace("-", "_") in short:
            full.append(f"--data.{key}{equals}{value}")
        else:
            full.append(word)
    return full


def _recognize(path: Path, given: Mapping[str, str]) -> _Found:
    """Return a recipe for a file or folder of data.

    Raises:
        UserError: If no task reads it, or several do and ``--task`` does not choose.
    """
    source = look_at(path)
    kinds = {name: find_task(name) for name in ([given["task"]] if "task" in given else TASKS)}
    found: dict[str, Recognition] = {}
    reasons: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        try:
            answer = kind.recognize(source, given)
        except UserError as error:
            reasons.setdefault(str(error), []).append(name)
            continue
        if answer is None and "task" in given:
            answer = Recognition(f"data of the task {name}")  # the user knows better
        if answer is not None:
            found[name] = answer
    found = {n: answer for n, answer in found.items() if not answer.is_general} or found
    if not found:
        told = " ".join(f"{' and '.join(names)}: {words}" for words, names in reasons.items())
        raise UserError(f"{path}: {told or _nobody(source)}")
    if len(found) > 1:
        readings = " and ".join(f"{name} ({answer.words})" for name, answer in found.items())
        choices = " or ".join(f"--task {name}" for name in found)
        raise UserError(f"{path} can be read by {readings}; choose with {choices}.")
    name, answer = next(iter(found.items()))
    settings = {key: dict(part) for key, part in answer.settings.items()}
    settings["data"] = {"train": str(path), **settings.get("data", {})}
    out = Path("outputs") / path.resolve().name.partition(".")[0]
    comment = f"{path.name or path.resolve().name}: {answer.words} (task {name})."
    return _Found({"task": name, **settings}, [comment], out)


def _nobody(source: Source) -> str:
    """Return why no task knows a source."""
    known = sorted({end for entry in TASKS.values() for end in entry.kind.endings})
    words = f"Files end in {', '.join(known)}; a folder holds one folder of files for each class."
    if source.is_folder:
        kinds = ", ".join(f"{n} {end or 'without ending'}" for end, n in source.endings.items())
        return f"no task recognises this folder, which holds the files {kinds or 'none'}. {words}"
    held = list_some(list(source.columns or source.arrays))
    what = f"what is in it ({held})" if held else f"the ending {source.suffix or 'of its name'!r}"
    return f"no task recognises {what}. {words} --task names the kind of data."
