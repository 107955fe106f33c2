"""Locks: a folder has one writer at a time.

``filelock`` holds the lock. This module adds the message that names the holder, and removes the
file of the lock, which ``filelock`` leaves behind.
"""

import json
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from primal_attention.support.command import UserError
from primal_attention.support.output import remove_temporary

__all__ = ["locked"]


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
    path = folder / ".lock"
    # a soft lock, the fallback where the system has none, would outlive a killed process
    lock = FileLock(
        path,
        thread_local=False,
        blocking=False,
        fallback_to_soft=False,
        on_acquired=_write_holder,
    )
    _acquire(lock, path)
    try:
        remove_temporary(folder)
        yield
    finally:
        # a forked process that comes here does not hold the lock: its parent does
        if lock.is_locked:
            # before the release: afterwards the file may be that of the next holder
            with suppress(OSError):
                path.unlink()
            lock.release()


def _acquire(lock: FileLock, path: Path) -> None:
    """Acquire a lock, or raise a :class:`UserError` that names its holder."""
    while True:
        try:
            lock.acquire()
            return
        except Timeout as error:
            # without the file the holder has just let go: try again
            if path.exists():
                raise UserError(
                    f"{path.parent} is in use by {_holder(path)}; wait until it ends or stop it, "
                    "or choose another folder."
                ) from error
        except OSError as error:
            if error.filename is not None:
                raise  # the file cannot be opened, for example in a folder that is read-only
            warnings.warn(
                f"{path.parent} cannot be locked ({error.strerror}); make sure that no other "
                "process writes into it.",
                stacklevel=4,
            )
            # nobody can lock it, so that its file says nothing
            with suppress(OSError):
                path.unlink()
            return


def _write_holder(handle: int) -> None:
    """Write who holds the lock into its open file."""
    with suppress(OSError):  # a full disk; the name of the holder is for people only
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode())


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_bytes()[:1000])
        return f"process {int(content['pid'])} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
