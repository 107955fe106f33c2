"""Files in folders: which count, in which order, and the class that a folder gives to its files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from primal_attention.support.command import UserError, did_you_mean

__all__ = ["MAX_FILES", "folder_classes", "list_files", "walk_files"]

MAX_FILES = 100_000
"""Most files of a folder."""


def walk_files(root: Path, endings: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the files of a folder and of the folders inside, in no order; hidden ones do not count.

    Args:
        root: The folder.
        endings: Endings in lower case that count; by default all.

    Raises:
        UserError: If there is no such folder, or too many files are in it.
    """
    if not root.is_dir():
        beside = [p.name for p in root.parent.glob("*/")] if root.parent.is_dir() else []
        raise UserError(f"there is no folder {root}.{did_you_mean(root.name, beside)}")
    count = 0
    for path in root.rglob("*"):
        if endings and path.suffix.lower() not in endings:
            continue
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_file():
            count += 1
            if count > MAX_FILES:
                raise UserError(
                    f"{root} has more than {MAX_FILES:,} files, the most that are read; split the "
                    "folder."
                )
            yield path


def list_files(root: Path, endings: Sequence[str]) -> list[Path]:
    """Return the files of :func:`walk_files`, sorted by path; at least one.

    Raises:
        UserError: Also if no file has one of the endings.
    """
    found = sorted(walk_files(root, endings))
    if not found:
        raise UserError(f"{root} holds no files that end in {', '.join(endings)}.")
    return found


def folder_classes(root: Path, files: Sequence[Path]) -> list[str]:
    """Return the class of every file: the name of the folder directly inside ``root``.

    Raises:
        UserError: If a file lies in ``root`` itself.
    """
    places = [file.relative_to(root).parts for file in files]
    if any(len(parts) < 2 for parts in places):
        raise UserError(f"{root} has files without a class; put them into one folder a class.")
    return [parts[0] for parts in places]
