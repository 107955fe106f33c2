"""The page about time lists what the registry allows."""

import re
from pathlib import Path

from primal_attention.attention import attention_entry, list_attentions
from primal_attention.kernels import TIME_FEATURES
from primal_attention.output import markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "time.md"
WAYS = ("concat", "stationary-bias", "rotary", "product")


def _table() -> str:
    rows = []
    for name in list_attentions():
        allowed = attention_entry(name).capabilities.time
        rows.append([f"`{name}`", *("✓" if way in allowed else "–" for way in WAYS)])
    return markdown_table(["attention", *WAYS], rows)


def test_the_page_has_the_table_of_the_registry():
    found = re.search(
        r"<!-- times: start -->\n(.*?)<!-- times: end -->", PAGE.read_text("utf-8"), re.DOTALL
    )
    assert found
    assert found[1].strip() == _table().strip()


def test_the_page_names_all_features_of_time():
    text = PAGE.read_text("utf-8")
    assert all(f"`{name}`" in text for name in TIME_FEATURES)
