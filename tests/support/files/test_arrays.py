"""Arrays in files: nothing is unpickled, and headers are checked before memory is taken."""

import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import list_arrays, read_array, read_arrays


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=True)
    return buffer.getvalue()


def _promise(shape: str, descr: str = "'<f8'") -> bytes:
    """Return an array file whose header says something else than the 16 bytes that follow."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


def _npz(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    for array in [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "wörd"]),
        np.array(5),
        np.zeros((0, 3), np.float32),
        np.array(["2024-01-01"], "M8[D]"),
    ]:
        np.savez_compressed(tmp_path / "a.npz", x=array)
        np.save(tmp_path / "a.npy", array)
        for found in (read_arrays(tmp_path / "a.npz")["x"], read_array(tmp_path / "a.npy")):
            np.testing.assert_array_equal(found, array)
            assert found.dtype == array.dtype
            assert found.flags.writeable


def test_a_member_that_is_no_plain_array_is_refused(tmp_path: Path) -> None:
    for member, words in [
        (_npy(np.array([{}], object)), "Python objects and records are never read"),
        (_npy(np.zeros(2, [("a", "f8")])), "records are never read"),
        (_promise("(1000000000000,)"), "promises 8,000,000,000,000 bytes"),
        (_promise("(-1,)"), "impossible"),
        (_promise("(1,)"), "does not hold the 1 numbers"),
        (_promise("(" + "1," * 40 + ")"), "impossible"),
        (_promise("__import__('os')"), "no header"),
        (_promise("(2,)", "'O'"), "Python objects"),
        (b"\x93NUMPY\x09\x00", "no header"),
        (b"words", "no header"),
        (b"", "no header"),
    ]:
        archive = _npz(tmp_path / "a.npz", {"x.npy": member})
        with pytest.raises(UserError, match=rf"a\.npz.*'x'.*{re.escape(words)}"):
            read_arrays(archive)
        (tmp_path / "a.npy").write_bytes(member)
        for mmap in (False, True):
            if mmap and words.startswith("does not hold"):
                continue  # what follows the numbers is not looked at
            with pytest.raises(UserError, match=r"a\.npy"):
                read_array(tmp_path / "a.npy", mmap=mmap)


def test_archives_that_are_encrypted_or_packed_otherwise_are_refused(tmp_path: Path) -> None:
    plain = _npz(tmp_path / "a.npz", {"x.npy": _npy(np.arange(3))}).read_bytes()
    encrypted = bytearray(plain)
    for start in (b"PK\x03\x04", b"PK\x01\x02"):
        at = plain.index(start) + (6 if start == b"PK\x03\x04" else 8)
        encrypted[at] |= 1
    (tmp_path / "locked.npz").write_bytes(encrypted)
    with pytest.raises(UserError, match="'x' is encrypted"):
        read_arrays(tmp_path / "locked.npz")
    _npz(tmp_path / "lzma.npz", {"x.npy": _npy(np.arange(3))}, zipfile.ZIP_LZMA)
    with pytest.raises(UserError, match="compression 14"):
        read_arrays(tmp_path / "lzma.npz")
    with pytest.raises(UserError, match=r"member 'words\.txt' is no array"):
        read_arrays(_npz(tmp_path / "b.npz", {"words.txt": b"a"}))
    damaged = plain.replace(b"PK\x03\x04", b"PK\x03\x05", 1)
    (tmp_path / "c.npz").write_bytes(damaged)
    with pytest.raises(UserError, match="damaged"):
        read_arrays(tmp_path / "c.npz")


def test_an_archive_without_its_beginning_is_damaged(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", {"x.npy": _npy(np.arange(50)), "y.npy": _npy(np.arange(50))})
    data = path.read_bytes()
    for cut in (1, 30, 200):
        path.write_bytes(data[:4] + data[4 + cut :])
        with pytest.raises(UserError, match=r"a\.npz is a damaged \.npz archive; copy it again"):
            read_arrays(path)


def test_a_flipped_byte_of_the_content_is_noticed(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", {"x.npy": _npy(np.arange(50))}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.npz is a damaged \.npz archive; copy it again"):
        read_arrays(path)


def test_a_header_that_is_no_line_of_python_is_refused(tmp_path: Path) -> None:
    data = _npy(np.arange(3)).replace(b"}", b"(")
    (tmp_path / "a.npy").write_bytes(data)
    for path in (tmp_path / "a.npy", _npz(tmp_path / "a.npz", {"x.npy": data})):
        with pytest.raises(UserError, match=r"no header of a \.npy array that can be read"):
            (read_array if path.suffix == ".npy" else read_arrays)(path)


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    path = tmp_path / "a.npz"
    for content, words in [
        (pickle.dumps(Evil()), "pickles are never read"),
        (_npy(np.arange(3)), "single array"),
        (b"", "it is empty"),
        (b"x,y\n1,2\n", "save arrays with numpy.savez"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_arrays(path)
    assert not (tmp_path / "evil").exists()


def test_sizes_are_limited(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100_000))
    with pytest.raises(UserError, match="800,1"):
        read_arrays(tmp_path / "a.npz", max_bytes=1000)
    np.save(tmp_path / "a.npy", np.zeros(100_000))
    with pytest.raises(UserError, match="800,000 bytes"):
        read_array(tmp_path / "a.npy", max_bytes=1000)
    assert isinstance(read_array(tmp_path / "a.npy", mmap=True, max_bytes=1000), np.memmap)


def test_some_arrays_are_read_and_shapes_are_listed_without_the_others(tmp_path: Path) -> None:
    objects = np.array([{}], dtype=object)
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 3)), y=np.arange(4), odd=objects)
    assert list_arrays(tmp_path / "a.npz") == {"X": (4, 3), "y": (4,), "odd": (1,)}
    assert list(read_arrays(tmp_path / "a.npz", ("X", "y", "z"))) == ["X", "y"]
    with pytest.raises(UserError, match=r"array 'odd': .* Python objects"):
        read_arrays(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"b\.npz is not an \.npz archive: it is empty"):
        list_arrays(tmp_path / "b.npz")
