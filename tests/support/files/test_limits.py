"""A file of exactly the largest size is read, and one byte more is refused, in every format."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.house.rows import each

from primal_attention.support.command import UserError
from primal_attention.support.files import read_array, read_arrays, read_bytes, read_json, read_text

READERS: list[tuple[str, Callable[[Path], object], Callable[..., object], int]] = [
    ("bytes", lambda path: path.write_bytes(b"a" * 100), read_bytes, 100),
    ("text", lambda path: path.write_text("a" * 100), read_text, 100),
    ("json", lambda path: path.write_text('{"a": 1}'.ljust(100)), read_json, 100),
    ("text.gz", lambda path: path.write_bytes(gzip.compress(b"a" * 900)), read_text, 900),
    # an array counts without its header, members of an archive with it
    ("array.npy", lambda path: np.save(path, np.zeros(50)), read_array, 400),
    ("arrays.npz", lambda path: np.savez(path, a=np.zeros(50)), read_arrays, 528),
]


@each("name, write, read, size", READERS)
def test_the_limit_itself_is_allowed(name, write, read, size, tmp_path):
    write(tmp_path / name)
    read(tmp_path / name, max_bytes=size)
    with pytest.raises(UserError, match=r"bytes|large"):
        read(tmp_path / name, max_bytes=size - 1)
