"""Exact kernels are exact, and what is bought at a price is nearer to them."""

import pytest
import torch

from primal_attention.attention import create_attention
from primal_attention.functional import naive_family, naive_nystrom
from primal_studies.core.exact import exact_rows, output_error, tokens
from primal_studies.core.family import BUDGETS


def _heads(layer, x):
    return [layer._split(p(x)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]


def _exact(layer, x):
    q, k, v = _heads(layer, x)
    return exact_rows(layer.core, q, k, v, torch.arange(x.shape[1])), (q, k, v)


@pytest.mark.parametrize("name", ["favor", "nystromformer", "linformer"])
def test_the_kernel_of_softmax_approximations_is_softmax(name):
    layer, x = create_attention(name, 16, 2).double(), torch.randn(1, 9, 16).double()
    got, (q, k, v) = _exact(layer, x)
    torch.testing.assert_close(got, (q @ k.mT / 8**0.5).softmax(-1) @ v)


@pytest.mark.parametrize("name", ["skyformer", "skyformer-learned"])
def test_the_kernel_of_skyformer_is_the_gaussian_one(name):
    layer, x = create_attention(name, 16, 2).double(), torch.randn(1, 9, 16).double()
    got, (q, k, v) = _exact(layer, x)
    expected = naive_nystrom.gaussian_attention(q * 8**-0.25, k * 8**-0.25, v, normalize=True)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kernel", ["exp", "inverse", "sqrt"])
def test_the_kernel_of_schoenbat_is_its_series(kernel):
    layer = create_attention("schoenbat", 16, 2, kernel=kernel).double()
    got, (q, k, v) = _exact(layer, torch.randn(1, 9, 16).double())
    f = {"exp": torch.exp, "inverse": lambda s: 1 / (1 - s), "sqrt": lambda s: 2 - (1 - s).sqrt()}
    tau = float(layer.core.temperature[0].detach())
    q, k = (naive_family.schoenbat_rows(t, tau) for t in (q, k))
    torch.testing.assert_close(got, naive_family.normalized_attention(f[kernel](q @ k.mT), v))


@pytest.mark.parametrize("name", ["kernelized", "kernelized-log"])
def test_the_kernel_of_kernelized_attention_weighs_lags(name):
    layer = create_attention(name, 16, 2, temperature=True).double()
    with torch.no_grad():
        layer.core.position.table.normal_()
        layer.core.temperature.fill_(1.3)
    got, (q, k, v) = _exact(layer, torch.randn(1, 9, 16).double())
    heat = torch.nn.functional.softplus(layer.core.temperature)[:, None, None]
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    lag = torch.arange(9)[None] - torch.arange(9)[:, None]
    weights = (heat * (q @ k.mT)).exp() * layer.core.position.weight(lag)
    torch.testing.assert_close(got, naive_family.normalized_attention(weights, v))


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_more_of_a_budget_buys_less_error(name):
    x = tokens(300, 32)
    few, many = (8, 128) if name != "schoenbat" else (40, 400)
    torch.manual_seed(0)
    errors = [
        sum(
            output_error(create_attention(name, 32, 2, **{BUDGETS[name][0]: size}), x)[0]
            for _ in range(3)
        )
        for size in (few, many)
    ]
    assert errors[1] < errors[0]


def test_with_landmarks_everywhere_skyformer_is_exact_and_softmax_always():
    x = tokens(20, 16)
    error, average = output_error(create_attention("skyformer", 16, 2, ridge=1e-6), x)
    assert error < 1e-3 < average
    assert output_error(create_attention("softmax", 16, 2), x) == (0.0, 0.0)
    assert output_error(create_attention("primal", 16, 2), x) == (0.0, 0.0)


def test_sharper_scores_cost_positive_features_more_error():
    x, layer = tokens(200, 32), create_attention("favor", 32, 2)
    smooth, sharp = (output_error(layer, x, sharpness)[0] for sharpness in (0.5, 6.0))
    assert smooth < sharp
