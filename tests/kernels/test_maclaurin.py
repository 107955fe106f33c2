"""Random Maclaurin features: exact low degrees, unbiased high ones, variance and rate."""

import copy
import math
import pickle

import pytest
import torch
from tests.house.rows import each

from primal_attention.kernels import SERIES, MaclaurinFeatures, as_series

PUBLISHED = {"exact_degree": 0, "law": "geometric", "stratified": False}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(n: int, dim: int, tau: float, seed: int = 5) -> torch.Tensor:
    rows = torch.randn(n, dim, generator=_generator(seed), dtype=torch.float64)
    return math.sqrt(tau) * rows / rows.norm(dim=-1, keepdim=True)


def _build(dim, p, series="exp", seed=0, **options) -> MaclaurinFeatures:
    options = {"dtype": torch.float64, "generator": _generator(seed), **options}
    return MaclaurinFeatures(dim, p, series, **options)


@pytest.mark.parametrize("series", ["exp", "inverse", "logi", "sqrt", "trigh"])
def test_degrees_up_to_two_are_exact(series):
    x, y = _rows(6, 5, 0.9), _rows(7, 5, 0.9, seed=6)
    phi = _build(5, 21, series, exact_degree=2)
    assert phi.counts == ()
    s = x @ y.T
    expected = as_series(SERIES[series].coefficients(2))(s)
    torch.testing.assert_close(phi.approximate(x, y), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(phi.expected_gram(x, y), expected, rtol=0, atol=1e-12)


def test_weights_of_the_second_order_exponential_are_positive():
    x, y = 3 * torch.randn(50, 5), 3 * torch.randn(50, 5)
    phi = MaclaurinFeatures(5, 21, "exp", exact_degree=2)
    assert phi.approximate(x, y).min() > 0.49


@each("p, degree", [(4, 0), (5, 0), (6, 1), (14, 1), (15, 2), (40, 2)])
def test_default_exact_degree_is_the_largest_that_fits(p, degree):
    assert _build(4, p).exact_degree == degree


@each("p", [1, 2, 6, 30, 128])
@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["ours", "published"])
def test_every_feature_is_counted(p, options):
    phi = _build(4, p, **options)
    features = phi.query_features(_rows(3, 4, 1.0))
    assert features.shape == (3, p)
    assert features.isfinite().all()


@each(
    "coefficients, p, width, degree",
    [
        ((1.0,), 64, 1, 0),
        ((1.0, 0.5), 64, 5, 1),
        ((1.0, 0.5), 5, 5, 1),
        ((1.0, 0.0, 1.0), 64, 15, 2),
    ],
)
def test_a_polynomial_has_no_more_features_than_it_needs(coefficients, p, width, degree):
    phi, x = _build(4, p, coefficients), _rows(3, 4, 1.0)
    assert phi.exact_degree == degree
    assert phi.num_features == phi.query_features(x).shape[-1] == width
    torch.testing.assert_close(phi.approximate(x, x), phi.gram(x, x))
    higher = _build(4, 64, (1.0, 0.5, 0.2, 0.1))
    assert higher.num_features == higher.query_features(x).shape[-1] == 64


def test_the_optimal_law_follows_coefficients_and_scale():
    law = _build(8, 64, "exp", scale=0.5, exact_degree=1).degree_law()
    assert sum(law.values()) == pytest.approx(1)
    assert law[3] / law[2] == pytest.approx(0.5 / 3)
    assert min(law) == 2


def test_the_published_law_halves_with_each_degree():
    law = _build(8, 64, **PUBLISHED).degree_law()
    assert list(law) == list(range(1, 21))
    assert law[2] / law[1] == pytest.approx(0.5)


