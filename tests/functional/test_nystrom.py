"""The lifted Nyström method: naive parity, error, features, and its causal form."""

import pytest
import torch
from tests.functional.points import F64, data_set, draw, gradients, masks
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.gaussian import gaussian_attention, gaussian_gram
from primal_attention.functional.landmarks import strided_landmarks
from primal_attention.functional.linear import append_ones
from primal_attention.functional.nystrom import (
    divide_by_row_sum,
    nystrom_attention,
    nystrom_error,
    nystrom_features,
    nystrom_residual,
    windowed_nystrom,
)


@each("normalize", [False, True])
@each("masked", [False, True])
def test_nystrom_matches_naive_in_values_and_gradients(normalize, masked):
    q, k, v, z = (t.requires_grad_() for t in draw(9, 7, 7, 4))
    keep = masks(2, 7) if masked else None
    fast = nystrom_attention(q, k, v, z, key_mask=keep, normalize=normalize)
    slow = naive.nystrom_attention(q, k, v, z, 1e-3, keep, normalize)
    assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for a, b in zip(gradients(fast, (q, k, v, z)), gradients(slow, (q, k, v, z)), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_cholesky_path_equals_the_dense_formula_in_float32():
    q, k, v, z = draw(40, 30, 30, 16, dtype=torch.float32)
    slow = naive.nystrom_attention(*(t.double() for t in (q, k, v, z)), 1e-3)
    assert_close(nystrom_attention(q, k, v, z).double(), slow, atol=1e-4, rtol=1e-4)


@each("inverse", ["cholesky", "schulz", "published"])
def test_gradcheck_with_fixed_landmarks_and_bandwidth(inverse):
    q, k, v, z = (t[:1, :1].requires_grad_() for t in draw(5, 4, 4, 3, d=2))
    bandwidth = torch.tensor(0.7, **F64, requires_grad=True)

    def run(q, k, v, z, bandwidth):
        return nystrom_attention(q * bandwidth, k * bandwidth, v, z, inverse=inverse)

    assert torch.autograd.gradcheck(run, (q, k, v, z, bandwidth))


def test_all_points_as_landmarks_give_the_exact_kernel():
    q, k, v = draw(12, 9, 9)
    z = torch.cat([q, k], dim=2)
    got = nystrom_attention(q, k, v, z, ridge=1e-8)
    assert_close(got, gaussian_attention(q, k, v), atol=1e-6, rtol=0)
    # the ridge enters linearly, so a hundredth of it leaves a hundredth of the error
    assert_close(
        nystrom_attention(q, k, v, z, ridge=1e-11),
        naive.gaussian_attention(q, k, v),
        atol=1e-8,
        rtol=0,
    )


def test_nested_landmarks_never_increase_the_lifted_error_which_bounds_the_block():
    q, k = (t[:1, :1] for t in draw(20, 20))
    x = torch.cat([q, k], dim=2)
    exact = naive.gaussian_gram(x, x)[0, 0]
    order, last = torch.randperm(40), float("inf")
    for s in (1, 3, 8, 15, 25):
        z = x[:, :, order[:s]]
        low = (
            gaussian_gram(x, z)
            @ torch.linalg.pinv(gaussian_gram(z, z), hermitian=True)
            @ gaussian_gram(z, x)
        )[0, 0]
        error = torch.linalg.matrix_norm(exact - low, 2).item()
        block = torch.linalg.matrix_norm((exact - low)[:20, 20:], 2).item()
        assert error <= last + 1e-8
        assert block <= error + 1e-8
        assert torch.linalg.eigvalsh(exact - low).min() >= -1e-8
        last = error


@pytest.mark.parametrize("kind", [0.5, 1.0, "clusters"])
def test_more_landmarks_give_less_error(kind):
    q, k = data_set(kind)
    errors = [
        nystrom_error(
            q, k, torch.cat([strided_landmarks(q, s // 2), strided_landmarks(k, s // 2)], dim=2)
        ).item()
        for s in (16, 64, 256)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_error_against_the_exact_kernel_is_that_of_the_tables():
    # spec 02 §8.1: 0.0424 at s = 0.5, d = 64, mean of two draws with uniform landmarks
    errors = []
    for seed in range(2):
        q, k = data_set(0.5, seed=seed)
        z = torch.cat([strided_landmarks(q, 32), strided_landmarks(k, 32)], dim=2)
        errors.append(nystrom_error(q, k, z).item())
    assert 0.03 < sum(errors) / 2 < 0.055


def test_residual_is_the_diagonal_of_the_error_matrix():
    x, z = draw(9, 4)
    low = naive.nystrom_matrix(x, x, z, 1e-3).diagonal(dim1=-2, dim2=-1)
    residual = nystrom_residual(x, z, 1e-3)
    assert_close(residual, 1 - low, atol=1e-10, rtol=0)
    assert_close(nystrom_residual(z, z, 1e-9), torch.zeros(2, 3, 4, **F64), atol=1e-8, rtol=0)
    far = nystrom_residual(x + 100, z)
    assert_close(far, torch.ones_like(far))


def test_features_reproduce_the_nystrom_kernel():
    q, k, z = draw(9, 7, 4)
    got = nystrom_features(q, z) @ nystrom_features(k, z).mT
    assert_close(got, naive.nystrom_matrix(q, k, z, 1e-3), atol=1e-10, rtol=0)


def test_autocast_leaves_the_kernel_in_float32():
    q, k, v, z = draw(20, 20, 20, 8, dtype=torch.float32)
    exact = nystrom_attention(q, k, v, z)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nystrom_attention(q, k, v, z), exact)


# causal


@each("window", [1, 4, 64])
@each("n", [1, 4, 13])
@each("normalize", [False, True])
def test_windowed_form_matches_naive_in_values_and_gradients(window, n, normalize):
    q, k, v = (t.requires_grad_() for t in draw(n, n, n))
    z = torch.randn(3, 6, 5, **F64, requires_grad=True)
    keep = masks(2, n)
    y = windowed_nystrom(q, k, append_ones(v, keep), z, window=window).values
    fast = divide_by_row_sum(y, 1e-3) if normalize else y[..., :-1]
    slow = naive.windowed_nystrom(q, k, v, z, window, 1e-3, keep, normalize)
    assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for a, b in zip(gradients(fast, (q, k, v, z)), gradients(slow, (q, k, v, z)), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-8)


@each("pieces", [[1] * 13, [5, 1, 7], [13]])
def test_windowed_form_continues_from_its_state(pieces):
    q, k, v = draw(13, 13, 13)
    z = torch.randn(3, 6, 5, **F64)
    whole = windowed_nystrom(q, k, v, z, window=4)
    state, outputs = None, []
    for a, b, c in zip(*(t.split(pieces, 2) for t in (q, k, v)), strict=True):
        y, state = windowed_nystrom(a, b, c, z, window=4, state=state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 2), whole.values)
    for a, b in zip(state, whole.state, strict=True):
        assert_close(a, b)


def test_without_a_window_the_causal_form_is_the_masked_low_rank_product():
    # spec 02 §10 (a): equal to the dense masked product
    q, k, v = draw(9, 9, 9)
    z = torch.randn(3, 6, 5, **F64)
    low = naive.nystrom_matrix(q, k, z.expand(2, -1, -1, -1), 1e-3).tril()
    exact = naive.gaussian_gram(q, k).diagonal(dim1=-2, dim2=-1)
    low = low + torch.diag_embed(exact - low.diagonal(dim1=-2, dim2=-1))
    assert_close(windowed_nystrom(q, k, v, z, window=1).values, low @ v)
