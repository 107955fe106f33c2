"""A save replaces all files of a folder or none, whenever its process is killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import (
    SealedFolder,
    finish_save,
    locked,
    new_folder,
    save_sealed,
    write_sealed,
)
from primal_attention.support.output import write_atomically

SIZE = 200_000


def _files(version: int) -> dict[str, object]:
    word = f"{version:08d}"
    return {"a.json": word, "z.bin": word * (SIZE // 8), "model": {"w": word * 1000, "c": word}}


def _version(folder: Path) -> int:
    """Return the version of a folder, all of whose files must be of one."""
    sealed = SealedFolder(folder)
    sealed.check()
    inner = sealed.part("model")
    inner.check()
    starts = [sealed.read("a.json"), sealed.read("z.bin"), inner.read("w"), inner.read("c")]
    found = {start[:8] for start in starts}
    assert len(found) == 1
    return int(found.pop())


def _forked(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid


def _kill_after(seconds: float, action: Callable[[], object]) -> None:
    """Run an action in a process that is killed so long after it has begun."""
    begun, begin = os.pipe()

    def announced() -> None:
        os.write(begin, b"!")
        action()

    pid = _forked(announced)
    os.read(begun, 1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(begun)
    os.close(begin)


def _save_for_ever(folder: Path, version: int) -> None:
    while True:
        version += 1
        save_sealed(folder, _files(version))


def kill_while_saving(folder: Path, kills: int, seed: int) -> int:
    """Kill processes that save; return how many versions of the folder were seen.

    After each kill the folder must hold one whole version, and none before the last one.
    """
    moments, start = random.Random(seed), time.monotonic()
    save_sealed(folder, _files(0))
    duration, seen = time.monotonic() - start, [0]
    while kills > 0 or len(seen) < 3:
        assert kills > -200, "the kills meet processes that save"
        kills -= 1
        _kill_after(moments.uniform(0, 2 * duration), partial(_save_for_ever, folder, seen[-1]))
        version = _version(folder)
        assert version >= seen[-1]
        if version > seen[-1]:
            seen.append(version)
        else:
            # a fork of a large process saves more slowly than the process itself
            duration *= 1.2
    return len(seen)


def test_a_killed_save_leaves_the_old_or_the_new_version(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    kill_while_saving(tmp_path, 20, seed=0)
    save_sealed(tmp_path, _files(1))
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")}
    inner = {f"model/{name}" for name in ("w", "c", "SHA256SUMS")}
    assert names == {"a.json", "z.bin", "model", "notes.txt", "SHA256SUMS"} | inner


def _replace_for_ever(folder: Path, version: int) -> None:
    while True:
        version += 1
        with new_folder(folder) as new:
            for name in ("a", f"only-{version}"):
                write_atomically(new / name, f"{version:08d}" * 1000)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    moments, start, folder = random.Random(0), time.monotonic(), tmp_path / "report"
    with new_folder(folder) as new:
        write_atomically(new / "a", "00000000")
    duration, version, kills = time.monotonic() - start, 0, 0
    while kills < 15 or version < 2:
        assert kills < 200, "the kills meet processes that save"
        kills += 1
        _kill_after(moments.uniform(0, 2 * duration), partial(_replace_for_ever, folder, version))
        finish_save(folder)
        found = int((folder / "a").read_text()[:8])
        assert found >= version
        duration *= 1.0 if found > version else 1.2
        assert not found or (folder / f"only-{found}").read_text() == (folder / "a").read_text()
        version = found
    with new_folder(folder) as new:
        write_atomically(new / "a", "b")
    assert [path.name for path in folder.iterdir()] == ["a"], "files of earlier versions are gone"


def test_a_report_that_fails_leaves_no_folder_or_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "report"

    def fail() -> None:
        with new_folder(folder) as new:
            write_atomically(new / "b", "half")
            raise KeyError

    for old in ([], ["a"]):
        with pytest.raises(KeyError):
            fail()
        assert [path.name for path in folder.glob("*")] == old
        assert folder.exists() == bool(old)
        write_atomically(folder / "a", "old")
    with new_folder(folder), pytest.raises(UserError, match="in use"), new_folder(folder):
        pass


@pytest.mark.slow
def test_three_hundred_kills_of_saves(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 300, seed=1)


@pytest.mark.parametrize("stopped", range(8))
def test_a_save_that_stops_after_any_file_is_finished_by_the_next_reader(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sealed(tmp_path, _files(1))
    replace, done = os.replace, list[Path]()

    def stop(source: Path, target: Path) -> None:
        if Path(source).parent.name in (".new", "model") and ".new" in Path(source).parts:
            done.append(target)
            if len(done) > stopped:
                raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        try:
            save_sealed(tmp_path, _files(2))
        except KeyboardInterrupt:
            assert len(done) == stopped + 1
    assert _version(tmp_path) == 2
    assert not (tmp_path / ".new").exists()


def test_the_next_save_also_finishes_one_that_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def stop(source: Path, target: Path) -> None:
        if Path(source).parent.name == ".new":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            save_sealed(tmp_path, {"a": "1"})
    assert [path.name for path in tmp_path.iterdir()] == [".new"]
    save_sealed(tmp_path, {"b": "2"})
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "SHA256SUMS"}
    SealedFolder(tmp_path).check()


def test_a_save_that_fails_leaves_the_old_version(tmp_path: Path) -> None:
    save_sealed(tmp_path, _files(1))
    with pytest.raises(FileExistsError, match="model is there as a folder") as failed:
        save_sealed(tmp_path, {"a.json": "2", "model": "not a folder"})
    assert failed.value.filename == str(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "z.bin", "model", "SHA256SUMS"}
    assert _version(tmp_path) == 1
    with pytest.raises(FileExistsError, match=r"a\.json is there as a file"):
        save_sealed(tmp_path, {"a.json": {"x": "not a file"}, "model": {"w": "2"}})
    assert _version(tmp_path) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", "z.bin", "model", "SHA256SUMS"}


def test_two_processes_do_not_save_into_one_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(UserError, match=f"is in use by process {os.getpid()} on .*wait until"),
    ):
        save_sealed(tmp_path, _files(1))


def test_a_reader_waits_for_no_save_but_says_who_saves(tmp_path: Path) -> None:
    save_sealed(tmp_path, _files(1))
    with locked(tmp_path):
        assert _version(tmp_path) == 1
        (tmp_path / ".new").mkdir()
        with pytest.raises(UserError, match="in use by process"):
            SealedFolder(tmp_path)
    assert _version(tmp_path) == 1


def test_a_link_in_a_folder_of_a_stranger_leads_nowhere(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    write_sealed(folder, {"a": "1"})
    (folder / "model").symlink_to(outside)
    (folder / ".new" / "model").mkdir(parents=True)
    (folder / ".new" / "model" / "keys").write_text("mine")
    with pytest.raises(UserError, match="model leads out of its folder"):
        finish_save(folder)
    assert not list(outside.iterdir())
