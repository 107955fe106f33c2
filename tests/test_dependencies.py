"""The package asks for what it imports."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {"pyyaml": "yaml"}


def test_every_core_dependency_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    source = "\n".join(p.read_text("utf-8") for p in (ROOT / "src").rglob("*.py"))
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=!~\[ ;]", requirement)[0]
        module = MODULES.get(name, name.replace("-", "_"))
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE), name


def test_install_hints_are_for_a_checkout_and_name_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    files = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = {file: file.read_text("utf-8") for file in files}
    studies = tomllib.loads((ROOT / "studies" / "pyproject.toml").read_text("utf-8"))["project"]
    named, of_studies = set(), set()
    for file, text in texts.items():
        # the package is on no index
        assert "primal-attention[" not in text, file
        for line in re.findall(r"pip install -e .*", text):
            for place, extras in re.findall(r"-e '(\.|\./studies)\[([a-z,-]+)\]'", line):
                found = of_studies if place.endswith("studies") else named
                found |= set(extras.split(","))
        named |= set(re.findall(r"(?:needs|install_hint)\([\"']([a-z]+)[\"']", text))
    assert (
        {"cli", "train", "hf", "vision", "sklearn"}
        <= named
        <= set(project["optional-dependencies"])
    )
    assert {"peers", "events"} <= of_studies <= set(studies["optional-dependencies"])


def test_torchvision_loads_in_a_new_interpreter_and_torch_only_with_it():
    # the environment of the Makefile, without anything that pytest has imported
    code = (
        "import importlib.util as u, sys\n"
        "found = u.find_spec('torchvision')\n"
        "assert 'torch' not in sys.modules\n"
        "if found: import torchvision\n"
        "from transformers import BertModel"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
