"""Tables of a user: every line is a row, and what pandas finds wrong is a sentence."""

import gzip

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files.tables import read_table, take_labels
from primal_attention.tasks.sources import look_at

pandas = pytest.importorskip("pandas")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n\n3,4\n", "line 3 is blank; remove the line"),
        (b"a,b\r\n1,2\r\n  \r\n3,4\r\n", "line 3 is blank; remove the line"),
        (b'text\n"one\n\ntwo"\n\nthree\n', "line 5 is blank; remove the line"),
        (b"a,b\n1,2,\n3,4,\n", "rows have more fields than the 2 names of its header"),
        (b"a,b\n1,2,3\n", "rows have more fields than the 2 names of its header"),
        (b"a,b\n1,2\n3,4,5\n", "line 3 has 3 fields, others have 2"),
        (b"a,b,a\n1,2,3\n", "two columns have the name 'a'"),
        (b'a,b\n1,"2\n3,4\n', "a quotation mark in row 1 has no second one"),
        (b"a,b\r1,2\r3,4\r", "a line has a carriage return inside"),
        (b"a,b\n1,caf\xe9\n", "not text in UTF-8: it has the byte 0xe9"),
    ],
)
def test_a_table_that_is_none_is_a_sentence(tmp_path, content, words):
    for name in ("t.csv", "t.csv.gz"):
        packed = gzip.compress(content) if name.endswith(".gz") else content
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(UserError, match=f"{name}.*{words}"):
            read_table(tmp_path / name)


def test_blank_lines_in_texts_and_at_the_end_are_no_rows(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('\ufefftext,b\n"one\n\ntwo",1\n"5"" pipe",2\n5" pipe,3\n,\n\n \n', "utf-8")
    frame = read_table(path, words=("text", "none"))
    assert frame["text"].tolist() == ["one\n\ntwo", '5" pipe', '5" pipe', ""]
    # a long field is no error
    path.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read_table(path)["text"][0]) == 200_000


def test_words_are_kept_as_they_are_written(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,label\n1,NA\n2,01\n3,null\n4,1_0\n")
    frame = read_table(path, words=("label",))
    assert take_labels(frame, "label", path) == ["NA", "01", "null", "1_0"]
    path.write_text("x,label\n1,a\n2,\n")
    with pytest.raises(UserError, match="1 of 2 rows have no 'label', the first is row 2"):
        take_labels(read_table(path, words=("label",)), "label", path)


def test_parquet_files_are_checked_like_others(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    pandas.DataFrame({"a": np.arange(1000)}).to_parquet(path)
    data = path.read_bytes()
    for damaged in (data[:-200], data[:8], b"PAR1" * 3, data[:4] + bytes(200) + data[204:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"t\.parquet is no Parquet file, or a damaged one"):
            read_table(path)
    pandas.DataFrame({"label": [[1], [2]]}).to_parquet(path)
    with pytest.raises(UserError, match="'label' holds lists"):
        take_labels(read_table(path), "label", path)
    assert look_at(path).columns["label"].kind == "text"


def test_a_field_does_not_end_at_a_nul_byte(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n1,a\n2,b\0c\n")
    with pytest.raises(UserError, match=r"a\.csv, line 3 has a NUL byte"):
        read_table(path)
