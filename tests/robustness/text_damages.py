"""Damages of bytes, of lines of text, and of values in JSON and YAML."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

__all__ = [
    "BYTES",
    "JSON",
    "JSON_LINES",
    "LINES",
    "NUMBERS",
    "YAML",
    "Damage",
    "change_tree",
    "flip_bits",
    "truncate",
]

Damage = Callable[[bytes, Random], bytes]

# bytes


def flip_bits(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 8, 64))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _slice(data: bytes, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.randint(1, max(1, len(data) // 4)))


def truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _duplicate(data: bytes, rng: Random) -> bytes:
    a, b = _slice(data, rng)
    return data[:b] + data[a:]


def _delete(data: bytes, rng: Random) -> bytes:
    a, b = _slice(data, rng)
    return data[:a] + data[b:]


def _move(data: bytes, rng: Random) -> bytes:
    a, b = _slice(data, rng)
    rest = data[:a] + data[b:]
    to = rng.randint(0, len(rest))
    return rest[:to] + data[a:b] + rest[to:]


def _splice(data: bytes, rng: Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:]


def _empty(data: bytes, rng: Random) -> bytes:
    return b""


BYTES: dict[str, Damage] = {
    "flip bits": flip_bits,
    "truncate": truncate,
    "duplicate a slice": _duplicate,
    "delete a slice": _delete,
    "move a slice": _move,
    "splice bytes": _splice,
    "empty": _empty,
}

# text

_NUMBER = re.compile(rb"(?<![\w.])-?\d+(\.\d+)?([eE][+-]?\d+)?")
_NONSENSE = (
    *("0", "-1", "0.5", "1e400", "-1e400", "1e25", "1e300", "NaN", "inf", "-0", "1_0", "0x10"),
    *("1" + "0" * 30, "-1" + "0" * 30, "4294967296", "1000000000", "1" * 5000, "", "one", "١٢"),
)


def _number(data: bytes, rng: Random) -> bytes:
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    match = rng.choice(found)
    return data[: match.start()] + rng.choice(_NONSENSE).encode() + data[match.end() :]


_SEPARATORS = ("\u2028", "\x85", "\x0c", "\r", "\x00", "\ufeff", "\n", '"', ",", ":", "\t")


def _separator(data: bytes, rng: Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(_SEPARATORS).encode() + data[at:]


def _lines(change: Callable[[list[bytes], int, Random], None]) -> Damage:
    def damage(data: bytes, rng: Random) -> bytes:
        lines = data.split(b"\n")
        change(lines, rng.randrange(len(lines)), rng)
        return b"\n".join(lines)

    return damage


def _repeat_line(lines: list[bytes], at: int, rng: Random) -> None:
    lines.insert(at, lines[at])


def _drop_line(lines: list[bytes], at: int, rng: Random) -> None:
    del lines[at]


def _blank_line(lines: list[bytes], at: int, rng: Random) -> None:
    lines.insert(at, rng.choice((b"", b" ", b"\t", b"\r")))


def _long_line(lines: list[bytes], at: int, rng: Random) -> None:
    lines[at] = lines[at] * 2000


def _shorten_line(lines: list[bytes], at: int, rng: Random) -> None:
    lines[at] = lines[at][: rng.randint(0, len(lines[at]))]


def _drop_field(lines: list[bytes], at: int, rng: Random) -> None:
    mark = rng.choice((b",", b"\t", b":"))
    fields = lines[at].split(mark)
    del fields[rng.randrange(len(fields))]
    lines[at] = mark.join(fields)


def _replace_field(lines: list[bytes], at: int, rng: Random) -> None:
    mark = rng.choice((b",", b"\t", b":"))
    fields = lines[at].split(mark)
    values = ("", "?", "NaN", "true", "x" * 3000, "$\\frac$", "../../x", "\x00", "2024-13-41")
    fields[rng.randrange(len(fields))] = rng.choice((*values, *_NONSENSE)).encode()
    lines[at] = mark.join(fields)


def _open_quote(data: bytes, rng: Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + b'"' + data[at:]


def _other_encoding(data: bytes, rng: Random) -> bytes:
    text = data.decode("utf-8", "replace") + "é\n"
    return text.encode(rng.choice(("utf-16", "utf-32", "cp1252")), "replace")


NUMBERS: dict[str, Damage] = {"replace a number": _number}
LINES: dict[str, Damage] = {
    "insert a separator": _separator,
    "repeat a line": _lines(_repeat_line),
    "drop a line": _lines(_drop_line),
    "insert a blank line": _lines(_blank_line),
    "lengthen a line": _lines(_long_line),
    "shorten a line": _lines(_shorten_line),
    "drop a field": _lines(_drop_field),
    "replace a field": _lines(_replace_field),
    "open a quote": _open_quote,
    "other encoding": _other_encoding,
}

# JSON and YAML

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2.5, 10**9, 10**30, 1e300, float("nan"), float("inf"), "", "x"),
    *([], {}, [[]], [None], {"x": 1}, [1, [2, [3]]], "../../etc/x", "x" * 5000, ["a", 1, None]),
    *(list(range(3)), 2**31, 2**63, -(2**31), 0.5, "1", "nan", {"": {}}),
)


def _paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value of a tree but the tree itself."""
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = []
    for key, child in children:
        found += [(*above, key), *_paths(child, (*above, key))]
    return found


