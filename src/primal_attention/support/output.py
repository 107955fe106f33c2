"""Tables and files that commands write."""

import csv
import io
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "flush_folder",
    "hardware",
    "is_same_place",
    "markdown_table",
    "page",
    "percent",
    "remove_folder",
    "remove_temporary",
    "replace_between",
    "replaced_file",
    "temporary_path",
    "to_csv",
    "to_json",
    "write_atomically",
]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it, and move it into place.

    The file has the permissions that the user's umask gives to any new file.
    """
    with replaced_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file that is moved to ``path`` if no error occurs.

    The content is on the disk before its name. Errors of the system name ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        # flushed before the rename: a power cut could keep the new name with no content
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            # name the file that the caller gave, not the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def temporary_path(path: Path) -> Path:
    """Return a name in the same folder for what is not complete yet, or no longer needed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_temporary(*folders: Path) -> None:
    """Remove what killed processes left under temporary names; other files stay.

    Only for the one writer of the folders: another would lose what it is writing.
    """
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if not _TEMPORARY.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder; a kill in the middle leaves no part of it under its name."""
    gone = temporary_path(path)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_same_place(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one place; nothing needs to be there."""
    # not Path.resolve: before Python 3.13 it raises for a loop of links
    return os.path.realpath(one) == os.path.realpath(other)


def flush_folder(path: Path) -> None:
    """Force the names in a folder to the disk: a power cut could keep a later rename alone."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hardware() -> dict[str, str | int]:
    """Return processor, threads and versions, to compare numbers."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table, columns aligned so that it also reads well as plain text."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def page(*parts: str) -> str:
    """Return paragraphs and tables as one Markdown page; paragraphs are wrapped.

    Example:
        >>> page("Caption.", "| a |")
        'Caption.\\n\\n| a |\\n'
    """
    wrapped = (
        p if p.startswith("|") else textwrap.fill(p, 120, break_on_hyphens=False) for p in parts
    )
    return "\n\n".join(wrapped) + "\n"


def percent(shares: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds in %, and how many seeds if not three.

    Example:
        >>> percent([0.9, 0.93, 0.93]), percent([0.9, 0.8]), percent([0.5])
        ('92.0 ± 1.7', '85.0 ± 7.1 (2 seeds)', '50.0 (1 seed)')
    """
    mean = f"{100 * statistics.fmean(shares):.1f}"
    if len(shares) < 2:
        return f"{mean} (1 seed)"
    text = f"{mean} ± {100 * statistics.stdev(shares):.1f}"
    return text if len(shares) == 3 else f"{text} ({len(shares)} seeds)"


def replace_between(text: str, mark: str, content: str) -> str:
    """Return a page with new content between its marks, which it must have.

    Example:
        >>> replace_between("<!-- a: start -->\\nold\\n<!-- a: end -->\\n", "a", "new\\n")
        '<!-- a: start -->\\nnew\\n<!-- a: end -->\\n'
    """
    start, end = (f"<!-- {mark}: {edge} -->\n" for edge in ("start", "end"))
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(
            f"The page has no place for a table; put the lines {start.strip()!r} and "
            f"{end.strip()!r} where it belongs."
        )
    return before + start + content + end + after


def to_csv(records: Sequence[Mapping[str, object]], comment: str = "") -> str:
    """Return records as CSV, with an optional comment line on top."""
    buffer = io.StringIO()
    if comment:
        buffer.write(f"# {comment}\n")
    writer = csv.DictWriter(buffer, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue()


def to_json(content: object) -> str:
    """Return indented JSON with a final newline."""
    return json.dumps(content, indent=1) + "\n"