def test_shares_are_in_proportion_and_the_same_for_every_seed():
    counts = dict(_build(32, 128, "exp", scale=1.0).counts)
    assert counts[2] > counts[3] > counts[4] >= 1
    assert sum(counts.values()) == 128 - 33
    assert counts == dict(_build(32, 128, "exp", scale=1.0, seed=9).counts)


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["ours", "published"])
@pytest.mark.parametrize("series", SERIES)
def test_the_mean_over_draws_is_the_expected_gram(series, options):
    x, y = _rows(4, 6, 0.5), _rows(4, 6, 0.5, seed=6)
    phi = _build(6, 20, series, scale=0.5, **options)
    mean = torch.zeros(4, 4, dtype=torch.float64)
    for seed in range(600):
        phi.redraw_(_generator(seed))
        mean += phi.approximate(x, y) / 600
    error = (mean - phi.expected_gram(x, y)) / (phi.variance(x, y) / 600).sqrt()
    assert error.abs().max() < 4.5


def test_the_variance_of_fixed_shares_is_that_of_all_signs():
    phi = _build(2, 9, "exp", scale=0.8, exact_degree=0)
    x, y = _rows(1, 2, 0.5), _rows(1, 2, 0.5, seed=6)
    a, expected = phi.series.coefficients(8), 0.0
    assert len(phi.counts) > 2
    assert max(count for _, count in phi.counts) > 1
    for n, count in phi.counts:
        draws = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 2 * n).double().view(-1, n, 2)
        products = ((draws @ x[0]) * (draws @ y[0])).prod(-1)
        # a feature of a degree is the mean of independent products
        expected += a[n] ** 2 * products.var(correction=0) / count
    torch.testing.assert_close(phi.variance(x, y)[0, 0], expected, rtol=1e-12, atol=0)


def test_truncation_bias_is_small_against_the_variance():
    x, y = _rows(8, 32, 1.0), _rows(8, 32, 1.0, seed=6)
    phi = _build(32, 128, scale=1.0)
    bias = (phi.gram(x, y) - phi.expected_gram(x, y)).abs()
    assert (bias < 0.1 * phi.variance(x, y).sqrt()).all()


def test_exact_degrees_and_the_optimal_law_cut_the_variance():
    # one feature of each kind, x·y = 0.076, tau = 1/√32: published 0.0748, ours 0.00044
    x, y = _rows(1, 32, 32**-0.5), _rows(1, 32, 32**-0.5, seed=2)
    y = y - (x @ y.T) / (x @ x.T) * x
    y = 0.43 * x + math.sqrt(1 - 0.43**2) * 32**-0.25 * y / y.norm()
    published = _build(32, 2, **PUBLISHED).variance(x, y)
    ours = _build(32, 34, scale=32**-0.5, stratified=False).variance(x, y)
    assert published.item() == pytest.approx(0.075, rel=0.1)
    assert ours.item() < published.item() / 100


def test_kernel_error_at_the_published_scale_is_small():
    x, y = _rows(64, 32, 32**-0.5), _rows(64, 32, 32**-0.5, seed=6)
    phi = _build(32, 128, scale=32**-0.5)
    assert (phi.approximate(x, y) - phi.gram(x, y)).square().mean().sqrt() < 0.004


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["ours", "published"])
@pytest.mark.parametrize("series", SERIES)
def test_error_falls_with_the_square_root_of_the_features(series, options):
    x, y = _rows(32, 16, 0.5), _rows(32, 16, 0.5, seed=6)
    options = {"exact_degree": 1, "scale": 0.5, **options}

    def error(p: int) -> float:
        maps = [_build(16, p, series, seed=s, **options) for s in range(12)]
        squares = [(m.approximate(x, y) - m.expected_gram(x, y)).square().mean() for m in maps]
        return math.sqrt(sum(squares).item() / len(squares))

    # the exact part takes 17 of the features
    fixed = 17 if options["exact_degree"] else 0
    assert 1.6 < error(128 + fixed) / error(512 + fixed) < 2.5


