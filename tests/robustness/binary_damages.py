"""Damages of arrays and archives, tensors, pictures and Parquet files."""

import io
import json
import re
import struct
import zipfile
import zlib
from random import Random
from typing import Any

import numpy as np

from .text_damages import Damage, change_tree, flip_bits, truncate

__all__ = ["NPY", "NPZ", "PARQUET", "PICTURE", "TENSORS"]

# arrays


def _other_array(array: Any, rng: Random) -> Any:
    """Return an array of another type or shape, or with other values."""
    size, flat = array.size, array.copy().reshape(-1)
    is_number = array.dtype.kind in "iuf" and size
    choice = rng.randrange(14)
    if choice == 0 and is_number:
        flat[rng.randrange(size)] = rng.choice((-1, 0, 1, 2, 100, 127))
    elif choice == 1 and is_number:
        flat = flat.astype(float)
        flat[rng.randrange(size)] = rng.choice((np.nan, np.inf, 0.9, 1e25, -0.5, 1e300))
    elif choice == 2 and is_number:
        flat = flat.astype(float) + 0.25
    elif choice == 3 and is_number:
        flat = flat.astype(np.int64)
        flat[rng.randrange(size)] = rng.choice((2**62, -(2**62), 2**31, 10**9))
    elif choice == 4 and is_number:
        flat = flat.astype(complex)
    elif choice == 5:
        flat = flat.astype(str)
    elif choice == 6:
        return array[..., None]
    elif choice == 7:
        return np.asarray(rng.choice((3, 2.5, "x", True)))
    elif choice == 8:
        return array[:0]
    elif choice == 9:
        return np.array([{"x": 1}, None], dtype=object)
    elif choice == 10:
        return array[: max(1, len(array) // 2)] if array.ndim else array[None]
    elif choice == 11:
        return array.astype(rng.choice(("<M8[s]", "S3", "?", "f2"))) if is_number else array[:1]
    elif choice == 12:
        flat = flat[::-1]
    else:
        return np.zeros((0, 3, 0)) if rng.random() < 0.5 else array.T
    return flat.reshape(array.shape)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _other_npy(data: bytes, rng: Random) -> bytes:
    return _npy(_other_array(np.load(io.BytesIO(data)), rng))


def _npy_header(data: bytes, rng: Random) -> bytes:
    """Let the header of an array say something else; the numbers stay."""
    end = data.index(b"\n") + 1
    words = (
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 8), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2.5,), }",
        "{'descr': '<i4', 'fortran_order': True, 'shape': (1,) * 40, }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1, " + "1, " * 50 + "), }",
        "[" * 500,
        "{'shape': ()}",
    )
    header = rng.choice(words).encode().ljust(64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data[end:]


def _old_npy(data: bytes, rng: Random) -> bytes:
    return data[:6] + bytes([rng.choice((2, 3, 9))]) + data[7:]


def _pickled(data: bytes, rng: Random) -> bytes:
    return b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00]."


NPY: dict[str, Damage] = {
    "other array": _other_npy,
    "another array": _other_npy,
    "header of an array": _npy_header,
    "other version": _old_npy,
    "pickle": _pickled,
}

Members = dict[str, bytes]


