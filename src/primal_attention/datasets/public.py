"""Public data sets: where they come from, where they belong, and how to get them.

``public.yaml`` beside this module is the table. A set has a folder under that of the environment
variable ``PRIMAL_DATA``, and a checksum for every file. A checksum is of the content: compression,
and the order and compression of the arrays of an ``.npz`` file, do not change it.
"""

import gzip
import hashlib
import http.client
import lzma
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from primal_attention.support.command import UserError, did_you_mean
from primal_attention.support.files import read_arrays, read_yaml
from primal_attention.support.files.tables import FILE_ERRORS
from primal_attention.support.settings import build

__all__ = ["PublicSet", "checksum", "data_folder", "fetch", "find_set", "public_sets"]

_TABLE = Path(__file__).with_name("public.yaml")
_MAX_BYTES = 2_000_000_000
"""Largest download, and largest content of a file."""
_CHUNK = 1 << 20
_ERRORS: tuple[type[Exception], ...] = (http.client.HTTPException, *FILE_ERRORS)
"""What a network or an archive may raise."""
_TIMEOUT = 30.0
"""Seconds without an answer after which a download fails."""


@dataclass(frozen=True)
class PublicSet:
    """A public data set."""

    folder: str
    """Its folder under that of ``PRIMAL_DATA``."""
    about: str
    """What it is, in a few words."""
    page: str
    """Page of the publisher."""
    terms: str
    """Licence, or what the publisher asks for."""
    files: Mapping[str, str]
    """The sha256 of the content of every file, by name."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """Addresses of single files, by name."""
    archive: str | None = None
    """Address of an archive from which ``convert`` makes the files."""
    convert: str | None = None
    """``module:function``, from an archive and the name of a file to its bytes."""
    note: str = ""
    """How the files differ from those of the publisher."""

    @property
    def is_downloadable(self) -> bool:
        """Whether the publisher has the set in a form that gives these files."""
        return self.archive is not None or self.urls.keys() == self.files.keys()

    def missing(self, root: Path) -> list[Path]:
        """Return the files that are not in their place."""
        paths = (root / self.folder / name for name in self.files)
        return [path for path in paths if not path.is_file()]

    def by_hand(self, root: Path) -> str:
        """Return which files to put where."""
        names = ", ".join(self.files)
        note = f" {self.note}" if self.note else ""
        return f"Put {names} into {root / self.folder}. Source: {self.page} .{note}"


def public_sets() -> dict[str, PublicSet]:
    """Return all sets of the table by name.

    Example:
        >>> public_sets()["JapaneseVowels"].folder
        'uea/JapaneseVowels'
    """
    return {name: build(PublicSet, row, name) for name, row in read_yaml(_TABLE).items()}


def find_set(name: str) -> PublicSet:
    """Return a set by name.

    Raises:
        UserError: If there is none.
    """
    known = public_sets()
    if name not in known:
        raise UserError(
            f"there is no public set {name!r}.{did_you_mean(name, known)} Sets: {', '.join(known)}."
        )
    return known[name]


def data_folder(root: Path | None = None) -> Path:
    """Return the folder of all sets: ``root``, or that of ``PRIMAL_DATA``."""
    if root is None and not os.environ.get("PRIMAL_DATA"):
        raise UserError(
            "there is no folder for data sets: set the environment variable PRIMAL_DATA, as in "
            "export PRIMAL_DATA=$HOME/data, or name the folder with --root or --data."
        )
    return root or Path(os.environ["PRIMAL_DATA"])


def checksum(path: Path) -> str:
    """Return the sha256 of the content of a file.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, opened in (("a.txt", open), ("a.txt.gz", gzip.open)):
        ...     with opened(folder / name, "wb") as file:
        ...         _ = file.write(b"words")
        >>> checksum(folder / "a.txt") == checksum(folder / "a.txt.gz")
        True
    """
    digest = hashlib.sha256()
    if path.suffix == ".npz":
        import numpy as np

        for key, values in sorted(read_arrays(path, max_bytes=_MAX_BYTES).items()):
            array = np.ascontiguousarray(values)
            digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "rb") as file:
        size = 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > _MAX_BYTES:
                raise ValueError(f"{path} holds more than {_MAX_BYTES:,} bytes.")
    return digest.hexdigest()


def fetch(
    name: str, root: Path, *, mirror: str | None = None, report: Callable[[str], None] = print
) -> list[Path]:
    """Download a set and return its files. Files appear together, checked, or not at all.

    Args:
        name: Name of the set.
        root: Folder of all sets.
        mirror: Address of a folder laid out like that of ``PRIMAL_DATA``, instead of the
            publisher's.
        report: Called with a line before each download.

    Raises:
        UserError: If the set cannot be downloaded, or a file is not what it should be. The message
            says which files to put where.
    """
    found = find_set(name)
    if mirror is None and not found.is_downloadable:
        raise UserError(
            f"{name} cannot be downloaded from its publisher in this form. {found.by_hand(root)}"
        )
    folder = root / found.folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as temporary:
        with _told(name, found, root):
            paths = _collect(found, Path(temporary), mirror, report)
        for path in paths:
            if checksum(path) != found.files[path.name]:
                raise UserError(
                    f"{path.name} of {name} is not what it should be: its sha256 differs. Nothing "
                    f"was kept. {found.by_hand(root)}"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.replace(folder / path.name)
    return [folder / path.name for path in paths]


@contextmanager
def _told(name: str, found: PublicSet, root: Path) -> Iterator[None]:
    """Turn what may go wrong with a network or an archive into a sentence."""
    try:
        yield
    except _ERRORS as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise UserError(
            f"{name} could not be downloaded: {reason.rstrip('.')}. {found.by_hand(root)}"
        ) from error


def _collect(
    found: PublicSet, folder: Path, mirror: str | None, report: Callable[[str], None]
) -> list[Path]:
    """Return all files of a set, in a temporary folder."""
    paths = [folder / name for name in found.files]
    if mirror is None and found.archive is not None and found.convert is not None:
        archive = folder / "archive"
        _download(found.archive, archive, report)
        module, _, function = found.convert.partition(":")
        convert: Callable[[Path, str], bytes] = getattr(import_module(module), function)
        for path in paths:
            path.write_bytes(convert(archive, path.name))
        return paths
    for path in paths:
        url = (
            f"{mirror.rstrip('/')}/{found.folder}/{path.name}" if mirror else found.urls[path.name]
        )
        _download(url, path, report)
        if path.suffix == ".gz" and path.read_bytes()[:2] != b"\x1f\x8b":
            path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    return paths


def _download(url: str, path: Path, report: Callable[[str], None]) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"an address starts with http:// or https://, got {url!r}")
    report(f"Downloading {url} …")
    try:
        opened = urllib.request.urlopen(url, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise ValueError(f"the server answers {error.code} {error.reason}") from error
    with opened as answer, path.open("wb") as file:
        size = 0
        while chunk := answer.read(_CHUNK):
            size += file.write(chunk)
            if size > _MAX_BYTES:
                raise ValueError(f"{url} has more than {_MAX_BYTES:,} bytes")
        expected = answer.headers.get("Content-Length")
    if expected is not None and size != int(expected):
        raise ValueError(f"the connection broke after {size:,} of {int(expected):,} bytes")
