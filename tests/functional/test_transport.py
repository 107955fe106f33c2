"""Solvers of optimal transport: definitions, closed forms, POT as oracle, gradients."""

import math

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive_transport as naive
from primal_attention.functional.transport import (
    cost_matrix,
    factored_sinkhorn,
    gaussian_map,
    gaussian_wasserstein,
    minibatch_assignment,
    monge_gap,
    optimal_assignment,
    pair_costs,
    sinkhorn,
    sinkhorn_divergence,
    sliced_wasserstein,
    wasserstein,
    wasserstein_1d,
)

F64 = torch.float64


def cloud(n, d=2):
    return torch.randn(n, d, dtype=F64)


def weights(n):
    w = torch.rand(n, dtype=F64) + 0.1
    return w / w.sum()


def convex_gradient(x):
    """Return ``∇ Σ_k softplus(⟨w_k, x⟩)``, which is no affine map."""
    w = torch.randn(5, x.shape[1], dtype=x.dtype)
    return (x @ w.T).sigmoid() @ w


# exact


@each("p", [1, 2])
@each("n", [1, 2, 6])
def test_an_assignment_is_the_best_of_all_permutations(n, p):
    cost = cost_matrix(cloud(n, 3), cloud(n, 3), p)
    assert optimal_assignment(cost).equal(naive.best_permutation(cost))


@each("p", [1, 2])
def test_costs_are_powers_of_distances(p):
    x, y = cloud(4, 3), cloud(5, 3)
    expected = torch.stack([torch.stack([(a - b).norm() ** p for b in y]) for a in x])
    assert_close(cost_matrix(x, y, p), expected)
    assert_close(pair_costs(x, y[:4], p), expected.diag())


def test_costs_of_near_points_far_from_the_origin_keep_their_digits():
    x = cloud(5) + 1e6
    assert_close(
        cost_matrix(x, x + 1e-3).diag(), torch.full((5,), 2e-6, dtype=F64), rtol=1e-6, atol=0
    )


def test_exact_cost_is_that_of_pot():
    ot = pytest.importorskip("ot")
    x, y = cloud(40, 3), 2 * cloud(40, 3) + 1
    assert_close(
        wasserstein(x, y), torch.tensor(ot.emd2([], [], cost_matrix(x, y).numpy()), dtype=F64)
    )
    assert_close(wasserstein(x, y, backend="pot"), wasserstein(x, y))


def test_pot_takes_other_numbers_and_weights():
    pytest.importorskip("ot")
    x, y = cloud(4), cloud(3)
    a = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=F64)
    # a point of weight ½ is two points of weight ¼
    doubled = torch.cat([x[:1], x[:3]])
    b = torch.tensor([0.25, 0.5, 0.25], dtype=F64)
    twice = torch.cat([y[:2], y[1:]])
    assert_close(wasserstein(x, y, a=a, b=b, backend="pot"), wasserstein(doubled, twice))


@pytest.mark.raw
def test_what_the_solvers_cannot_do_is_said():
    x, y = cloud(4), cloud(3)
    with pytest.raises(ValueError, match=r"equal numbers of points, got 4 and 3.*backend='pot'"):
        wasserstein(x, y)
    with pytest.raises(ValueError, match="uniform weights only"):
        wasserstein(x, x, a=weights(4))
    with pytest.raises(ValueError, match="backend must be 'scipy' or 'pot', got 'ott'"):
        wasserstein(x, x, backend="ott")
    with pytest.raises(ValueError, match="NaN or infinite"):
        wasserstein(x * math.nan, x)
    with pytest.raises(ValueError, match="same shape, got"):
        monge_gap(x, y)
    with pytest.raises(ValueError, match="solver must be one of"):
        monge_gap(x, x, solver="exakt")
    with pytest.raises(ValueError, match="epsilon must be positive"):
        sinkhorn(cost_matrix(x, y), epsilon=0)
    with pytest.raises(ValueError, match="divide them by their sum"):
        sinkhorn(cost_matrix(x, y), torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match="use positive features"):
        factored_sinkhorn(cloud(4), -cloud(3).abs())


