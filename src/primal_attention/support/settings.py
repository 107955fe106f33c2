"""Settings: frozen dataclasses, built strictly from trees of YAML and from the command line.

A key that no dataclass has is an error, and so is a value of another type. A dataclass may be
generic: ``build(Recipe[DataSettings, ModelSettings], tree)``. msgspec and pydantic are not used:
their messages name Python types, and neither offers the setting that was meant.
"""

import ast
import difflib
import hashlib
import inspect
import io
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from primal_attention.support.command import UserError, did_you_mean, user_errors
from primal_attention.support.files.values import YamlDumper

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "at_least_one",
    "build",
    "check_limits",
    "check_value",
    "commented_yaml",
    "fingerprint",
    "flatten",
    "one_of",
    "parse",
    "to_yaml",
    "unchecked",
]

T = TypeVar("T")


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
    known = {f.name: f for f in _fields(kind)}
    prefix = f"{where}." if where else ""
    for key in tree:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(
                f"there is no setting {prefix}{key}.{hint} Known: {', '.join(sorted(known))}."
            )
    hints = _hints(kind)
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in tree:
            if not is_dataclass(hints[name]):
                raise UserError(f"the setting {prefix}{name} is missing.")
            tree = {**tree, name: {}}
    values = {key: check_value(value, hints[key], prefix + key) for key, value in tree.items()}
    kinds = (ValueError, TypeError, OSError)
    with user_errors(where, *kinds, *((UserError,) if where else ())):
        found = kind(**values)
        check_limits(found)
    return found


def unchecked(kind: type[T], tree: Any, where: str = "") -> T:
    """Return a dataclass without running its own checks, to show its settings in ``--help``.

    The checks look up attentions, which needs torch. Help must not wait for torch.
    """
    _check_tree(tree, where)
    found, hints = object.__new__(get_origin(kind) or kind), _hints(kind)
    for field in _fields(kind):
        name, hint = field.name, hints[field.name]
        if is_dataclass(hint):
            value = unchecked(typing.cast(Any, hint), tree.get(name, {}), name)
        elif name in tree:
            value = check_value(tree[name], hint, name)
        else:
            value = field.default if field.default_factory is MISSING else field.default_factory()
        object.__setattr__(found, name, value)
    return typing.cast(T, found)


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(get_origin(kind) or kind)


def _hints(kind: object) -> dict[str, Any]:
    """Return the annotations of a dataclass; type variables of a generic one are replaced."""
    origin = get_origin(kind) or kind
    given = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=False))
    return {name: given.get(hint, hint) for name, hint in get_type_hints(origin).items()}


def _check_tree(tree: object, where: str) -> None:
    if not isinstance(tree, Mapping):
        raise UserError(f"{where or 'a recipe'} must hold `key: value` settings, got {tree!r}.")


def check_value(value: object, hint: object, where: str) -> Any:
    """Return a value converted to its annotation, or raise :class:`UserError`."""
    found = _convert(value, hint, where)
    if found is _FAILED:
        raise UserError(f"{where} must be {_describe(hint)}, got {value!r}.")
    return found


_FAILED = object()


def _convert(value: object, hint: object, where: str) -> object:
    """Return a value converted to its annotation, or ``_FAILED``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _convert(value, inner[0], where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        candidates = (_convert(value, h, where) for h in inner)
        return next((v for v in candidates if v is not _FAILED), _FAILED)
    if origin is Literal:
        return value if value in inner else _FAILED
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            return _FAILED
        parts = [_convert(v, inner[0], where) for v in value]
        return _FAILED if any(p is _FAILED for p in parts) else tuple(parts)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return dict(value) if isinstance(value, Mapping) else _FAILED
    if is_dataclass(hint):
        return build(typing.cast(Any, hint), value, where)
    return _convert_plain(value, hint)


def _convert_plain(value: object, hint: Any) -> object:
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _FAILED
    # True is a whole number to Python, and a mistake in a file
    if hint is float and not isinstance(value, bool):
        return float(value) if isinstance(value, int | float) else _FAILED
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, bool) and hint is not bool:
        return _FAILED
    return value if isinstance(value, hint) else _FAILED


def _describe(hint: Any) -> str:
    """Return an annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _describe(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(h) for h in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (tuple, Sequence):
        return f"a list of {_describe(inner[0])}"
    words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words |= {type(None): "null", Path: "a path"}
    return words.get(hint, "`key: value` settings")


def to_yaml(settings: object) -> str:
    """Return a dataclass as YAML that :func:`build` reads back.

    Example:
        >>> from primal_attention.training.config import TrainingConfig
        >>> build(TrainingConfig, yaml.safe_load(to_yaml(TrainingConfig()))) == TrainingConfig()
        True
    """
    return yaml.dump(_plain(settings), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def commented_yaml(settings: "DataclassInstance") -> str:
    """Return a dataclass as YAML with the meaning of every setting; defaults are commented out.

    Example:
        >>> from primal_attention.training.config import TrainingConfig
        >>> text = commented_yaml(TrainingConfig(epochs=3))
        >>> print(text.partition(";")[0])
        epochs: 3                    # Epochs to train
    """
    notes, lines, live = _field_notes(type(settings)), [], 0
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            block = textwrap.indent(commented_yaml(value), "  ")
            lines.append(f"\n{field.name}:  # {notes.get(field.name, '')}\n{block.rstrip()}")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        plain = str(value) if isinstance(value, Path) else _plain(value)
        style: Any = {"default_flow_style": True, "width": 1000, "allow_unicode": True}
        dumped = yaml.dump(plain, Dumper=YamlDumper, **style).partition("\n")[0]
        text = f"{field.name}: {dumped}"
        live += value != default
        mark = "" if value != default else "# "
        lines.append(f"{mark + text:<28} # {notes.get(field.name, '')}".rstrip(" #"))
    if not live and lines[0].startswith("# "):
        lines[0] = lines[0][2:]  # a section needs one setting
    # settings after a section stand apart from it
    gaps = ["\n" * (a.startswith("\n") and not b.startswith("\n")) for a, b in pairwise(lines)]
    return "".join(f"{gap}{line}\n" for gap, line in zip(["", *gaps], lines, strict=True))


def _field_notes(kind: type) -> dict[str, str]:
    """Return the docstring below every field of a dataclass, on one line."""
    notes = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(base)))
            for field, note in pairwise(tree.body[0].body):
                if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr):
                    text = ast.literal_eval(note.value).replace("`", "")
                    notes[ast.unparse(field.target)] = " ".join(text.split())
    return notes


