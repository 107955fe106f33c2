"""Random features: the draw, the mean, the variance and the rate."""

import copy
import math
import pickle

import pytest
import torch
from scipy.special import hyp0f1
from tests.house.rows import each

from primal_attention.kernels import PositiveFeatures, TrigonometricFeatures, draw_directions


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _pair(dim: int, norm: float, seed: int = 5) -> torch.Tensor:
    rows = torch.randn(2, dim, generator=_generator(seed), dtype=torch.float64)
    return norm * rows / rows.norm(dim=-1, keepdim=True)


MAPS = [
    lambda d, p, **o: PositiveFeatures(d, p, **o),
    lambda d, p, **o: PositiveFeatures(d, p, directions="iid", **o),
    lambda d, p, **o: PositiveFeatures(d, p, antithetic=True, **o),
    lambda d, p, **o: PositiveFeatures(d, p, spread=2.0, **o),
    lambda d, p, **o: PositiveFeatures(d, p, kernel="gaussian", **o),
    lambda d, p, **o: TrigonometricFeatures(d, p, **o),
    lambda d, p, **o: TrigonometricFeatures(d, p, kernel="exponential", **o),
]
NAMES = ["positive", "iid", "antithetic", "tilted", "positive-gaussian", "fourier", "fourier-exp"]
each_map = pytest.mark.parametrize("build", MAPS, ids=NAMES)


def test_orthogonal_blocks_have_a_diagonal_gram_matrix():
    w = draw_directions(20, 8, generator=_generator())
    for block in w.split(8):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-12)
    assert (w[:8] @ w[8:16].T).abs().max() > 0.1


def test_orthogonal_rows_have_the_norms_of_normal_ones():
    w = draw_directions(20000, 16, generator=_generator())
    square = w.square().sum(-1)
    assert square.mean().item() == pytest.approx(16, rel=0.02)
    assert square.var().item() == pytest.approx(32, rel=0.1)


def test_antithetic_rows_come_in_pairs():
    w = draw_directions(12, 5, antithetic=True, generator=_generator())
    torch.testing.assert_close(w[6:], -w[:6])


