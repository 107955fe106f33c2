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
    if path.parent.name != "cli"
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
