"""``primal data``: public data sets, where they come from and where they belong."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from primal_attention.cli.list import aligned
from primal_attention.datasets.public import (
    PublicSet,
    checksum,
    data_folder,
    fetch,
    find_set,
    public_sets,
)
from primal_attention.support.command import UserError, user_errors
from primal_attention.support.settings import parse

__all__ = ["main"]


@dataclass(frozen=True)
class DataCommand:
    """List public data sets, say where one comes from and belongs, or download it."""

    action: Annotated[Literal["list", "where", "fetch"], tyro.conf.Positional] = "list"
    """What to do: list all sets, show where one comes from and belongs, or fetch it."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of the set."""
    root: Path | None = None
    """Folder of the sets; by default that of the environment variable PRIMAL_DATA."""
    mirror: str | None = None
    """Address of a folder laid out like PRIMAL_DATA, to download from instead of the publisher."""


def main(argv: list[str]) -> int:
    """List, explain or download."""
    options = parse(DataCommand, argv, prog="primal data")
    if options.action == "list" or (options.action == "where" and not options.name):
        print(_listing(options.root))
    elif options.action == "where":
        print(_explain(options.name, find_set(options.name), options.root))
    elif not options.name:
        raise UserError("which set? primal data list shows them; write primal data fetch NAME.")
    else:
        with user_errors("", OSError):
            paths = fetch(options.name, data_folder(options.root), mirror=options.mirror)
        print("\n".join(f"Saved {path}" for path in paths))
    return 0


def _listing(root: Path | None) -> str:
    rows = [
        [name, found.folder, _state(found, root), found.about]
        for name, found in public_sets().items()
    ]
    table = aligned([["set", "folder", "state", "what it is"], *rows])
    folder = root or os.environ.get("PRIMAL_DATA") or "not set; it names the folder of all sets"
    return (
        f"{table}\n\nPRIMAL_DATA: {folder}\n"
        "primal data where NAME shows source, licence and checksums; primal data fetch NAME "
        "downloads."
    )


def _state(found: PublicSet, root: Path | None) -> str:
    if root is None and not os.environ.get("PRIMAL_DATA"):
        return "–"
    absent = found.missing(data_folder(root))
    return "here" if not absent else "absent" if len(absent) == len(found.files) else "incomplete"


def _explain(name: str, found: PublicSet, root: Path | None) -> str:
    """Return source, terms and files of a set; files that are there are checked."""
    is_set = root is not None or bool(os.environ.get("PRIMAL_DATA"))
    folder = data_folder(root) if is_set else Path("$PRIMAL_DATA")
    lines = [f"{name}: {found.about}", f"source  {found.page}", f"terms   {found.terms}"]
    if found.note:
        lines.append(f"note    {found.note}")
    for file, expected in found.files.items():
        path = folder / found.folder / file
        state = "absent"
        if path.is_file():
            with user_errors(str(path)):
                state = "correct" if checksum(path) == expected else "DIFFERS"
        lines += [f"file    {path}  ({state})", f"        sha256 of its content {expected}"]
    how = f"primal data fetch {name}" if found.is_downloadable else found.by_hand(folder)
    return "\n".join([*lines, f"get it  {how}"])
