"""Check that the names of the tests are the same in every process, on every machine and every day.

Workers of pytest-xdist compare the tests they collected and stop if the lists differ. Names made
from data differ by chance: compressed bytes contain the current second, sets have the order of
the hash seed, and the text of an object contains its address. This script collects the suite
twice at once, with another hash seed, locale, time zone, clock and folder of temporary files, and
fails with the names that differ.

    python tools/collect_twice.py [arguments of pytest]
"""

import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

# a day and a second later; what calls time.time itself, such as gzip, sees the other clock
CLOCK = """\
import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + 86_401
time.time_ns = lambda: now_ns() + 86_401 * 10**9
"""
# the time zones are 26 hours apart, so that local dates differ too, also those of datetime
FIRST = {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "WEST+12"}
SECOND = {
    "PYTHONHASHSEED": "2",
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONUTF8": "0",  # text files are not read as UTF-8 unless the code says so
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "utf-8",
    "TZ": "EAST-14",
}


def differences(first: list[str], second: list[str]) -> list[str]:
    """Return one line for each name that only one list has, or for the first place that differs."""
    known = set(first), set(second)
    only = [f"only in the first run:  {name}" for name in first if name not in known[1]]
    only += [f"only in the second run: {name}" for name in second if name not in known[0]]
    if only or first == second:
        return only
    pairs = zip_longest(first, second)
    place, pair = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return [f"another order from test {place + 1} on: {pair[0]} and {pair[1]}"]


def main(arguments: list[str]) -> int:
    """Collect twice with the arguments of pytest and return the exit code."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name, variables in (("first", FIRST), ("second", SECOND)):
            own = Path(folder) / name
            own.mkdir()
            if name == "second":
                (own / "sitecustomize.py").write_text(CLOCK, "utf-8")
            paths = [str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
            changed = variables | {"TMPDIR": str(own), "PYTHONPATH": os.pathsep.join(paths)}
            runs.append(
                subprocess.Popen(
                    [*command, *arguments],
                    env=os.environ | changed,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        outputs = [run.communicate()[0].decode(errors="replace") for run in runs]
    for run, output in zip(runs, outputs, strict=True):
        if run.returncode:
            print(output, file=sys.stderr)
            return 1
    first, second = ([row for row in text.splitlines() if "::" in row] for text in outputs)
    rows = differences(first, second)
    for row in rows:
        print(row)
    if rows:
        print("Names of tests must not come from data: give ids= to parametrize.")
        return 1
    print(f"{len(first)} tests have the same names and order in two different processes.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
