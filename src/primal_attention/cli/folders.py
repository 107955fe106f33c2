"""Folders that a command may write."""

import os
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.files import finish_save

__all__ = ["check_folder"]


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
    if out.is_symlink() and not out.exists():
        raise UserError(f"--out {out} cannot be used: it is a link that leads nowhere.")
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
        raise UserError(f"--out {out} would replace the model in {source}; name another folder.")
    finish_save(out)
    # hidden files stay, and a killed process may have left some
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out {out} is not empty; name another folder or add --overwrite.")
    if not (out / marker).is_file():
        raise UserError(
            f"--out {out} was not written by this command (it has no {marker}), so --overwrite "
            "does not replace it; name another folder."
        )
