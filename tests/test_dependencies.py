"""The package asks for what it imports."""

import re
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
