"""Where neither the home nor the package can be written, `primal train FILE.ts` trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def _series_file(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [",".join(f"{v:.3f}" for v in rng.normal(size=12) + np.arange(12) * s) for s in (0, 1)]
    lines = [f"{row}:{name}" for row, name in zip(rows, ("flat", "up"), strict=True)] * 8
    path.write_text("@problemName s\n@classLabel true flat up\n@data\n" + "\n".join(lines) + "\n")
    return path


def _as_nobody(folder: Path) -> list[str] | None:
    """Return the start of a command as a user without rights, who owns a folder; None if none."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        # env looks for the interpreter as that user, setpriv itself as root
        start = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "env", python]
        if subprocess.run([*start, "-c", "pass"], capture_output=True).returncode == 0:
            shutil.chown(folder, "nobody")
            return start
    return None


@pytest.fixture
def stranger():
    """Give a folder, and run Python there as a user without rights and without a home."""
    place = Path(os.environ.get("TMPDIR", "/tmp")) / f"primal prüf {os.getpid()}"
    place.mkdir(mode=0o700)
    start: list[str] | None = [sys.executable]
    if os.getuid() == 0:
        start = _as_nobody(place) if shutil.which("setpriv") else None
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/dev/null/home",
        "LANG": "C",
        "LC_ALL": "C",
        "TMPDIR": str(place),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join([str(ROOT / "src"), *(p for p in sys.path if "-packages" in p)]),
    }

    def run(script: str, *arguments: object) -> None:
        if start is None:
            pytest.skip("no interpreter that another user may run")
        command = [*start, "-c", f"import os; os.umask(0o77); {script}", *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    yield place, run
    shutil.rmtree(place)


def test_compiled_functions_are_found_by_a_user_without_rights(stranger) -> None:
    _, run = stranger
    run(
        "import primal_attention.tasks.series.blend.convolutions as c; c._mini_rocket(84, 0); "
        "assert os.environ['NUMBA_CACHE_DIR'].startswith(os.environ['TMPDIR'])"
    )


@pytest.mark.slow
def test_a_file_of_series_is_trained_by_a_user_without_rights(stranger) -> None:
    place, run = stranger
    file = _series_file(place / "reihen.ts")
    file.chmod(0o644)
    options = ["--training.epochs", 1, "--out", place / "out"]
    script = "import sys; from primal_attention.cli.main import main; sys.exit(main(sys.argv[1:]))"
    run(script, "train", file, *options)
    assert (place / "out" / "report.html").stat().st_mode & 0o777 == 0o600