# all series have the right mean and variance, see above; the tail needs few of them
@pytest.mark.parametrize(
    ("series", "options"),
    [("exp", {}), ("exp", PUBLISHED), ("inverse", {}), ("logi", PUBLISHED)],
    ids=["exp", "exp-published", "inverse", "logi-published"],
)
def test_large_errors_are_rare_and_rarer_with_more_features(series, options):
    # spec 04 §2.6: the tail of a mean of bounded products, on the scale of the exact variance
    x, y = _rows(1, 8, 0.5), _rows(1, 8, 0.5, seed=6)

    def errors(p: int) -> tuple[torch.Tensor, float]:
        phi = _build(8, p, series, **{"exact_degree": 1, "scale": 0.5, **options})
        found = []
        for seed in range(400):
            phi.redraw_(_generator(seed))
            found.append((phi.approximate(x, y) - phi.expected_gram(x, y)).abs().item())
        return torch.tensor(found), phi.variance(x, y).sqrt().item()

    few, sigma = errors(40)
    # Chebyshev allows 0.11; a mean of many is far below
    assert (few > 3 * sigma).float().mean() < 0.04
    assert (few > 6 * sigma).float().mean() < 0.01
    many, _ = errors(640)
    assert (many > sigma).float().mean() < 0.02


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["ours", "published"])
def test_the_draw_is_saved_copied_and_moved(options):
    phi, x = _build(4, 30, seed=1, **options), _rows(3, 4, 1.0)
    expected = phi.query_features(x)
    other = _build(4, 30, seed=2, **options)
    assert not torch.equal(other.query_features(x), expected)
    other.load_state_dict(phi.state_dict())
    for same in (other, copy.deepcopy(phi), pickle.loads(pickle.dumps(phi)), phi.eval()):
        assert torch.equal(same.query_features(x), expected)
    phi.redraw_(_generator(3))
    assert not torch.equal(phi.query_features(x), expected)
    phi.redraw_(_generator(1))
    assert torch.equal(phi.query_features(x), expected)
    assert phi.float().signs.dtype == torch.float32
    assert phi.degrees.dtype == torch.long


def test_a_draw_of_another_size_does_not_load():
    with pytest.raises(RuntimeError, match="size mismatch"):
        _build(4, 30).load_state_dict(_build(4, 31).state_dict())


def test_heads_have_their_own_signs():
    phi = _build(4, 30, num_heads=2)
    features = phi.query_features(_rows(3, 4, 1.0).expand(2, 2, 3, 4))
    torch.testing.assert_close(features[0], features[1])
    assert not torch.allclose(features[:, 0], features[:, 1])


@pytest.mark.parametrize("options", [{}, PUBLISHED, {"exact_degree": 2}], ids=str)
def test_features_have_exact_gradients(options):
    phi = _build(3, 12, **options)
    x = torch.zeros(1, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(phi.query_features, x)
    assert torch.autograd.gradcheck(phi.query_features, _rows(2, 3, 1.0).requires_grad_())


def test_features_are_full_precision_under_autocast():
    phi, x = MaclaurinFeatures(4, 30), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = phi.query_features(x)
    assert torch.equal(got, phi.query_features(x))


@pytest.mark.raw
def test_invalid_options_raise():
    with pytest.raises(ValueError, match="needs 15 features for rows of width 4"):
        MaclaurinFeatures(4, 10, exact_degree=2)
    with pytest.raises(ValueError, match="must be 0, 1 or 2"):
        MaclaurinFeatures(4, 10, exact_degree=3)
    with pytest.raises(ValueError, match="'optimal' or 'geometric', got 'uniform'"):
        MaclaurinFeatures(4, 10, law="uniform")


@pytest.mark.slow
@each("tau", [32**-0.5, 0.5])
@pytest.mark.parametrize("series", ["exp", "inverse", "logi", "sqrt"])
def test_published_features_are_unbiased_with_the_variance_of_the_formula(series, tau):
    x, y = _rows(1, 32, tau), _rows(1, 32, tau, seed=2)
    draws = 200_000
    phi = _build(32, draws + 1, series, **PUBLISHED)
    products = (phi.query_features(x) * phi.query_features(y))[0]
    constant, single = products[0], products[1:] * draws
    z = (single.mean() + constant - phi.gram(x, y)[0, 0]) / (single.std() / draws**0.5)
    assert abs(z.item()) < 4.5
    if series != "inverse":
        formula = phi.variance(x, y).item() * draws
        assert single.var().item() == pytest.approx(formula, rel=0.1)
