"""Studies: grids of runs that can be stopped and continued, and the tables made of them.

A study lists its cells, runs one of them, and makes tables of the rows. :func:`run_study` does the
rest: it skips finished cells, appends each row to ``rows.jsonl`` as soon as it is there, and writes
the tables. A result folder has no other writer::

    <out>/rows.jsonl      one finished cell a line (or several lines, see ``Study.run``)
    <out>/about.json      command, commits, fingerprints of the code, and machine
    <out>/<name>          whatever ``Study.tables`` returns: Markdown, CSV, PNG
    <out>/runs/<cell>/    scratch folder of a cell, for checkpoints; removed when the cell is done

A folder has one writer: while a study runs, a second one in its folder is refused.
"""

import functools
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from primal_attention.support.command import MissingPackageError, UserError, did_you_mean
from primal_attention.support.files import locked, parse_json, read_json, read_lines
from primal_attention.support.output import hardware, remove_folder, to_json, write_atomically
from primal_attention.support.settings import fingerprint
from primal_attention.tasks.evidence import code_commit, module_hashes

__all__ = [
    "STUDY_GROUP",
    "Cell",
    "Progress",
    "Row",
    "Study",
    "StudyEntry",
    "find_study",
    "known_studies",
    "measured_cells",
    "read_about",
    "read_rows",
    "run_study",
    "studies_of",
]

Cell = Mapping[str, Any]
"""Everything that decides a row, as plain values. Large settings go in as a fingerprint."""
Row = Mapping[str, Any]
"""What was measured, as plain values."""
OptionsT = TypeVar("OptionsT")

_ROWS, _ABOUT = "rows.jsonl", "about.json"

STUDY_GROUP = "primal.studies"
"""Group of the entry points by which packages bring studies."""


class Study(ABC, Generic[OptionsT]):
    """A grid of runs and its tables.

    Subclasses keep torch out of their module's imports, so that ``--help`` answers at once.
    """

    name: ClassVar[str]
    """Name on the command line, and of the result folder."""
    Options: ClassVar[type]
    """Frozen dataclass of what a user may choose; the docstrings of its fields are the help."""
    threads: ClassVar[int] = 1
    """Threads of torch during a run, unless the options have a field of this name."""

    @abstractmethod
    def cells(self, options: OptionsT) -> Sequence[Cell]:
        """Return the cells in the order in which they run; raise for options that cannot run."""

    @abstractmethod
    def run(self, cell: Cell, options: OptionsT, scratch: Path) -> Row | Sequence[Row]:
        """Return what one cell measures: a row, or several if rivals are measured together.

        Args:
            cell: One of :meth:`cells`.
            options: What the user chose.
            scratch: Folder for checkpoints; a stopped cell finds it again.
        """

    @abstractmethod
    def tables(self, rows: Sequence[Row], options: OptionsT) -> Mapping[str, str | bytes]:
        """Return files by name: tables as Markdown or CSV, pictures as PNG.

        Args:
            rows: Rows of the wanted cells in their order, then the other rows of the folder. Each
                holds its cell too.
            options: What the user chose.
        """

    def describe(self, row: Row) -> str:
        """Return a row in one line, for the progress display."""
        return ", ".join(f"{key} {value}" for key, value in row.items() if _is_short(value))


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float | bool) and len(str(value)) < 24


def run_study(
    study: Study[OptionsT],
    options: OptionsT | None = None,
    *,
    out: str | Path,
    max_seconds: float | None = None,
    report: Callable[[str], None] = print,
) -> list[Row]:
    """Run the cells that are missing in a folder, write the tables, return the wanted rows.

    Args:
        study: What to run.
        options: What the user chose; by default the defaults of the study.
        out: Result folder; rows that are there already are not measured again.
        max_seconds: Start no further cell after this time; call again to continue.
        report: Called with one line per finished cell.

    Raises:
        UserError: If ``rows.jsonl`` holds something that is no row, or another process writes into
            the folder.
    """
    options = study.Options() if options is None else options
    ends = math.inf if max_seconds is None else time.monotonic() + max_seconds
    wanted = list(study.cells(options))
    out = Path(out)
    with locked(out):
        done, left, new = set(_read(out)), 0, set[str]()
        for number, cell in enumerate(wanted, 1):
            if _key(cell) in done:
                continue
            if time.monotonic() >= ends:
                left += 1
                continue
            for row in _measure(study, cell, options, out):
                report(f"{number}/{len(wanted)} {study.describe({**cell, **row})}")
            done.add(_key(cell))
            new.add(_key(cell))
        have = _read(out)
        if have:
            _write(study, options, wanted, have, out)
        if have and (new or not (out / _ABOUT).exists()):
            machine = hardware() | {"threads": _num_threads(study, options)}
            about = {
                "command": command_line(study, options),
                "code": _code(study, out, is_first=len(have) == len(new)),
                "machine": machine,
            }
            write_atomically(out / _ABOUT, to_json(about))
    if left:
        report(f"out of time with {left} of {len(wanted)} cells left; the same command continues")
    return [row for cell in wanted for row in have.get(_key(cell), ())]


