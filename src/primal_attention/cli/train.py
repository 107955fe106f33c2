"""``primal train``: the models of a recipe, a table, spectra and a report."""

import functools
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from primal_attention.cli.recipes import (
    find_recipe,
    is_run,
    recipe_comment,
    recipe_paths,
    recipe_summary,
)
from primal_attention.command import UserError, user_errors
from primal_attention.settings import build, flatten, parse, read_yaml, to_yaml, unchecked
from primal_attention.tasks.experiment import DataT, ModelT, Recipe, recipe_type
from primal_attention.tasks.task import find_task

if TYPE_CHECKING:
    from primal_attention.tasks.results import Result

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Recipe[DataT, ModelT]):
    """Train the models of a recipe; any setting can be changed here."""

    task: tyro.conf.Suppress[str]
    out: Path
    """Folder for models, checkpoints, table and report."""
    resume: bool = False
    """Continue the run in that folder, to the same weights as a run without a break."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run."""

    @property
    def recipe(self) -> Recipe[DataT, ModelT]:
        """The settings without the folder."""
        return Recipe(**{f.name: getattr(self, f.name) for f in fields(Recipe)})


def main(argv: list[str]) -> int:
    """Train what a recipe says, with the changes on the command line."""
    if argv[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    if not argv or argv[0].startswith("-"):
        raise UserError(f"which recipe? One of {', '.join(recipe_paths())}, or a YAML file.")
    path = find_recipe(argv[0])
    tree = _read(path)
    # the settings saved beside a run are a recipe too, and belong to its folder
    in_run = path.name == "config.yaml" and is_run(path.parent)
    name = path.resolve().parent.name if in_run else path.stem
    out = path.parent if in_run else Path("outputs") / name
    kind = find_task(tree["task"])
    options_type: Any = TrainOptions[kind.Settings, kind.Model]  # type: ignore[name-defined]
    if any(word.split("=")[0] == "--data.train" for word in argv):
        tree["data"] = {k: v for k, v in tree.get("data", {}).items() if k != "name"}
    if {"-h", "--help"} & set(argv[1:]):
        default = unchecked(options_type, {**tree, "out": str(out)})
    else:
        with user_errors(str(path), ValueError, TypeError, UserError):
            recipe = build(recipe_type(tree["task"]), tree)
        values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
        default = options_type(**values, out=out)
    with user_errors(""):
        options = parse(options_type, argv[1:], prog=f"primal train {argv[0]}", default=default)
    _train(name, options, recipe_comment(path))
    return 0


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path)
    if not isinstance(tree.get("task"), str):
        raise UserError(f"{path}: the setting task is missing; primal list tasks shows them.")
    return tree


def _help() -> str:
    recipes = recipe_paths()
    width = max(map(len, recipes)) + 2
    rows = "\n".join(f"  {name:<{width}}{recipe_summary(p)}" for name, p in recipes.items())
    return (
        "usage: primal train RECIPE [--resume] [--overwrite] [--out FOLDER] [SETTINGS]\n\n"
        "Train the models of a recipe: a name, a YAML file, or the folder of an earlier run.\n"
        "Every setting can be changed, as in --training.epochs 5 or --model.dim 32;\n"
        "primal train RECIPE --help shows them all.\n\n"
        f"recipes:\n{rows}"
    )


def _train(name: str, options: TrainOptions[Any, Any], comment: list[str]) -> None:
    import torch

    from primal_attention.tasks.experiment import check_experiment, run_experiment
    from primal_attention.training import CheckpointError, NonFiniteLossError, join_processes

    recipe, out = options.recipe, options.out
    torch.set_num_threads(recipe.threads)
    processes = join_processes()
    if processes.is_main_process:
        _check_folder(options)
        print(to_yaml(recipe), flush=True)
    processes.wait_for_everyone()
    task, data = find_task(recipe.task).load(recipe.data)
    check_experiment(task, data, recipe)  # before anything is removed
    if processes.is_main_process and options.overwrite:
        for attention in _trained(options):
            shutil.rmtree(out / attention)
    processes.wait_for_everyone()
    with user_errors("training", CheckpointError, NonFiniteLossError):
        results = run_experiment(
            task,
            data,
            recipe,
            out=out,
            resume=options.resume,
            title=name,
            comment=comment,
            report=functools.partial(print, flush=True),
        )
    if processes.is_main_process:
        _print_results(name, results)
        print(f"Saved report.html, result.csv and the models in {out}")


def _trained(options: TrainOptions[Any, Any]) -> list[str]:
    """Return the models of a recipe whose training has begun."""
    return [name for name in options.names if (options.out / name / "checkpoints").is_dir()]


def _check_folder(options: TrainOptions[Any, Any]) -> None:
    """Raise unless the folder is free for a new run, or holds the one to continue."""
    out, there = options.out, _trained(options)
    if options.resume and options.overwrite:
        raise UserError("--resume and --overwrite exclude each other.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out names a folder.")
    if (out / "config.yaml").exists() and not is_run(out):
        raise UserError(
            f"{out / 'config.yaml'} does not belong to a run, and would be replaced; choose "
            "another --out."
        )
    if there and not options.resume and not options.overwrite:
        raise UserError(
            f"{out} already holds a run ({', '.join(there)}); add --resume to continue it, "
            "--overwrite to start anew, or --out for another folder."
        )
    if options.resume and not there and (out / "config.yaml").exists():
        print(f"Nothing to continue in {out}; starting.")
    for name in there if options.resume else ():
        _check_same(options, name)


def _check_same(options: TrainOptions[Any, Any], name: str) -> None:
    """Raise if a model was trained with other settings, except those that change no result."""
    from primal_attention.training.loop import FREE

    path = options.out / name / "config.yaml"
    if not path.is_file():
        return  # the checkpoint knows the settings too, by fewer names
    with user_errors(str(path), ValueError, TypeError, UserError):
        tree = _read(path)
        saved = build(recipe_type(tree["task"]), tree)
    was, now = (
        flatten(replace(recipe, model=recipe.options(name))) for recipe in (saved, options.recipe)
    )
    changed = [
        f"{key} was {was.get(key)!r} and is {value!r}"
        for key, value in now.items()
        if was.get(key) != value and key.split(".")[1] not in FREE
    ]
    if changed:
        raise UserError(
            f"{options.out / name} belongs to another run: {'; '.join(changed)}. Resume with what "
            "it was started with, or choose another folder."
        )


def _print_results(title: str, results: "list[Result]") -> None:
    from rich.console import Console
    from rich.table import Table

    from primal_attention.tasks.results import result_table, verdict

    rows = result_table(results)
    shown = Table(title=title)
    for i, head in enumerate(rows[0]):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    console = Console()
    console.print(verdict(results))
    console.print(shown)