def flatten(settings: "DataclassInstance") -> dict[str, Any]:
    """Return the settings of all parts by their full names, such as ``data.seed``."""
    parts = {k: v for k, v in _plain(settings).items() if isinstance(v, dict)}
    return {f"{part}.{key}": v for part, values in parts.items() for key, v in values.items()}


def fingerprint(*settings: object) -> str:
    """Return a short hash of some settings, to recognise results that they decided.

    Example:
        >>> fingerprint({"seed": 1}) == fingerprint({"seed": 1}) != fingerprint({"seed": 2})
        True
    """
    text = json.dumps([_plain(value) for value in settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    # a saved recipe is read from other folders too
    return str(value.absolute()) if isinstance(value, Path) else value


def parse(kind: type[T], argv: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Return an instance of a dataclass, its fields taken from the command line.

    Args:
        kind: The dataclass; its docstring and those below its fields are the help.
        argv: The arguments.
        prog: What the user typed before them.
        default: Values of everything that no argument changes; by default those of the dataclass.
    """
    import tyro

    errors = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(errors):
            found: T = tyro.cli(kind, args=list(argv), prog=prog, **options)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(f"{_message_in_box(errors.getvalue())} See {prog} --help.") from None
    with user_errors(""):
        check_limits(found)
    return found


def _message_in_box(box: str) -> str:
    """Return the message of a tyro error box: its first part, and the option it suggests."""
    lines = [line.strip("│ \n") for line in box.splitlines() if line[:1] not in "╭╰"]
    parts = re.split(r"[-─]{8,}", "\n".join(lines))
    if not box.startswith("╭"):
        del parts[0]  # where boxes cannot be drawn, the title has a line of its own
    message = " ".join(parts[0].split()).rstrip(".")
    # an error of a dataclass names its field; the name of the class is internal
    message = re.sub(r"^Error parsing \w+: ", "", message)
    for part in parts[1:]:
        names = re.findall(r"^--[\w.-]+", part, re.MULTILINE)
        asked = re.search(r"--[\w.-]+", message)
        if "Perhaps you meant" in part and names and asked:
            nearest = difflib.get_close_matches(asked[0], names, 1, cutoff=0)[0]
            return f"{message}. Did you mean {nearest}?"
    return f"{message}."


def check_limits(settings: object) -> None:
    """Raise if a seed or a number of threads, at any depth of dataclasses, cannot be used.

    Every generator takes seeds below 2³². Many more threads than processors are slow, and from some
    number on the system refuses to start them and ends the program.

    Example:
        >>> from primal_attention.training.config import TrainingConfig
        >>> check_limits(TrainingConfig(seed=7))
    """
    for field in _fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue
        if is_dataclass(value):
            check_limits(value)
        elif field.name == "seed" or (field.name == "seeds" and isinstance(value, tuple)):
            for seed in _numbers(value):
                if not 0 <= seed < 2**32:
                    raise ValueError(
                        f"{field.name} must be from 0 to {2**32 - 1} (2³² - 1), got {seed}."
                    )
        elif field.name == "threads":
            most = max(64, 4 * (os.cpu_count() or 1))
            if not 1 <= value <= most:
                raise ValueError(f"threads must be from 1 to {most}, got {value}.")


def at_least_one(options: object, *names: str) -> None:
    """Raise if one of these fields holds a number below one, or is empty.

    Example:
        >>> at_least_one(range(0, 8, 2), "step", "stop")
        >>> at_least_one(range(0, 8, 2), "start")
        Traceback (most recent call last):
        ValueError: start must be at least 1, got 0.
    """
    for name in names:
        value = getattr(options, name)
        if not _numbers(value) or min(_numbers(value)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def one_of(options: object, name: str, known: Iterable[str]) -> None:
    """Raise if a field lists a word that is not known.

    Example:
        >>> one_of(slice("lisops"), "stop", ["listops", "text"])
        Traceback (most recent call last):
        ValueError: stop has no 'lisops'. Did you mean 'listops'? Choose from listops, text.
    """
    words, value = list(known), getattr(options, name)
    for word in (value,) if isinstance(value, str) else value:
        if word not in words:
            hint = did_you_mean(word, words)
            raise ValueError(f"{name} has no {word!r}.{hint} Choose from {', '.join(words)}.")


def _numbers(value: Any) -> list[int]:
    """Return the numbers in a value, at any depth of tuples."""
    return [n for part in value for n in _numbers(part)] if isinstance(value, tuple) else [value]
