"""The KSVD objective against its theory; T-numbers are those of the list of invariants."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import each
from torch import Tensor

from primal_attention.functional import (
    balance,
    dual_residual,
    effective_rank,
    feature_gram,
    implied_singular_values,
    kernel_singular_values,
    kkt_residual,
    ksvd_objective,
    naive,
    off_diagonality,
    parameter_trace,
    reduce_objective,
    score_gram,
)
from primal_attention.ksvd import apply_kernel, feature_svd, transpose_kernel, unit_rows


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def orthonormal(*shape: int) -> Tensor:
    return torch.linalg.qr(randn(*shape)).Q


class Problem(NamedTuple):
    """One sequence, one head: tokens, rows F, and the singular triplets of K = Φ_q FᵀF Φ_kᵀ."""

    q: Tensor  # [n d]
    k: Tensor  # [m d]
    f: Tensor  # [rows d]
    left: Tensor  # [n s]
    sigma: Tensor  # [s]
    right: Tensor  # [m s]

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return unit_rows(q) @ self.f.T @ self.f @ unit_rows(k).T

    @property
    def matrix(self) -> Tensor:
        return self.kernel(self.q, self.k)


def problem(n: int = 40, m: int | None = None, d: int = 12, rows: int = 20, s: int = 5) -> Problem:
    q, k, f = randn(n, d), randn(m or n, d), randn(rows, d)
    left, sigma, right = feature_svd(unit_rows(q), unit_rows(k), s, f=f)
    return Problem(q, k, f, left, sigma, right)


def stationary_weights(p: Problem) -> tuple[Tensor, Tensor]:
    """Return the weights that the singular vectors build, for means instead of sums of tokens."""
    n, m = len(p.q), len(p.k)
    from_keys = naive.dual_weights(unit_rows(p.k)[None, None], p.right[None, None])[0, 0] * m
    from_queries = naive.dual_weights(unit_rows(p.q)[None, None], p.left[None, None])[0, 0] * n
    return p.f @ from_keys, p.f @ from_queries * math.sqrt(m / n)


def effective(p: Problem, w: Tensor) -> Tensor:
    return naive.data_weights(p.f[None, None], w[None])


def scores(p: Problem, w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    e = naive.primal_scores(p.q[None, None], effective(p, w_e))
    r = naive.primal_scores(p.k[None, None], effective(p, w_r))
    return e[0, 0], r[0, 0]


def objective(p: Problem, w_e: Tensor, w_r: Tensor, lam: Tensor) -> Tensor:
    grams = (score_gram(gram(x), effective(p, w)) for x, w in ((p.q, w_e), (p.k, w_r)))
    moments = [g.diagonal(dim1=-2, dim2=-1) for g in grams]
    return ksvd_objective(*moments, lam[None], parameter_trace(w_e[None], w_r[None])).squeeze()


def residual(p: Problem, w_e: Tensor, w_r: Tensor, lam: Tensor) -> Tensor:
    w_e, w_r, f = w_e[None, None], w_r[None, None], p.f[None, None]
    return kkt_residual(gram(p.q), gram(p.k), w_e, w_r, lam[None], f).squeeze()


def gram(x: Tensor) -> Tensor:
    return feature_gram(x[None, None]) / len(x)


def test_t02_singular_vectors_make_the_objective_stationary_and_zero() -> None:
    p = problem()
    w_e, w_r = (w.requires_grad_() for w in stationary_weights(p))
    lam = (40 / p.sigma).sqrt().requires_grad_()
    value = objective(p, w_e, w_r, lam)
    scale = parameter_trace(w_e, w_r).item()
    grads = torch.autograd.grad(value, (w_e, w_r, lam))
    assert abs(value.item()) < 1e-10 * scale
    assert grads[0].abs().max() < 1e-10 * w_r.abs().max()
    assert grads[1].abs().max() < 1e-10 * w_e.abs().max()
    # J is never stationary in lam: only squaring it adapts the spectrum
    assert (grads[2] > 0).all()


def test_t02_scores_satisfy_the_dual_equations() -> None:
    p = problem()
    e, r = scores(p, *stationary_weights(p))
    torch.testing.assert_close(e, p.left * p.sigma, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(r, p.right * p.sigma, rtol=1e-10, atol=1e-10)
    found = dual_residual(
        e[None, None], r[None, None], p.left[None, None], p.right[None, None],
        (1 / p.sigma).sqrt()[None],
    )  # fmt: skip
    assert found.item() < 1e-20


def test_t02_primal_equals_dual_also_for_new_tokens() -> None:
    p = problem()
    w_e, w_r = stationary_weights(p)
    more = p._replace(q=torch.cat([p.q, randn(7, 12)]), k=torch.cat([p.k, randn(7, 12)]))
    e, r = scores(more, w_e, w_r)
    dual_e = apply_kernel(p.kernel, more.q, p.k, p.right)
    dual_r = apply_kernel(transpose_kernel(p.kernel), more.k, p.q, p.left)
    torch.testing.assert_close(e, dual_e, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(r, dual_r, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(1, 30),
    m=st.integers(1, 30),
    d=st.integers(1, 8),
    rows=st.integers(1, 12),
    s=st.integers(1, 10),
)
def test_t03_euler_identity(n: int, m: int, d: int, rows: int, s: int) -> None:
    p = Problem(randn(n, d), randn(m, d), randn(rows, d), *[torch.empty(0)] * 3)
    w_e, w_r = randn(rows, s).requires_grad_(), randn(rows, s).requires_grad_()
    value = objective(p, w_e, w_r, randn(s))
    grads = torch.autograd.grad(value, (w_e, w_r))
    half = (grads[0] * w_e).sum() / 2 + (grads[1] * w_r).sum() / 2
    torch.testing.assert_close(half, value, rtol=1e-10, atol=1e-10)


@each("n, m", [(40, 40), (40, 25), (25, 40)])
def test_t04_parameter_trace_implies_the_spectrum_of_the_weighted_kernel(n: int, m: int) -> None:
    p = problem(n, m)
    lam = (math.sqrt(n * m) / p.sigma).sqrt()
    w_e, w_r = stationary_weights(p)
    assert residual(p, w_e, w_r, lam).item() < 1e-20
    assert abs(objective(p, w_e, w_r, lam).item()) < 1e-10 * parameter_trace(w_e, w_r).item()
    implied = implied_singular_values(lam[None], n, m)[0]
    torch.testing.assert_close(implied, p.sigma, rtol=1e-10, atol=0.0)
    if n == m:
        torch.testing.assert_close(implied_singular_values(lam[None], n)[0], n / lam.square())


@each("n, m", [(40, 40), (40, 25)])
def test_t04_data_trace_drops_f_from_the_kernel(n: int, m: int) -> None:
    q, k, f = randn(n, 12), randn(m, 12), randn(20, 12)
    bare = Problem(q, k, torch.eye(12).double(), *feature_svd(unit_rows(q), unit_rows(k), 5))
    # codes whose effective weights Fᵀ W are the stationary ones
    codes = torch.linalg.pinv(f.T) @ torch.cat(stationary_weights(bare), 1)
    codes_e, codes_r = codes.requires_grad_().split(5, dim=1)
    w_e, w_r = f.T @ codes_e, f.T @ codes_r
    lam = (math.sqrt(n * m) / bare.sigma).sqrt()
    value = objective(bare, w_e, w_r, lam)
    (grad,) = torch.autograd.grad(value, codes)
    assert abs(value.item()) < 1e-10 * bare.sigma.sum().item()
    assert grad.abs().max() < 1e-10 * bare.sigma[0]
    found = kkt_residual(gram(q), gram(k), w_e[None, None], w_r[None, None], lam[None])
    assert found.item() < 1e-20
    implied = implied_singular_values(lam[None], n, m)[0]
    torch.testing.assert_close(implied, bare.sigma, rtol=1e-10, atol=0.0)


def test_residual_can_vanish_only_where_lam_matches_a_singular_value() -> None:
    p = problem()

    def smallest(sigma: Tensor) -> float:
        """Return the least residual of any one direction, an eigenvalue of its quadratic form."""
        lam = (40 / sigma).sqrt()[None]

        def squared(w: Tensor) -> Tensor:
            return residual(p, w[:20, None], w[20:, None], lam) * w.square().sum()

        form = torch.autograd.functional.hessian(squared, randn(40))
        assert isinstance(form, Tensor)
        return torch.linalg.eigvalsh(form)[0].item() / 2

    assert abs(smallest(p.sigma[0])) < 1e-12
    assert smallest(p.sigma[0] / 1.1) > 1e-4


def test_gram_matrices_and_block_matrix_have_the_spectrum_of_the_kernel() -> None:
    p = problem(40, 25)
    means = kernel_singular_values(gram(p.q), gram(p.k), p.f[None, None])[0, 0]
    torch.testing.assert_close(means[:5] * math.sqrt(40 * 25), p.sigma, rtol=1e-10, atol=0.0)

    block = torch.zeros(65, 65, dtype=torch.float64)
    block[:40, 40:], block[40:, :40] = p.matrix, p.matrix.T
    spectrum = torch.linalg.eigvalsh(block)
    torch.testing.assert_close(spectrum.flip(0)[:5], p.sigma, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(spectrum[:5], -p.sigma, rtol=1e-10, atol=0.0)


def test_kernel_is_rebuilt_only_from_all_orthonormal_triplets() -> None:
    few, all_of_them = problem(s=5), problem(s=12)

    def error(p: Problem) -> float:
        rebuilt = p.left * p.sigma @ p.right.T
        return ((p.matrix - rebuilt).norm() / p.matrix.norm()).item()

    assert error(few) > 0.05
    assert error(all_of_them) < 1e-13


def test_objective_is_indefinite() -> None:
    p = problem(s=1)
    lam = torch.ones(1, dtype=torch.float64) * (40 / p.sigma[0]).sqrt()
    flat = randn(40)
    hessian = torch.autograd.functional.hessian(
        lambda w: objective(p, w[:20, None], w[20:, None], lam), flat
    )
    assert isinstance(hessian, Tensor)
    values = torch.linalg.eigvalsh(hessian)
    assert values[0] < -0.5
    assert values[-1] > 0.5


@each("n, s", [(1, 1), (7, 3), (63, 20)])
def test_t05_moment_form_equals_the_naive_one_in_values_and_gradients(n: int, s: int) -> None:
    b, h, d = 2, 3, 5
    e, r = randn(b, h, n, s).requires_grad_(), randn(b, h, n, s).requires_grad_()
    w_e, w_r = randn(h, d, s).requires_grad_(), randn(h, d, s).requires_grad_()
    lam = randn(h, s).requires_grad_()
    inputs = (e, r, lam, w_e, w_r)
    truth = naive.ksvd_objective(*inputs)
    got = ksvd_objective(
        e.square().mean(2), r.square().mean(2), lam, parameter_trace(w_e, w_r)[None]
    )
    torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-10)
    pull = randn(b, h)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, pull),
        torch.autograd.grad(truth, inputs, pull),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_t05_covariance_form_equals_the_moments() -> None:
    phi, w = randn(2, 3, 50, 6), randn(2, 3, 6, 4)
    covariance = phi.mT @ phi / 50
    moments = (phi @ w).square().mean(2)
    from_gram = score_gram(covariance, w).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(from_gram, moments, rtol=1e-10, atol=1e-10)


def test_t06_sample_minus_batch_is_the_variance() -> None:
    j = randn(9, 4)
    difference = reduce_objective(j, "sample") - reduce_objective(j, "batch")
    torch.testing.assert_close(difference, j.mean(1).var(correction=0), rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(b=st.integers(2, 12), cut=st.integers(1, 11))
def test_t06_sample_and_head_reductions_do_not_see_how_a_batch_is_split(b: int, cut: int) -> None:
    cut = min(cut, b - 1)
    j = randn(b, 3)
    for reduction in ("sample", "head"):
        parts = cut * reduce_objective(j[:cut], reduction)
        parts = parts + (b - cut) * reduce_objective(j[cut:], reduction)
        torch.testing.assert_close(parts / b, reduce_objective(j, reduction), rtol=1e-10, atol=0.0)


def test_t06_batch_reduction_depends_on_the_split() -> None:
    j = torch.tensor([[1.0], [-1.0]])
    assert reduce_objective(j, "batch") == 0
    assert (reduce_objective(j[:1], "batch") + reduce_objective(j[1:], "batch")) / 2 == 1


def test_t06_two_towers_are_the_batch_reduction_of_both() -> None:
    first, second = randn(5, 4), randn(5, 4)
    published = ((first.mean() + second.mean()) / 2).square()
    got = reduce_objective(torch.cat([first, second]), "batch")
    torch.testing.assert_close(got, published, rtol=1e-10, atol=1e-12)


def test_t06_heads_cancel_unless_reduced_one_by_one() -> None:
    j = torch.tensor([[0.15, -0.16, 0.06, -0.05]], dtype=torch.float64)
    assert reduce_objective(j, "sample") < 1e-30
    assert reduce_objective(j, "batch") < 1e-30
    assert reduce_objective(j, "head") > 0.01


@each("reduction", ["sample", "batch", "head"])
def test_empty_sequences_are_left_out(reduction: str) -> None:
    j, keep = randn(5, 3), torch.tensor([True, False, True, True, False])
    got = reduce_objective(j, reduction, keep=keep)
    torch.testing.assert_close(got, reduce_objective(j[keep], reduction), rtol=1e-12, atol=0.0)
    assert reduce_objective(j, reduction, keep=torch.zeros(5, dtype=torch.bool)) == 0


@pytest.mark.raw
def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="'sample', 'batch' or 'head', got 'sum'"):
        reduce_objective(randn(2, 2), "sum")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=20)
@given(scale=st.floats(1e-3, 1e3), s=st.integers(1, 8))
def test_kkt_residual_is_free_of_scale_and_positive_off_the_solution(scale: float, s: int) -> None:
    g_q, g_k, lam = gram(randn(20, 6)), gram(randn(20, 6)), randn(1, s)
    w_e, w_r = randn(1, 1, 6, s), randn(1, 1, 6, s)
    residual = kkt_residual(g_q, g_k, w_e, w_r, lam)
    assert residual.item() > 1e-6
    scaled = kkt_residual(g_q, g_k, scale * w_e, scale * w_r, lam)
    torch.testing.assert_close(scaled, residual, rtol=1e-10, atol=0.0)


def test_kkt_residual_is_the_gradient_of_the_objective() -> None:
    p = problem(30, 20)
    w_e, w_r, lam = randn(20, 4).requires_grad_(), randn(20, 4).requires_grad_(), randn(4)
    grads = torch.autograd.grad(objective(p, w_e, w_r, lam), (w_e, w_r))
    expected = sum(g.square().sum() for g in grads) / (w_e.square().sum() + w_r.square().sum())
    torch.testing.assert_close(residual(p, w_e, w_r, lam), expected, rtol=1e-10, atol=0.0)


def test_kkt_residual_of_weights_that_vanish_together_is_zero() -> None:
    p, w = problem(), torch.zeros(20, 3, dtype=torch.float64, requires_grad=True)
    found = residual(p, w, w, randn(3))
    found.backward()
    assert found.item() == 0
    assert not w.grad.any()
    assert residual(p, w, randn(20, 3), randn(3)) > 0


def test_diagnostics_vanish_at_singular_directions_and_not_elsewhere() -> None:
    p = problem()
    e, r = scores(p, *stationary_weights(p))
    moments = [t.square().mean(0)[None, None] for t in (e, r)]
    assert balance(*moments).item() < 1e-20
    assert off_diagonality((e.T @ e)[None, None]).item() < 1e-20
    assert balance(moments[0], 2 * moments[1]).item() == pytest.approx(1 / 9)
    assert off_diagonality((e.T @ e + 1)[None, None]).item() > 0


def test_off_diagonality_counts_pairs_of_equal_columns() -> None:
    column = randn(10, 1)
    e = column * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert off_diagonality((e.T @ e)[None, None]).item() == pytest.approx(3.0)


def test_what_is_below_the_floor_is_compared_with_the_floor() -> None:
    floor, small = 1e-2, torch.full((1, 1, 1, 1), 1e-3, dtype=torch.float64)
    none, one = torch.zeros_like(small), small.new_ones(1, 1)
    # residual and size of the dual variables are both 1e-3: their ratio counts as (0.1)²
    found = dual_residual(none, none, small, none, one, floor=floor)
    assert found.item() == pytest.approx(1e-2)
    assert dual_residual(none, none, 20 * small, none, one, floor=floor).item() == pytest.approx(1)
    moment = small[0].square()  # the mean square of scores of size 1e-3
    assert balance(moment, 0 * moment, floor=floor).item() == pytest.approx(1e-4)
    assert balance(400 * moment, 0 * moment, floor=floor).item() == pytest.approx(1)
    # columns of length 1e-3 that are parallel: the cosine counts as 1e-6 / 0.5e-4
    gram = moment.expand(1, 1, 2, 2)
    assert off_diagonality(gram, floor=floor).item() == pytest.approx(4e-4)
    assert off_diagonality(400 * gram, floor=floor).item() == pytest.approx(1)


def test_dual_residual_ignores_padding() -> None:
    e, r, h_e, h_r = (randn(2, 3, 8, 4) for _ in range(4))
    lam, keep = randn(3, 4), torch.arange(8).expand(2, -1) < 5
    poisoned = [t.masked_fill(~keep[:, None, :, None], float("nan")) for t in (e, r, h_e, h_r)]
    got = dual_residual(*poisoned, lam, key_mask=keep)
    cut = dual_residual(*(t[:, :, :5] for t in (e, r, h_e, h_r)), lam)
    torch.testing.assert_close(got, cut, rtol=1e-12, atol=0.0)


@given(s=st.integers(1, 20), scale=st.floats(1e-3, 1e3))
def test_effective_rank_of_a_flat_spectrum_is_its_length(s: int, scale: float) -> None:
    flat = torch.full((s,), scale, dtype=torch.float64)
    assert effective_rank(flat).item() == pytest.approx(s)
    padded = torch.cat([flat, torch.zeros(3, dtype=torch.float64)])
    assert effective_rank(padded).item() == pytest.approx(s)
    assert effective_rank(torch.zeros(s)).item() == pytest.approx(1.0)


def fit_directions(loss: str, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return residual, objective and cosines with left singular vectors, of four problems."""
    problems, n, d, s = 4, 40, 8, 3
    sigma = n * 0.6 ** torch.arange(d, dtype=torch.float64)
    left, right = orthonormal(problems, n, d), orthonormal(problems, n, d)
    mix = orthonormal(problems, d, d)
    phi_q, phi_k = left * sigma.sqrt() @ mix, right * sigma.sqrt() @ mix
    gram_q, gram_k = (phi_q.mT @ phi_q / n)[None], (phi_k.mT @ phi_k / n)[None]
    w_e, w_r = 0.3 * randn(problems, d, s), 0.3 * randn(problems, d, s)
    lam = 1 + randn(problems, s).abs()
    parameters = [t.requires_grad_() for t in (w_e, w_r, lam)]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        gram_e, gram_r = score_gram(gram_q, w_e[None]), score_gram(gram_k, w_r[None])
        residual = kkt_residual(gram_q, gram_k, w_e[None], w_r[None], lam)
        moments = [g.diagonal(dim1=-2, dim2=-1) for g in (gram_e, gram_r)]
        j = ksvd_objective(*moments, lam, parameter_trace(w_e, w_r)[None])
        kkt = residual + 0.1 * off_diagonality(gram_e)
        optimizer.zero_grad()
        (kkt if loss == "kkt" else j.square()).sum().backward()
        optimizer.step()
        schedule.step()
    scores = torch.nn.functional.normalize((phi_q @ w_e).detach(), dim=1)
    return residual.detach()[0], j.detach()[0], (scores.mT @ left).abs()


@pytest.mark.slow
def test_t22_kkt_residual_with_orthogonality_finds_distinct_singular_vectors() -> None:
    residual, _, cosines = fit_directions("kkt", steps=3000)
    best, which = cosines.max(-1)
    assert (residual < 1e-4).all()
    assert (best > 0.999).all()
    assert all(len(set(row.tolist())) == 3 for row in which)


def test_t22_squared_objective_alone_does_not_find_singular_vectors() -> None:
    residual, j, cosines = fit_directions("ksvd", steps=500)
    assert (j.abs() < 1e-6).all()
    assert (residual > 0.3).all()
    assert (cosines.max(-1).values.min(-1).values < 0.9).all()
