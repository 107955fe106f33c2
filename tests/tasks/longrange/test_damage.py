"""Damaged files of token sequences: nothing is taken for another token, each has its sentence."""

import io
import json

import numpy as np
import pytest

from primal_attention.datasets.longrange.sequences import TokenSequences
from primal_attention.support.command import UserError
from primal_attention.tasks.longrange.readers import read_aan, read_cifar10
from primal_attention.tasks.longrange.settings import TokenSettings
from primal_attention.tasks.longrange.task import TokenTask

TEXT = TokenTask("text", ("negative", "positive"))
GOOD = {
    "tokens": np.array([1, 2, 3], np.uint16),
    "offsets": np.array([0, 1, 3]),
    "labels": np.array([0, 1]),
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"offsets": np.array([0, 5, 3])}, "offsets must not decrease, but 5 is followed by 3"),
        ({"offsets": np.array([0, 5, 3], np.uint64)}, "offsets must not decrease"),
        ({"offsets": np.array([0, 1, 2])}, "offsets must run from 0 to 3"),
        ({"offsets": np.array([1, 1, 3])}, "offsets must run from 0 to 3"),
        ({"offsets": np.array([0, 1.5, 3])}, "'offsets' must hold whole numbers"),
        ({"offsets": np.array([0, 0, 3])}, "sequence 0, counted from 0, is empty"),
        ({"offsets": np.zeros(0, int)}, "offsets must run from 0 to 3"),
        ({"tokens": np.array([1.0, 2, 3])}, "'tokens' must hold whole numbers"),
        ({"tokens": np.array([1, np.nan, 3])}, "'tokens' must hold whole numbers"),
        ({"tokens": np.array([1, 2j, 3])}, "'tokens' must hold whole numbers"),
        ({"tokens": np.array(["1", "2", "3"])}, "'tokens' must hold whole numbers"),
        ({"tokens": np.array([[1, 2, 3]])}, "have 1 axis"),
        ({"tokens": np.array([-1, 2, 3])}, "must be from 0 to 511, got -1 to 3"),
        ({"tokens": np.array([1, 2, 512])}, "must be from 0 to 511, got 1 to 512"),
        ({"tokens": np.array([1, 2, 2**63], np.uint64)}, "must be from 0 to 511"),
        ({"labels": np.array([0, 0.9])}, "'labels' must hold whole numbers"),
        ({"labels": np.array([0, 1, 1])}, "with one more entry than the 3 labels"),
        ({"labels": np.array([0, 2])}, "labels must be from 0 to 1, got 0 to 2"),
        ({"labels": np.array([0, -1])}, "labels must be from 0 to 1, got -1 to 0"),
    ],
)  # fmt: skip
def test_damaged_sequences_are_a_sentence(tmp_path, changed, words):
    np.savez(tmp_path / "a.npz", **(GOOD | changed))
    with pytest.raises(UserError, match=r"a\.npz") as caught:
        TEXT.read(tmp_path / "a.npz", labelled=True)
    assert words in str(caught.value)


def test_sequences_to_predict_need_no_labels(tmp_path):
    np.savez(tmp_path / "a.npz", tokens=GOOD["tokens"], offsets=GOOD["offsets"])
    assert len(TEXT.read(tmp_path / "a.npz", labelled=False)) == 2
    np.savez(tmp_path / "b.npz", **(GOOD | {"labels": np.array([-1, np.nan])}))
    assert len(TEXT.read(tmp_path / "b.npz", labelled=False)) == 2


