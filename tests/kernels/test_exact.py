"""Kernels in closed form against their formula, pair by pair."""

import math

import pytest
import torch

from primal_attention.kernels import Cosine, DotProduct, Exponential, Gaussian, Kernel


def _pairs(kernel: Kernel, pair) -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    gram = kernel.gram(x, y)
    assert gram.shape == (2, 5, 4)
    for b in range(2):
        for i in range(5):
            for j in range(4):
                assert gram[b, i, j].item() == pytest.approx(pair(x[b, i], y[b, j]), rel=1e-4)


def test_cosine_is_the_cosine():
    _pairs(Cosine(3), lambda x, y: (x @ y / x.norm() / y.norm()).item())


def test_exponential_is_exp_of_the_scaled_inner_product():
    _pairs(Exponential(0.3), lambda x, y: math.exp(0.3 * (x @ y).item()))


def test_gaussian_is_exp_of_the_scaled_distance():
    _pairs(Gaussian(0.7), lambda x, y: math.exp(-0.35 * (x - y).square().sum().item()))


def test_dot_product_applies_its_series():
    _pairs(DotProduct("exp", 0.2), lambda x, y: math.exp(0.2 * (x @ y).item()))
    _pairs(DotProduct("logi", 0.01), lambda x, y: 1 - math.log(1 - 0.01 * (x @ y).item()))


def test_normalized_kernels_ignore_length():
    x, y = torch.randn(4, 6), torch.randn(5, 6)
    for kernel in (Exponential(normalize=True), Gaussian(normalize=True), Cosine(6)):
        torch.testing.assert_close(kernel.gram(3 * x, y), kernel.gram(x, 0.1 * y))


def test_gaussian_and_exponential_differ_by_a_factor_per_row_and_column():
    x, y = torch.randn(4, 6), torch.randn(5, 6)
    half = [z.square().sum(-1).mul(-0.5).exp() for z in (x, y)]
    expected = half[0][:, None] * Exponential().gram(x, y) * half[1]
    torch.testing.assert_close(Gaussian().gram(x, y), expected)


def test_gaussian_of_equal_rows_of_huge_norm_is_one():
    x = 1e4 * torch.randn(6, 8)
    diagonal = Gaussian().gram(x, x).diagonal()
    assert torch.isfinite(diagonal).all()
    assert (diagonal <= 1).all()


def test_cosine_features_reproduce_the_cosine_exactly():
    x, y = torch.randn(4, 6), torch.randn(5, 6)
    kernel = Cosine(6)
    assert kernel.relation == "exact"
    torch.testing.assert_close(kernel.approximate(x, y), kernel.gram(x, y))


def test_a_zero_row_has_zero_cosine_and_a_finite_gradient():
    x = torch.zeros(1, 3, requires_grad=True)
    gram = Cosine(3).gram(x, torch.ones(2, 3))
    gram.sum().backward()
    assert (gram == 0).all()
    assert torch.isfinite(x.grad).all()


def test_gram_is_full_precision_under_autocast():
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        got = Exponential(0.1).gram(x, x)
    torch.testing.assert_close(got, Exponential(0.1).gram(x, x), rtol=0, atol=0)