def test_matching_in_batches_is_a_permutation_that_costs_more_in_smaller_batches():
    x, y = cloud(120), cloud(120) + 1
    costs = []
    for size in (120, 30, 8):
        order = minibatch_assignment(
            x, y, batch_size=size, generator=torch.Generator().manual_seed(0)
        )
        assert order.sort().values.equal(torch.arange(120))
        costs.append(float(pair_costs(x, y[order]).mean()))
    assert costs[0] == pytest.approx(float(wasserstein(x, y)))
    assert costs[0] < costs[1] < costs[2]


# the Monge gap


@each("p", [1, 2])
def test_gap_is_the_excess_over_the_best_permutation(p):
    x, y = cloud(6), cloud(6)
    cost = cost_matrix(x, y, p)
    best = cost[torch.arange(6), naive.best_permutation(cost)].mean()
    assert_close(monge_gap(x, y, p=p), cost.diag().mean() - best)


# O1
def test_gradients_of_convex_functions_have_no_gap():
    x = cloud(400, 3)
    root = torch.randn(3, 3, dtype=F64)
    positive = root @ root.T
    mean, other = torch.randn(2, 3, dtype=F64)
    to_gaussian = gaussian_map(
        mean, positive + torch.eye(3), other, torch.diag(torch.rand(3)).to(F64)
    )
    maps = {
        "positive affine": x @ positive + mean,
        "translation": x + other,
        "softplus gradient": convex_gradient(x),
        "Gaussian to Gaussian": to_gaussian(x),
        "increasing coordinates": x**3,
    }
    for name, y in maps.items():
        assert abs(monge_gap(x, y)) <= 1e-9 * pair_costs(x, y).mean(), name


# O2
@each("p", [1, 2])
def test_gap_is_never_negative(p):
    for seed in range(20):
        torch.manual_seed(seed)
        x, w = cloud(50, 3), torch.randn(3, 3, dtype=F64)
        for y in (x @ w, torch.sin(5 * x), cloud(50, 3), x[torch.randperm(50)]):
            assert monge_gap(x, y, p=p) >= -1e-9 * pair_costs(x, y, p).mean()


def rotated(x, degrees):
    t = math.radians(degrees)
    turn = torch.tensor([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]], dtype=x.dtype)
    return x @ turn.T


# O3
def test_gap_of_a_rotation_grows_with_the_angle():
    x = math.sqrt(1.0725) * cloud(500)
    angles = (0, 10, 45, 89, 91, 135, 180)
    gaps = [float(monge_gap(x, rotated(x, angle))) for angle in angles]
    costs = [float(pair_costs(x, rotated(x, angle)).mean()) for angle in angles]
    assert gaps[0] == 0
    assert gaps == sorted(gaps)
    # the cost of an angle θ is 2 (1 − cos θ) E‖x‖², and the clouds are nearly the same
    size = float(x.square().sum(1).mean())
    assert costs == pytest.approx([2 * (1 - math.cos(math.radians(a))) * size for a in angles])
    # numbers of the specification, on a cloud of the same size: costs 0.065, 1.26, …, 8.59
    golden = {10: 0.032 / 0.065, 45: 1.19 / 1.26, 89: 4.1 / 4.2, 91: 4.3 / 4.4, 135: 7.24 / 7.33}
    golden[180] = 8.50 / 8.59
    for angle, gap, cost in zip(angles, gaps, costs, strict=True):
        if angle in golden:
            assert gap / cost == pytest.approx(golden[angle], abs=0.02)


