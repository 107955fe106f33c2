"""Recipes: commented YAML files, found by name, as a path, or as the folder of a run."""

from pathlib import Path
from typing import Any, get_type_hints

from primal_attention.support.command import UserError, did_you_mean
from primal_attention.support.files import read_lines, read_yaml
from primal_attention.tasks.sources import existing
from primal_attention.tasks.task import find_task

__all__ = [
    "find_recipe",
    "is_run",
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
    for line in read_lines(path):
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
