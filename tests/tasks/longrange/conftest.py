"""Where the real data lies, for the tests that need it."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    default = Path(__file__).parents[4] / "shared/data"
    root = Path(os.environ.get("PRIMAL_DATA", default))
    if not root.is_dir():
        pytest.skip("the real data is not here; set PRIMAL_DATA to its folder")
    return root
