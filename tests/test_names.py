"""Every public name is reached from ``import primal_attention``, and loads on first use."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import primal_attention as pa

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT / "src")).replace("/", ".")
    for path in (ROOT / "src" / "primal_attention").glob("*/__init__.py")
    if path.parent.name not in ("cli", "support")  # no part of the library for users
)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_an_attribute_that_lists_and_has_its_names(name):
    short = name.rpartition(".")[2]
    assert short in dir(pa)
    package = getattr(pa, short)
    assert package is importlib.import_module(name)
    names = getattr(package, "__all__", ())  # bench has studies only, which are found by name
    assert set(names) <= set(dir(package))
    for public in names:
        assert getattr(package, public) is not None


def test_names_in_the_docs_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    names = set(re.findall(r"\{py:\w+\}`~?primal_attention\.([\w.]+)`", text))
    assert names
    for name in names:
        found = pa
        for part in name.split("."):
            found = getattr(found, part)


ESTIMATORS = {
    **dict.fromkeys(["TableClassifier", "TableRegressor", "TableImputer", "KernelSVD"], "sklearn"),
    **dict.fromkeys(["EventPredictor", "EventClassifier"], "sklearn"),
    **dict.fromkeys(["Reranker", "ImageTextMatcher"], "sklearn"),
    **dict.fromkeys(["SeriesClassifier", "SeriesRegressor"], "series"),
}
"""Estimators at the front door, and the extra that each needs."""


def test_estimators_are_at_the_front_door():
    assert set(ESTIMATORS) <= set(pa.__all__)
    for name in ESTIMATORS:
        assert isinstance(getattr(pa, name), type)
        assert getattr(pa, name).__name__ == name


def test_estimators_load_when_used_and_name_the_extra_that_is_missing():
    code = (
        "import sys\n"
        "sys.modules.update(sklearn=None, aeon=None)\n"  # as if they were not installed
        "import primal_attention as pa\n"
        "print(dir(pa).count('TableClassifier'), 'torch' in sys.modules)\n"
        "from primal_attention.support.command import MissingPackageError\n"
        f"for name in {list(ESTIMATORS)}:\n"
        "    try:\n"
        "        getattr(pa, name)()\n"
        "    except MissingPackageError as error:\n"
        "        print(name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert first == "1 False"
    assert [line.split()[0] for line in lines] == list(ESTIMATORS)
    for line, extra in zip(lines, ESTIMATORS.values(), strict=True):
        assert f"pip install -e '.[{extra}]'" in line


def test_packages_are_imported_when_they_are_used():
    code = (
        "import sys, primal_attention as pa\n"
        "names = dir(pa), dir(pa.surgery), dir(pa.tasks), dir(pa.analysis)\n"
        "print('torch' in sys.modules)\n"
        "pa.surgery.convert, pa.tasks.run_experiment, pa.analysis.layer_spectra, pa.load\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
