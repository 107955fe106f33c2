"""Texts, pairs and pictures come out as the ids Long Range Arena feeds its models."""

import io
import json
import lzma

import numpy as np
import pytest
import torch

from primal_attention.datasets.longrange.sequences import PairSequences, TokenSequences
from primal_attention.tasks.longrange.readers import encode_bytes, read_aan, read_cifar10, read_imdb
from primal_attention.training import pad_collate


def test_reviews_are_bytes_above_padding(tmp_path):
    rows = [{"id": 1, "label": 1, "text": "Great é!"}, {"id": 2, "label": 0, "text": "x" * 5000}]
    with lzma.open(tmp_path / "train.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    data = read_imdb(tmp_path / "train.jsonl.xz")
    assert bytes((data.row(0) - 1).tolist()).decode() == "Great é!"
    assert list(data.lengths) == [9, 4000]
    assert list(data.labels) == [1, 0]


def test_a_byte_of_255_keeps_its_place_above_padding():
    assert encode_bytes(b"\x00\xff").tolist() == [1, 256]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nothing", "line 2 is not readable as JSON"),
        ("[1, 2]", "line 2 must hold an object"),
        ('{"text": "a"}', "line 2 has no 'label'; it has 'text'"),
        ('{"text": "a", "label": 7}', "line 2: label must be 0 or 1, got '7'"),
        ('{"text": "a", "label": 0.9}', "line 2: label must be 0 or 1, got '0.9'"),
        ("", "line 2 is blank"),
    ],
)
def test_a_line_that_is_no_review_is_named(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=words):
        read_imdb(tmp_path / "a.jsonl")


def jpegs(path, colours):
    from PIL import Image

    files = []
    for colour in colours:
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), colour).save(buffer, "JPEG", quality=100)
        files.append(buffer.getvalue())
    np.savez(
        path,
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        labels=np.arange(len(files)),
    )


def test_pictures_become_grey_values_row_by_row(tmp_path):
    jpegs(tmp_path / "train_jpeg.npz", [(200, 200, 200), (255, 0, 0), (0, 0, 0)])
    data = read_cifar10(tmp_path / "train_jpeg.npz")
    assert set(data.lengths) == {1024}
    assert [round(float(data.row(i).mean())) for i in range(3)] == pytest.approx(
        [200, 76, 0], abs=2
    )
    some = read_cifar10(tmp_path / "train_jpeg.npz", limit=2, seed=1)
    assert len(set(some.labels.tolist())) == 2


def test_pairs_are_read_in_the_released_format(tmp_path):
    path = tmp_path / "new_aan_pairs.train.tsv"
    path.write_text(
        "1.0\tP04-1001\tW05-0002\tb'abc \\xc3\\xa9'\tb\"it's\"\n0.0\tA\tB\tplain text\tb'open\n"
    )
    data = read_aan(path)
    assert [int(data[i]["labels"]) for i in range(2)] == [1, 0]
    texts = [
        bytes(data[i][side].numpy().astype(np.uint8) - 1)
        for i in range(2)
        for side in data[i]
        if side != "labels"
    ]
    assert texts == ["abc é".encode(), b"it's", b"plain text", b"b'open"]


def test_a_line_that_is_no_pair_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("1.0\ta\tb\tc\n")
    with pytest.raises(ValueError, match="line 1: expected label, two identifiers"):
        read_aan(tmp_path / "a.tsv")


def test_data_sets_survive_a_file(tmp_path):
    data = TokenSequences.pack([[1, 2], [300]], [1, 0], np.uint16)
    data.save(tmp_path / "a.npz")
    again = TokenSequences.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(again.tokens, data.tokens)
    np.testing.assert_array_equal(again.labels, data.labels)
    np.savez(tmp_path / "b.npz", tokens=data.tokens)
    with pytest.raises(ValueError, match="no array 'offsets'; it needs tokens, offsets, labels"):
        TokenSequences.load(tmp_path / "b.npz")


def test_batches_are_padded_and_masked():
    data = TokenSequences.pack([[1, 2], [3]], [1, 0])
    batch = pad_collate([data[0], data[1]])
    assert batch["x"].tolist() == [[1, 2], [3, 0]]
    assert batch["key_mask"].tolist() == [[True, True], [True, False]]
    assert batch["labels"].tolist() == [1, 0]
    assert "key_mask" not in pad_collate([data[0], data[0]])
    assert data.truncate(1)[0]["x"].tolist() == [1]
    assert data.select([1])[0]["x"].dtype == torch.int64


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(IndexError, match="There are 2 sequences"):
        TokenSequences.pack([[1], [2]], [0, 1])[index]


@pytest.mark.raw
def test_sides_of_pairs_must_match():
    one, two = TokenSequences.pack([[1]], [0]), TokenSequences.pack([[1], [2]], [0, 0])
    with pytest.raises(ValueError, match="one length"):
        PairSequences(one, two)
    with pytest.raises(ValueError, match="offsets must run"):
        TokenSequences(np.zeros(3, int), np.array([0, 2]), np.array([0]))


@pytest.mark.slow
def test_real_files_have_their_published_sizes(real_data):
    reviews = read_imdb(real_data / "text/imdb/test.jsonl.xz")
    assert len(reviews) == 25_000
    assert reviews.labels.mean() == 0.5
    pictures = read_cifar10(real_data / "vision/cifar-10/test_jpeg.npz")
    assert np.bincount(pictures.labels).tolist() == [1000] * 10
    assert set(pictures.lengths) == {1024}
