"""Sealed folders."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SUMS,
    SealedFolder,
    UnsealedWarning,
    parse_tensors,
    read_tensors,
    to_bytes,
    write_sealed,
)


def _read_all(path: Path) -> list[bytes]:
    folder = SealedFolder(path)
    return [folder.read(name) for name in ("a.json", "b.bin")]


def test_every_flipped_byte_of_every_file_is_noticed(tmp_path: Path) -> None:
    write_sealed(tmp_path, {"a.json": '{"a": 1}', "b.bin": bytes(range(20))})
    for name in ("a.json", "b.bin", SUMS):
        good = (tmp_path / name).read_bytes()
        for i in range(len(good)):
            damaged = bytearray(good)
            damaged[i] ^= 4
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(UserError, match=r"damaged|not that of"):
                _read_all(tmp_path)
        (tmp_path / name).write_bytes(good)
    assert SealedFolder(tmp_path).read("b.bin") == bytes(range(20))


def test_the_standard_tool_agrees(tmp_path: Path) -> None:
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("sha256sum is not installed")
    write_sealed(tmp_path, {"a b.json": "{}"})
    command = [tool, "-c", "--strict", "--quiet", SUMS]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    (tmp_path / "a b.json").write_text("[]")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


def test_parts_belong_to_their_folder(tmp_path: Path) -> None:
    for name, content in (("one", "1"), ("two", "2")):
        write_sealed(tmp_path / name, {"task": content, "model": {"w": content}})
    assert SealedFolder(tmp_path / "one").part("model").read("w") == b"1"
    shutil.rmtree(tmp_path / "one" / "model")
    shutil.copytree(tmp_path / "two" / "model", tmp_path / "one" / "model")
    with pytest.raises(UserError, match="not that of"):
        SealedFolder(tmp_path / "one").part("model")


def test_later_files_join_the_list_and_removed_ones_leave_it(tmp_path: Path) -> None:
    write_sealed(tmp_path, {"a": "1"})
    write_sealed(tmp_path, {"b": "2"})
    folder = SealedFolder(tmp_path)
    assert (folder.read("a"), folder.read("b")) == (b"1", b"2")
    (tmp_path / "a").unlink()
    write_sealed(tmp_path, {"b": "3"})
    assert set(SealedFolder(tmp_path).sums or ()) == {"b"}


def test_a_folder_without_checksums_is_read_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    with pytest.warns(UnsealedWarning, match="has no SHA256SUMS"):
        assert SealedFolder(tmp_path).read("a") == b"1"
    write_sealed(tmp_path, {"b": "1"})
    with pytest.raises(UserError, match="not that of"):
        SealedFolder(tmp_path).read("a")


def test_damaged_tensors_are_a_sentence(tmp_path: Path) -> None:
    data = to_bytes({"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    path = tmp_path / "model.safetensors"
    for damaged in (b"", data[:20], data[:-1], b"\xff" * 8 + data[8:], b"\x80\x04."):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
            read_tensors(path)
    assert parse_tensors(data, "x")["a"].tolist() == [0, 1, 2]


def test_a_folder_is_checked_as_a_whole(tmp_path: Path) -> None:
    write_sealed(tmp_path, {"a": "1", "b": "2"})
    SealedFolder(tmp_path).check()
    (tmp_path / "b").unlink()
    with pytest.raises(UserError, match="b: No such file"):
        SealedFolder(tmp_path).check()
    (tmp_path / SUMS).unlink()
    with pytest.warns(UnsealedWarning):
        folder = SealedFolder(tmp_path)
    with pytest.raises(UserError, match="has no SHA256SUMS"):
        folder.check()
