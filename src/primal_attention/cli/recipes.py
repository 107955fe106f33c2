"""Recipes: commented YAML files that become frozen dataclasses, key by key.

A recipe is found by its name, or given as a file. A key that no dataclass has is an error, and so
is a value of another type: what a recipe says is what runs.
"""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from primal_attention.command import UserError, did_you_mean, told_as_mistake

__all__ = [
    "as_written",
    "build",
    "check_value",
    "find_recipe",
    "flat",
    "is_run",
    "read_recipe",
    "recipe_comment",
    "recipe_paths",
    "recipe_summary",
    "to_yaml",
]

T = TypeVar("T")

FROM_DATA = {"from_data": True}
"""Metadata of a field that no recipe sets, because the data decide it."""


def recipe_paths() -> dict[str, Path]:
    """Return the files of all recipes that come with the library, by name.

    Example:
        >>> "japanese-vowels" in recipe_paths()
        True
    """
    package = Path(__file__).parents[1]
    # in a checkout the folder stands beside src, in an installed package inside it
    folders = [package / "configs", package.parents[1] / "configs"]
    folder = next((f for f in folders if f.is_dir()), folders[0])
    paths = {path.stem: path for path in folder.glob("*.yaml")}
    return dict(sorted(paths.items()))


def recipe_comment(path: Path) -> list[str]:
    """Return the lines of the comment that a recipe begins with, without their marks."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return lines


def recipe_summary(path: Path) -> str:
    """Return the first line of a recipe's comment."""
    return next(iter(recipe_comment(path)), "")


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by its name or as a path."""
    known = recipe_paths()
    if name in known:
        return known[name]
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name == "config.yaml") and (folder / "reader.json").is_file():
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
        if path.is_file():
            return path
        raise UserError(f"there is no file {name}.")
    raise UserError(
        f"there is no recipe {name!r}.{did_you_mean(name, known)} Recipes: {', '.join(known)}; "
        "or give a YAML file."
    )


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: settings, and models that know how to read their data.

    A ``config.yaml`` alone may be anybody's.
    """
    models = (path.parent for path in folder.glob("*/reader.json"))
    return (folder / "config.yaml").is_file() and any((m / "config.yaml").is_file() for m in models)


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file; the same key twice is an error."""
    try:
        tree = yaml.load(path.read_text("utf-8"), _Strict)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"{path} is not readable as YAML: {words}.") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold settings as `key: value`, got {type(tree).__name__}.")
    return tree


class _Strict(yaml.SafeLoader):
    """Refuses a key that is given twice; reads ``1e-3`` as a number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping node as a dictionary."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for (key_node, _), key in zip(node.value, keys, strict=True):
            if keys.count(key) > 1:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key!r} is given twice, last in line {line}")
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Strict` reads."""


for _kind in (_Strict, _Dumper):
    # YAML 1.1 wants a point and a sign
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
        list("-+.0123456789"),
    )


def build(kind: type[T], tree: Any, where: str = "") -> T:
    """Return a dataclass from nested dictionaries, strictly.

    Args:
        kind: The dataclass, whose fields may be dataclasses.
        tree: Its settings by name.
        where: The path to them, for messages.

    Example:
        >>> from primal_attention.training.config import TrainingConfig
        >>> build(TrainingConfig, {"epochs": 3}).epochs
        3
    """
    _check_tree(tree, where)
    known = {f.name: f for f in _settable(kind)}
    prefix = f"{where}." if where else ""
    for key in tree:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(
                f"there is no setting {prefix}{key}.{hint} Known: {', '.join(sorted(known))}."
            )
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in tree:
            raise UserError(f"the setting {prefix}{name} is missing.")
    hints = get_type_hints(kind)
    values = {key: check_value(value, hints[key], prefix + key) for key, value in tree.items()}
    with told_as_mistake(where):
        return kind(**values)


def as_written(kind: type[T], tree: Any, where: str = "") -> T:
    """Return a dataclass with what a recipe says, checked by nobody: to be shown, not to be run.

    Checks know the attentions, and so need torch; whoever asks for help should not wait for it.
    """
    _check_tree(tree, where)
    found, hints = object.__new__(kind), get_type_hints(kind)
    for field in fields(typing.cast(Any, kind)):
        name, hint = field.name, hints[field.name]
        if is_dataclass(hint):
            value = as_written(typing.cast(Any, hint), tree.get(name, {}), name)
        elif name in tree:
            value = check_value(tree[name], hint, name)
        else:
            value = field.default if field.default_factory is MISSING else field.default_factory()
        object.__setattr__(found, name, value)
    return found


def _check_tree(tree: Any, where: str) -> None:
    if not isinstance(tree, Mapping):
        raise UserError(f"{where or 'a recipe'} must hold `key: value` settings, got {tree!r}.")


def _settable(kind: Any) -> list[Field[Any]]:
    """Return the fields that a recipe may set."""
    return [f for f in fields(kind) if f.init and "from_data" not in f.metadata]


def check_value(value: Any, hint: Any, where: str) -> Any:
    """Return a value as its annotation wants it."""
    found = _fit(value, hint, where)
    if found is _NOTHING:
        raise UserError(f"{where} must be {_spell(hint)}, got {value!r}.")
    return found


_NOTHING = object()


def _fit(value: Any, hint: Any, where: str) -> Any:
    """Return a value as its annotation wants it, or ``_NOTHING`` if it cannot be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _fit(value, inner[0], where)
    if origin in (Union, types.UnionType):
        candidates = (_fit(value, h, where) for h in inner)
        return next((v for v in candidates if v is not _NOTHING), _NOTHING)
    if origin is Literal:
        return value if value in inner else _NOTHING
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            return _NOTHING
        parts = [_fit(v, inner[0], where) for v in value]
        return _NOTHING if any(p is _NOTHING for p in parts) else tuple(parts)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return dict(value) if isinstance(value, Mapping) else _NOTHING
    if is_dataclass(hint):
        return build(typing.cast(Any, hint), value, where)
    return _fit_plain(value, hint)


def _fit_plain(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _NOTHING
    if hint is float and not isinstance(value, bool):
        return float(value) if isinstance(value, int | float) else _NOTHING
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, bool) and hint is not bool:
        return _NOTHING
    return value if isinstance(value, hint) else _NOTHING


def _spell(hint: Any) -> str:
    """Return an annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _spell(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(h) for h in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (tuple, Sequence):
        return f"a list of {_spell(inner[0])}"
    words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words |= {type(None): "null", Path: "a path"}
    return words.get(hint, "`key: value` settings")


def to_yaml(settings: Any) -> str:
    """Return a dataclass as YAML that :func:`build` reads back.

    Example:
        >>> from primal_attention.training.config import TrainingConfig
        >>> build(TrainingConfig, yaml.safe_load(to_yaml(TrainingConfig()))) == TrainingConfig()
        True
    """
    return yaml.dump(_plain(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flat(settings: Any) -> dict[str, Any]:
    """Return the settings in the parts of a recipe by their full names.

    Example:
        >>> from primal_attention.cli.settings import DataSettings, Recipe
        >>> flat(Recipe(DataSettings(seed=3)))["data.seed"]
        3
    """
    parts = {k: v for k, v in _plain(settings).items() if isinstance(v, dict)}
    return {f"{part}.{key}": v for part, values in parts.items() for key, v in values.items()}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in _settable(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    # a saved recipe is read from other folders too
    return str(value.absolute()) if isinstance(value, Path) else value