# O11
def test_gradient_of_the_gap_matches_the_formula_and_finite_differences():
    x, y = cloud(30, 3), cloud(30, 3).requires_grad_()
    (grad,) = torch.autograd.grad(monge_gap(x, y), y)
    order = optimal_assignment(cost_matrix(x, y.detach()))
    assert_close(grad, naive.danskin_gradient(x, y.detach(), order))
    direction = cloud(30, 3)
    up, down = (monge_gap(x, y.detach() + h * direction) for h in (1e-6, -1e-6))
    assert_close((up - down) / 2e-6, (grad * direction).sum(), rtol=1e-5, atol=0)


@each("p", [1, 2])
def test_exact_costs_pass_gradcheck_on_both_sides(p):
    x, y = (cloud(7, 3).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: wasserstein(a, b, p=p), (x, y))


def test_float32_gives_the_matching_of_float64():
    x = cloud(200, 3)
    y = convex_gradient(x)
    assert monge_gap(x.float(), y.float()) == 0


# entropic


def test_log_domain_is_plain_scaling_with_weights_and_unequal_sizes():
    x, y, a, b = cloud(7), cloud(5) + 1, weights(7), weights(5)
    cost = cost_matrix(x, y)
    found = sinkhorn(cost, a, b, epsilon=0.3, tolerance=1e-13)
    plan = naive.plain_sinkhorn(cost, a, b, 0.3 * float(cost.mean()))
    assert_close(found.plan, plan, atol=1e-12, rtol=1e-9)
    assert_close(found.plan.sum(0), b)
    assert_close(found.plan.sum(1), a)
    kl = (plan * (plan / (a[:, None] * b)).log()).sum()
    eps = float(found.epsilon)
    assert_close(found.transport, (plan * cost).sum())
    assert_close(found.value, (plan * cost).sum() + eps * kl)
    assert_close(found.entropic_value, (plan * cost).sum() + eps * (plan * plan.log()).sum())


def test_entropic_cost_is_that_of_pot():
    ot = pytest.importorskip("ot")
    x, y, a, b = cloud(20, 3), cloud(15, 3), weights(20), weights(15)
    cost = cost_matrix(x, y)
    found = sinkhorn(cost, a, b, epsilon=0.1, tolerance=1e-12)
    plan = ot.sinkhorn(a.numpy(), b.numpy(), cost.numpy(), float(found.epsilon), stopThr=1e-14)
    assert_close(found.plan, torch.tensor(plan), atol=1e-10, rtol=1e-6)


def test_points_without_weight_play_no_part():
    x, y = cloud(6), cloud(5)
    a = torch.tensor([0.25, 0.25, 0.25, 0.25, 0, 0], dtype=F64)
    with_zeros = sinkhorn(cost_matrix(x, y), a, epsilon=0.2, scale=1.0, tolerance=1e-12)
    without = sinkhorn(cost_matrix(x[:4], y), epsilon=0.2, scale=1.0, tolerance=1e-12)
    assert_close(with_zeros.value, without.value)
    assert_close(with_zeros.entropic_value, without.entropic_value)
    assert_close(with_zeros.plan[4:], torch.zeros(2, 5, dtype=F64))


def test_iterations_stop_at_the_error_or_at_the_cap():
    cost = cost_matrix(cloud(30), cloud(30) + 2)
    early, late = (sinkhorn(cost, epsilon=0.1, tolerance=t) for t in (1e-2, 1e-8))
    assert early.iterations < late.iterations < 1000
    assert early.error <= 1e-2
    for found in (early, late):
        assert (found.plan.sum(1) - 1 / 30).abs().sum() == pytest.approx(found.error, rel=1e-3)
    assert sinkhorn(cost, epsilon=0.1, tolerance=0.0, max_iterations=17).iterations == 17


@each("which", ["value", "entropic_value"])
def test_entropic_costs_have_exact_gradients(which):
    x, y, a = cloud(6).requires_grad_(), cloud(5).requires_grad_(), weights(6)

    def run(x, y):
        cost = cost_matrix(x, y)
        return getattr(sinkhorn(cost, a, epsilon=0.5, scale=1.0, tolerance=1e-14), which)

    assert torch.autograd.gradcheck(run, (x, y))


