"""``primal bench`` and ``primal repro``: list the studies of a group, or run one."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from primal_attention.support.command import UserError, progress, user_errors
from primal_attention.support.output import markdown_table
from primal_attention.support.settings import parse
from primal_attention.tasks.evidence import changed_modules
from primal_attention.tasks.study import (
    find_study,
    known_studies,
    measured_cells,
    read_about,
    run_study,
    studies_of,
)

__all__ = ["main", "status"]

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
    """Folder with one result folder for each study."""


def status(argv: list[str]) -> int:
    """Print the age of every result folder; the exit code is 0 whatever it is."""
    with user_errors(""):
        chosen = parse(StatusRun, argv, prog="primal repro status", default=StatusRun())
    if not chosen.results.is_dir():
        raise UserError(f"there is no folder {chosen.results}; name one with --results.")
    folders = sorted(path.parent for path in chosen.results.glob("*/rows.jsonl"))
    rows = [[folder.name, *_age(folder)] for folder in folders]
    print(markdown_table(["results", "measured at", "cells", "code changed since"], rows))
    old = sum(row[-1] != "no" for row in rows)
    print(f"\n{len(rows)} results, {old} older than their code.")
    return 0


def _age(folder: Path) -> list[str]:
    """Return commits, cells and changed modules of a result folder, in words."""
    about = read_about(folder)
    code, words = about.get("code", {}), shlex.split(str(about.get("command", "")))
    commits = ", ".join(code.get("commits", ["unknown"]))
    name = words[2] if len(words) > 2 and not words[2].startswith("-") else words[-1:]
    if name not in known_studies():
        return [commits, "no such study now", "–"]
    study = find_study(str(name))
    kind: Any = StudyRun[study.Options]  # type: ignore[name-defined]
    try:
        start = kind(study.Options(), out=folder)
        options = parse(kind, words[3:], prog=" ".join(words[:3]), default=start).study
        found = measured_cells(study, options, folder)
        lacks = f", without {', '.join(found.without)}" if found.without else ""
        cells = f"{found.measured} of {found.cells}{lacks}"
    except UserError as error:  # the cells of some studies depend on their data
        cells = "unknown without the data"
        progress(f"{folder.name}: {error}")
    changed = changed_modules(code.get("modules", {}), known_studies()[str(name)].module)
    short = [module.partition(".")[2] for module in changed]
    more = f" and {len(short) - 3} more" if len(short) > 3 else ""
    return [
        commits,
        cells,
        (", ".join(short[:3]) + more) if short else "no",
    ]


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
