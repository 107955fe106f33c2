"""Graphs from primal scores against dense matrices."""

import pytest
import torch

from primal_attention.analysis.causes.primal import (
    HatMatrix,
    captured_scores,
    kernel_factor,
    moral_graph,
)
from primal_attention.attention import PrimalAttention
from primal_attention.attention.kernel_problem import pose_on_tokens
from primal_attention.hosts import capture

DOUBLE = {"dtype": torch.float64}


def dense_partial(covariance):
    """Partial correlations given all others, from the inverse of the covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    precision = (vectors / values) @ vectors.T
    scale = precision.diagonal().rsqrt()
    found = -precision * scale * scale[:, None]
    return found.fill_diagonal_(1.0)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_gram_of_scores_is_the_covariance_of_tokens():
    # T11: K Kᵀ = E Eᵀ and Kᵀ K = R Rᵀ with all directions; σ²_{s+1} with s of them
    k = torch.randn(20, 20, **DOUBLE)
    u, sigma, vh = torch.linalg.svd(k)
    e, r = k @ vh.T, k.T @ u
    close(e @ e.T, k @ k.T)
    close(r @ r.T, k.T @ k)
    for s in (1, 7, 19):
        left = torch.linalg.matrix_norm(k @ k.T - e[:, :s] @ e[:, :s].T, 2)
        close(left, sigma[s] ** 2)


@pytest.mark.parametrize("m", [4, 60])
def test_covariance_from_features_needs_no_kernel_matrix(m):
    # T11: K Kᵀ = Φ_q B Φ_qᵀ with B = FᵀF (Φ_kᵀΦ_k) FᵀF, fewer keys than features included
    q, k, f = torch.randn(50, 6, **DOUBLE), torch.randn(m, 6, **DOUBLE), torch.randn(9, 6, **DOUBLE)
    kernel = q @ f.T @ f @ k.T
    b = f.T @ f @ (k.T @ k) @ f.T @ f
    x = kernel_factor(q, k, f)
    assert x.shape == (50, min(m, 6))
    close(x @ x.T, kernel @ kernel.T, atol=1e-8)
    close(q @ b @ q.T, kernel @ kernel.T, atol=1e-8)
    y = kernel_factor(k, q, f)
    close(y @ y.T, kernel.T @ kernel, atol=1e-8)
    batch = kernel_factor(q.expand(3, -1, -1), k.expand(3, -1, -1))
    close(batch[2] @ batch[2].T, q @ k.T @ k @ q.T, atol=1e-9)


def test_features_of_a_primal_layer_give_its_kernel():
    layer = PrimalAttention(16, 2, rank=4, **DOUBLE).eval()
    x = torch.randn(1, 30, 16, **DOUBLE)
    problem = pose_on_tokens(layer, x, None, None, is_causal=False)
    q, k = (
        torch.nn.functional.normalize(s.inputs[0], dim=-1) for s in (problem.queries, problem.keys)
    )
    factor = kernel_factor(q, k, problem.rows[0])
    f = problem.rows[0]
    kernel = q @ f.mT @ f @ k.mT
    close(factor @ factor.mT, kernel @ kernel.mT, atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_hat_matrix_equals_the_dense_inverse(ridge):
    # T12: n = 60, s = 16
    e = torch.randn(60, 16, **DOUBLE)
    gram = e @ e.T
    lam = ridge * gram.diagonal().mean()
    hat = HatMatrix(e, ridge=ridge)
    expected = dense_partial(gram + lam * torch.eye(60, **DOUBLE))
    close(hat.rows(range(60)), expected)
    close(hat.row(17), expected[17])
    projector = e @ torch.cholesky_inverse(
        torch.linalg.cholesky(e.T @ e + lam * torch.eye(16, **DOUBLE))
    )
    close(hat.leverage, (projector * e).sum(1))


def test_more_directions_than_tokens_and_float32_scores():
    e = torch.randn(12, 30)
    expected = dense_partial(
        e.double() @ e.double().T + 0.01 * e.double().square().sum() / 12 * torch.eye(12, **DOUBLE)
    )
    found = HatMatrix(e.numpy(), ridge=0.01).rows(range(12))
    assert found.dtype == torch.float64
    close(found, expected)


def test_moral_graph_of_a_target_is_that_row_of_the_whole_graph():
    # 300 tokens: two blocks of rows
    e = torch.randn(300, 8, **DOUBLE) * (1 + torch.arange(300.0, **DOUBLE))[:, None]
    whole, one = moral_graph(e, count=5), moral_graph(e, target=270, count=5)
    assert whole.neighbors.shape == (300, 5)
    assert torch.equal(whole.neighbors[270], one.neighbors[0])
    # the scale of a token does not matter
    scaled = moral_graph(e * torch.rand(300, 1, **DOUBLE), target=270, count=5)
    assert torch.equal(scaled.neighbors, one.neighbors)
    unit = e / e.norm(dim=1, keepdim=True)
    rho = HatMatrix(unit).row(270)
    rho[270] = 0
    assert set(one.neighbors[0].tolist()) == set(rho.abs().topk(5).indices.tolist())
    close(one.partial[0], rho[one.neighbors[0]])
    edges = whole.edges(tau=0.02)
    assert edges
    assert all(i < j and abs(rho) >= 0.02 for i, j, rho in edges)


def test_duplicates_and_zero_rows_stay_finite():
    e = torch.randn(6, 3, **DOUBLE)
    e[1], e[2] = e[0], 0
    found = HatMatrix(e, ridge=1e-12).rows(range(6))
    assert found.isfinite().all()
    assert found.abs().max() <= 1
    assert not found[2, [0, 1, 3, 4, 5]].any()
    assert moral_graph(e, target=0, count=9).neighbors[0, 0] == 1


@pytest.mark.raw
def test_layers_without_dependence_between_tokens_are_refused():
    x = torch.randn(1, 9, 8)
    (static,) = capture(
        PrimalAttention(8, 2, rank=2, weights="static"), {"x": x, "is_causal": True}
    )
    with pytest.raises(ValueError, match="do not depend on the tokens"):
        captured_scores(static)
    (data,) = capture(PrimalAttention(8, 2, rank=2), x)
    assert captured_scores(data).e.shape == (2, 9, 2)
    for bad in ({"ridge": 0.0}, {"ridge": -1.0}):
        with pytest.raises(ValueError, match="ridge must be positive"):
            HatMatrix(torch.ones(3, 2), **bad)
    with pytest.raises(ValueError, match="one row for each token"):
        HatMatrix(torch.ones(2, 3, 2))
    with pytest.raises(ValueError, match="not all zero"):
        HatMatrix(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="between 0 and 2"):
        HatMatrix(torch.ones(3, 2)).row(3)
    with pytest.raises(ValueError, match="count"):
        moral_graph(torch.ones(3, 2), count=0)