def test_divergence_of_a_cloud_from_itself_is_zero_and_descends_to_it():
    x, y = cloud(30), (cloud(30) + 3).requires_grad_()
    assert abs(sinkhorn_divergence(x, x, tolerance=1e-10)) < 1e-9
    first = None
    for _ in range(8):
        loss = sinkhorn_divergence(x, y, tolerance=1e-4)
        first = float(loss.detach()) if first is None else first
        (grad,) = torch.autograd.grad(loss, y)
        y = (y - 14 * grad).detach().requires_grad_()
    assert loss < 0.01 * first


def test_divergence_takes_weights_and_any_numbers_of_points():
    x, y = cloud(8), cloud(5)
    doubled = torch.cat([x, x[:1]])
    a = torch.full((9,), 1 / 8, dtype=F64)
    a[[0, 8]] = 1 / 16
    options = {"epsilon": 0.2, "tolerance": 1e-12}
    # the scale of ε is the mean over pairs, which the doubled point would shift
    ratio = float(cost_matrix(x, y).mean() / cost_matrix(doubled, y).mean())
    split = sinkhorn_divergence(doubled, y, a=a, epsilon=0.2 * ratio, tolerance=1e-12)
    assert_close(split, sinkhorn_divergence(x, y, **options))


# O10
def test_entropic_cost_tends_to_the_exact_one():
    x = cloud(60)
    y = 1.5 * x + 1
    exact = wasserstein(x, y)
    cost = cost_matrix(x, y)
    errors = [
        abs(float(sinkhorn(cost, epsilon=e, max_iterations=5000).transport - exact))
        for e in (0.3, 0.1, 0.03, 0.01, 0.003)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.005 * exact
    debiased = monge_gap(x, y, solver="debiased", epsilon=0.1)
    assert abs(debiased) <= 0.02 * pair_costs(x, y).mean()


def test_entropic_gaps_have_the_signs_of_the_table():
    # section 4: 80 points, displacement cost about 2, pairwise cost about 12, true gap zero
    x = 2.0 * cloud(80)
    y = x @ torch.tensor([[1.35, 0.1], [0.1, 1.2]], dtype=F64) + torch.tensor(
        [0.9, -0.6], dtype=F64
    )
    assert monge_gap(x, y) == 0
    cost = float(pair_costs(x, y).mean())
    scale = float(cost_matrix(x, y).mean())
    assert cost == pytest.approx(2, abs=0.8)
    assert scale == pytest.approx(16, abs=6)
    names = ("plan", "kl", "entropy", "debiased")
    table = {
        eps: [float(monge_gap(x, y, solver=s, epsilon=eps / scale)) for s in names]
        for eps in (1.0, 0.3, 0.1)
    }
    for plan, kl, entropy, debiased in table.values():
        assert kl < plan < 0 < entropy
        assert abs(debiased) < 0.02 * cost
        assert abs(debiased) < abs(plan)
    for large, small in ((1.0, 0.3), (0.3, 0.1)):
        assert all(abs(b) < abs(a) for a, b in zip(table[large][:3], table[small][:3], strict=True))


def test_automatic_solver_is_exact_up_to_1500_points(monkeypatch):
    from primal_attention.functional import transport

    monkeypatch.setattr(transport, "EXACT_UP_TO", 20)
    x, y = cloud(21), cloud(21)
    assert monge_gap(x[:20], y[:20]) == monge_gap(x[:20], y[:20], solver="exact")
    assert monge_gap(x, y) == monge_gap(x, y, solver="debiased")
    assert monge_gap(x, y) != monge_gap(x, y, solver="exact")


# factored


# O15
def test_factored_scaling_is_dense_scaling():
    phi_q, phi_k = torch.rand(40, 12, dtype=F64), torch.rand(30, 12, dtype=F64)
    a, b = weights(40), weights(30)
    u, v, error = factored_sinkhorn(phi_q, phi_k, a, b, tolerance=1e-14)
    kernel = phi_q @ phi_k.T
    plan = u[:, None] * kernel * v
    assert_close(plan, naive.plain_sinkhorn(-kernel.log(), a, b, 1.0), atol=1e-10, rtol=0)
    assert error <= 1e-14
    assert torch.linalg.matrix_rank(plan) == 12


def test_factored_scaling_takes_batches_and_has_gradients():
    phi_q, phi_k = torch.rand(2, 5, 3, dtype=F64) + 0.1, torch.rand(2, 4, 3, dtype=F64) + 0.1
    together = factored_sinkhorn(phi_q, phi_k, tolerance=1e-13)
    alone = factored_sinkhorn(phi_q[1], phi_k[1], tolerance=1e-13)
    plans = [
        s.u[..., None] * (q @ k.mT) * s.v[..., None, :]
        for s, q, k in ((together, phi_q, phi_k), (alone, phi_q[1], phi_k[1]))
    ]
    assert_close(plans[0][1], plans[1])

    def plan(q, k):
        u, v, _ = factored_sinkhorn(q, k, max_iterations=30, tolerance=0.0)
        return u[..., None] * (q @ k.mT) * v[..., None, :]

    assert torch.autograd.gradcheck(plan, (phi_q.requires_grad_(), phi_k.requires_grad_()))


# one dimension


@each("p", [1, 2])
@each("n, m", [(1, 1), (6, 6), (6, 4), (3, 7), (8, 4)])
def test_sorting_is_the_corner_rule(n, m, p):
    x, y = torch.randn(n, dtype=F64), torch.randn(m, dtype=F64)
    assert_close(wasserstein_1d(x, y, p=p), naive.corner_cost(x, y, p))


@each("p", [1, 2])
def test_sorting_is_the_exact_solver_on_a_line(p):
    x, y = cloud(30, 1), cloud(30, 1)
    assert_close(wasserstein_1d(x[:, 0], y[:, 0], p=p), wasserstein(x, y, p=p))


def test_sliced_cost_of_a_translation_is_its_square_over_the_width():
    x, shift = cloud(50, 3), torch.tensor([1.0, 2.0, -2.0], dtype=F64)
    draw = torch.Generator().manual_seed(0)
    found = sliced_wasserstein(x, x + shift, num_projections=4000, generator=draw)
    assert float(found) == pytest.approx(9 / 3, rel=0.05)
    y = cloud(70, 3)
    both = [sliced_wasserstein(x, y, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert both[0] == both[1]
    assert both[0] < wasserstein(x, y[:50])


# Gaussians


def gaussians():
    x = torch.tensor([0.0, 1.0], dtype=F64), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
    y = torch.tensor([3.0, 0.0], dtype=F64), torch.tensor([[1.0, -0.4], [-0.4, 3.0]], dtype=F64)
    return *x, *y


def sample(mean, covariance, n):
    return mean + torch.randn(n, 2, dtype=F64) @ torch.linalg.cholesky(covariance).T


def test_gaussian_map_carries_one_gaussian_to_the_other_at_the_stated_cost():
    m1, s1, m2, s2 = gaussians()
    carry = gaussian_map(m1, s1, m2, s2)
    assert_close(carry.matrix @ s1 @ carry.matrix.T, s2)
    assert_close(carry(m1[None])[0], m2)
    # E‖T x − x‖² in closed form
    move = carry.matrix - torch.eye(2, dtype=F64)
    assert_close(
        (move @ s1 @ move.T).trace() + (m2 - m1).square().sum(), gaussian_wasserstein(*gaussians())
    )


# O9
@pytest.mark.parametrize("n", [1000, pytest.param(2000, marks=pytest.mark.slow)])
def test_cost_of_samples_is_near_the_closed_form(n):
    m1, s1, m2, s2 = gaussians()
    exact = float(gaussian_wasserstein(m1, s1, m2, s2))
    found = float(wasserstein(sample(m1, s1, n), sample(m2, s2, n)))
    assert found == pytest.approx(exact, rel=0.05)