def change_tree(tree: Any, rng: Random) -> Any:
    """Return a tree with one value replaced, lost, doubled or nested."""
    paths = _paths(tree)
    action = rng.choice(("replace", "replace", "replace", "drop", "add", "wrap", "root"))
    if not paths or (action == "root" and rng.random() < 0.2):
        return rng.choice(_VALUES)
    path = rng.choice(paths)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    last = path[-1]
    if action == "drop":
        del parent[last]
    elif action == "add":
        new = rng.choice(_VALUES)
        if isinstance(parent, list):
            parent.insert(rng.randint(0, len(parent)), rng.choice((new, parent[last])))
        else:
            parent[rng.choice(("x", "", "__class__", "x" * 2000, f"{last}s"))] = new
    elif action == "wrap":
        parent[last] = rng.choice(([parent[last]], {"x": parent[last]}, str(parent[last])))
    else:
        parent[last] = rng.choice(_VALUES)
    return tree


def _json_value(data: bytes, rng: Random) -> bytes:
    return json.dumps(change_tree(json.loads(data), rng)).encode()


def _json_line(data: bytes, rng: Random) -> bytes:
    lines = data.rstrip(b"\n").split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(change_tree(json.loads(lines[at]), rng)).encode()
    return b"\n".join(lines) + b"\n"


def _deep(mark: bytes) -> Damage:
    def damage(data: bytes, rng: Random) -> bytes:
        depth = rng.choice((60, 1000, 100_000))
        end = {b"[": b"]", b"{": b"}", b'{"x":': b"}"}[mark]
        value = mark * depth + (b"1" if mark == b'{"x":' else b"") + end * depth
        found = list(_NUMBER.finditer(data))
        if not found or rng.random() < 0.3:
            return value
        match = rng.choice(found)
        return data[: match.start()] + value + data[match.end() :]

    return damage


def _twice(data: bytes, rng: Random) -> bytes:
    """Give the first object a key twice."""
    found = re.search(rb'\{\s*("[^"]*")\s*:', data)
    if found is None:
        return data
    at = found.start() + 1
    return data[:at] + found[1] + b": " + rng.choice((b"1", b"null", b"{}")) + b"," + data[at:]


JSON: dict[str, Damage] = {
    "replace a value": _json_value,
    "another value": _json_value,
    "one more value": _json_value,
    "nest lists": _deep(b"["),
    "nest objects": _deep(b'{"x":'),
    "double a key": _twice,
}
JSON_LINES: dict[str, Damage] = {**JSON, **dict.fromkeys(list(JSON)[:3], _json_line)}


def _yaml_value(data: bytes, rng: Random) -> bytes:
    return yaml.safe_dump(change_tree(yaml.safe_load(data), rng), sort_keys=False).encode()


def _yaml_words(data: bytes, rng: Random) -> bytes:
    words = (
        *("!!python/object/apply:os.getcwd []", "!!set {a, b}", "!!binary aGk=", "!new 3", "*a"),
        *("2024-05-31", "2024-05-31 12:00:00", "&a [*a]", "&a {x: *a}", "0o17", "1:30", ".inf"),
        *("|\n  text", ">-\n  text", "'", '"', "{", "[1, 2", "- 1", "? a : b", "%YAML 9.9", "~"),
    )
    lines = data.split(b"\n")
    at = rng.choice([i for i, line in enumerate(lines) if b":" in line] or [0])
    key = lines[at].split(b":", 1)[0]
    lines[at] = key + b": " + rng.choice(words).encode()
    return b"\n".join(lines)


def _yaml_aliases(data: bytes, rng: Random) -> bytes:
    rows = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 30):
        rows.append(b"a%d: &a%d [%s]" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)))
    return data + b"\n" + b"\n".join(rows) + b"\n"


def _yaml_keys(data: bytes, rng: Random) -> bytes:
    rows = b"".join(b"k%d: %d\n" % (i, i) for i in range(20_000))
    return data + b"\n" + (rows if rng.random() < 0.5 else data)


YAML: dict[str, Damage] = {
    "replace a value": _yaml_value,
    "another value": _yaml_value,
    "one more value": _yaml_value,
    "unusual YAML": _yaml_words,
    "more unusual YAML": _yaml_words,
    "nest lists": _deep(b"["),
    "nest mappings": _deep(b"{"),
    "aliases of aliases": _yaml_aliases,
    "many keys": _yaml_keys,
}
