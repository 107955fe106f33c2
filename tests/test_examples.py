"""The example scripts run, and print what they are there to show."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def run(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | env,
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


def test_held_out_thirds_choose_a_training_without_the_test_part(tmp_path):
    folder = tmp_path / "uea" / "BasicMotions"
    folder.mkdir(parents=True)
    x, y = np.random.default_rng(0).normal(size=(12, 20, 2)), np.arange(12) % 2
    arrays = {"X_train": x.astype(np.float32), "y_train": y, "classes": np.array(["p", "q"])}
    np.savez(folder / "BasicMotions.npz", **arrays)  # there is no test part to read
    again = ("examples/uea_trainings.py", "--quick", "--sets", "BasicMotions")
    again += ("--out", str(tmp_path))
    printed = run(*again, PRIMAL_DATA=str(tmp_path))
    assert printed.count("third") == 6
    rows = (tmp_path / "uea_trainings.csv").read_text().splitlines()[2:]
    means = {"published": 0.0, "ours": 0.0}
    for _, training, _, best, _ in (row.split(",") for row in rows):
        means[training] += float(best)
    chosen = [cell.strip() for cell in printed.splitlines()[-1].strip("|").split("|")]
    assert chosen[-1] == ("ours" if means["ours"] > means["published"] else "published")
    assert run(*again, PRIMAL_DATA=str(tmp_path)).count("third") == 0  # runs are kept
