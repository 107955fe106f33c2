"""A folder has one writer; what a killed one left is removed; files have ordinary permissions."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import locked
from primal_attention.support.output import remove_folder, remove_temporary, write_atomically

_HOLD = """
import sys, time
from pathlib import Path
from primal_attention.support.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        words = f"in use by process {other.pid} on"
        with pytest.raises(UserError, match=words), locked(tmp_path):
            pass
        os.kill(other.pid, signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path), pytest.raises(UserError, match="in use"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir()), "the file of the lock goes with it"


def test_a_folder_inside_has_a_lock_of_its_own(tmp_path: Path) -> None:
    with locked(tmp_path), locked(tmp_path / "inside"), locked(tmp_path / "another"):
        pass


def _forked(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_a_forked_process_does_not_end_the_lock(tmp_path: Path) -> None:
    def leave() -> None:
        with pytest.raises(UserError, match=f"process {os.getppid()}"), locked(tmp_path):
            pass

    with locked(tmp_path):
        assert os.waitpid(_forked(leave), 0)[1] == 0
        assert (tmp_path / ".lock").exists()


def test_a_child_of_a_killed_process_does_not_keep_its_lock(tmp_path: Path) -> None:
    pids, folder = tmp_path / "pids", tmp_path / "folder"

    def lock_and_fork() -> None:
        with locked(folder):
            child = _forked(lambda: time.sleep(60))
            write_atomically(pids, str(child))
            time.sleep(60)

    holder = _forked(lock_and_fork)
    while not pids.exists():
        time.sleep(0.01)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        with locked(folder):
            pass
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


def test_a_lock_on_a_file_that_its_holder_just_removed_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = fcntl.flock, list[int]()

    def removed_meanwhile(handle: int, flags: int) -> None:
        if flags & fcntl.LOCK_EX:
            calls.append(handle)
            if len(calls) == 1:
                (tmp_path / ".lock").unlink()
        flock(handle, flags)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with locked(tmp_path), pytest.raises(UserError, match="in use"), locked(tmp_path):
        pass
    assert len(calls) == 3


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    def enter() -> str:
        try:
            with locked(tmp_path):
                return "inside"
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            assert f"in use by process {os.getpid()} on" in pool.submit(enter).result()
            assert (tmp_path / ".lock").exists()
        assert pool.submit(enter).result() == "inside"
        # the lock is that of the process: another thread may let it go
        with ExitStack() as lock:
            pool.submit(lock.enter_context, locked(tmp_path)).result()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_where_the_system_has_no_locks_a_warning_says_so(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, flags: int) -> None:
        raise OSError(number, "No locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked \(No locks\); make sure that no other"),
        locked(tmp_path),
    ):
        assert not list(tmp_path.iterdir()), "no file says that there is a lock"


def test_only_one_of_many_that_come_and_go_is_inside(tmp_path: Path) -> None:
    """The file of the lock is removed at the end, which must not let two in."""
    inside, clashes = tmp_path / "inside", tmp_path / "clash"

    def come_and_go() -> None:
        done = 0
        while done < 20:
            try:
                with locked(tmp_path / "folder"):
                    try:
                        inside.mkdir()
                    except FileExistsError:
                        clashes.touch()
                    inside.rmdir()
                    done += 1
            except UserError:
                pass

    for pid in [_forked(come_and_go) for _ in range(3)]:
        assert os.waitpid(pid, 0)[1] == 0
    assert not clashes.exists()
    assert not inside.exists()


def test_leftovers_go_when_the_next_writer_comes(tmp_path: Path) -> None:
    stale = [tmp_path / ".a.csv.0123abcd.tmp", tmp_path / ".b.0123abcd.tmp" / "file"]
    kept = [tmp_path / name for name in (".a.tmp", "a.0123abcd.tmp", ".a.0123abcg.tmp", ".env")]
    for path in (*stale, *kept):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with locked(tmp_path):
        assert not any(path.exists() for path in stale)
        assert all(path.exists() for path in kept)


def test_temporary_names_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    (tmp_path / "folder").mkdir()
    with monkeypatch.context() as patch:
        for place in ("os.replace", "shutil.rmtree"):
            patch.setattr(place, kill)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KilledError):
            write_atomically(tmp_path / "a.csv", "x")
        with pytest.raises(KilledError):
            remove_folder(tmp_path / "folder")
    assert len(list(tmp_path.iterdir())) == 2
    assert not (tmp_path / "folder").exists()
    remove_temporary(tmp_path, tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    umask = 0o027  # neither the usual one nor that of private files
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_write_that_fails_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"):
        write_atomically(tmp_path / "a", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
