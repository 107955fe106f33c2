"""The page about time lists what the registry allows."""

import re
from pathlib import Path
from typing import get_args

from primal_attention.attention import attention_entry, list_attentions
from primal_attention.attention.base import JOINED_TIME
from primal_attention.attention.time import Fusion
from primal_attention.kernels import TIME_FEATURES
from primal_attention.support.output import markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "time.md"
WAYS = ("stationary-bias", "rotary", "product")


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


def test_the_page_explains_every_way_and_says_which_work_everywhere():
    text = PAGE.read_text("utf-8")
    assert all(f'| `"{way}"` |' in text for way in get_args(Fusion))
    assert '`"concat"`, `"concat-mlp"` and `"add"` work with every attention' in text
    assert all(attention_entry(n).capabilities.time >= JOINED_TIME for n in list_attentions())
    assert {*WAYS, *JOINED_TIME} == set(get_args(Fusion))


def test_the_page_names_all_features_of_time():
    text = PAGE.read_text("utf-8")
    assert all(f"`{name}`" in text for name in TIME_FEATURES)
