"""Text files."""

import gzip
import lzma
from pathlib import Path

import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import read_bytes, read_lines, read_text


def test_only_line_feeds_end_a_line_and_empty_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\fpage\r\n\ntwo\u0085x\u2028y\x1cz\n".encode())
    assert read_lines(path) == ["one\fpage", "", "two\u0085x\u2028y\x1cz"]
    path.write_bytes(b"no end")
    assert read_lines(path) == ["no end"]
    path.write_bytes(b"")
    assert read_lines(path) == []


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    for name, content, words in [
        ("a.txt", b"caf\xe9", "the byte 0xe9"),
        ("a.txt.gz", b"plain", "Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"words" * 100)[:-12], "Compressed file ended"),
        ("a.txt.xz", lzma.compress(b"words" * 100)[:-12], "Compressed file ended"),
        ("a.txt.xz", b"plain", "not supported"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.*{words}"):
            read_text(tmp_path / name)


def test_size_is_limited_after_decompression(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"0" * 1_000_000))
    with pytest.raises(UserError, match=r"more than 2,000 bytes.*; split the file"):
        read_text(path, 2000)
    with pytest.raises(UserError, match="more than 100 bytes"):
        read_bytes(path, 100)
    with pytest.raises(UserError, match="directory"):
        read_bytes(tmp_path)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(9_000_000_000_000)  # without blocks on the disk
    for read in (read_text, read_lines, read_bytes):
        with pytest.raises(UserError, match="more than 8,000,000,000 bytes"):
            read(path)
