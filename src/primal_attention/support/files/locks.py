"""Locks: a folder has one writer at a time."""

import fcntl
import json
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.output import remove_temporary

__all__ = ["locked"]

_FILE = ".lock"
_held: set[int] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; only one process can, and only once.

    The operating system keeps the lock and releases it when its process ends, however it ends. So
    there are no stale locks: a file ``.lock`` that a killed process left means nothing by itself.
    Temporary files that a killed process left in the folder are removed.

    Args:
        folder: Made if it is not there. Folders inside it have locks of their own.

    Raises:
        UserError: If another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = _lock(folder)
    _held.add(handle)
    try:
        remove_temporary(folder)
        yield
    finally:
        if handle in _held:  # a forked process has left it to its parent
            _held.remove(handle)
            with suppress(OSError):
                (folder / _FILE).unlink()
            os.close(handle)


def _lock(folder: Path) -> int:
    """Return an open file that holds the lock."""
    path = folder / _FILE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(handle)
            os.close(handle)
            raise UserError(
                f"{folder} is in use by {holder}; wait until it ends or stop it, or choose another "
                "folder."
            ) from error
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}); make sure that no other process "
                "writes into it.",
                stacklevel=4,
            )
        if _is_file(path, handle):
            break
        os.close(handle)  # its holder removed the file before it let go
    with suppress(OSError):  # a full disk; the name of the holder is for people only
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
    return handle


def _is_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    try:
        content = json.loads(os.pread(handle, 1000, 0))
        return f"process {int(content['pid'])} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _leave_to_parent() -> None:
    """Close the locks in a new process; workers that load data would hold them after its end."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_parent)
