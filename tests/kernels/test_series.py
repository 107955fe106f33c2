"""Power series: closed forms against automatic differentiation and against themselves."""

import pickle

import pytest
import torch

from primal_attention.kernels import SERIES, DotProduct, PowerSeries, as_series


def _taylor_by_autograd(series: PowerSeries, degree: int) -> list[float]:
    s = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value, found, factorial = series(s), [], 1.0
    for n in range(degree + 1):
        found.append(value.item() / factorial)
        (value,) = torch.autograd.grad(value, s, create_graph=True)
        factorial *= n + 1
    return found


def _taylor_by_contour(series: PowerSeries, degree: int) -> torch.Tensor:
    # Cauchy: the coefficients are the Fourier coefficients of f on a circle, over its radius
    angle = torch.arange(128, dtype=torch.float64) * (2 * torch.pi / 128)
    values = series(torch.polar(torch.full_like(angle, 0.5), angle))
    powers = torch.arange(degree + 1, dtype=torch.float64)
    return torch.fft.fft(values).real[: degree + 1] / 128 / 0.5**powers


@pytest.mark.parametrize("name", sorted(SERIES))
def test_coefficients_are_those_of_automatic_differentiation(name):
    series = SERIES[name]
    expected = torch.tensor(series.coefficients(10), dtype=torch.float64)
    by_autograd = torch.tensor(_taylor_by_autograd(series, 6), dtype=torch.float64)
    torch.testing.assert_close(by_autograd, expected[:7], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(_taylor_by_contour(series, 10), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", sorted(SERIES))
def test_series_sums_to_its_closed_form(name):
    s = torch.tensor([-0.3, 0.0, 0.3], dtype=torch.float64)
    torch.testing.assert_close(SERIES[name].truncated(s, 40), SERIES[name](s), rtol=0, atol=1e-10)


def test_trigh_equals_exp():
    assert SERIES["trigh"].coefficients(20) == SERIES["exp"].coefficients(20)


def test_sqrt_coefficients_are_the_published_fractions():
    assert SERIES["sqrt"].coefficients(4) == [1, 1 / 2, 1 / 8, 1 / 16, 5 / 128]


def test_truncation_bias_of_the_inverse_series_is_as_published():
    s = torch.tensor([0.5, 0.9], dtype=torch.float64)
    bias = SERIES["inverse"](s) - SERIES["inverse"].truncated(s, 20)
    torch.testing.assert_close(bias, s**21 / (1 - s))
    assert bias[0] < 1e-6
    assert 1.0 < bias[1] < 1.2


def test_custom_coefficients_make_a_polynomial():
    s = torch.tensor([-1.0, 0.5, 2.0])
    torch.testing.assert_close(as_series([1.0, 0.0, 0.5])(s), 1 + s**2 / 2)
    assert DotProduct([0.0, 1.0]).gram(torch.ones(1, 2), torch.ones(1, 2)).item() == 2


def test_series_pickle():
    for series in (*SERIES.values(), as_series([1.0, 2.0])):
        assert pickle.loads(pickle.dumps(series)).coefficients(5) == series.coefficients(5)


def test_negative_coefficients_and_unknown_names_raise():
    with pytest.raises(ValueError, match=r"Coefficient 1 .* is -1\.0"):
        as_series([1.0, -1.0])
    with pytest.raises(ValueError, match="no series named 'cosh'"):
        as_series("cosh")
    for nothing in ((), (0.0, 0.0)):
        with pytest.raises(ValueError, match="All coefficients are zero"):
            as_series(nothing)
