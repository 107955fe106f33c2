"""JSON and YAML: what is refused, and with which sentence."""

import json
import re
from pathlib import Path

import pytest
import yaml

from primal_attention.support.command import UserError
from primal_attention.support.files import parse_json, read_json, read_json_lines, read_yaml
from primal_attention.support.files.values import YamlDumper


def test_damaged_json_is_a_sentence_with_the_name() -> None:
    for text, words in [
        (b"", "not readable as JSON: Expecting value"),
        (b"{", "(column 2)"),
        (b"{\n\n]", "(line 3, column 1)"),
        (b"\xff{}", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested deeper"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "5001 digits"),
        (b'{"a": 100000000000000000000000000000}', "30 digits"),
        (b"[]", "must hold an object {…}, got a list"),
        (b"null", "got null"),
    ]:
        with pytest.raises(UserError, match=rf"config\.json.*{re.escape(words)}"):
            parse_json(text, "config.json")


def test_a_json_file_that_is_too_large_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json: No such file"):
        read_json(path)
    path.write_text(json.dumps({"a": "b" * 100}))
    with pytest.raises(UserError, match="more than 50"):
        read_json(path, max_bytes=50)
    assert read_json(path)["a"] == "b" * 100


def test_json_lines_keep_the_numbers_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b"}\n\n{"text": "c"}\n', "utf-8")
    found = list(read_json_lines(path))
    assert [(line.number, line.value["text"]) for line in found] == [(1, "a\u2028b"), (3, "c")]
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 is blank; remove the line"):
        list(read_json_lines(path, skip_blank=False))
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 must hold an object"):
        list(read_json_lines(path))


def test_yaml_that_is_no_settings_is_a_sentence_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text, words in [
        ("a: !!python/object/apply:os.system [ls]", "line 1 uses a tag"),
        ("a: 1\nb: !!timestamp 2001-13-45", "line 2 uses a tag"),
        ("a: &x [1]\nb: *x", "line 2 uses an alias"),
        ("a: 1\nb: 2\na: 3", "the key 'a' is given twice, last in line 3"),
        ("? [1]\n: 2", "in line 1 a key is not a plain word"),
        ("a: " + "[" * 500, "nested deeper than 50 levels"),
        ("- " * 5000, "nested deeper than 50 levels"),
        ("a: " + "9" * 5000, "5000 digits"),
        ("a: \x00", "special characters"),
        ("- 1", "must hold settings as `key: value`, got a list"),
        ("# nothing", "must hold settings as `key: value`, it holds none"),
        ("a" * 300_000, "more than 250,000"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError, match=rf"a\.yaml.*{re.escape(words)}"):
            read_yaml(path)


def test_yaml_words_that_look_like_dates_times_or_octal_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 2024-01-01\nb: 1:30\nc: 010\nd: 1e-3\ne: 1_000\nf: -.5\ng:\nh: 0x10\n")
    expected = {"a": "2024-01-01", "b": "1:30", "c": 10, "d": 0.001, "e": 1000, "f": -0.5}
    assert read_yaml(path) == {**expected, "g": None, "h": "0x10"}


def test_what_is_written_as_yaml_is_read_back(tmp_path: Path) -> None:
    words = ["09", "1e5", "yes", "null", "~", "", "1:30", "2024-01-01", "0x10", ".5", "<<", "a: b"]
    tree = {word: word for word in words} | {"numbers": [1, -2.5, 1e-9, True, None]}
    path = tmp_path / "a.yaml"
    path.write_text(yaml.dump(tree, Dumper=YamlDumper))
    assert read_yaml(path) == tree


def test_many_keys_do_not_cost_the_square_of_their_number(tmp_path: Path) -> None:
    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    from primal_attention.support.files import values

    text = "".join(f"k{i}: 1\n" for i in range(500))
    loader = values._Loader(text)
    node = loader.get_single_node()
    loader.construct_object = lambda n, deep=False: Counted(n.value)  # type: ignore[method-assign]
    assert len(loader.construct_mapping(node)) == 500
    assert Counted.compared < 5000
