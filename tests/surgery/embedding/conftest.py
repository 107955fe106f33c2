"""One small encoder for all tests of this folder."""

from pathlib import Path

import pytest
from tests.surgery.embedding.models import save_model


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert")
