"""``primal bench`` and ``primal repro``: list the studies of a group, or run one."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import tyro

from primal_attention.support.command import UserError, progress, user_errors
from primal_attention.support.output import markdown_table
from primal_attention.support.settings import parse
from primal_attention.tasks.evidence import changed_modules, module_hashes
from primal_attention.tasks.study import (
    Study,
    find_study,
    known_studies,
    measured_cells,
    read_about,
    run_study,
    studies_of,
)

__all__ = ["main", "recorded", "status"]

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class StudyRun(Generic[OptionsT]):
    """Run what is missing of a study and write its tables. A stopped study continues."""

    study: Annotated[OptionsT, tyro.conf.arg(name="")]
    out: Path
    """Result folder; finished cells in it are not run again."""
    max_seconds: float | None = None
    """Start no further cell after this time; 0 only writes the tables."""


@dataclass(frozen=True)
class StatusRun:
    """List studies whose code has changed since they were measured, and cells that are missing."""

    results: Path = Path("docs/results")
    """Folder with one result folder for each study, or one result folder."""


def status(argv: list[str]) -> int:
    """Print the age of every result folder; the exit code is 0 whatever it is."""
    with user_errors(""):
        chosen = parse(StatusRun, argv, prog="primal repro status", default=StatusRun())
    if not chosen.results.is_dir():
        raise UserError(f"there is no folder {chosen.results}; name one with --results.")
    is_one = (chosen.results / "rows.jsonl").exists()
    paths = [chosen.results] if is_one else chosen.results.glob("*/")
    ages = {p.name: _age(p) for p in sorted(paths) if (p / "rows.jsonl").exists()}
    rows = [
        [name, age.commits, age.cells, f"{len(age.changed)} of {age.modules}"]
        for name, age in ages.items()
    ]
    print(markdown_table(["results", "measured at", "cells", "modules changed since"], rows))
    if is_one:
        print("".join(f"\n{name}" for age in ages.values() for name in age.changed))
        return 0
    old, incomplete = (
        sum(bool(found) for found in kind)
        for kind in ([a.changed for a in ages.values()], [a.is_incomplete for a in ages.values()])
    )
    print(
        f"\n{len(rows)} results: {old} older than their code, {incomplete} with missing cells.\n"
        f"primal repro status --results {chosen.results}/NAME lists the modules that changed."
    )
    return 0


class _Age(NamedTuple):
    commits: str
    cells: str
    is_incomplete: bool
    changed: list[str]
    modules: int


def _age(folder: Path) -> _Age:
    """Return commits, cells and changed modules of a result folder."""
    code = read_about(folder).get("code", {})
    commits = ", ".join(code.get("commits", ["unknown"]))
    try:
        study, options = recorded(folder)
    except UserError as error:
        progress(str(error))
        return _Age(commits, "no such study now", False, [], 0)
    try:
        found = measured_cells(study, options, folder)
        lacks = f", without {', '.join(found.without)}" if found.without else ""
        cells = f"{found.measured} of {found.cells}{lacks}"
        is_incomplete = found.measured < found.cells or bool(lacks)
    except UserError as error:  # the cells of some studies depend on their data
        cells, is_incomplete = "unknown without the data", False
        progress(f"{folder.name}: {error}")
    module = known_studies()[study.name].module
    changed = changed_modules(code.get("modules", {}), module)
    return _Age(commits, cells, is_incomplete, changed, len(module_hashes(module)))


def recorded(folder: Path) -> tuple[Study[Any], Any]:
    """Return the study that wrote a result folder, and its options."""
    words = shlex.split(str(read_about(folder).get("command", "")))
    name = words[2] if len(words) > 2 and not words[2].startswith("-") else "".join(words[-1:])
    if name not in known_studies():
        raise UserError(f"{folder}: there is no study {name!r} now.")
    study = find_study(name)
    kind: Any = StudyRun[study.Options]  # type: ignore[name-defined]
    start = kind(study.Options(), out=folder)
    return study, parse(kind, words[3:], prog=" ".join(words[:3]), default=start).study


def main(group: str, argv: list[str], default: str | None = None) -> int:
    """Run a study of a group with the rest of the arguments."""
    if argv[:1] in (["--help"], ["-h"]) or (not argv and default is None):
        print(_help(group))
        return 0
    is_named = bool(argv) and not argv[0].startswith("-")
    name = argv[0] if is_named or default is None else default
    if name.startswith("-"):
        raise UserError(f"name a study before its options. See primal {group} --help.")
    study = find_study(name, group)
    kind: Any = StudyRun[study.Options]  # type: ignore[name-defined]
    with user_errors(""):
        start = kind(study.Options(), out=Path("outputs") / name)
        chosen = parse(kind, argv[is_named:], prog=f"primal {group} {name}", default=start)
        study.cells(chosen.study)  # raises for options that cannot run
    rows = run_study(
        study, chosen.study, out=chosen.out, max_seconds=chosen.max_seconds, report=progress
    )
    for table in sorted(chosen.out.glob("*.md")):
        print(table.read_text("utf-8"))
    print(f"{len(rows)} rows; tables and pictures are in {chosen.out}")
    if (chosen.out / "report.html").exists():
        print(f"Open {chosen.out / 'report.html'} in a browser.")
    return 0


def _help(group: str) -> str:
    studies = studies_of(group)
    width = max(map(len, studies)) + 2
    rows = "\n".join(f"  {name:<{width}}{entry.summary}" for name, entry in studies.items())
    return (
        f"usage: primal {group} STUDY [OPTIONS]\n\nstudies:\n{rows}\n\n"
        "A study can be stopped at any time; the same command continues it.\n"
        f"primal {group} STUDY --help shows its options."
    )