def _code(study: Study[Any], out: Path, *, is_first: bool) -> dict[str, object]:
    """Return the commits that measured the rows of a folder, and the code they agree on."""
    commit, modules = code_commit(), module_hashes(type(study).__module__)
    before = read_about(out).get("code", {})
    commits = [] if is_first else [*before.get("commits", ["unknown"])]
    if not is_first:
        # a module that differs between two measurements counts as changed for good
        known = set(before.get("modules", {}).values())
        modules = {name: value for name, value in modules.items() if value in known}
    return {"commits": [*dict.fromkeys([*commits, commit or "unknown"])], "modules": modules}


def read_about(out: str | Path) -> dict[str, Any]:
    """Return the command, code and machine of a result folder; nothing if it was never measured."""
    path = Path(out) / _ABOUT
    return read_json(path, dict) if path.exists() else {}


def _measure(study: Study[Any], cell: Cell, options: Any, out: Path) -> list[Row]:
    """Run a cell, add its rows to the file, and return them."""
    scratch = out / "runs" / fingerprint(dict(cell))
    with _threads(_num_threads(study, options)):
        found = study.run(cell, options, scratch)
    rows: list[Row] = [dict(row) for row in ([found] if isinstance(found, Mapping) else found)]
    _append(out / _ROWS, {"cell": dict(cell), "rows": rows})
    if scratch.exists():
        remove_folder(scratch)
    return rows


class Progress(NamedTuple):
    """How much of a study a folder holds."""

    cells: int
    """Cells of the study with the options of the folder."""
    measured: int
    """Those that the folder has, even if rivals were added to them since."""
    without: tuple[str, ...]
    """Rivals that were added to a cell after it was measured, such as a new attention."""


def measured_cells(study: Study[OptionsT], options: OptionsT, out: str | Path) -> Progress:
    """Return how many cells a study has with these options, and what a folder lacks of them."""
    cells = [json.loads(key) for key in _read(Path(out))]
    done = {_key(cell) for cell in cells}
    wanted = [json.loads(_key(cell)) for cell in study.cells(options)]
    missing = [cell for cell in wanted if _key(cell) not in done]
    # a cell whose rivals take turns names them all: one rival more makes a new cell of it
    found = [lacks for cell in missing if (lacks := _added(cell, cells)) is not None]
    without = dict.fromkeys(name for lacks in found for name in lacks)
    return Progress(len(wanted), len(wanted) - len(missing) + len(found), tuple(without))


def _added(wanted: Cell, cells: Sequence[Cell]) -> list[str] | None:
    """Return what the lists of a cell have and those of a finished one lack; none if no such."""
    for cell in cells:
        different = [key for key in {*wanted, *cell} if wanted.get(key) != cell.get(key)]
        pairs: list[tuple[Any, Any]] = [(wanted.get(key), cell.get(key)) for key in different]
        if all(isinstance(part, list) for pair in pairs for part in pair):
            return [_label(part) for new, old in pairs for part in new if part not in old]
    return None


def _label(rival: Any) -> str:
    """Return a rival in words, and its option in brackets."""
    name, *options = rival if isinstance(rival, list) else [rival]
    return f"{name} ({', '.join(map(str, options))})" if any(options) else str(name)


def _num_threads(study: Study[Any], options: Any) -> int:
    return int(getattr(options, "threads", study.threads))


def _write(
    study: Study[Any],
    options: Any,
    wanted: Sequence[Cell],
    have: Mapping[str, list[Row]],
    out: Path,
) -> None:
    """Write the tables of all rows in the folder."""
    first = [_key(cell) for cell in wanted]
    order = [key for key in first if key in have] + [key for key in have if key not in set(first)]
    rows = [row for key in order for row in have[key]]
    for name, content in study.tables(rows, options).items():
        write_atomically(out / name, content)


