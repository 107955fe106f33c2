import pytest
import torch

from primal_attention.attention import SparseAttention, create_attention


def test_with_enough_keys_it_is_softmax():
    sparse, softmax = create_attention("primal-sparse", 16, 2), create_attention("softmax", 16, 2)
    softmax.load_state_dict(sparse.state_dict())
    x = torch.randn(2, 64, 16)
    torch.testing.assert_close(sparse(x), softmax(x), atol=1e-5, rtol=1e-4)


def test_the_chosen_keys_have_the_largest_primal_kernel():
    core = SparseAttention(16, 2, num_keys=4).core
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 30, 8)
    f, g = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    kernel = (f @ g.mT).sum(1)[0]
    weights = core.weights(q, k)[0]
    for i in range(5):
        for h in range(2):
            chosen = weights[h, i].nonzero()[:, 0].tolist()
            assert sorted(chosen) == sorted(kernel[i].topk(4).indices.tolist())


def test_the_output_is_continuous_where_keys_change_places():
    torch.manual_seed(0)
    layer = SparseAttention(8, 1, num_keys=3).double()
    a, b = torch.randn(1, 8).double(), torch.randn(1, 8).double()
    context = torch.randn(1, 12, 8).double()
    steps = torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None]
    x = (a + steps * (b - a))[None]
    y = layer(x, context)[0]
    jumps = (y[1:] - y[:-1]).norm(dim=1)
    chosen, _ = layer.core.choose(
        *(layer._split(p(t)) for p, t in ((layer.q_proj, x), (layer.k_proj, context))),
        torch.ones(1, 1, 1, 12, dtype=torch.bool),
    )
    changes = (chosen[0, 1:, :3].sort().values != chosen[0, :-1, :3].sort().values).any(1)
    assert changes.any()
    assert jumps[changes].max() < 20 * jumps[~changes].max()


def test_the_choice_itself_learns():
    core = SparseAttention(8, 1, num_keys=2).core
    k = torch.randn(1, 1, 6, 8, dtype=torch.float64, requires_grad=True)
    q, v = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 6, 8).double()
    index, _ = core.choose(q, k, torch.ones(1, 1, 1, 6, dtype=torch.bool))
    (slope,) = torch.autograd.grad(core(q, k, v).sum(), k)
    learns = slope[0, 0].abs().sum(1) > 0
    # key t + 1 has no weight, yet it sets the scale of the factors
    assert sorted(learns.nonzero()[:, 0].tolist()) == sorted(index[0, 0].tolist())


def test_at_least_one_key_is_needed():
    with pytest.raises(ValueError, match="num_keys must be at least 1, got 0"):
        SparseAttention(8, 2, num_keys=0)
