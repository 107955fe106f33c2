"""Runs damaged files through the library in a child process with limits, and judges the outcome.

A damaged file must be told in one sentence that names it, or be read with a result of the usual
kind. Anything else is a problem: a foreign error, a crash, a hang, or gigabytes of memory.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.cli.main import main
from primal_attention.support.command import UserError, exit_code

from .mutations import mutate

__all__ = ["Case", "command", "in_use", "printed", "problems", "same"]

MEMORY = 1_500_000_000
"""Bytes that reading a damaged file may add to the address space."""
SECONDS = 60
"""A damaged file that takes longer hangs."""
LONGEST = {True: 1100, False: 10_000}
"""Characters of a sentence that a command prints, and of others, which hold a value once."""
SUMS = "SHA256SUMS"
_USED = "in use"
FOREIGN = (
    *("Traceback", "Error(", "<class", "object at 0x", "NoneType", "__init__", "argument must be"),
    *("values to unpack", "allow_pickle", "pickle.load", "Unpickl", "object has no attribute"),
    *("unsupported operand", "not supported between", "index out of range", "out of bounds"),
    *("codec can't", "not subscriptable", "not iterable", "not callable", "not JSON serializable"),
    *("must be real number", "unexpected keyword", "required positional", "invalid literal"),
    *("could not convert", "truth value of", "cannot reshape", "broadcast", "unhashable"),
    *("maximum recursion", "DefaultCPU", "buffer is smaller", "state_dict", "size mismatch"),
    *("not a zip file", "Bad magic number", "too large to convert", "too many indices", "Arrow"),
    *("C error", "dtype('", "can't convert", "cannot convert", "be converted", "Cannot cast"),
)
"""What other libraries and Python itself say. Our sentences say it in the words of the user."""
PARSERS = (
    "Expecting ",
    "Extra data",
    "Unterminated",
    "while parsing",
    "deserializing",
    "could not",
)
"""What parsers say. It tells the place, so it may follow our own words about the file."""
INTRODUCED = ("is not readable as", "no safetensors file")


class PrintedError(UserError):
    """What a command printed."""


@dataclass(frozen=True)
class Case:
    """A format, and how the library reads it."""

    name: str
    clean: Path
    """Folder with intact files; a damaged copy of it is read."""
    reads: tuple[Callable[[Path], Any], ...]
    """What a user does with the folder; each raises a documented error or returns a result."""
    targets: tuple[str, ...] = ("**/*",)
    """Patterns of the files to damage."""
    errors: tuple[type[Exception], ...] = (UserError,)
    """Documented errors; a plain ``ValueError`` does not stand for its subclasses."""
    check: Callable[[Any, Path], str | None] = lambda result, folder: None
    """What is wrong with a result, if anything."""
    is_sealed: bool = False
    """Whether checksums protect the folder: then a damage changes no result."""
    names: tuple[str, ...] = field(default=())
    """Words, one of which a message must have; by default the name of the damaged file."""


def command(*arguments: object) -> None:
    """Run ``primal`` and raise the sentence that it prints."""
    printed(lambda: main([str(a) for a in arguments]))


def printed(action: Callable[[], int]) -> None:
    """Run a part of a command and raise the sentence that it prints."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = exit_code(action)
    lines = errors.getvalue().split("\n")
    told = [x for x in lines if x and not x.startswith(("primal: warning: ", "  … "))]
    if code == 0:
        return
    if code != 2 or not told or not told[0].startswith("primal: "):
        raise RuntimeError(f"exit code {code}: {told[-3:]}")
    raise PrintedError("\n".join(told).removeprefix("primal: "))


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Mark errors of a model that was loaded; they are about the data, and name no file."""
    try:
        yield
    except Exception as error:
        error.add_note(_USED)
        raise


def problems(case: Case, numbers: Iterable[int], seed: int, kept: Path) -> Iterator[str]:
    """Yield a line for each damage that is not handled.

    Args:
        case: The format.
        numbers: Which damages to make.
        seed: The damages depend on it, on the name of the format and on their number.
        kept: Folder for copies of the damaged files.
    """
    # intact files can be read; imports and caches belong to the parent
    expected, *_ = [_quietly(case, read) for read in range(len(case.reads))]
    waiting = list(numbers)
    while waiting:
        done = 0
        for done, problem in enumerate(_in_child(case, waiting, seed, kept, expected), 1):
            if problem:
                yield f"{case.name} {waiting[done - 1]}: {problem}"
        waiting = waiting[max(done, 1) :]


def _quietly(case: Case, number: int) -> Any:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")
        here = Path(name) / "clean"
        shutil.copytree(case.clean, here)
        with _inside(here):
            return case.reads[number](here)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _in_child(
    case: Case, numbers: list[int], seed: int, kept: Path, expected: Any
) -> Iterator[str]:
    """Yield a problem or an empty word for each number; a dead or hanging child ends it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            _work(case, numbers, seed, kept, expected, writer)
        except BaseException:
            os.write(writer, (json.dumps(traceback.format_exc()[-600:]) + "\n").encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            for _ in numbers:
                if not select.select([lines], [], [], SECONDS)[0]:
                    yield f"hangs for more than {SECONDS} s"
                    return
                line = lines.readline()
                if not line:
                    _, status = os.waitpid(pid, 0)
                    pid = 0
                    yield f"the process died with status {status}"
                    return
                yield json.loads(line)
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(
    case: Case, numbers: list[int], seed: int, kept: Path, expected: Any, writer: int
) -> None:
    """Damage and read, one number after the other; write a line for each."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as place:
        for number in numbers:
            folder = Path(place) / f"{number}" / case.clean.name
            shutil.copytree(case.clean, folder)
            rng = random.Random(zlib.crc32(f"{seed} {case.name} {number}".encode()))
            damage, names, is_sealed = _damage(case, folder, rng)
            if kept.is_dir():
                shutil.copytree(folder, kept / f"{number}", dirs_exist_ok=True)
            read = rng.randrange(len(case.reads))
            told = _judge(case, read, folder, names, expected if is_sealed else None)
            if not told:
                shutil.rmtree(kept / f"{number}", ignore_errors=True)
            shutil.rmtree(folder.parent, ignore_errors=True)
            line = f"{damage}: {told}" if told else ""
            os.write(writer, (json.dumps(line) + "\n").encode())


def _damage(case: Case, folder: Path, rng: random.Random) -> tuple[str, tuple[str, ...], bool]:
    """Damage a file of a folder; return what was done, names to be told, and if it is noticed."""
    found = {p for pattern in case.targets for p in folder.glob(pattern) if p.is_file()}
    path = rng.choice(sorted(found))
    file = str(path.relative_to(folder))
    seal = rng.choice(("kept", "renewed", "lost")) if case.is_sealed else "kept"
    action = rng.random() if case.is_sealed else 1.0
    if action < 0.05:
        path.unlink()
        what = "remove"
    elif action < 0.1:
        path.unlink()
        path.mkdir()
        what = "make a folder of"
    else:
        mutation = mutate(path.read_bytes(), path.suffix, rng)
        path.write_bytes(mutation.data)
        what = f"{mutation.name} in"
    if seal != "kept":
        _seal_again(folder, is_lost=seal == "lost")
    words = f"{what} {file}" + (f", checksums {seal}" if case.is_sealed else "")
    return words, (*case.names, path.name), case.is_sealed and seal == "kept"


def _seal_again(folder: Path, *, is_lost: bool) -> None:
    """Renew or remove all checksums, the inner folders first."""
    for path in sorted(folder.rglob(SUMS), key=lambda p: -len(p.parts)):
        if not path.is_file():
            continue
        if is_lost:
            path.unlink()
            continue
        names = [line.partition("  ")[2] for line in path.read_text("utf-8", "replace").split("\n")]
        there = [path.parent / name for name in names if name and len(name) < 200]
        lines = [
            f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(path.parent)}\n"
            for p in there
            if p.is_file()
        ]
        path.write_text("".join(lines))


def _judge(case: Case, read: int, folder: Path, names: tuple[str, ...], expected: Any) -> str:
    """Return what is wrong with reading a folder; empty if nothing."""
    try:
        with _inside(folder):
            result = case.reads[read](folder)
    except case.errors as error:
        kind = type(error)
        if kind is ValueError or kind.__module__.split(".")[0] in ("primal_attention", "tests"):
            return _judge_words(error, names)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:300]}"
    if expected is not None and read == 0 and not same(result, expected):
        return f"other results, silently: {str(result)[:200]}"
    return case.check(result, folder) or ""


def _judge_words(error: Exception, names: tuple[str, ...]) -> str:
    words = str(error)
    shown = f"{type(error).__name__}: {' '.join(words.split())}"
    if "\n" in words.strip():
        return f"more than one line: {shown[:400]}"
    if len(words) > LONGEST[isinstance(error, PrintedError)]:
        return f"a message of {len(words)} characters: {shown[:300]}"
    # transformers may say in brackets why it cannot load a model
    own = re.sub(r"cannot be loaded \(.*\);", "", words)
    foreign = [phrase for phrase in FOREIGN if phrase in own]
    if not any(mark in words for mark in INTRODUCED):
        foreign += [phrase for phrase in PARSERS if phrase in own]
    if foreign:
        return f"foreign words {foreign[0]!r}: {shown[:400]}"
    is_used = _USED in getattr(error, "__notes__", ())
    if not is_used and not any(name in words for name in names):
        return f"does not name the file: {shown[:400]}"
    return ""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))
