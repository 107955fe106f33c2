"""Transport attention: both marginals, anchors, few queries, padding."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.attention import TransportAttention, create_attention
from primal_attention.functional import naive_transport as naive
from primal_attention.functional.anchors import anchored_attention

F64 = torch.float64


def weights(n, m, *, steps=200, size=1.0, key_mask=None):
    layer = TransportAttention(16, 2, num_anchors=5, num_steps=steps, dtype=F64)
    with torch.no_grad():
        layer.core.log_mass.normal_()
    q, k = (size * torch.randn(2, 2, t, 8, dtype=F64) for t in (n, m))
    return layer.core.weights(q, k, key_mask=key_mask).detach()


@each("n, m", [(30, 30), (30, 20), (7, 40), (1, 9)])
def test_weights_are_a_plan_between_queries_and_keys(n, m):
    plan = weights(n, m)
    assert (plan > 0).all()
    assert_close(plan.sum(-1), torch.ones(2, 2, n, dtype=F64))
    assert_close(plan.sum(-2), torch.full((2, 2, m), n / m, dtype=F64))
    assert (torch.linalg.matrix_rank(plan) <= 5).all()


def test_masked_keys_take_nothing_and_the_others_share_all():
    keep = torch.arange(12) < torch.tensor([[12], [7]])
    plan = weights(9, 12, key_mask=keep)
    assert (plan.transpose(1, 3)[~keep] == 0).all()
    for i, count in enumerate((12, 7)):
        share = torch.full((2, count), 9 / count, dtype=F64)
        assert_close(plan[i, :, :, :count].sum(-2), share)


def test_rows_are_exact_after_any_number_of_steps_and_columns_improve():
    errors = []
    for steps in (0, 1, 5, 20):
        torch.manual_seed(0)
        plan = weights(40, 30, steps=steps, size=2.0)
        assert_close(plan.sum(-1), torch.ones(2, 2, 40, dtype=F64))
        errors.append(float((plan.sum(-2) * 30 / 40 - 1).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.1
    torch.manual_seed(0)
    # the default number of steps, queries and keys of order one
    assert (weights(40, 30, steps=5).sum(-2) * 30 / 40 - 1).abs().max() < 0.01


def test_fast_form_is_two_dense_plans_in_values_and_gradients():
    shapes = (2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 5), (3, 6, 4)
    q, k, v, z = (torch.randn(s, dtype=F64, requires_grad=True) for s in shapes)
    mass = torch.rand(3, 6, dtype=F64).softmax(-1).requires_grad_()
    fast = anchored_attention(q, k, v, z, mass, num_steps=3)
    slow = torch.stack(
        [
            torch.stack(
                [naive.anchored_weights(q[i, h], k[i, h], z[h], mass[h], 3) for h in range(3)]
            )
            for i in range(2)
        ]
    )
    slow = slow @ v
    assert_close(fast, slow)
    probe = torch.randn_like(fast)
    both = [torch.autograd.grad((y * probe).sum(), (q, k, v, z, mass)) for y in (fast, slow)]
    for a, b in zip(*both, strict=True):
        assert_close(a, b)


def test_one_query_takes_the_mean_of_all_values():
    layer = create_attention("transport", 16, 2, dtype=F64, num_steps=200)
    x, context = torch.randn(1, 1, 16, dtype=F64), torch.randn(1, 11, 16, dtype=F64)
    expected = layer.out_proj(layer.v_proj(context).mean(1, keepdim=True))
    assert_close(layer(x, context), expected)


def test_an_anchor_without_mass_is_no_anchor():
    q, k, v = torch.randn(3, 1, 1, 8, 4, dtype=F64)
    z = torch.randn(1, 3, 4, dtype=F64)
    two = anchored_attention(q, k, v, z[:, :2], torch.tensor([[0.4, 0.6]], dtype=F64), floor=0)
    mass = torch.tensor([[0.4, 0.6, 0.0]], dtype=F64)
    assert_close(anchored_attention(q, k, v, z, mass, floor=0), two)


@pytest.mark.raw
def test_sizes_that_mean_nothing_are_refused():
    for options in ({"num_anchors": 0}, {"num_steps": -1}):
        with pytest.raises(ValueError, match="they must be at least 1 and at least 0"):
            create_attention("transport", 16, 2, **options)
