"""Where numba keeps compiled functions, and which processes may call them.

Call :func:`prepare_numba` before the first import of numba, which reads its settings then.
"""

import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["numba_threads", "prepare_numba"]

_VARIABLE = "NUMBA_CACHE_DIR"
_process: int | None = None
"""The process in which threads of numba run."""


def prepare_numba(package: str) -> None:
    """Give numba a folder to cache the functions of a package if it would find none.

    Without one, the import of the package fails. Numba caches beside the package, or in the home of
    the user; neither may be writable.

    Args:
        package: The package with compiled functions.
    """
    if _VARIABLE in os.environ or "numba" in sys.modules:
        return
    found = importlib.util.find_spec(package)
    homes = [Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())]
    beside = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    if found is not None and not any(map(_can_write, [*homes, *beside])):
        os.environ[_VARIABLE] = str(_own_folder())


def _can_write(folder: Path) -> bool:
    """Return whether files can be made in a folder, or in a new folder of this name."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _own_folder() -> Path:
    """Return a folder for temporary files that only this user can write; the same one each time."""
    folder = Path(tempfile.gettempdir()) / f"primal-numba-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="primal-numba-"))
    # numba unpickles what it finds there: another user may have made the folder first
    is_own = about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700
    if stat.S_ISDIR(about.st_mode) and is_own:
        return folder
    return Path(tempfile.mkdtemp(prefix="primal-numba-"))


@contextmanager
def numba_threads() -> Iterator[None]:
    """Call compiled functions that use threads.

    Raises:
        RuntimeError: If this process was forked from one whose threads they used: the copies of
            the threads do not exist, and the call would wait for them for ever.
    """
    global _process
    if _process not in (None, os.getpid()) and _uses_openmp():
        raise RuntimeError(
            f"This process was forked from process {_process}, which had used compiled functions "
            "in threads; they cannot run in a fork. Start processes anew, with joblib's backend "
            "'loky' or multiprocessing's method 'spawn', or use threads."
        )
    _process = os.getpid()
    yield


def _uses_openmp() -> bool:
    """Return whether numba's threads are those of OpenMP; its other ones survive a fork."""
    import numba

    try:
        return numba.threading_layer() == "omp"
    except ValueError:  # no function has run in threads
        return False
