import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "ksvd.md"


def test_examples_of_the_page_run(capsys) -> None:
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    exec("\n".join(blocks), {})
