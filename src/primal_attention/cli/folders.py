"""Folders that a command writes whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primal_attention.support.command import UserError

__all__ = ["check_folder", "new_folder"]


def check_folder(out: Path, marker: str, *, overwrite: bool, source: Path) -> None:
    """Raise if a command must not write to ``out``.

    Args:
        out: The folder to write.
        marker: File by which a folder of this command is recognised.
        overwrite: Allow to replace such a folder.
        source: The folder that the command reads; it must not be inside ``out``.
    """
    if out.is_file():
        raise UserError(f"--out {out} is a file; name a folder.")
    if source.resolve().is_relative_to(out.resolve()):
        raise UserError(f"--out {out} would replace the model in {source}; name another folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out {out} is not empty; name another folder or add --overwrite.")
    if not (out / marker).is_file():
        raise UserError(
            f"--out {out} was not written by this command (it has no {marker}), so --overwrite "
            "does not replace it; name another folder."
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``out``, and move it to ``out`` if no error occurs.

    A folder that is already there is removed only after the new one is complete.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (out.with_name(f".{out.name}.{kind}.{os.getpid()}") for kind in ("new", "old"))
    temporary.mkdir()
    try:
        yield temporary
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        raise
