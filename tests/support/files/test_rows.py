"""Rows of files of texts: every format, nothing read ahead, nothing lost."""

import gzip
from itertools import islice

import pandas as pd
import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import read_text_rows


def test_every_line_of_a_text_file_is_a_text(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("a\u2028b\r\n\n c \nd".encode(), mtime=0))
    assert [row.text for row in read_text_rows(path)] == ["a\u2028b", "", " c ", "d"]


def test_fields_may_hold_separators_quotes_and_lines(tmp_path):
    path = tmp_path / "a.csv"
    texts = ['say "hi", twice', "two\nlines", "", "NA"]
    pd.DataFrame({"id": ["01", "2", "3", "4"], "body": texts}).to_csv(path, index=False)
    rows = list(read_text_rows(path, "body", ["id"]))
    assert [row.text for row in rows] == texts
    assert [row.kept for row in rows] == [("01",), ("2",), ("3",), ("4",)]


def test_values_of_parquet_and_json_lines_keep_their_types(tmp_path):
    frame = pd.DataFrame({"text": ["a", "b"], "n": [1, 2], "flag": [True, False]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    for name in ("a.parquet", "a.jsonl"):
        rows = list(read_text_rows(tmp_path / name, keep=["flag", "n", "text"]))
        assert [row.kept for row in rows] == [(True, 1, "a"), (False, 2, "b")]


@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl"])
def test_rows_are_read_as_they_are_needed(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    good = {"txt": b"a\n", "csv": b"text\na\n", "jsonl": b'{"text": "a"}\n'}[ending]
    # far behind, so that no buffer of a reader reaches it
    line = good.splitlines(keepends=True)[-1]
    damaged = line * (3_000_000 // len(line)) + b"\xff\n"
    path.write_bytes(good + damaged)
    rows = read_text_rows(path)
    assert [row.text for row in islice(rows, 3)] == ["a"] * 3
    rows.close()
    with pytest.raises(UserError, match="not text in UTF-8"):
        list(read_text_rows(path))


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet"])
def test_a_file_that_is_missing_is_one_sentence(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: No such file"):
        list(read_text_rows(tmp_path / name))


def test_a_text_file_has_no_other_columns(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"no column 'id'; its columns are text\. .* with --keep"):
        list(read_text_rows(tmp_path / "a.txt", keep=["id"]))
