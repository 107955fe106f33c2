"""Every solver against the dense SVD, and properties of all solvers."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import each
from torch import Tensor

from primal_attention.ksvd import (
    KernelTriplets,
    apply_kernel,
    dense_svd,
    feature_svd,
    kernel_means,
    matrix_free_svd,
    named_kernel,
    nystrom_svd,
    transpose_kernel,
)
from primal_attention.ksvd import solvers as solvers_module


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def centered(k: Tensor) -> Tensor:
    k = k - k.mean(0)
    return k - k.mean(1, keepdim=True)


def asymmetric(x: Tensor, y: Tensor) -> Tensor:
    """A smooth kernel with κ(x, y) ≠ κ(y, x), of mixed sign."""
    return torch.sin(x @ y.T + x[:, :1]) + 0.5 * torch.exp(-(x[:, :1] - 2 * y[:, 1]).square())


def assert_triplets(got: KernelTriplets, kernel_matrix: Tensor, tol: float) -> None:
    """Check the coupled equations, orthonormality, order, signs and the exact values."""
    left, sigma, right = got
    s, scale = len(sigma), sigma[0].item()
    eye = torch.eye(s, dtype=left.dtype)
    assert (left.T @ left - eye).abs().max() < max(tol, 1e-12)
    assert (right.T @ right - eye).abs().max() < max(tol, 1e-12)
    assert (sigma.diff() <= 0).all()
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()
    assert (kernel_matrix @ right - left * sigma).norm() < tol * scale
    assert (kernel_matrix.T @ left - right * sigma).norm() < tol * scale
    exact = torch.linalg.svdvals(kernel_matrix)[:s]
    torch.testing.assert_close(sigma, exact, rtol=0.0, atol=tol * scale)


Solver = Callable[[Tensor, Tensor, int, bool], KernelTriplets]

EXACT: dict[str, Solver] = {
    "dense": lambda x, y, rank, center: dense_svd(asymmetric(x, y), rank, center=center),
    "matrix_free": lambda x, y, rank, center: matrix_free_svd(
        asymmetric, x, y, rank, center=center, tol=1e-9, generator=generator()
    ),
}


@each("center", [False, True])
@each("n, m", [(300, 300), (300, 170), (170, 300)])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_solvers_satisfy_the_coupled_equations(
    name: str, n: int, m: int, center: bool
) -> None:
    x, y = randn(n, 3), randn(m, 3)
    k = centered(asymmetric(x, y)) if center else asymmetric(x, y)
    assert_triplets(EXACT[name](x, y, 6, center), k, 1e-8)


@pytest.mark.parametrize("name", ["exponential", "laplacian", "polynomial", "rbf"])
def test_matrix_free_agrees_with_dense_for_every_kernel(name: str) -> None:
    kernel, x, y = named_kernel(name), randn(400, 3), randn(350, 3) + 0.3
    got = matrix_free_svd(kernel, x, y, 8, generator=generator())
    exact = dense_svd(kernel(x, y), 8)
    torch.testing.assert_close(got.singular_values, exact.singular_values, rtol=1e-8, atol=0.0)
    # the sign rule makes the vectors comparable, not only their spans
    torch.testing.assert_close(got.left[:, :3], exact.left[:, :3], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(got.right[:, :3], exact.right[:, :3], rtol=0.0, atol=1e-5)


def test_matrix_free_works_in_single_precision() -> None:
    x, y = torch.randn(400, 2), torch.randn(350, 2)
    kernel = named_kernel("rbf")
    got = matrix_free_svd(kernel, x, y, 10, generator=generator())
    exact = torch.linalg.svdvals(kernel(x.double(), y.double()))[:10]
    assert got.left.dtype == torch.float32
    torch.testing.assert_close(got.singular_values.double(), exact, rtol=1e-4, atol=0.0)


def test_matrix_free_converges_on_a_slow_spectrum_by_compressing_its_basis() -> None:
    # nearly the identity: hundreds of singular values between 0.5 and 1.5
    x = 10 * randn(600, 3)
    kernel = named_kernel("rbf", gamma=1.0)
    passes = 0

    def counted(a: Tensor, b: Tensor) -> Tensor:
        nonlocal passes
        passes += a.shape[0]
        return kernel(a, b)

    got = matrix_free_svd(counted, x, x, 4, tol=1e-8, max_passes=200, generator=generator())
    assert passes / 600 > 10
    assert_triplets(got, kernel(x, x), 1e-7)


def test_matrix_free_warns_if_it_does_not_converge() -> None:
    x = 10 * randn(600, 3)
    with pytest.warns(RuntimeWarning, match="not converge to tol=1.0e-06 in 2 passes"):
        matrix_free_svd(named_kernel("rbf", gamma=1.0), x, x, 4, max_passes=2)


@each("d", [1, 3, 40])
def test_matrix_free_works_for_a_rank_below_the_requested_one(d: int) -> None:
    x, y = randn(500, d), randn(450, d)
    got = matrix_free_svd(named_kernel("linear"), x, y, 12, generator=generator())
    exact = torch.linalg.svdvals(x @ y.T)[:12]
    torch.testing.assert_close(got.singular_values, exact, rtol=1e-8, atol=1e-10 * exact[0].item())
    assert torch.isfinite(got.left).all()


def test_matrix_free_stores_at_most_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = randn(900, 3), randn(800, 3)
    budget = 800 * 8 * 10  # ten rows
    monkeypatch.setattr(solvers_module, "_BLOCK_BYTES", budget)
    sizes = []

    def watched(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(a.shape[0] * b.shape[0] * 8)
        return asymmetric(a, b)

    got = matrix_free_svd(watched, x, y, 5, center=True, generator=generator())
    assert max(sizes) <= budget
    assert_triplets(got, centered(asymmetric(x, y)), 1e-5)


@pytest.mark.parametrize("solver", [matrix_free_svd, nystrom_svd])
def test_the_generator_determines_the_result(solver: Callable[..., KernelTriplets]) -> None:
    x, y = randn(400, 3), randn(380, 3)
    first, second = (solver(asymmetric, x, y, 4, generator=generator()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each("center", [False, True])
@each("rows", [4, 16, 50])
def test_t23_thin_qr_spectrum_equals_the_dense_one(rows: int, center: bool) -> None:
    phi_q, phi_k, f = randn(500, 16), randn(300, 16), randn(rows, 16)
    k = phi_q @ f.T @ f @ phi_k.T
    got = feature_svd(phi_q, phi_k, 100, f=f, center=center)
    # K has rank min(rows, p); thin QR keeps p columns, the rest of them null
    assert got.left.shape[1] <= 16
    rank = min(rows, 16)
    k = centered(k) if center else k
    trimmed = KernelTriplets(got.left[:, :rank], got.singular_values[:rank], got.right[:, :rank])
    assert_triplets(trimmed, k, 1e-10)
    exact = torch.linalg.svdvals(k)
    torch.testing.assert_close(got.singular_values[:rank], exact[:rank], rtol=1e-8, atol=0.0)
    assert exact[rank] < 1e-12 * exact[0]


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 40), m=st.integers(1, 40), p=st.integers(1, 12), rank=st.integers(1, 15))
def test_t23_thin_qr_for_any_shape(n: int, m: int, p: int, rank: int) -> None:
    phi_q, phi_k = randn(n, p), randn(m, p)
    got = feature_svd(phi_q, phi_k, rank)
    assert len(got.singular_values) == min(n, m, p, rank)
    assert_triplets(got, phi_q @ phi_k.T, 1e-10)


def published_nystrom(
    kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, n: int, m: int, rank: int
) -> Tensor:
    """Return ``σ √(NM / nm)``, the estimate of the literature."""
    landmarks = kernel(x[torch.randperm(len(x))[:n]], y[torch.randperm(len(y))[:m]])
    return torch.linalg.svdvals(landmarks)[:rank] * math.sqrt(len(x) * len(y) / (n * m))


def test_nystrom_is_close_and_closer_than_the_published_estimate() -> None:
    # columns of different scale keep the singular values apart
    x, y = (randn(rows, 2) * torch.tensor([2.0, 0.7]).double() for rows in (600, 500))
    kernel = named_kernel("rbf", gamma=0.3)
    exact = dense_svd(kernel(x, y), 5)
    ours, theirs = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        got = nystrom_svd(kernel, x, y, 5, num_landmarks=90)
        ours.append((got.singular_values / exact.singular_values - 1).abs().max())
        sigma = published_nystrom(kernel, x, y, 100, 80, 5)
        theirs.append((sigma / exact.singular_values - 1).abs().max())
        assert (got.left[:, :3] * exact.left[:, :3]).sum(0).min() > 0.99
    assert max(ours) < 0.02
    assert max(ours) < min(theirs)


def test_nystrom_is_exact_when_the_landmarks_span_the_kernel() -> None:
    x, y = randn(300, 2), randn(200, 2)
    kernel = named_kernel("polynomial", degree=2)  # six features
    for center in (False, True):
        got = nystrom_svd(kernel, x, y, 5, num_landmarks=40, center=center, generator=generator())
        k = centered(kernel(x, y)) if center else kernel(x, y)
        assert_triplets(got, k, 1e-9)


def test_nystrom_shares_landmarks_when_the_sides_are_the_same_data() -> None:
    x = randn(300, 2)
    got = nystrom_svd(named_kernel("rbf"), x, x, 4, generator=generator())
    torch.testing.assert_close(got.left, got.right, rtol=0.0, atol=1e-9)


def test_signs_do_not_depend_on_the_solver_or_on_a_flip() -> None:
    k = randn(20, 15)
    first, second = dense_svd(k, 4), dense_svd(-k, 4)
    torch.testing.assert_close(first.left, second.left)
    torch.testing.assert_close(first.right, -second.right)


def test_applying_a_kernel_in_blocks_equals_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers_module, "_BLOCK_BYTES", 1000)
    x, y, v = randn(57, 3), randn(31, 3), randn(31, 4)
    torch.testing.assert_close(apply_kernel(asymmetric, x, y, v), asymmetric(x, y) @ v)
    u = randn(57, 2)
    mirrored = apply_kernel(transpose_kernel(asymmetric), y, x, u)
    torch.testing.assert_close(mirrored, asymmetric(x, y).T @ u)
    means = kernel_means(asymmetric, x, y)
    torch.testing.assert_close(means.columns, asymmetric(x, y).mean(0))
    torch.testing.assert_close(means.rows, asymmetric(x, y).mean(1))


def test_out_of_sample_scores_equal_the_left_vectors_on_old_rows() -> None:
    x, y = randn(120, 3), randn(100, 3)
    left, sigma, right = dense_svd(asymmetric(x, y), 5)
    torch.testing.assert_close(apply_kernel(asymmetric, x, y, right), left * sigma)
    torch.testing.assert_close(
        apply_kernel(transpose_kernel(asymmetric), y, x, left), right * sigma
    )


def test_centered_scores_of_new_rows_differ_by_a_shift() -> None:
    x, y, new = randn(120, 3), randn(100, 3), randn(7, 3)
    k, row = asymmetric(x, y), asymmetric(new, y)
    left, sigma, right = dense_svd(k, 5, center=True)
    means = kernel_means(asymmetric, x, y)
    expected = (row - row.mean(1, keepdim=True) - k.mean(0) + k.mean()) @ right
    got = apply_kernel(asymmetric, new, y, right) - means.columns @ right
    torch.testing.assert_close(got, expected)
    old = apply_kernel(transpose_kernel(asymmetric), y, x, left) - means.rows @ left
    torch.testing.assert_close(old, right * sigma)


def test_no_solver_builds_a_graph() -> None:
    x = randn(300, 3).requires_grad_()
    for solver in (matrix_free_svd, nystrom_svd):
        assert not solver(asymmetric, x, x, 2, generator=generator()).left.requires_grad


def test_zero_kernel_is_not_an_error() -> None:
    x = torch.zeros(300, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solver in (matrix_free_svd, nystrom_svd):
            got = solver(named_kernel("linear"), x, x, 2, generator=generator())
            assert (got.singular_values == 0).all()


@each("n", [30, 400])
def test_infinite_kernel_values_raise(n: int) -> None:
    x = 1e3 * randn(n, 3)
    kernel = named_kernel("exponential", gamma=1.0)
    with pytest.raises(ValueError, match="NaN or infinite values"):
        matrix_free_svd(kernel, x, x, 2)


@each("value", [math.nan, math.inf])
@each("side", [0, 1])
@each("center", [False, True])
def test_nan_features_raise(value: float, side: int, center: bool) -> None:
    phi = [randn(30, 4), randn(20, 4)]
    phi[side][11, 2] = value
    with pytest.raises(ValueError, match="NaN or infinite values"):
        feature_svd(*phi, 2, center=center)


def test_nystrom_raises_for_nan_outside_the_landmarks() -> None:
    x = randn(300, 3)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T).masked_fill((a[:, :1] == x[5, 0]) | (b[:, 0] == x[5, 0]), math.inf)

    assert 5 not in torch.randperm(300, generator=generator())[:10]
    with pytest.raises(ValueError, match="NaN or infinite values"):
        nystrom_svd(kernel, x, x, 1, num_landmarks=10, generator=generator())


def test_nystrom_is_zero_if_the_kernel_of_its_landmarks_is_zero() -> None:
    x = randn(300, 3)
    seen = torch.randperm(300, generator=generator())[:10]
    x[seen] = 0  # no distance between landmarks, but to all others
    got = nystrom_svd(torch.cdist, x, x, 2, num_landmarks=10, generator=generator())
    assert (got.singular_values == 0).all()


@pytest.mark.parametrize("solver", [matrix_free_svd, nystrom_svd])
def test_rank_below_one_raises(solver: Callable[..., KernelTriplets]) -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        solver(asymmetric, randn(5, 2), randn(5, 2), 0)
