"""JSON and YAML: plain values, with limits on size, depth and numbers.

YAML is a small part of YAML 1.1: no tags, no aliases. A date is a word, ``010`` is ten and ``1:30``
is a word. The same key twice is an error in both formats.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from primal_attention.support.command import UserError
from primal_attention.support.files.text import open_text, read_text

__all__ = [
    "JsonLine",
    "YamlDumper",
    "parse_json",
    "read_json",
    "read_json_lines",
    "read_yaml",
]

MAX_JSON = 100_000_000
"""Most bytes of a JSON file, or of a line of JSON."""
MAX_YAML = 250_000
"""Most bytes of settings."""
MAX_DEPTH = 50
"""Most lists and mappings inside each other."""
_LARGEST = 2**64
"""Whole numbers are below this: none that a program can count with is larger."""


def read_json(path: Path, kind: type = dict, *, max_bytes: int = MAX_JSON) -> Any:
    """Return the value in a JSON file.

    Args:
        path: The file.
        kind: What it must hold: ``dict``, ``list`` or ``object`` for any value.
        max_bytes: Most bytes that are read.

    Raises:
        UserError: If the file cannot be read, is too large, or is damaged.
    """
    return parse_json(read_text(path, max_bytes), path, kind)


def parse_json(text: str | bytes, where: Path | str, kind: type = dict) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        where: Name of the text, for messages.
        kind: What it must be: ``dict``, ``list`` or ``object`` for any value.

    Raises:
        UserError: If the text is damaged.

    Example:
        >>> parse_json('{"dim": 16}', "config.json")
        {'dim': 16}
        >>> parse_json("[1]", "config.json")
        Traceback (most recent call last):
        primal_attention.support.command.UserError: config.json must hold an object {…}, got a list.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_whole, object_pairs_hook=_mapping)
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is damaged: byte {error.start} is not UTF-8.") from error
    except json.JSONDecodeError as error:
        # a line of JSON lines has its number in its name
        is_line = "\n" not in error.doc.rstrip("\n")
        place = f"column {error.colno}" if is_line else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{where} is not readable as JSON: {error.msg} ({place}).") from error
    except RecursionError:
        raise UserError(f"{where} is damaged: {_TOO_DEEP}.") from None
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}.") from error
    if not isinstance(value, kind):
        words = "an object {…}" if kind is dict else "a list […]"
        raise UserError(f"{where} must hold {words}, got {_describe(value)}.")
    return value


class JsonLine(NamedTuple):
    """A line of a file of JSON lines."""

    number: int
    """Counted from one."""
    value: Any


def read_json_lines(
    path: Path, kind: type = dict, *, skip_blank: bool = True
) -> Iterator[JsonLine]:
    """Return the values of a file with one JSON value in a line.

    Args:
        path: The file, plain, ``.gz`` or ``.xz``. It is read line by line.
        kind: What every line must hold, as for :func:`read_json`.
        skip_blank: Leave blank lines out; otherwise one is an error, because it shifts the count of
            those behind it.

    Raises:
        UserError: If the file or a line is damaged; the message names the line.
    """
    with open_text(path) as file:
        number = 0
        while line := file.readline(MAX_JSON + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_JSON:
                raise UserError(f"{where} has more than {MAX_JSON:,} characters.")
            if not line.strip() and not skip_blank:
                raise UserError(f"{where} is blank; remove the line, or write a value into it.")
            if line.strip():
                yield JsonLine(number, parse_json(line, where, kind))


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _whole(digits: str) -> int:
    # int() of a very long text is slow, and raises an error that names no file
    if len(digits) > 21 or abs(int(digits)) >= _LARGEST:
        raise ValueError(f"the number {digits[:12]}… has {len(digits)} digits")
    return int(digits)


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in set(names[:i]))
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return found


def _check_depth(value: object) -> None:
    # level by level: a function that calls itself fails on deep values
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = list(chain.from_iterable(map(_parts, level)))
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _parts(value: object) -> Iterable[object]:
    """Return the lists and mappings directly inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [v for v in inside if isinstance(v, dict | list)] if isinstance(inside, Iterable) else []


def _describe(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    words = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return words[type(value)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file.

    Raises:
        UserError: If the file is too large, not YAML, nested too deeply, gives a key twice, or uses
            tags or aliases.
    """
    text = read_text(path, MAX_YAML)
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"{path} is not readable as YAML: {words}.") from error
    except RecursionError:
        raise UserError(f"{path} is not readable as YAML: {_TOO_DEEP}.") from None
    if not isinstance(tree, dict):
        found = "it holds none" if tree is None else f"got {_describe(tree)}"
        raise UserError(f"{path} must hold settings as `key: value`, {found}.")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses tags, aliases and the same key twice; decides which plain words are numbers."""

    depth = 0
    # empty: the rules of YAML 1.1 make a number of 1:30 and a date of 2024-01-01
    yaml_implicit_resolvers: Any = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; an alias is an error, because nested aliases grow without bound."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line} uses an alias (*name); write the value out")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"line {line} uses a tag ({event.tag}); write a plain value")
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"in line {line} {_TOO_DEEP}")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping node as a dictionary."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, dict | list):
                raise yaml.YAMLError(f"in line {line} a key is not a plain word")
            if key in seen:
                raise yaml.YAMLError(f"the key {key!r} is given twice, last in line {line}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class YamlDumper(yaml.SafeDumper):
    """Writes what :func:`read_yaml` reads."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012

    def ignore_aliases(self, data: object) -> bool:
        """Write equal values out each time."""
        return True


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return _whole(loader.construct_scalar(node).replace("_", "").removeprefix("+"))


_RESOLVERS = {
    "bool": (r"(?i:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    "int": (r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    "float": (
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", "~nN"),
}
"""Plain words that are no text, and their first characters."""

for _name, (_pattern, _first) in _RESOLVERS.items():
    for _kind in (_Loader, YamlDumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(f"({_pattern})$"),
            [*_first, *([""] if _name == "null" else [])],
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
