"""Locks: a folder has one writer at a time."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primal_attention.command import UserError

__all__ = ["locked"]

_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; only one process can.

    The operating system keeps the lock and releases it when its process ends, however it ends. So
    there are no stale locks: the file ``.lock`` stays and means nothing by itself. It says which
    process has or had the lock.

    Args:
        folder: Made if it is not there.

    Raises:
        UserError: If another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by {_holder(handle)}; wait until it ends or stop it, or "
                "choose another folder."
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    try:
        content = json.loads(os.pread(handle, 1000, 0))
        return f"process {int(content['pid'])} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
