"""ListOps: expressions are what was asked for, and their labels are their values."""

import gzip
import hashlib
import statistics

import numpy as np
import pytest

from primal_attention.datasets.longrange import listops
from primal_attention.datasets.longrange.listops import (
    LISTOPS_TOKENS,
    ListOpsConfig,
    encode_expression,
    evaluate_expression,
    generate_listops,
    read_listops,
)

SHORT = ListOpsConfig(min_length=20, max_length=60)


def tokens_of(data, index):
    return [LISTOPS_TOKENS[i] for i in data.row(index)]


def recursive_value(tokens):
    """Evaluate from the outside in, sharing nothing with the library's evaluator."""

    def parse(at):
        if not tokens[at].startswith("["):
            return int(tokens[at]), at + 1
        name, values = tokens[at][1:], []
        at += 1
        while tokens[at] != "]":
            value, at = parse(at)
            values.append(value)
        result = {
            "MIN": lambda: min(values),
            "MAX": lambda: max(values),
            "MED": lambda: int(statistics.median(values)),
            "SM": lambda: int(str(sum(values))[-1]),
        }[name]()
        return result, at + 1

    value, end = parse(0)
    assert end == len(tokens)
    return value


def depth(tokens):
    level = deepest = 1
    for token in tokens:
        level += token.startswith("[")
        deepest = max(deepest, level)
        level -= token == "]"
    return deepest


def arguments(tokens):
    open_lists, counts = [0], []
    for token in tokens:
        if token == "]":
            counts.append(open_lists.pop())
        open_lists[-1] += token != "]"
        if token.startswith("["):
            open_lists.append(0)
    return counts


def test_long_range_arena_settings_are_kept():
    data = generate_listops(20)
    assert 500 <= data.lengths.min() <= data.lengths.max() <= 2000
    for i in range(len(data)):
        tokens = tokens_of(data, i)
        assert depth(tokens) <= 10
        assert 2 <= min(arguments(tokens)) <= max(arguments(tokens)) <= 10


def test_labels_agree_with_an_independent_evaluator():
    data = generate_listops(10)
    more = generate_listops(300, config=SHORT)
    for found in (data, more):
        for i, label in enumerate(found.labels):
            assert recursive_value(tokens_of(found, i)) == label
    assert set(more.labels) == set(range(10))


def test_expressions_do_not_change_between_versions():
    data = generate_listops(5)
    digest = hashlib.sha256(data.tokens.tobytes() + data.labels.tobytes()).hexdigest()
    assert digest[:16] == "15cc1bfaf4307841"


def test_expressions_do_not_depend_on_the_number_asked_for():
    few, many = generate_listops(3, config=SHORT), generate_listops(7, config=SHORT)
    np.testing.assert_array_equal(few.tokens, many.tokens[: many.offsets[3]])


def test_expressions_do_not_depend_on_the_number_of_processes():
    one = generate_listops(6, config=SHORT)
    two = generate_listops(6, config=SHORT, workers=2)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.labels, two.labels)


def test_splits_and_seeds_differ():
    found = {
        generate_listops(4, config=SHORT, split=split, seed=seed).tokens.tobytes()
        for split in ("train", "test")
        for seed in (0, 1)
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 9 0 4 5 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MIN [MAX 3 8 ] 9 ]", 8),
    ],
)
def test_operators_follow_the_original_definition(expression, value):
    assert evaluate_expression(expression.split()) == value


@pytest.mark.parametrize("expression", ["", "[MAX 1 2", "1 2", "[MAX ]", "]", "[AVG 1 ]", "12"])
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises(ValueError, match=r"does not belong here|must be one digit"):
        evaluate_expression(expression.split())


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 0},
        {"min_length": 9, "max_length": 8},
        {"max_args": 1},
        {"max_depth": 2, "min_length": 500},
    ],
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match=r"length|max_args|No expression"):
        ListOpsConfig(**options)


def test_both_file_formats_are_read(tmp_path):
    data = generate_listops(3, config=SHORT)
    lines = (
        f"{' '.join(LISTOPS_TOKENS[i] for i in data.row(index))}\t{label}\n"
        for index, label in enumerate(data.labels)
    )
    (tmp_path / "basic_test.tsv").write_text("".join(["Source\tTarget\n", *lines]))
    again = read_listops(tmp_path / "basic_test.tsv")
    np.testing.assert_array_equal(data.tokens, again.tokens)
    np.testing.assert_array_equal(data.labels, again.labels)

    with gzip.open(tmp_path / "original.tsv.gz", "wt") as file:
        file.write("0\t( ( ( [SM 6 ) 4 ) ] )\n5\t5\n")
    original = read_listops(tmp_path / "original.tsv.gz")
    expected = [encode_expression(expression) for expression in ("[SM 6 4 ]", "5")]
    assert [list(original.row(i)) for i in range(2)] == expected
    assert list(original.labels) == [0, 5]


@pytest.mark.parametrize("line", ["", "3", "x\t3 4", "3\t[AVG 1 ]", "Source\tTarget\n3\t[MAX 1 ]"])
def test_a_foreign_file_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "data.tsv"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"line [12]: expected|Unknown token"):
        read_listops(path)


def test_every_label_of_the_original_test_file_is_right(real_data):
    data = read_listops(real_data / "lra/listops-d20s/test_d20s.tsv.gz")
    assert len(data) == 10_000
    assert data.lengths.max() == 939
    values = [evaluate_expression(tokens_of(data, i)) for i in range(len(data))]
    assert values == data.labels.tolist()


@pytest.mark.raw
def test_lengths_that_no_expression_has_end_in_a_sentence(monkeypatch):
    monkeypatch.setattr(listops, "_TRIES", 1000)
    with pytest.raises(ValueError, match="had 2 to 3 tokens; allow other lengths"):
        generate_listops(1, config=ListOpsConfig(2, 3))
