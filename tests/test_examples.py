"""The example scripts run, and say what the documentation says they say."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "results" / "what_the_loss_does.txt"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def experiments() -> ModuleType:
    return load("what_the_loss_does")


def test_the_published_loss_reaches_zero_far_from_singular_vectors(experiments):
    p = experiments.problem()
    loss = experiments.LOSSES["J², the published loss"]
    found = experiments.judge(p, experiments.minimise(p, loss, steps=500))
    assert found.objective.max() < 1e-6
    assert found.residual.min() > 0.5
    assert found.distinct == [0, 0, 0, 0]


@pytest.mark.slow
def test_the_kkt_residual_with_orthogonality_finds_singular_vectors(experiments):
    p = experiments.problem()
    loss = experiments.LOSSES["KKT residual + 0.1 orthogonality"]
    found = experiments.judge(p, experiments.minimise(p, loss))
    assert found.cosines.min() > 0.999
    assert found.distinct == [3, 3, 3, 3]


def test_static_weights_mix_no_tokens_and_data_weights_lose_the_sign(experiments):
    assert experiments.mixing("static", False).others == 0
    assert experiments.mixing("static", True).others > 0
    assert experiments.mixing("data", False).even < 1e-6
    assert experiments.mixing("dual", False).odd < 1e-6


def test_an_untrained_layer_already_concentrates_its_spectrum(experiments):
    primal, softmax, cosine = experiments.first_share(0.5, centred=False)
    assert primal > softmax > cosine
    independent = experiments.first_share(0.0, centred=False)
    assert independent[0] < primal / 3


@pytest.mark.slow
def test_the_quoted_output_is_the_printed_one():
    def frame(text: str) -> str:
        return re.sub(r"[ \d.%e+–-]+", " ", text)

    assert frame(run("examples/what_the_loss_does.py")) == frame(OUTPUT.read_text("utf-8"))
