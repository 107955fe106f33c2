"""``primal train``: the models of a recipe or for a file; a table, spectra and a report."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from primal_attention.cli.plans import Plan, TrainOptions, make_plan
from primal_attention.cli.recipes import is_run, read_recipe, recipe_paths, recipe_summary
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.settings import build, flatten, to_yaml
from primal_attention.tasks.experiment import Recipe, recipe_type, trained_models
from primal_attention.tasks.task import Parts, Task, find_task

if TYPE_CHECKING:
    from rich.table import Table

    from primal_attention.tasks.results import Result

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Train what a recipe or a file of data says, with the changes on the command line."""
    if argv[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    if argv[:1] == ["--task"] and len(argv) > 2 and not argv[2].startswith("-"):
        argv = [argv[2], *argv[:2], *argv[3:]]  # the file comes first for everything below
    if argv[:1] == ["--task"]:
        argv = [*argv[2:], *argv[:2]]  # the name of the data may come after it
    options = {word.partition("=")[0] for word in argv}
    is_known_set = "--task" in options and bool(options & {"--data.name", "--name"})
    if not argv or (argv[0].startswith("-") and not is_known_set):
        raise UserError(
            f"which recipe? One of {', '.join(recipe_paths())}, a YAML file, or a file or folder "
            "of data."
        )
    _train(make_plan(argv, prog="primal train"))
    return 0


def _help() -> str:
    recipes = recipe_paths()
    width = max(map(len, recipes)) + 2
    rows = "\n".join(f"  {name:<{width}}{recipe_summary(p)}" for name, p in recipes.items())
    return (
        "usage: primal train DATA [--target COLUMN] [--test FILE] [--task TASK] [SETTINGS]\n"
        "       primal train RECIPE [--resume] [--overwrite] [--out FOLDER] [SETTINGS]\n\n"
        "Train on a file or folder of data, whose kind is recognised, or the models of a recipe:\n"
        "a name, a YAML file, or the folder of an earlier run. primal init writes a recipe.\n"
        "Every setting can be changed, as in --training.epochs 5 or --model.dim 32; primal train\n"
        "DATA --help or primal train RECIPE --help shows them all. --target is --data.target.\n\n"
        f"recipes:\n{rows}"
    )


def _train(plan: Plan) -> None:
    import torch

    from primal_attention.tasks.experiment import check_experiment, run_experiment
    from primal_attention.training import NonFiniteLossError, join_processes

    options = plan.options
    recipe, out = options.recipe, options.out
    torch.set_num_threads(recipe.threads)
    processes = join_processes()
    if processes.is_main_process:
        _check_folder(options)
        if options.show_settings:
            print(to_yaml(recipe), flush=True)
    processes.wait_for_everyone()
    task, data = find_task(recipe.task).load(recipe.data)
    check_experiment(task, data, recipe)
    if processes.is_main_process:
        print(_summary(plan, task, data), flush=True)
    processes.wait_for_everyone()
    try:
        with user_errors("training", NonFiniteLossError):
            results = run_experiment(
                task,
                data,
                recipe,
                out=out,
                resume=options.resume,
                overwrite=options.overwrite,
                title=plan.name,
                comment=plan.comment,
                report=functools.partial(print, flush=True),
                verbose=True,
            )
    except KeyboardInterrupt:
        hint = (f"primal train {out} --resume continues it",) if is_run(out) else ()
        raise KeyboardInterrupt(*hint) from None
    if processes.is_main_process:
        _print_results(plan.name, results)
        print(f"Saved report.html, result.csv and the models in {out}")
        model = out / results[0].name
        print(f"Use it: {task.usage.format(model=model)}")


def _summary(plan: Plan, task: Task, data: Parts) -> str:
    """Return the comment of the recipe, and the main settings on a line."""
    recipe: Recipe[Any, Any] = plan.options.recipe
    parts = {"to train": data.train, "to choose the epoch": data.valid, "to score": data.test}
    counts = ", ".join(f"{len(part)} {use}" for use, part in parts.items())  # type: ignore[arg-type]
    training, model = recipe.training, recipe.model
    line = (
        f"{task.summary}; {counts}; {', '.join(recipe.names)} with {model.num_layers} blocks of "
        f"width {model.dim}; {training.epochs} epochs, batches of {training.batch_size}, learning "
        f"rate {training.lr:g} (--show-settings prints all)"
    )
    return "\n".join(filter(None, [*plan.comment[:1], line, data.note]))


def _check_folder(options: TrainOptions[Any, Any]) -> None:
    """Raise unless the folder is free for a new run, or holds the one to continue."""
    out, there = options.out, trained_models(options.out, options.names)
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
    from primal_attention.training.resuming import FREE

    path = options.out / name / "config.yaml"
    if not path.is_file():
        return  # the checkpoint knows the settings too, by fewer names
    with user_errors(str(path), ValueError, TypeError, UserError):
        tree = read_recipe(path)
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

    from primal_attention.tasks.results import baseline_table, result_table, verdict

    console = Console()
    console.print(verdict(results))
    console.print(_table(title, result_table(results)))
    if results[0].baselines:
        console.print(_table("beside baselines", baseline_table(results)))


def _table(title: str, rows: list[list[str]]) -> "Table":
    from rich.table import Table

    shown = Table(title=title)
    for i, head in enumerate(rows[0]):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    return shown
