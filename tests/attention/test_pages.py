"""Every registered attention has a page that says what it is, what it costs and when to use it."""

import re
from pathlib import Path

from tests.house.rows import each

from primal_attention.attention import attention_entry, list_attentions

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    table = (DOCS / "results" / "family" / "choice.md").read_text("utf-8")
    link = re.search(rf"\[`{name}`\]\((.+?)\)", table)  # included by guides/choosing.md
    assert link, f"the table of the guide for choosing has no row for {name}"
    return (DOCS / "guides" / link[1]).read_text("utf-8")


@each("name", list_attentions())
def test_a_page_has_formula_paper_use_cost_and_example(name):
    text = page(name)
    assert f'"{name}"' in text
    assert "$$" in text
    assert "https://arxiv.org/abs/" in text
    for part in (
        "**Use it**",
        "**Do not use it**",
        "\n| time |",
        "\n| memory |",
        "\n| random |",
        "```python",
    ):
        assert part in text, part


@each("name", list_attentions())
def test_a_page_lists_the_capabilities(name):
    text, can = page(name), attention_entry(name).capabilities
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+)", text, re.MULTILINE)
    for word, flag in (
        ("padding", can.padding),
        ("causal", can.causal),
        ("cross", can.cross),
        ("decoding", can.stateful),
        ("relative positions", can.relative_position),
    ):
        said = [value for head, value in rows if word in head.split(", ")]
        assert said, f"no row for {word}"
        if flag:
            assert not re.match(r"no\b", said[0]), f"{name} has {word}"
        else:
            # a page may deny it, for all of its names or for this one, or tie it to an option
            denied = rf'^no\b|^with `|\bonly\b|`"{name}"` not'
            assert re.search(denied, said[0]), f"{name} has no {word}, the page says: {said[0]}"
