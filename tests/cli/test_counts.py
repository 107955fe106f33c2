"""``primal analyze counts``: counts, attention and word vectors from the command line."""

import gzip
import json
import subprocess
import sys

import pytest

from primal_attention.analysis.counts import Cooccurrence, normalize_rows
from primal_attention.cli.main import main

TEXTS = ["The river bank flooded.", "The bank gave a loan", "a loan of money, the bank said"]


@pytest.fixture
def counts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS[:2]))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": TEXTS[2]}) + "\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl.gz")]
    out = tmp_path / "counts.npz"
    assert main(["analyze", "counts", "count", *files, "-o", str(out), "--field", "body"]) == 0
    assert (
        "3 documents, 16 words, of which the 10 most frequent are 100.0%" in capsys.readouterr().out
    )
    return out


def test_counts_are_those_of_the_library(counts):
    found, expected = Cooccurrence.load(counts), Cooccurrence.from_corpus(TEXTS)
    assert found.words == expected.words
    assert (found.forward != expected.forward).nnz == 0


def test_attention_of_texts_is_printed_and_written(counts, tmp_path, capsys):
    out = tmp_path / "attention.json"
    arguments = ["analyze", "counts", "attend", str(counts), "bank loan zebra", "the bank"]
    assert main([*arguments, "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    first, second = json.loads(out.read_text())
    library = Cooccurrence.load(counts)
    for found, text in ((first, "bank loan"), (second, "the bank")):
        ids = library.encode(text)
        expected = normalize_rows(library.forward.toarray()[ids][:, ids])
        assert found["weights"][0][:2] == pytest.approx(expected[0].tolist())
    assert "Not in the vocabulary, so their rows are uniform: zebra." in printed
    assert f"| bank  | {first['weights'][0][0]:.2f} " in printed
    picture = tmp_path / "attention.png"
    options = ["--rank", "3", "--distance", "--causal", "--symmetric", "--content"]
    assert (
        main(
            ["analyze", "counts", "attend", str(counts), "bank loan", *options, "-o", str(picture)]
        )
        == 0
    )
    assert picture.read_bytes()[1:4] == b"PNG"
    assert main(["analyze", "counts", "attend", str(counts), "zebra"]) == 0


@pytest.mark.parametrize("method", ["pmi-svd", "ksvd", "glove"])
def test_vectors_are_printed_and_written(counts, tmp_path, capsys, method):
    out = tmp_path / "vectors.txt"
    arguments = [str(counts), "bank", "-k", "3", "--method", method, "--neighbors", "2"]
    assert main(["analyze", "counts", "vectors", *arguments, "-o", str(out)]) == 0
    assert "| bank | " in capsys.readouterr().out
    width = 6 if method == "ksvd" else 3
    assert out.read_text().split("\n")[0] == f"10 {width}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forget"], "there is no tool 'forget'"),
        (["count", "-o", "x.npz"], "name at least one"),
        (["count", "{missing}.txt", "-o", "{missing}.npz"], "missing.txt: No such file"),
        (["count", "{jsonl}", "-o", "{missing}.npz"], "line 1 must hold an object"),
        (["count", "{jsonl}", "-o", "{missing}.txt"], "must end in .npz"),
        (["attend", "{jsonl}", "bank"], "not an .npz archive"),
        (["attend", "{counts}", "?!"], "has no words"),
        (["attend", "{counts}", "bank", "-o", "x.pdf"], "must end in .png or .json"),
        (["attend", "{counts}", "bank", "--rank", "99"], "rank is 99"),
        (["vectors", "{counts}"], "nothing to do"),
        (["vectors", "{counts}", "banks"], "Did you mean 'bank'?"),
    ],
)
def test_mistakes_are_told_in_one_sentence(counts, tmp_path, capsys, arguments, message):
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    names = {
        "counts": counts,
        "jsonl": tmp_path / "rows.jsonl",
        "missing": tmp_path / "missing",
    }
    assert main(["analyze", "counts", *(a.format(**names) for a in arguments)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["count", "--help"], ["attend", "--help"]])
def test_help_does_not_wait_for_torch(arguments):
    script = (
        "import sys; from primal_attention.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "sys.exit(int(bool({'torch', 'scipy', 'matplotlib'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "analyze", "counts", *arguments],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
