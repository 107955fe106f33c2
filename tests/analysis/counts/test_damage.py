"""Files of counts and of judged word pairs that are damaged are refused in a sentence."""

import json

import numpy as np
import pytest

from primal_attention.analysis.counts import Cooccurrence
from primal_attention.analysis.counts.evaluation import read_pairs
from primal_attention.cli.main import main
from primal_attention.support.command import UserError


def pack(value):
    text = value if isinstance(value, str) else json.dumps(value)
    return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture
def saved(tmp_path):
    Cooccurrence.from_corpus(["the river bank", "the bank loan"], min_count=1).save(
        tmp_path / "c.npz"
    )
    with np.load(tmp_path / "c.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ("[" * 100_000, "nested deeper"),
        ({"options": {}}, "options"),
        ({"options.window": 2.5}, "option window"),
        ({"options.window": "5"}, "option window"),
        ({"options.window": True}, "option window"),
        ({"options.directional": "no"}, "option directional"),
        ({"options.smoothing": "x"}, "option smoothing"),
        ({"num_tokens": -5}, "num_tokens"),
        ({"num_tokens": None}, "num_tokens"),
        ({"unit": []}, "unit"),
        ({"format": "x"}, "format"),
    ],
)
def test_what_a_file_says_of_itself_is_checked(tmp_path, saved, about, words):
    if isinstance(about, dict):
        changed = json.loads(saved["about"].tobytes())
        for name, value in about.items():
            where, _, key = name.rpartition(".")
            (changed[where] if where else changed)[key] = value
        about = changed
    np.savez(tmp_path / "b.npz", **{**saved, "about": pack(about)})
    with pytest.raises(UserError, match=r"b\.npz") as caught:
        Cooccurrence.load(tmp_path / "b.npz")
    assert words in str(caught.value)
    assert ".." not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"words": pack("[" * 100_000)}, "nested deeper"),
        ({"words": pack([1])}, "list of words"),
        ({"words": pack({})}, "must hold a list"),
        ({"data": np.full(3, np.nan)}, "not finite"),
        ({"tail": np.zeros(2)}, "'tail' must hold whole numbers"),
        ({"unigram": np.array([[1]])}, "'unigram' must hold whole numbers"),
    ],
)
def test_arrays_of_counts_are_checked(tmp_path, saved, change, words):
    np.savez(tmp_path / "b.npz", **{**saved, **change})
    with pytest.raises(UserError, match=r"b\.npz") as caught:
        Cooccurrence.load(tmp_path / "b.npz")
    assert words in str(caught.value)


@pytest.mark.parametrize("score", ["nan", "inf", "1_0", "1e400", "\u0661"])
def test_a_judgement_is_a_finite_number(tmp_path, score):
    (tmp_path / "pairs.txt").write_text(f"cat dog 7.5\ncat car {score}\n", "utf-8")
    with pytest.raises(UserError, match=r"line 2: .* is not two words and a number"):
        read_pairs(tmp_path / "pairs.txt")


def test_a_file_of_pairs_in_another_encoding_is_one_sentence(tmp_path):
    (tmp_path / "pairs.txt").write_bytes("caf\xe9 bar 1\n".encode("latin-1"))
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_pairs(tmp_path / "pairs.txt")
    with pytest.raises(UserError, match="No such file"):
        read_pairs(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"[" * 100_000, "nested deeper"),
        ("a.jsonl", b"{", "line 1 is not readable as JSON"),
        ("a.jsonl", b"[1]\n", "must hold an object"),
        ("a.jsonl", b'{"a": 1}\n', "--field"),
        ("a.jsonl", b'{"text": 1' + b"0" * 5000 + b"}", "digits"),
        ("a.txt", "caf\xe9".encode("latin-1"), "not text in UTF-8"),
        ("a.txt.gz", b"\x1f\x8bxx", "a.txt.gz"),
        ("a.txt.xz", b"junk", "a.txt.xz"),
    ],
)
def test_counting_refuses_a_damaged_corpus(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    command = ["analyze", "counts", "count", str(tmp_path / name), "-o", str(tmp_path / "c.npz")]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert words in printed
