"""A small file in the form of the public set of emoji."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def write_emoji() -> Callable[[Path, list[str], list[str]], None]:
    def write(root: Path, names: list[str], tags: list[str]) -> None:
        folder = root / "multimodal" / "emoji"
        folder.mkdir(parents=True)
        n = len(names)
        styles = {
            style: np.zeros((n, 32, 32, 3), np.uint8) + (n * k + np.arange(n))[:, None, None, None]
            for k, style in enumerate(("color", "black", "twemoji"))
        }
        arrays = {name: image.astype(np.uint8) for name, image in styles.items()}
        np.savez(folder / "emoji32.npz", text=np.array(names), tags=np.array(tags), **arrays)

    return write
