"""Newton-Schulz inverses converge as derived."""

import torch
from tests.functional.points import F64, data_set, draw
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.gaussian import gaussian_gram
from primal_attention.functional.nystrom import (
    landmark_gram,
    nystrom_attention,
)
from primal_attention.functional.schulz import schulz_inverse


def test_preconditioned_eigenvalues_lie_in_the_unit_interval_and_reach_one():
    for s, scale, ridge in ((2, 1.0, 1e-3), (16, 0.1, 0.1), (64, 3.0, 1e-3), (64, 0.5, 1e-6)):
        (z,) = draw(s, scale=scale)
        m = landmark_gram(z, ridge)
        root = m.sum(-1).rsqrt()
        values = torch.linalg.eigvalsh(root[..., :, None] * m * root[..., None, :])
        assert values.min() > 0
        assert_close(values[..., -1], torch.ones(2, 3, **F64), atol=1e-10, rtol=0)


def test_one_schulz_step_maps_the_residual_as_derived():
    # a diagonal N_M is its own degree matrix, so feed the iteration a matrix scaled back
    lam = torch.linspace(0.05, 1, 8, **F64)
    m = torch.diag(lam)[None, None]
    got = schulz_inverse(m, 1)[0, 0].diagonal() * lam
    # after degree scaling a diagonal matrix is the identity: residual 0 stays 0
    assert_close(got, torch.ones(8, **F64), atol=1e-14, rtol=0)
    n_m = torch.tensor([[0.6, 0.4], [0.4, 0.6]], **F64)  # row sums 1, eigenvalues 1 and 0.2
    residual = torch.eye(2, **F64) - n_m @ schulz_inverse(n_m[None, None], 1)[0, 0]
    r = 0.8
    assert_close(
        torch.linalg.eigvalsh(residual),
        torch.tensor([0.0, (3 * r**3 + r**4) / 4], **F64),
        atol=1e-14,
        rtol=0,
    )


@each("published", [False, True])
def test_schulz_matches_naive_for_each_matrix_of_a_batch(published):
    (z,) = draw(12)
    m = landmark_gram(z, 0.1)
    got = schulz_inverse(m, 6, published_start=published)
    for i in range(2):
        for j in range(3):
            assert_close(got[i, j], naive.schulz_inverse(m[i, j], 6, published))
    m[1] *= 100
    assert torch.equal(schulz_inverse(m, 6, published_start=published)[0], got[0])


def test_schulz_converges_to_the_inverse():
    q, k, v, z = draw(20, 20, 20, 12)
    exact = nystrom_attention(q, k, v, z, ridge=0.1)
    m = landmark_gram(z, 0.1)
    w = schulz_inverse(m, 20) @ (gaussian_gram(k, z).mT @ v)
    assert_close(gaussian_gram(q, z) @ w, exact, atol=1e-8, rtol=0)


def test_the_identity_start_needs_half_the_steps_of_the_published_one():
    # spec 02 §8.2, s = 0.1: residual 1.0 after 6 published steps, 8e-5 after 8 from the identity
    z = torch.cat(data_set(0.1, n=64), dim=2)
    m = landmark_gram(z, 0.1)
    root = m.sum(-1).rsqrt()
    n_m = root[..., :, None] * m * root[..., None, :]
    eye = torch.eye(128, **F64)

    def residual(steps, published):
        inverse = schulz_inverse(m, steps, published_start=published)
        inverse = inverse / (root[..., :, None] * root[..., None, :])
        return torch.linalg.matrix_norm(n_m @ inverse - eye, 2).item()

    assert residual(6, True) > 0.99
    assert 0.25 < residual(6, False) < 0.5
    assert residual(8, False) < 2e-4
    assert residual(15, True) < 1e-10


@each("scale", [1e-3, 1.0, 1e3, 1e6])
def test_landmark_gram_can_always_be_factored_in_float32(scale):
    z = torch.randn(4, 2, 128, 32) * scale + 10 * scale
    z = torch.cat([z, z[:, :, :64]], dim=2)  # duplicates
    factor, info = torch.linalg.cholesky_ex(landmark_gram(z, 0.0))
    assert (info == 0).all()
    assert factor.isfinite().all()
