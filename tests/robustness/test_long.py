"""Kills, torn writes and flipped bytes over all saved formats; ``make test-long``.

    LONG_KILLS=2000 LONG_SEED=0 make test-long

``outputs/long.json`` has the counts of every format that is done, so that a run which was stopped
goes on there. The last test writes them to the page of promises.
"""

import os
import random
import shutil
import signal
import textwrap
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from primal_attention.support.files import SUMS, SealedFolder, read_json, save_sealed
from primal_attention.support.output import replace_between, to_json, write_atomically

from . import data_cases, model_cases
from .cases import CASES, make
from .harness import Case, same

__all__ = ["data_cases", "model_cases"]  # they fill CASES

ROOT = Path(__file__).parents[2]
STATE, PAGE = ROOT / "outputs" / "long.json", ROOT / "docs" / "guides" / "promises.md"
KILLS, SEED = int(os.environ.get("LONG_KILLS", "2000")), int(os.environ.get("LONG_SEED", "0"))
FORMATS = 14
"""About so many formats have checksums; they share the kills."""
DAMAGES = ("kills", "torn writes", "flipped bytes")

pytestmark = [pytest.mark.long, pytest.mark.slow]


def done() -> dict[str, Any]:
    """Return what a run with these settings has done; empty if there is none."""
    found = read_json(STATE) if STATE.is_file() else {}
    is_same = (found.get("kills"), found.get("seed")) == (KILLS, SEED)
    return found if is_same else {"kills": KILLS, "seed": SEED, "formats": {}}


def contents(folder: Path) -> dict[str, Any]:
    """Return the files of a folder and of sealed folders inside, as a save takes them."""
    return {
        path.name: contents(path) if path.is_dir() else path.read_bytes()
        for path in folder.iterdir()
        if path.name != SUMS
    }


def with_version(files: dict[str, Any], version: str) -> dict[str, Any]:
    """Add a file that tells the saves of a folder apart, also inside."""
    inner = {k: with_version(v, version) if isinstance(v, dict) else v for k, v in files.items()}
    return {**inner, "version": version}


def save_for_ever(folder: Path, files: dict[str, Any]) -> None:
    number = 0
    while True:
        number += 1
        save_sealed(folder, with_version(files, f"{os.getpid()}-{number}"))


def killed(action: Callable[[], object], seconds: float) -> bool:
    """Run something in a forked process and kill it after a moment; return whether it ran still."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def read(case: Case, folder: Path) -> Any:
    """Read a folder as a user does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.reads[0](folder)


def kill_saves(case: Case, place: Path, count: int, moments: random.Random, expected: Any) -> None:
    """Kill saves into one folder; whatever a kill leaves is one whole version."""
    folder, files, start = place / case.clean.name, contents(case.clean), time.monotonic()
    save_sealed(folder, with_version(files, "0"))
    duration = time.monotonic() - start
    while count:
        count -= killed(partial(save_for_ever, folder, files), moments.uniform(0, 2 * duration))
        SealedFolder(folder).check()
        # what a kill left unfinished is hidden, and the next save removes it
        found = [folder / "version", *folder.glob("[!.]*/version")]
        assert len({path.read_bytes() for path in found}) == 1
        assert same(read(case, folder), expected)


def kill_runs(case: Case, place: Path, count: int, moments: random.Random, expected: Any) -> None:
    """Kill a training that continues; it ends with the weights of one without a break."""
    duration, done = 1.0, 0
    while done < count:
        folder = shutil.copytree(case.clean, place / f"{done}" / case.clean.name)
        for _ in range(5):
            done += killed(partial(read, case, folder), moments.uniform(0, duration))
        start = time.monotonic()
        assert same(read(case, folder), expected)
        duration = time.monotonic() - start
        shutil.rmtree(folder.parent, ignore_errors=True)
        place.mkdir(exist_ok=True)


def damage(case: Case, place: Path, count: int, how: str, moments: random.Random, expected: Any):
    """Damage a file after the other: each is told, or changes no result."""
    for number in range(count):
        folder = shutil.copytree(case.clean, place / f"{number}" / case.clean.name)
        there = {p for pattern in case.targets for p in folder.glob(pattern) if p.is_file()}
        # what is empty cannot be damaged, and must not be counted
        path = moments.choice(sorted(p for p in there if p.stat().st_size))
        data = bytearray(path.read_bytes())
        if how == "torn writes":
            del data[moments.randrange(len(data)) :]
        else:
            data[moments.randrange(len(data))] ^= 1 << moments.randrange(8)
        path.write_bytes(data)
        try:
            found, told = read(case, folder), ""
        except case.errors as error:
            found, told = None, str(error)
        is_named = any(name in told for name in (*case.names, path.name))
        assert is_named if told else same(found, expected), f"{how} {number} of {path}: {told}"
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("name", CASES)
def test_a_format_survives(name: str, tmp_path: Path) -> None:
    state = done()
    if name in state["formats"]:
        return
    (tmp_path / "files").mkdir()
    case = make(name, tmp_path / "files")
    if not case.is_sealed:
        pytest.skip("no checksums protect this format")
    count, counts = -(-KILLS // FORMATS), {}
    clean = shutil.copytree(case.clean, tmp_path / "whole" / case.clean.name)
    expected = read(case, clean)
    for how in DAMAGES:
        moments = random.Random(f"{SEED} {name} {how}")
        place = tmp_path / how.replace(" ", "-")
        place.mkdir()
        if how != "kills":
            damage(case, place, count, how, moments, expected)
        else:
            kill = kill_saves if (case.clean / SUMS).is_file() else kill_runs
            kill(case, place, count, moments, expected)
        counts[how] = count
    write_atomically(STATE, to_json({**state, "formats": {**state["formats"], name: counts}}))


def test_the_page_shows_what_was_done() -> None:
    """Last, because the others must have passed."""
    state = done()
    formats = state["formats"]
    assert formats, "no format was tested"
    sums = {how: sum(counts[how] for counts in formats.values()) for how in DAMAGES}
    names = ", ".join(formats)
    line = (
        f"Last result (seed {state['seed']}, {len(formats)} formats): {sums['kills']:,} kills, "
        f"{sums['torn writes']:,} torn writes, {sums['flipped bytes']:,} flipped bytes; none lost "
        "a folder, left a mixture or changed a result."
    )
    content = f"{textwrap.fill(line, 120)}\n\n{textwrap.fill(f'Formats: {names}.', 120)}\n"
    write_atomically(PAGE, replace_between(PAGE.read_text("utf-8"), "long", content))
