"""The tables in docs/results are those that their studies write from the rows beside them."""

import shlex
import shutil
from pathlib import Path

import pytest

from primal_attention.cli.main import main
from primal_attention.tasks.study import read_about

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FOLDERS = ("causal-text", "depth-sweep", "layers-ranks", "pairs-mechanism", "tables-probes")
"""Both commands, other options than the defaults, missing cells; none needs data for its cells.

``test_studies.py`` compares the tables of all folders, without their commands.
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_tables_are_written_again_byte_for_byte(folder, tmp_path):
    here, there = RESULTS / folder, tmp_path / folder
    there.mkdir()
    for name in ("rows.jsonl", "about.json"):
        shutil.copyfile(here / name, there / name)
    words = shlex.split(read_about(here)["command"])[1:]
    assert main([*words, "--out", str(there), "--max-seconds", "0"]) == 0
    written = {path.name: path.read_bytes() for path in there.glob("*.md")}
    assert written == {path.name: path.read_bytes() for path in here.glob("*.md")}
    # pictures are not compared: their bytes depend on the versions of matplotlib and its fonts
    assert {path.name for path in there.glob("*.png")} == {p.name for p in here.glob("*.png")}
