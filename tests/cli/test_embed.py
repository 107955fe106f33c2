"""``primal embed``: one command from texts to vectors."""

import numpy as np
import pandas as pd
import pytest
from tests.surgery.embedding.models import make_texts, save_model

import primal_attention as pa
from primal_attention.cli.main import main

TEXTS = make_texts(9, 30)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def fails(capsys):
    """Run a command that must end with code 2; return its last line, after those of progress."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        *before, sentence = capsys.readouterr().err.splitlines()
        assert all(line.startswith("  … ") for line in before)
        return sentence

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.csv"
    pd.DataFrame({"id": range(9), "body": TEXTS}).to_csv(path, index=False)
    return path


def test_the_command_writes_vectors_and_says_how_fast(bert, file, tmp_path, capsys):
    out = tmp_path / "vectors.parquet"
    arguments = ["embed", bert, file, "--out", out, "--column", "body", "--keep", "id"]
    assert main([str(a) for a in arguments]) == 0
    printed, progress = capsys.readouterr()
    assert printed.startswith(f"Wrote 9 vectors of 32 numbers to {out}: ")
    assert printed.endswith(" a second.\n")
    assert "beside the model" in progress
    frame = pd.read_parquet(out)
    assert frame["id"].tolist() == [str(i) for i in range(9)]
    np.testing.assert_allclose(
        np.stack(frame["vector"]), pa.Embedder(bert).encode(TEXTS), atol=1e-5
    )


def test_long_texts_are_refused_or_averaged(bert, tmp_path, fails):
    (tmp_path / "long.txt").write_text("a " * 100 + "\n")
    out = tmp_path / "vectors.parquet"
    words = fails("embed", bert, tmp_path / "long.txt", "--out", out)
    assert "text 1 has 102 tokens" in words
    assert "--extend 128" in words
    arguments = ["embed", bert, tmp_path / "long.txt", "--out", out, "--chunk", "average"]
    assert main([str(a) for a in arguments]) == 0
    assert len(pd.read_parquet(out)) == 1
    whole = tmp_path / "whole.parquet"
    arguments = [*arguments[:3], "--out", whole, "--extend", "128", "--attention", "adaptive"]
    assert main([str(a) for a in arguments]) == 0
    embedder = pa.Embedder(bert, extend=128, attention="adaptive")
    np.testing.assert_allclose(
        np.stack(pd.read_parquet(whole)["vector"]), embedder.encode(["a " * 100]), atol=1e-5
    )


def test_results_are_replaced_only_when_asked(bert, file, tmp_path, fails):
    out = tmp_path / "vectors.parquet"
    out.write_text("mine")
    arguments = ["embed", bert, file, "--out", out, "--column", "body"]
    assert "is there; name another file or add --overwrite" in fails(*arguments)
    assert out.read_text() == "mine"
    assert main([str(a) for a in [*arguments, "--overwrite"]]) == 0
    assert len(pd.read_parquet(out)) == 9


@pytest.mark.parametrize(
    ("also", "words"),
    [
        (["--out", "a.csv"], "out must end in .parquet, got 'a.csv'; rename it"),
        (["--out", "a.parquet", "--batch-tokens", "0"], "batch_tokens must be at least 1, got 0"),
        (["--out", "a.parquet", "--extend", "0"], "extend must be at least 1, got 0"),
        (["--out", "a.parquet", "--threads", "0"], "threads must be from 1 to 64, got 0"),
        (["--out", "folder.parquet"], "is a folder; name a file that ends in .parquet"),
        (["--out", "a.parquet"], "has no column 'text'; its columns are id, body."),
    ],
)
def test_wrong_options_are_one_sentence(bert, file, tmp_path, fails, also, words):
    (tmp_path / "folder.parquet").mkdir()
    assert words in fails("embed", bert, file, *also)


def test_the_file_to_read_is_not_replaced(bert, tmp_path, fails):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"text": TEXTS}).to_parquet(path)
    assert "would replace" in fails("embed", bert, path, "--out", path, "--overwrite")
    loop = tmp_path / "loop.parquet"
    loop.symlink_to(loop)
    assert "would replace" in fails("embed", bert, loop, "--out", loop)
    assert "symbolic links" in fails("embed", bert, loop, "--out", tmp_path / "b.parquet")


def test_something_else_than_a_model_is_one_sentence(file, tmp_path, fails):
    assert "is not a folder" in fails("embed", tmp_path / "none", file, "--out", "a.parquet")
