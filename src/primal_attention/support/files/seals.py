"""Sealed folders: ``SHA256SUMS`` lists the checksums of their files.

A flipped byte, an incomplete copy or an interrupted save is an error instead of other numbers. The
standard tool reads the same list: ``sha256sum -c SHA256SUMS``.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from primal_attention.support.command import UserError
from primal_attention.support.files.text import read_bytes
from primal_attention.support.output import write_atomically

__all__ = ["SUMS", "SealedFolder", "UnsealedWarning", "write_sealed"]

SUMS = "SHA256SUMS"
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


def write_sealed(
    folder: Path, files: Mapping[str, str | bytes], *, parts: Sequence[str] = ()
) -> None:
    """Write files into a folder, each completely or not at all, and their checksums last.

    Checksums of other files stay in the list as long as the files are there.

    Args:
        folder: Made if it is not there.
        files: Their contents by name.
        parts: Sealed folders inside, already written, that belong to these files.
    """
    data = {name: c.encode() if isinstance(c, str) else c for name, c in files.items()}
    for name, content in data.items():
        write_atomically(folder / name, content)
    data |= {f"{part}/{SUMS}": (folder / part / SUMS).read_bytes() for part in parts}
    try:
        known = _read_sums(folder) or {}
    except UserError:
        known = {}  # a damaged list is replaced
    sums = {name: digest for name, digest in known.items() if (folder / name).is_file()}
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    # last: if a kill comes first, the old list does not fit the new files, and reading says so
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    write_atomically(folder / SUMS, "".join(lines))


def _read_sums(folder: Path) -> dict[str, str] | None:
    path = folder / SUMS
    if not path.is_file():
        return None
    lines = read_bytes(path, _MAX_SUMS).decode("utf-8", "replace").split("\n")
    found = [_LINE.fullmatch(line) for line in lines if line]
    if not all(found):
        raise UserError(f"{path} is damaged; restore or save the whole folder again.")
    return {match[2]: match[1] for match in found if match}