def _unzip(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip(members: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def _member(change: Damage) -> Damage:
    def damage(data: bytes, rng: Random) -> bytes:
        members = _unzip(data)
        name = rng.choice(sorted(members))
        members[name] = change(members[name], rng)
        return _zip(members)

    return damage


def _zip_flags(data: bytes, rng: Random) -> bytes:
    """Change a field of the entries: encrypted, another method, terabytes."""
    changed = bytearray(data)
    for mark, flags, method, size in ((b"PK\3\4", 6, 8, 22), (b"PK\1\2", 8, 10, 24)):
        starts = [m.start() for m in re.finditer(re.escape(mark), data)]
        chosen = starts if rng.random() < 0.5 else starts[:1]
        for start in chosen:
            if rng.random() < 0.4:
                changed[start + flags] |= 1
            if rng.random() < 0.4:
                changed[start + method] = rng.choice((0, 9, 12, 14, 93, 99))
            if rng.random() < 0.4:
                changed[start + size : start + size + 4] = struct.pack("<I", 0xFFFFFFF0)
    return bytes(changed)


def _other_method(data: bytes, rng: Random) -> bytes:
    return _zip(_unzip(data), rng.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))


def _bomb(data: bytes, rng: Random) -> bytes:
    """Add an array that unpacks to 64 MB of zeros and promises terabytes."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (4398046511104,), }\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    members = _unzip(data)
    members[rng.choice(sorted(members))] = start + bytes(2**26)
    return _zip(members)


def _foreign_member(data: bytes, rng: Random) -> bytes:
    names = ("note.txt", "x", "../x.npy", "x/", "", "a" * 300 + ".npy", "é.npy")
    content = rng.choice((b"hello", b"", _npy(np.arange(3)), b"\x80\x04]."))
    return _zip({**_unzip(data), rng.choice(names): content})


def _lost_member(data: bytes, rng: Random) -> bytes:
    members = _unzip(data)
    del members[rng.choice(sorted(members))]
    return _zip(members)


def _renamed_member(data: bytes, rng: Random) -> bytes:
    members = _unzip(data)
    name = rng.choice(sorted(members))
    members[rng.choice(("x.npy", name.upper(), name[:-4]))] = members.pop(name)
    return _zip(members)


NPZ: dict[str, Damage] = {
    "other array": _member(_other_npy),
    "another array": _member(_other_npy),
    "one more array": _member(_other_npy),
    "header of an array": _member(_npy_header),
    "bytes of an array": _member(flip_bits),
    "end of an array": _member(truncate),
    "other version": _member(_old_npy),
    "member is a pickle": _member(_pickled),
    "fields of entries": _zip_flags,
    "more fields of entries": _zip_flags,
    "other compression": _other_method,
    "promises terabytes": _bomb,
    "foreign member": _foreign_member,
    "lost member": _lost_member,
    "renamed member": _renamed_member,
}

# tensors


def _tensor_header(data: bytes, rng: Random) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(change_tree(json.loads(data[8 : 8 + size]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def _tensor_size(data: bytes, rng: Random) -> bytes:
    return struct.pack("<Q", rng.choice((0, 1, 2**40, 2**63))) + data[8:]


def _tensor_values(data: bytes, rng: Random) -> bytes:
    """Change numbers only, so that the file stays a valid one."""
    (size,) = struct.unpack("<Q", data[:8])
    changed = bytearray(data)
    for _ in range(rng.choice((1, 16))):
        if 8 + size < len(data):
            changed[rng.randrange(8 + size, len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


TENSORS: dict[str, Damage] = {
    "header of tensors": _tensor_header,
    "length of the header": _tensor_size,
    "values of tensors": _tensor_values,
    "more values of tensors": _tensor_values,
}

# pictures and tables


def _png_size(data: bytes, rng: Random) -> bytes:
    """Let a PNG file promise another size, with a right checksum."""
    if data[12:16] != b"IHDR":
        return data
    width, height = rng.choice(((2**31 - 1, 2**31 - 1), (60_000, 60_000), (0, 5), (1, 10**9)))
    chunk = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]


PICTURE: dict[str, Damage] = {"size of a picture": _png_size}


def _column(data: bytes, rng: Random) -> bytes:
    import pandas as pd

    frame = pd.read_parquet(io.BytesIO(data))
    name, n = rng.choice(list(frame.columns)), len(frame)
    values = (
        [None] * n,
        [[1, 2]] * n,
        [{"a": 1}] * n,
        [b"\xff"] * n,
        ["x"] * n,
        [float("nan")] * n,
        [10**15] * n,
        [True] * n,
        list(pd.date_range("2024", periods=n)),
        [1e300] * n,
    )
    action = rng.randrange(4)
    if action == 0:
        frame = frame.drop(columns=name)
    elif action == 1:
        frame = frame.rename(columns={name: rng.choice(("", "x", "$\\frac$", "x" * 2000))})
    elif action == 2:
        frame = frame.iloc[:0]
    else:
        frame[name] = rng.choice(values)
    file = io.BytesIO()
    frame.to_parquet(file)
    return file.getvalue()


PARQUET: dict[str, Damage] = {"other column": _column, "another column": _column}
