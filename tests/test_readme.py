"""The README runs, and its table is the registry's."""

import re
from pathlib import Path

import yaml

import primal_attention
from primal_attention.cli.attentions import attention_table, renewed, stored_table

README = Path(__file__).parents[1] / "README.md"


def test_every_python_block_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)


def test_the_table_of_attentions_is_the_registry():
    assert README.read_text("utf-8") == renewed(README), "run primal info --update README.md"


def test_the_command_line_lists_the_registry():
    kept = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in attention_table().splitlines()
    ]
    assert stored_table() == [kept[0], *kept[2:]], "run primal info --update README.md"


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text("utf-8")):
        assert (README.parent / target).exists(), target


def test_citation_and_changelog_carry_the_version():
    citation = yaml.safe_load((README.parent / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == primal_attention.__version__
    assert "## [Unreleased]" in (README.parent / "CHANGELOG.md").read_text("utf-8")
