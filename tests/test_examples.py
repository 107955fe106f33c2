"""The example scripts run, and print what they are there to show."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWN = {
    "causal_decoding": "numbers in the state after 100 tokens: 513, after 200: 513",
    "classify_series": "accuracy on new series: 1.00",
    "convert_huggingface": "the same after the way back: True",
    "kernel_svd": "relative error with 16 components: 0.0",
    "spectra": "primal: {'effective rank'",
    "training_loop": "accuracy of the last batch: 0.9",
}


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_is_for(name):
    path = f"examples/{name}.py"
    assert len((ROOT / path).read_text("utf-8").splitlines()) < 40
    assert SHOWN[name] in run(path)
