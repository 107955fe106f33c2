"""The example scripts run, and say what the documentation says they say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "results" / "what_the_loss_does.txt"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.fixture
def conversion(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return load("relative_convert")


def test_features_of_unit_rows_can_take_the_place_of_the_kernel(conversion):
    core = conversion.RelativeCore(conversion.draw("positive", 2, True, 0), is_exact=True)
    with torch.no_grad():
        core.position.table.normal_()
    q, k, v = 3 * torch.randn(3, 2, conversion.HEADS, 25, conversion.HEAD)
    exact = core(q, k, v)
    core.is_exact = False
    for kind in conversion.MAPS:
        errors = []
        for size in (8, 2048):
            core.features = conversion.draw(kind, size, True, 0)
            errors.append((core(q, k, v) - exact).norm() / exact.norm())
        assert errors[1] < 0.1 < errors[0]


def test_exact_relative_weights_are_those_of_softmax_with_a_bias(conversion):
    core = conversion.RelativeCore(conversion.draw("positive", 2, False, 0), is_exact=True)
    with torch.no_grad():
        core.position.table.normal_()
    q, k, v = torch.randn(3, 2, conversion.HEADS, 25, conversion.HEAD)
    lag = torch.arange(25) - torch.arange(25)[:, None]
    bias = core.position.table[:, lag + core.position.reach]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(core(q, k, v), expected)


@pytest.mark.slow
def test_the_conversion_runs(tmp_path):
    run("examples/relative_convert.py", "--quick", "--out", str(tmp_path))
    assert {p.suffix for p in tmp_path.iterdir()} == {".csv", ".png"}


def test_a_table_held_at_zero_is_attention_without_positions():
    grid = load("relative_grid")
    model = grid.build("no relative positions").eval()
    core = model.blocks[0].attention.core
    q, k, v = torch.randn(3, 2, 4, grid.GRID**2, 16)
    order = torch.randperm(grid.GRID**2)
    torch.testing.assert_close(core(q, k[:, :, order], v[:, :, order]), core(q, k, v))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not any("position.table" in name for name in trained)
    assert any("position.table" in n for n, _ in grid.build("grid").named_parameters())


def test_kernels_differ_in_kernel_and_temperature_only():
    kernels = load("schoenbat_kernels")
    found = list(kernels.contestants())
    assert len({contestant[:3] for contestant in found}) == 2 * (2 * len(kernels.KERNELS) + 1)
    for kernel, name, sees, changes in found:
        config = kernels.model_config("listops", "softmax", **changes)
        assert config.is_causal == (sees == "before")
        model = kernels.EncoderClassifier(config)
        if kernel == "softmax":
            continue
        core = model.blocks[0].attention.core
        assert core.features.series.name == kernel
        assert (core.fixed_temperature is None) == (name == "learned")
        if name != "learned":
            assert core.fixed_temperature == pytest.approx(
                model.blocks[0].attention.head_dim ** -0.5
            )


@pytest.mark.slow
def test_the_kernels_train_and_finished_runs_are_kept(tmp_path):
    again = ("examples/schoenbat_kernels.py", "--quick", "--tasks", "listops")
    run(*again, "--out", str(tmp_path))
    first = (tmp_path / "schoenbat_kernels.csv").read_text()
    assert len(first.splitlines()) == 2 + 18
    assert "listops, exp" not in run(*again, "--out", str(tmp_path))
    assert (tmp_path / "schoenbat_kernels.csv").read_text() == first


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