def command_line(study: Study[Any], options: Any) -> str:
    """Return the command that runs a study with these options."""
    entry = known_studies().get(study.name)
    group = entry.group if entry else "repro"
    words = ["primal", *dict.fromkeys((group, study.name))]  # `primal demo` is its own group
    default = study.Options()
    for field in fields(options):
        value = getattr(options, field.name)
        if value == getattr(default, field.name) or isinstance(value, Path):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *map(str, _flat(value))]
    return " ".join(words)


def _flat(value: Any) -> Iterator[Any]:
    """Yield the parts of nested tuples, as a command line takes them."""
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _key(cell: Cell) -> str:
    return json.dumps(dict(cell), sort_keys=True)


def _read(out: Path) -> dict[str, list[Row]]:
    """Return the finished rows of a folder by cell; a line cut off by a crash is left out."""
    path = out / _ROWS
    found: dict[str, list[Row]] = {}
    for number, line in enumerate(read_lines(path) if path.exists() else (), 1):
        where = f"{path}, line {number}"
        try:
            content = parse_json(line, where, object)
        except UserError as error:
            if isinstance(error.__cause__, json.JSONDecodeError):
                continue
            raise
        if not _is_row(content):
            raise UserError(f"{where}: not a row of a study: {line[:60]!r}.")
        found[_key(content["cell"])] = [content["cell"] | row for row in content["rows"]]
    return found


def _is_row(content: Any) -> bool:
    if not isinstance(content, dict) or set(content) != {"cell", "rows"}:
        return False
    cell, rows = content["cell"], content["rows"]
    return isinstance(rows, list) and all(isinstance(part, dict) for part in (cell, *rows))


def read_rows(out: str | Path) -> list[Row]:
    """Return all rows of a result folder, each with its cell; none if there is no such folder."""
    return [row for rows in _read(Path(out)).values() for row in rows]


def _append(path: Path, content: Mapping[str, object]) -> None:
    """Add one line completely or not at all, and flush it to the disk."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.fstat(handle).st_size
    is_torn = size and os.pread(handle, 1, size - 1) != b"\n"
    rest = (("\n" if is_torn else "") + json.dumps(content) + "\n").encode()
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]  # a full disk takes a part before it refuses
        os.fsync(handle)
    except OSError as error:
        os.ftruncate(handle, size)
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads inside the context."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class StudyEntry:
    """Where a study is, and what it is for."""

    where: str
    """Module and class, ``module:Class``."""
    group: Literal["bench", "repro", "demo"]
    """Command that runs it: costs and errors, published tables, or the demo."""
    summary: str
    """One line for the list of studies."""

    @property
    def module(self) -> str:
        """Name of the module, which is not imported."""
        return self.where.partition(":")[0]


@functools.cache
def known_studies() -> Mapping[str, StudyEntry]:
    """Return all studies by name, those of every installed package that brings some.

    A package brings studies through the entry-point group ``primal.studies``; each entry point
    leads to a mapping from names to :class:`StudyEntry`. Nothing else of the package is imported.
    """
    found: dict[str, StudyEntry] = {}
    for point in sorted(entry_points(group=STUDY_GROUP), key=lambda point: point.name):
        found |= point.load()
    return found


def studies_of(group: str | None = None) -> Mapping[str, StudyEntry]:
    """Return the studies of a group by name.

    Args:
        group: Command that runs them; by default all.

    Raises:
        MissingPackageError: If no package that is installed brings such a study.
    """
    found = {name: e for name, e in known_studies().items() if group in (None, e.group)}
    if not found:
        raise MissingPackageError(
            "no study is installed: the studies are a package of their own, "
            "primal-attention-studies. In a checkout of the repository: pip install -e ./studies"
        )
    return found


def find_study(name: str, group: str | None = None) -> Study[Any]:
    """Return a study by name.

    Raises:
        UserError: If there is no such study; the message lists those there are.
    """
    known = studies_of(group)
    if name not in known:
        raise UserError(
            f"there is no study {name!r}.{did_you_mean(name, known)} Studies: {', '.join(known)}."
        )
    entry = known[name]
    kind = entry.where.partition(":")[2]
    found: type[Study[Any]] = getattr(import_module(entry.module), kind)
    return found()
