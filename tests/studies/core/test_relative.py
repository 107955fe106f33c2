"""Features can replace the kernel, and models without positions have none."""

import pytest
import torch

from primal_studies.core.relative import MAPS
from primal_studies.core.relative_models import (
    HEAD_DIM,
    HEADS,
    RelativeCore,
    draw,
    grid_model,
)


def test_features_of_unit_rows_can_replace_the_kernel():
    core = RelativeCore(draw("positive", 2, True, 0), is_exact=True)
    with torch.no_grad():
        core.position.table.normal_()
    q, k, v = 3 * torch.randn(3, 2, HEADS, 25, HEAD_DIM)
    exact = core(q, k, v)
    core.is_exact = False
    for kind in MAPS:
        errors = []
        for size in (8, 2048):
            core.features = draw(kind, size, True, 0)
            errors.append((core(q, k, v) - exact).norm() / exact.norm())
        assert errors[1] < 0.1 < errors[0]


def test_exact_relative_weights_are_those_of_softmax_with_a_bias():
    core = RelativeCore(draw("positive", 2, False, 0), is_exact=True)
    with torch.no_grad():
        core.position.table.normal_()
    q, k, v = torch.randn(3, 2, HEADS, 25, HEAD_DIM)
    lag = torch.arange(25) - torch.arange(25)[:, None]
    bias = core.position.table[:, lag + core.position.reach]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(core(q, k, v), expected)


def test_a_table_held_at_zero_is_attention_without_positions():
    model = grid_model("no relative positions").eval()
    core = model.blocks[0].attention.core
    q, k, v = torch.randn(3, 2, 4, 64, 16)
    order = torch.randperm(64)
    torch.testing.assert_close(core(q, k[:, :, order], v[:, :, order]), core(q, k, v))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not any("position.table" in name for name in trained)
    assert any("position.table" in n for n, _ in grid_model("grid").named_parameters())


@pytest.mark.parametrize("kernel", ["exp", "inverse", "softmax"])
def test_kernels_differ_in_kernel_temperature_and_order_only(kernel):
    from primal_studies.core.schoenbat_kernels import KernelOptions, KernelStudy, build_encoder

    for cell in KernelStudy().cells(KernelOptions(("listops",), (kernel,))):
        model = build_encoder(cell)
        assert model.config.is_causal == (cell["sees"] == "before")
        if kernel == "softmax":
            continue
        layer = model.blocks[0].attention
        assert layer.core.features.series.name == kernel
        fixed = None if cell["temperature"] == "learned" else pytest.approx(layer.head_dim**-0.5)
        assert layer.core.fixed_temperature == fixed
