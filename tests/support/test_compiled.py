"""Compiled functions work for ordinary users, and say so where they cannot."""

import os
import stat
import subprocess
import sys
from pathlib import Path

_PLACE = """
import os, sys
from primal_attention.support.compiled import prepare_numba
prepare_numba(sys.argv[1])
print(os.environ.get("NUMBA_CACHE_DIR", ""))
"""
_FORK = """
import os, numba, numpy as np
from primal_attention.support.compiled import numba_threads
@numba.njit(parallel=True)
def double(x):
    for i in numba.prange(len(x)):
        x[i] *= 2
with numba_threads():
    double(np.ones(8))
pid = os.fork()
if pid == 0:
    try:
        with numba_threads():
            double(np.ones(8))
        os._exit(0)
    except RuntimeError as error:
        os._exit(3 if "was forked from process" in str(error) and "'loky'" in str(error) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with numba_threads():
    double(np.ones(8))
"""
_TORCH = """
import os, signal, threading, torch
from primal_attention.support.randomness import isolated
torch.set_num_threads(2)
x = torch.ones(600, 600)
total = (x @ x).exp().isinf().sum()
trains, done = threading.Event(), threading.Event()
def train():
    with isolated():
        trains.set()
        done.wait()
threading.Thread(target=train).start()
trains.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    with isolated(0):
        os._exit(0 if (x @ x).exp().isinf().sum() == total else 1)
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.get_num_threads())
"""


def _run(script: str, *arguments: str, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | variables
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def _package_on_a_file(folder: Path) -> str:
    """Make a package in an archive: nothing can be written beside it, not even by root."""
    import zipfile

    with zipfile.ZipFile(folder / "made.zip", "w") as archive:
        archive.writestr("compiled_thing/__init__.py", "")
    return str(folder / "made.zip")


def test_numba_gets_a_folder_if_it_would_find_none(tmp_path: Path) -> None:
    path, nowhere = _package_on_a_file(tmp_path), "/dev/null/home"
    path = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    places = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": ""}
    found = Path(_run(_PLACE, "compiled_thing", HOME=nowhere, **places))
    assert found == tmp_path / f"primal-numba-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert _run(_PLACE, "compiled_thing", HOME=nowhere, **places) == str(found)
    # numba unpickles what it finds: a folder that others may write is not used
    found.chmod(0o777)
    other = Path(_run(_PLACE, "compiled_thing", HOME=nowhere, **places))
    assert other != found
    assert other.parent == tmp_path
    assert _run(_PLACE, "compiled_thing", HOME=str(tmp_path), **places) == ""
    assert _run(_PLACE, "no_such_package", HOME=nowhere, **places) == ""
    assert _run(_PLACE, "compiled_thing", HOME=nowhere, NUMBA_CACHE_DIR="mine", **places) == "mine"
    # beside its package numba can cache, too
    (tmp_path / "here" / "other_thing").mkdir(parents=True)
    (tmp_path / "here" / "other_thing" / "__init__.py").write_text("")
    places["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "here"), path])
    assert _run(_PLACE, "other_thing", HOME=nowhere, **places) == ""


def test_a_fork_of_a_process_with_threads_is_told() -> None:
    assert _run(_FORK, NUMBA_THREADING_LAYER="omp") == "3"
    assert _run(_FORK, NUMBA_THREADING_LAYER="forksafe") == "0"


def test_a_fork_computes_and_its_parent_keeps_its_threads() -> None:
    assert _run(_TORCH, OMP_NUM_THREADS="2") == "0 2"
