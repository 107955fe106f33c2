"""Sums and products of kernels agree with their features and with their parts."""

import pytest
import torch

from primal_attention.kernels import (
    BochnerTime,
    Cosine,
    Exponential,
    Gaussian,
    MercerTime,
    PositiveFeatures,
    ProductFeatures,
    ProductKernel,
    SumFeatures,
    SumKernel,
    TimeColumn,
    TimeKernel,
)

F64 = torch.float64


def _rows(n: int) -> torch.Tensor:
    return torch.cat([torch.randn(2, n, 3, dtype=F64), 50 * torch.rand(2, n, 1, dtype=F64)], -1)


@pytest.fixture(params=[BochnerTime(8, dtype=F64), MercerTime(2, 3, dtype=F64)])
def time(request):
    return request.param


def test_sum_features_add_the_kernels(time):
    x, y = _rows(5), _rows(6)
    phi = SumFeatures([Cosine(3), TimeColumn(time)], [3, 1])
    sums = Cosine(3).gram(x[..., :3], y[..., :3]) + TimeKernel(time).gram(x[..., 3], y[..., 3])
    for got in (phi.gram(x, y), phi.approximate(x, y)):
        torch.testing.assert_close(got, sums, rtol=0, atol=2e-11)
    assert phi.num_features == phi.query_features(x).shape[-1]


def test_product_features_multiply_the_kernels(time):
    x, y = _rows(5), _rows(6)
    phi = ProductFeatures([Cosine(3), TimeColumn(time)], [3, 1])
    product = Cosine(3).gram(x[..., :3], y[..., :3]) * TimeKernel(time).gram(x[..., 3], y[..., 3])
    for got in (phi.gram(x, y), phi.approximate(x, y)):
        torch.testing.assert_close(got, product, rtol=0, atol=2e-11)
    assert phi.num_features == phi.query_features(x).shape[-1] == 3 * time.num_features


def test_the_exponential_of_joined_features_is_a_product(time):
    x, y = _rows(5), _rows(6)
    joined, event, when = SumFeatures([Cosine(3), TimeColumn(time)], [3, 1]), Cosine(3), time
    exp = Exponential()
    sums = exp.gram(joined.query_features(x), joined.key_features(y))
    parts = [
        exp.gram(event.query_features(x[..., :3]), event.key_features(y[..., :3])),
        exp.gram(when(x[..., 3]), when(y[..., 3])),
    ]
    torch.testing.assert_close(sums, parts[0] * parts[1], rtol=0, atol=2e-11)


def test_kernels_without_features_combine_too(time):
    x, y = _rows(5), _rows(6)
    parts, grams = [Gaussian(0.3), TimeColumn(time)], []
    grams = [parts[0].gram(x[..., :3], y[..., :3]), parts[1].gram(x[..., 3:], y[..., 3:])]
    torch.testing.assert_close(SumKernel(parts, [3, 1]).gram(x, y), grams[0] + grams[1])
    torch.testing.assert_close(ProductKernel(parts, [3, 1]).gram(x, y), grams[0] * grams[1])


def test_a_combination_is_as_good_as_its_weakest_part(time):
    random = PositiveFeatures(3, 16, dtype=F64)
    phi = ProductFeatures([random, TimeColumn(time)], [3, 1])
    assert phi.relation == "unbiased"
    assert not phi.is_positive
    assert SumFeatures([random, random], [3, 3]).is_positive
    assert SumFeatures([Cosine(3), TimeColumn(time)], [3, 1]).relation == "exact"


def test_rows_of_another_width_are_refused(time):
    with pytest.raises(ValueError, match=r"5 columns, but the kernels take \(3, 1\)"):
        SumKernel([Cosine(3), TimeColumn(time)], [3, 1]).gram(torch.randn(2, 5), torch.randn(2, 5))
    with pytest.raises(ValueError, match="two or more kernels"):
        SumKernel([Cosine(3)], [3])
