"""The balanced kernel: trivial pair, centring, correspondence analysis."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.ksvd import balance_features, balanced_svd, dense_svd

F64 = torch.float64


def features(n=40, m=40, p=12):
    return torch.rand(n, p, dtype=F64), torch.rand(m, p, dtype=F64)


# O16
@each("m", [40, 25])
def test_the_first_pair_of_a_balanced_kernel_is_trivial(m):
    phi_q, phi_k = balance_features(*features(m=m))
    kernel = phi_q @ phi_k.T
    rows = torch.full((40,), (m / 40) ** 0.5, dtype=F64)
    columns = torch.full((m,), (40 / m) ** 0.5, dtype=F64)
    assert_close(kernel.sum(1), rows, atol=1e-8, rtol=0)
    assert_close(kernel.sum(0), columns, atol=1e-8, rtol=0)
    left, sigma, right = dense_svd(kernel, 12)
    assert abs(sigma[0] - 1) < 1e-8
    assert sigma[1] < 1
    assert_close(left[:, 0].abs(), torch.full((40,), 40**-0.5, dtype=F64), atol=1e-8, rtol=0)
    assert_close(right[:, 0].abs(), torch.full((m,), m**-0.5, dtype=F64), atol=1e-8, rtol=0)
    assert torch.linalg.matrix_rank(kernel) == 12


# O16
@each("m", [40, 25])
def test_dropping_the_trivial_pair_leaves_all_others(m):
    phi_q, phi_k = features(m=m)
    balanced = balance_features(phi_q, phi_k)
    whole = dense_svd(balanced.phi_q @ balanced.phi_k.T, 12)
    rest = balanced_svd(phi_q, phi_k, 11)
    assert_close(rest.singular_values, whole.singular_values[1:], atol=1e-8, rtol=0)
    assert rest.left.sum(0).abs().max() < 1e-8
    assert rest.right.sum(0).abs().max() < 1e-8
    # vectors of values that are not equal
    assert_close(rest.left[:, :3].abs(), whole.left[:, 1:4].abs(), atol=1e-6, rtol=0)


def test_scaling_rows_and_columns_before_changes_nothing():
    phi_q, phi_k = features()
    u, v = torch.rand(2, 40, 1, dtype=F64) + 0.1
    a, b = balanced_svd(phi_q, phi_k, 5), balanced_svd(u * phi_q, v * phi_k, 5)
    assert_close(a.singular_values, b.singular_values, atol=1e-8, rtol=0)


def test_balanced_counts_are_correspondence_analysis_of_equal_masses():
    # a table whose margins are already equal: standardised residuals give the same values
    table = balance_features(*features(12, 12, 5))
    table = table.phi_q @ table.phi_k.T
    share = table / table.sum()
    residuals = (share - 1 / 144) * 12
    expected = torch.linalg.svdvals(residuals)[:4]
    found = balanced_svd(table, torch.eye(12, dtype=F64), 4)
    assert_close(found.singular_values, expected, atol=1e-8, rtol=0)


def test_float32_is_balanced_to_its_rounding():
    phi_q, phi_k = (t.float() for t in features())
    found = balance_features(phi_q, phi_k)
    assert (found.phi_q @ found.phi_k.T).sum(1).sub(1).abs().max() < 1e-4


@pytest.mark.raw
def test_kernels_that_cannot_be_balanced_are_refused():
    with pytest.raises(ValueError, match="not positive"):
        balance_features(torch.randn(5, 3), torch.randn(5, 3))
    # the off-diagonal zero lets the corner tend to zero ever more slowly
    almost = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=F64)
    with pytest.raises(RuntimeError, match="not balanced after 50 steps"):
        balance_features(almost, torch.eye(2, dtype=F64), max_iterations=50)
