"""Every Python block of the pages runs, links lead somewhere, and evidence shows every result."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
PAGES = sorted(
    p for p in DOCS.rglob("*.md") if "_build" not in p.parts and RESULTS not in p.parents
)
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
EVIDENCE = sorted((DOCS / "evidence").glob("*.md"))
# what a page includes or draws, relative to the page
SHOWN = re.compile(r"^```\{include\} (.+)|!\[[^\]]*\]\((?!https?:)([^)]+)\)", re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def shown(page: Path) -> set[Path]:
    found = SHOWN.findall(page.read_text("utf-8"))
    return {(page.parent / (table or picture)).resolve() for table, picture in found}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name)
def test_python_blocks_of_a_page_run_in_order(page, capsys):
    namespace: dict[str, object] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_includes_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    for target in {page.parent / link for link in links} | shown(page):
        assert target.exists(), target


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=name)
def test_a_guide_begins_with_when_to_use_it_and_when_not(page):
    first = page.read_text("utf-8").split("\n\n")[1].replace("\n", " ")
    assert first.startswith("**Use it when** "), first
    assert "**Do not use it when** " in first


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_every_test_that_a_page_names_exists(page):
    for file, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text("utf-8")):
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), test


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_lines_of_prose_have_at_most_120_columns(page):
    lines = page.read_text("utf-8").split("\n")
    long = [n for n, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
    assert not long, f"lines {long}"


@pytest.mark.parametrize("page", EVIDENCE, ids=name)
def test_an_evidence_page_has_question_protocol_verdict_table_and_command(page):
    text = page.read_text("utf-8")
    questions = text.count("\n**Question.** ")
    assert questions
    assert text.count("\n**Protocol.** ") == questions
    assert re.search(r"^```\{include\} \.\./results/", text, re.MULTILINE)
    assert re.search(r"^\$ .*primal (bench|repro) ", text, re.MULTILINE)
    # the verdict stands before the first table
    assert text.index("\n**Verdict.**") < text.index("```{include}")


def test_evidence_shows_every_table_and_picture_of_a_study():
    there = {p.resolve() for kind in ("*.md", "*.png") for p in RESULTS.rglob(kind)}
    drawn = set().union(*(shown(page) for page in PAGES))
    assert not {str(p.relative_to(DOCS)) for p in there - drawn}
