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