def test_same_seed_same_draw_and_heads_differ():
    first, second = (
        PositiveFeatures(6, 8, num_heads=3, generator=_generator(7)).directions for _ in range(2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, PositiveFeatures(6, 8, num_heads=3).directions)


@each_map
def test_features_converge_to_the_gram_matrix(build):
    x, y = torch.randn(8, 4) / 4, torch.randn(9, 4) / 4
    phi = build(4, 40000, generator=_generator())
    assert phi.relation == "unbiased"
    assert (phi.approximate(x, y) - phi.gram(x, y)).abs().max() < 0.03


@each_map
def test_error_falls_with_the_square_root_of_the_features(build):
    x, y = torch.randn(16, 8) / 4, torch.randn(16, 8) / 4

    def error(p: int) -> float:
        maps = [build(8, p, generator=_generator(seed)) for seed in range(24)]
        return math.sqrt(
            sum((m.approximate(x, y) - m.gram(x, y)).square().mean().item() for m in maps) / 24
        )

    assert 1.6 < error(64) / error(256) < 2.5


@each_map
def test_features_marked_positive_are_positive(build):
    phi = build(8, 32, generator=_generator())
    features = phi.query_features(torch.randn(50, 8))
    assert features.shape == (50, phi.num_features)
    assert (features > 0).all().item() == phi.is_positive


@each_map
def test_heads_have_their_own_directions(build):
    phi = build(8, 32, num_heads=3, generator=_generator())
    x = torch.randn(8).expand(2, 3, 5, 8)
    features = phi.query_features(x)
    assert features.shape == (2, 3, 5, 32)
    assert not torch.allclose(features[:, 0], features[:, 1])
    torch.testing.assert_close(features[0], features[1])


@each_map
def test_normalized_features_ignore_length(build):
    phi = build(8, 32, normalize=True, generator=_generator())
    x = torch.randn(5, 8)
    torch.testing.assert_close(phi.query_features(x), phi.query_features(7 * x))


@each_map
def test_the_draw_is_saved_moved_copied_and_kept_in_eval(build):
    phi = build(8, 16, generator=_generator(1))
    x = torch.randn(5, 8)
    expected = phi.query_features(x)
    other = build(8, 16, generator=_generator(2))
    other.load_state_dict(phi.state_dict())
    for same in (other, copy.deepcopy(phi), pickle.loads(pickle.dumps(phi)), phi.eval()):
        assert torch.equal(same.query_features(x), expected)
    assert phi.double().directions.dtype == torch.float64
    assert phi.query_features(x.double()).dtype == torch.float64


@each_map
def test_redraw_changes_the_features_by_the_generator(build):
    phi = build(8, 16, generator=_generator(1))
    x = torch.randn(5, 8)
    before = phi.query_features(x)
    phi.redraw_(_generator(3))
    assert not torch.equal(phi.query_features(x), before)
    phi.redraw_(_generator(1))
    assert torch.equal(phi.query_features(x), before)


@each_map
def test_features_have_exact_gradients(build):
    phi = build(3, 4, generator=_generator(), dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(phi.query_features, x)


@each_map
def test_features_are_full_precision_under_autocast(build):
    phi, x = build(8, 16, generator=_generator()), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = phi.query_features(x)
    assert torch.equal(got, phi.query_features(x))


def test_log_features_are_finite_where_features_overflow():
    phi = PositiveFeatures(8, 16, generator=_generator())
    logs = phi.log_features(1e4 * torch.randn(5, 8))
    assert torch.isfinite(logs).all()


def test_antithetic_orthogonal_features_beat_orthogonal_beat_independent():
    x, y = (torch.nn.functional.normalize(torch.randn(16, 16), dim=-1) / 2 for _ in range(2))

    def mean_square(**options) -> float:
        maps = [PositiveFeatures(16, 32, generator=_generator(s), **options) for s in range(200)]
        return sum((m.approximate(x, y) - m.gram(x, y)).square().mean().item() for m in maps) / 200

    iid, orthogonal = mean_square(directions="iid"), mean_square()
    both = mean_square(antithetic=True)
    assert orthogonal < iid
    assert both < orthogonal / 4


def test_only_normal_directions_are_marked_unbiased():
    for cls in (PositiveFeatures, TrigonometricFeatures):
        assert cls(4, 8, directions="sphere").relation == "near"
        assert {cls(4, 8, directions=d).relation for d in ("iid", "orthogonal")} == {"unbiased"}


def test_features_on_the_sphere_approximate_another_kernel():
    # the mean of exp(w·u) over the sphere of radius √d is 0F1(d/2; d‖u‖²/4)
    x, y = _pair(8, 1.0)
    size = (x + y).square().sum().item()
    expected = hyp0f1(4, 2 * size) * math.exp(-1.0)
    phi = PositiveFeatures(
        8, 200_000, directions="sphere", generator=_generator(), dtype=torch.float64
    )
    assert torch.allclose(phi.directions.norm(dim=-1), torch.tensor(8.0).sqrt().double())
    assert phi.approximate(x[None], y[None]).item() == pytest.approx(expected, rel=5e-3)
    # which is below exp(x·y), by ‖u‖⁴/4(d + 2) to first order
    exact = phi.gram(x[None], y[None]).item()
    assert exact / expected - 1 == pytest.approx(size**2 / 40, rel=0.35)


def test_tilted_features_have_less_variance_for_large_norms():
    x, y = (2 * torch.nn.functional.normalize(torch.randn(16, 16), dim=-1) for _ in range(2))

    def mean_square(spread: float | None) -> float:
        maps = [PositiveFeatures(16, 32, spread=spread, generator=_generator(s)) for s in range(99)]
        return sum((m.approximate(x, y) - m.gram(x, y)).square().mean().item() for m in maps) / 99

    assert mean_square(8.0) < mean_square(None) / 2


@pytest.mark.raw
def test_invalid_options_raise():
    with pytest.raises(ValueError, match="'orthogonal' or 'sphere', got 'cube'"):
        PositiveFeatures(4, 8, directions="cube")
    with pytest.raises(ValueError, match="cannot be used with directions"):
        PositiveFeatures(4, 8, directions="sphere", spread=2.0)
    with pytest.raises(ValueError, match="num is 7; the number"):
        PositiveFeatures(4, 7, antithetic=True)
    with pytest.raises(ValueError, match="num_features is 7; it must be even"):
        TrigonometricFeatures(4, 7)
    with pytest.raises(ValueError, match="scale must be positive"):
        PositiveFeatures(4, 8, scale=0.0)
    with pytest.raises(ValueError, match="it must be positive, or None"):
        PositiveFeatures(4, 8, spread=-1.0)
    with pytest.raises(ValueError, match="kernel must be"):
        TrigonometricFeatures(4, 8, kernel="cosine")


@pytest.mark.slow
@each("norm", [0.5, 1.0])
def test_positive_features_are_unbiased(norm):
    x, y = _pair(32, norm)
    w = draw_directions(400_000, 32, directions="iid", generator=_generator(3))
    estimate = (w @ x + w @ y - (x @ x + y @ y) / 2).exp()
    z = (estimate.mean() - (x @ y).exp()) / (estimate.std() / len(w) ** 0.5)
    assert abs(z.item()) < 4


@pytest.mark.slow
def test_variance_of_positive_features_follows_the_formula():
    x, y = _pair(32, 0.5)
    phi = PositiveFeatures(
        32, 100_000, directions="iid", generator=_generator(3), dtype=torch.float64
    )
    logs = phi.log_features(torch.stack([x, y])) + 0.5 * math.log(100_000)
    variance = logs.sum(0).exp().var().item()
    exact = math.expm1((x + y).square().sum().item()) * math.exp(2 * (x @ y).item())
    assert variance == pytest.approx(exact, rel=0.1)


@pytest.mark.slow
def test_attention_error_against_features_is_as_published():
    # mean over 20 trials of the l1 distance of two rows of attention over 1024 keys of norm 1
    expected = {4: 0.530, 16: 0.319, 64: 0.182, 256: 0.100, 1024: 0.053}
    found = {}
    for p in expected:
        total = 0.0
        for seed in range(20):
            rows = torch.randn(1025, 64, generator=_generator(seed), dtype=torch.float64)
            rows = rows / rows.norm(dim=-1, keepdim=True)
            phi = PositiveFeatures(
                64, p, directions="iid", generator=_generator(100 + seed), dtype=torch.float64
            )
            exact, estimate = phi.gram(rows[:1], rows[1:]), phi.approximate(rows[:1], rows[1:])
            total += (exact / exact.sum() - estimate / estimate.sum()).abs().sum().item()
        found[p] = total / 20
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for p, value in expected.items():
        assert found[p] == pytest.approx(value, rel=0.2)
