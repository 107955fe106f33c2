"""``primal train``: the models of a recipe, a table, spectra and a report."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.recipes import (
    as_written,
    build,
    find_recipe,
    flat,
    is_run,
    read_recipe,
    recipe_comment,
    recipe_paths,
    recipe_summary,
    to_yaml,
)
from primal_attention.command import UserError, user_errors
from primal_attention.settings import parse

if TYPE_CHECKING:
    from primal_attention.cli.settings import TrainOptions

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Train what a recipe says, with the changes on the command line."""
    if argv[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    if not argv or argv[0].startswith("-"):
        raise UserError(f"which recipe? One of {', '.join(recipe_paths())}, or a YAML file.")
    path = find_recipe(argv[0])
    tree = read_recipe(path)

    from primal_attention.cli.settings import Recipe, TrainOptions

    # the settings saved beside a run are a recipe too, and belong to its folder
    in_run = path.name == "config.yaml" and is_run(path.parent)
    name = path.resolve().parent.name if in_run else path.stem
    out = path.parent if in_run else Path("outputs") / name
    if {"-h", "--help"} & set(argv[1:]):
        default = as_written(TrainOptions, {**tree, "out": out})
    else:
        with user_errors(str(path), ValueError, TypeError, UserError):
            recipe = build(Recipe, tree)
        default = TrainOptions(**{f.name: getattr(recipe, f.name) for f in fields(Recipe)}, out=out)
    with user_errors(""):
        options = parse(TrainOptions, argv[1:], prog=f"primal train {argv[0]}", default=default)
    _train(name, options, recipe_comment(path))
    return 0


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


def _train(name: str, options: "TrainOptions", comment: list[str]) -> None:
    import torch

    from primal_attention.cli.experiment import Run, table, train_model, write_report
    from primal_attention.cli.problems import load_problem
    from primal_attention.training import CheckpointError, NonFiniteLossError, join_processes

    recipe, out = options.recipe, options.out
    torch.set_num_threads(recipe.threads)
    processes = join_processes()
    if processes.is_main_process:
        _check_room(options)
        print(to_yaml(recipe), flush=True)
    processes.wait_for_everyone()
    run = Run(
        name,
        recipe,
        load_problem(recipe.data),
        out,
        resume=options.resume,
        writes=processes.is_main_process,
        comment=comment,
    )
    run.check()
    if run.writes and options.overwrite:
        for attention in _trained(options):
            shutil.rmtree(out / attention)
    processes.wait_for_everyone()
    results = []
    for attention in recipe.names:
        if run.writes:
            print(f"Training {attention} …", flush=True)
        with user_errors(f"training {attention}", CheckpointError, NonFiniteLossError):
            results.append(train_model(run, attention))
    if not run.writes:
        return
    write_report(run, results)
    rows = table(results)
    _print_table(name, rows)
    print(f"Saved report.html, result.csv and the models in {out}")


def _trained(options: "TrainOptions") -> list[str]:
    """Return the models of a recipe whose training has begun."""
    return [name for name in options.names if (options.out / name / "checkpoints").is_dir()]


def _check_room(options: "TrainOptions") -> None:
    """See that the folder is free for a new run, or holds the one to continue."""
    out, there = options.out, _trained(options)
    if options.resume and options.overwrite:
        raise UserError("--resume and --overwrite exclude each other.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out names a folder.")
    if (out / "config.yaml").exists() and not is_run(out):
        raise UserError(
            f"{out / 'config.yaml'} is not of a run, and would be replaced; choose another --out."
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


def _check_same(options: "TrainOptions", name: str) -> None:
    """Raise if a model was trained with other settings, except those that change no result."""
    from primal_attention.cli.settings import Recipe
    from primal_attention.training.loop import FREE

    path = options.out / name / "config.yaml"
    if not path.is_file():
        return  # the checkpoint knows the settings too, by fewer names
    with user_errors(str(path), ValueError, TypeError, UserError):
        saved = build(Recipe, read_recipe(path))
    was, now = (
        flat(replace(recipe, model=recipe.model.named(name))) for recipe in (saved, options.recipe)
    )
    changed = [
        f"{key} was {was[key]!r} and is {value!r}"
        for key, value in now.items()
        if was[key] != value and key.split(".")[1] not in FREE
    ]
    if changed:
        raise UserError(
            f"{options.out / name} belongs to another run: {'; '.join(changed)}. Resume with what "
            "it was started with, or choose another folder."
        )


def _print_table(title: str, rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for i, head in enumerate(rows[0]):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    Console().print(shown)