@pytest.mark.raw
@pytest.mark.parametrize(
    ("rows", "labels"),
    [([[1]], [0.9]), ([[1.5]], [0]), ([[300]], [0]), ([[-1]], [0]), ([[[1]]], [0]), ([[1]], ["a"])],
)
def test_nothing_is_rounded_or_wrapped_when_sequences_are_packed(rows, labels):
    with pytest.raises(ValueError, match="must be whole numbers"):
        TokenSequences.pack(rows, labels)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"text": "a", "label": [1]}, "line 1: a class must be a word or a number, got a list"),
        ({"text": "a", "label": {}}, "line 1: a class must be a word or a number, got an object"),
        ({"text": "a", "label": None}, "line 1: a class must be a word or a number, got none"),
        ({"text": "a", "label": ""}, "line 1: a class must be a word or a number, got none"),
        ({"text": "a", "label": float("nan")}, "line 1: a class must be a word or a number"),
        ({"text": "a", "label": 10**30}, "line 1 is damaged: the number 100000000000"),
        ({"text": 5, "label": 1}, "line 1: the text must be words, got 5"),
        ({"text": None, "label": 1}, "line 1: the text must be words, got none"),
        ({"text": ["a"], "label": 1}, "line 1: the text must be words, got a list"),
        ({"text": "\ud800", "label": 1}, "line 1: the text has half of a character"),
        ({"text": "a", "label": "7" * 5000}, "are not among the classes negative, positive"),
        ({"body": "a", "label": 1}, "line 1 has no 'text'; it has 'body', 'label'"),
    ],
)
def test_a_line_that_is_no_labelled_text_is_a_sentence(tmp_path, item, words):
    (tmp_path / "a.jsonl").write_text(json.dumps(item) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl") as caught:
        TEXT.read(tmp_path / "a.jsonl", labelled=True)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_one_class_is_nothing_to_learn(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n' * 9)
    with pytest.raises(UserError, match="all have the class 'x'; a model needs at least two"):
        TokenTask.load(TokenSettings(train=tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("listops", "[MAX 1 2 ]\n\n", "line 2 has no expression"),
        ("listops", "[MAX 1 x ]\n", "line 1: Unknown token 'x'"),
        ("listops", "<pad>\n", "line 1: Unknown token '<pad>'"),
        ("retrieval", "a\tb\n\n", "line 2: expected two texts and a tab, got 1 fields"),
        ("retrieval", "a\tb\na\t\n", "line 2: the text is empty"),
    ],
)
def test_lines_of_other_kinds_are_named(tmp_path, kind, content, words):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match=r"a\.txt") as caught:
        TokenTask(kind, tuple("0123456789")).read(tmp_path / "a.txt", labelled=False)
    assert words in str(caught.value)


def test_texts_that_look_like_python_are_texts(tmp_path):
    strange = ["b'a' + b'b'", "b'" + "(" * 5000 + "'", r"b'\d'", "b'a', b'b'"]
    lines = [f"1\tA\tB\t{text}\tx\n" for text in strange]
    (tmp_path / "a.tsv").write_text("".join(lines))
    data = read_aan(tmp_path / "a.tsv").first
    texts = [bytes((data.row(i) - 1).astype(np.uint8)).decode() for i in range(4)]
    assert texts == [strange[0], "(" * 4000, "\\d", strange[3]]


def picture(size=(32, 32), mode="RGB"):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


def test_damaged_pictures_are_named(tmp_path):
    task = TokenTask("image", ("a", "b"))
    cases = {
        "cut": picture((64, 64))[:-30],
        "words": b"words",
        "empty": b"",
        "wide": picture((60_000, 1000), "1"),
    }
    told = {
        "cut": "is broken: ",
        "words": "is no image of a known format",
        "empty": "is no image of a known format",
        "wide": "it has more than 50,000,000 pixels",
    }
    for name, data in cases.items():
        (tmp_path / f"{name}.png").write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}\.png:? {told[name]}"):
            task.read(tmp_path / f"{name}.png", labelled=False)
    with pytest.raises(UserError, match=r"cut\.png has no class"):
        task.read(tmp_path / "cut.png", labelled=True)
    for data, words in ((picture()[:60], "is broken"), (picture((8, 8)), "32 × 32 points")):
        offsets = np.array([0, len(data)])
        np.savez(
            tmp_path / "a.npz", data=np.frombuffer(data, np.uint8), offsets=offsets, labels=[0]
        )
        with pytest.raises(UserError, match=rf"a\.npz, picture 0, counted from 0, .*{words}"):
            read_cifar10(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", data=np.zeros(5, np.uint8), offsets=[0, 9, 5], labels=[0, 1])
    with pytest.raises(UserError, match="offsets must not decrease"):
        read_cifar10(tmp_path / "a.npz")


@pytest.mark.raw
@pytest.mark.parametrize(
    "data", [[np.full((32, 32), 0.5)], [np.full((32, 32), 256)], [np.zeros((32, 32, 3))]]
)
def test_pictures_in_memory_must_be_grey_values(data):
    with pytest.raises(ValueError, match="picture 0, counted from 0, must be grey values"):
        TokenTask("image", ("a", "b")).from_arrays(data)


@pytest.mark.raw
def test_texts_in_memory_must_be_texts():
    for data, words in ((["a", ""], "text 1, .* is empty"), (["a", 5], "text 1, .*, got 5")):
        with pytest.raises(ValueError, match=words):
            TEXT.from_arrays(data)
