"""Files that never end, never begin or promise what no memory holds are refused at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SealedFolder,
    list_arrays,
    read_array,
    read_bytes,
    read_json,
    read_lines,
    read_start,
    read_tensors,
    read_yaml,
    write_sealed,
)
from primal_attention.support.files.tables import read_table
from primal_attention.support.output import is_same_place

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bytes": ("a.bin", read_bytes),
    "start": ("a.bin", lambda path: read_start(path, 4)),
    "lines": ("a.txt", read_lines),
    "lines, gz": ("a.txt.gz", read_lines),
    "lines, xz": ("a.txt.xz", read_lines),
    "json": ("a.json", read_json),
    "yaml": ("a.yaml", read_yaml),
    "array": ("a.npy", read_array),
    "mapped array": ("a.npy", lambda path: read_array(path, mmap=True)),
    "arrays": ("a.npz", list_arrays),
    "tensors": ("a.safetensors", read_tensors),
    "csv": ("a.csv", read_table),
    "parquet": ("a.parquet", read_table),
    "sealed": ("a.bin", lambda path: SealedFolder(path.parent).read(path.name)),
    "sealed tensors": ("a.safetensors", lambda path: SealedFolder(path.parent).read(path.name)),
}


@pytest.mark.parametrize("reader", READERS)
def test_devices_pipes_and_loops_of_links_are_refused(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    write_sealed(tmp_path, {"other": "1"})
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{name} is a device, pipe or socket; only ordinary"):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=rf"{name} is a device"):
        read(path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UserError, match=rf"{name}: Too many levels of symbolic links"):
        read(path)


def _sparse(path: Path, header: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)


def test_a_sparse_file_of_weights_is_refused_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + 10_000_000_000
    for header in (b"", (60_000_000_000).to_bytes(8, "little"), b"\x02" + bytes(7) + b"{}"):
        _sparse(path, header, size)
        with pytest.raises(UserError, match=r"model\.safetensors is damaged, or no safetensors"):
            read_tensors(path)
    content = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    header = len(content).to_bytes(8, "little") + content.encode()
    _sparse(path, header, len(header) + size)
    with pytest.raises(UserError, match="bytes, and this machine has"):
        read_tensors(path)
    write_sealed(tmp_path, {"a": "1"})
    with pytest.raises(UserError, match="bytes, and this machine has"):
        SealedFolder(tmp_path).read(path.name)


def test_a_table_of_100_000_columns_is_read(tmp_path: Path) -> None:
    path, names = tmp_path / "wide.csv", [f"c{i}" for i in range(100_000)]
    row = ",".join("1" for _ in names)
    path.write_text(f"{','.join(names)}\n{row}\n")
    assert read_table(path).shape == (1, 100_000)
    path.write_text(f"{','.join([*names[:-1], 'c7'])}\n{row}\n")
    with pytest.raises(UserError, match="two columns have the name 'c7'"):
        read_table(path)


def test_loops_of_links_are_one_place_or_two(tmp_path: Path) -> None:
    loop, other, link = (tmp_path / name for name in ("loop", "other", "link"))
    loop.symlink_to(loop)
    link.symlink_to(other)
    assert is_same_place(loop, loop)
    assert not is_same_place(loop, other)
    assert is_same_place(link, tmp_path / "." / "other")
