"""Sealed folders: ``SHA256SUMS`` lists the checksums of their files.

A flipped byte, an incomplete copy or an interrupted save is an error instead of other numbers. The
standard tool reads the same list: ``sha256sum -c SHA256SUMS``.

A save replaces all files or none. It does not rename the folder itself: a user may keep other files
there, stand in it, or have no right to write beside it.
"""

import errno
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.files.headers import check_large_weights
from primal_attention.support.files.locks import locked
from primal_attention.support.files.text import read_bytes
from primal_attention.support.output import (
    flush_folder,
    remove_folder,
    temporary_path,
    write_atomically,
)

__all__ = [
    "SUMS",
    "SealedFolder",
    "UnsealedWarning",
    "finish_save",
    "new_folder",
    "save_sealed",
    "write_sealed",
]

SUMS = "SHA256SUMS"
_NEW = ".new"
"""Files of a save that are complete and not yet in place."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\n]+)")
_MAX_SUMS = 1_000_000
_MAX_BYTES = 200_000_000_000


class UnsealedWarning(UserWarning):
    """A folder has no checksums, so that damage of its files is not noticed."""


class SealedFolder:
    """Reads the files of a folder and checks them against its checksums.

    A folder without checksums is read too, with an :class:`UnsealedWarning`: earlier versions of
    the library wrote none.

    Args:
        path: The folder.

    Raises:
        UserError: If the list of checksums is damaged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_sealed(folder, {"a.json": "{}"})
        >>> SealedFolder(folder).read("a.json")
        b'{}'
        >>> _ = (folder / "a.json").write_text("[]")
        >>> SealedFolder(folder).read("a.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        primal_attention.support.command.UserError: .../a.json was changed or damaged...
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        finish_save(self.path)
        self.sums = _read_sums(self.path)
        if self.sums is None and self.path.is_dir():
            warnings.warn(
                f"{self.path} has no {SUMS}; an earlier version saved it, or the file was lost. "
                "Damage of its files is not noticed; save it again.",
                UnsealedWarning,
                stacklevel=3,
            )

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            UserError: If the file cannot be read, or is not what was saved.
        """
        path = self.path / name
        if path.suffix == ".safetensors":
            check_large_weights(path)
        # the checksum is that of the bytes that are returned: the file may change after the read
        data = read_bytes(path, _MAX_BYTES)
        if self.sums is not None and self.sums.get(name) != hashlib.sha256(data).hexdigest():
            raise UserError(
                f"{path} was changed or damaged after it was saved, or its save was interrupted: "
                f"its content is not that of {SUMS}. Restore or save the whole folder."
            )
        return data

    def check(self) -> None:
        """Read every file of the list.

        Raises:
            UserError: If one of them is not what was saved, or if there is no list.
        """
        if self.sums is None:
            raise UserError(f"{self.path} has no {SUMS}; restore or save the whole folder.")
        for name in self.sums:
            self.read(name)

    def part(self, name: str) -> "SealedFolder":
        """Return a sealed folder inside this one.

        Raises:
            UserError: If it is not the one that was saved with this one.
        """
        if self.sums is not None:
            self.read(f"{name}/{SUMS}")
        return SealedFolder(self.path / name)


Files = Mapping[str, "str | bytes | Files"]
"""Contents by name; a mapping is a sealed folder inside."""


def save_sealed(folder: Path, files: Files) -> None:
    """Replace files of a folder, all of them or none, as its one writer.

    Args:
        folder: Made if it is not there; locked meanwhile.
        files: As for :func:`write_sealed`.

    Raises:
        UserError: If another process writes into the folder.
    """
    with locked(folder):
        write_sealed(folder, files)


def write_sealed(folder: Path, files: Files) -> None:
    """Replace files of a folder and their checksums: all of them or none, also after a kill.

    Only for the one writer of the folder; :func:`save_sealed` locks it. Other files stay, and so do
    their checksums.

    Args:
        folder: Made if it is not there.
        files: Their contents by name. A mapping becomes a sealed folder inside, which belongs to
            the other files.
    """
    new = temporary_path(folder / "new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _move_into_place(folder)
        _write(files, new, folder)
        # this decides: before it a kill leaves the old files, after it finish_save has the new ones
        new.rename(folder / _NEW)
        flush_folder(folder)
        _move_into_place(folder)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            # the caller knows the folder, not the names of files that are not complete yet
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder whose files replace those of ``folder`` if no error occurs.

    Whoever is killed meanwhile leaves the old files or, for :func:`finish_save`, all new ones. The
    folder is locked; files that the new ones do not replace are removed at the end.

    Raises:
        UserError: If another process writes into the folder.
    """
    try:
        with locked(folder):
            _move_into_place(folder)
            new = temporary_path(folder / "new")
            try:
                new.mkdir()
                yield new
                names = {path.name for path in new.iterdir()}
                new.rename(folder / _NEW)
                flush_folder(folder)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            for path in list(folder.iterdir()):
                if path.name not in names and not path.name.startswith("."):
                    remove_folder(path) if path.is_dir() else path.unlink()
            _move_into_place(folder)
    except BaseException:
        with suppress(OSError):
            folder.rmdir()  # if this made it, it is empty
        raise


def finish_save(folder: Path) -> None:
    """Finish a save that was killed after it had written everything; most folders need nothing.

    Raises:
        UserError: If the save is still going on, or the folder cannot be changed.
    """
    if not (folder / _NEW).is_dir():
        return
    try:
        with locked(folder):
            _move_into_place(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: the process that saved it was killed before its new files were in place, "
            f"and they cannot be moved now ({error.strerror}). They are complete: read the folder "
            "once as a user who may write into it."
        ) from error


def _write(files: Files, new: Path, folder: Path) -> None:
    """Write files into ``new`` as they are to lie in ``folder``, and their checksums."""
    sums = _sums_that_stay(folder)
    for name, content in files.items():
        is_folder = isinstance(content, Mapping)
        # now, because a move that fails would leave a mixture
        if (folder / name).exists() and (folder / name).is_dir() != is_folder:
            raise FileExistsError(
                errno.EEXIST, f"{name} is there as a {'file' if is_folder else 'folder'}"
            )
        if isinstance(content, Mapping):
            _write(content, new / name, folder / name)
            name, data = f"{name}/{SUMS}", (new / name / SUMS).read_bytes()
        else:
            data = content.encode() if isinstance(content, str) else content
            write_atomically(new / name, data)
        sums[name] = hashlib.sha256(data).hexdigest()
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    write_atomically(new / SUMS, "".join(lines))
    flush_folder(new)


def _sums_that_stay(folder: Path) -> dict[str, str]:
    """Return the checksums of the files that are in a folder."""
    try:
        known = _read_sums(folder) or {}
    except UserError:
        known = {}  # a damaged list is replaced
    return {name: digest for name, digest in known.items() if (folder / name).is_file()}


def _move_into_place(folder: Path) -> None:
    """Move the files of a complete save over the old ones; a kill leaves the rest to the next."""
    new = folder / _NEW
    if not new.is_dir():
        return
    places = [new, *sorted(path for path in new.rglob("*") if path.is_dir())]
    for place in reversed(places):
        target = folder / place.relative_to(new)
        target.mkdir(exist_ok=True)
        # a folder of a stranger may hold a link, and a reader must not write where it leads
        if not target.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{target} leads out of its folder; save the whole folder again.")
        for path in list(place.iterdir()):
            os.replace(path, target / path.name)
        flush_folder(target)
        place.rmdir()


def _read_sums(folder: Path) -> dict[str, str] | None:
    path = folder / SUMS
    if not path.is_file():
        return None
    lines = read_bytes(path, _MAX_SUMS).decode("utf-8", "replace").split("\n")
    found = [_LINE.fullmatch(line) for line in lines if line]
    if not all(found):
        raise UserError(f"{path} is damaged; restore or save the whole folder again.")
    return {match[2]: match[1] for match in found if match}
