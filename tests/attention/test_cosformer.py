"""cosFormer: the decomposition, the horizon, and positions through padding and decoding."""

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention import CosformerAttention
from primal_attention.attention.cosformer import CosformerCore
from primal_attention.functional import naive_family


def _heads(n, m=None):
    m = n if m is None else m
    sizes = ((n, 8), (m, 8), (m, 4))
    return [torch.randn(2, 2, length, width, dtype=torch.float64) for length, width in sizes]


@each("power", [1, 2])
def test_features_decompose_the_dense_cosine_weights(power):
    q, k, _ = _heads(30, 40)
    core = CosformerCore(50, power)
    position = [torch.arange(t.shape[2]).expand(2, -1) for t in (q, k)]
    got = core.query_features(q, position[0]) @ core.key_features(k, position[1]).mT
    expected = naive_family.cosformer_weights(q, k, 50, power)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@each("power", [1, 2])
@each("is_causal", [False, True])
def test_core_agrees_with_its_dense_reference_in_values_and_gradients(power, is_causal):
    inputs = [t.requires_grad_() for t in _heads(70)]
    mask = torch.arange(70).expand(2, -1) < 61
    fast = CosformerCore(100, power)(*inputs, key_mask=mask, is_causal=is_causal)
    weights = naive_family.cosformer_weights(*inputs[:2], 100, power)
    slow = naive_family.normalized_attention(weights, inputs[2], mask, is_causal)
    torch.testing.assert_close(fast, slow)
    probe = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def _decode(core, q, k, v):
    state, rows = core.init_state(k[:, :, :0], v[:, :, :0]), []
    for t in range(q.shape[2]):
        y, state = core.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        rows.append(y)
    return torch.cat(rows, dim=2)


@each("horizon", [1, 2, 3, 7])
@each("dtype", [torch.float32, torch.float64])
def test_steps_causal_and_dense_form_agree_at_and_beyond_a_small_horizon(horizon, dtype):
    # heads of width two: the only key that a query overlaps is often exactly at the horizon
    core = CosformerCore(horizon)
    shapes = ((8, 4, 30, 2), (8, 4, 30, 2), (8, 4, 30, 3))
    inputs = [(2.5 * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    weights = naive_family.cosformer_weights(*exact[:2], horizon, 2)
    slow = naive_family.normalized_attention(weights, exact[2], is_causal=True)
    probe = torch.randn_like(slow)
    expected = torch.autograd.grad((slow * probe).sum(), exact)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-2
    for fast in (core(*inputs, is_causal=True), _decode(core, *inputs)):
        torch.testing.assert_close(fast.double(), slow, rtol=tolerance, atol=tolerance)
        found = torch.autograd.grad((fast * probe).sum(), inputs)
        for got, correct in zip(found, expected, strict=True):
            torch.testing.assert_close(got.double(), correct, rtol=tolerance, atol=tolerance)


def test_squared_weights_are_positive_far_beyond_the_horizon():
    q, k, _ = _heads(40)
    weights = CosformerCore(8).weights(q, k)
    assert weights.min() > -1e-12
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_the_published_weight_raises_beyond_its_horizon():
    layer = CosformerAttention(16, 2, horizon=8, power=1)
    assert layer(torch.randn(1, 8, 16)).shape == (1, 8, 16)
    with pytest.raises(ValueError, match=r"has 9 tokens, .* at most horizon=8; .*power=2"):
        layer(torch.randn(1, 9, 16))
    _, state = layer.step(torch.randn(2, 7, 16), layer.init_state(2))
    keep = torch.tensor([[True, False], [True, True]])
    with pytest.raises(ValueError, match=r"has 9 tokens, .* at most horizon=8; .*power=2"):
        layer.step(torch.randn(2, 2, 16), state, key_mask=keep)
    layer.step(torch.randn(2, 2, 16), state, key_mask=~keep)


def test_weights_depend_on_distance_only():
    q, k, _ = _heads(1)
    q, k = q.expand(-1, -1, 20, -1), k.expand(-1, -1, 20, -1)
    weights = naive_family.cosformer_weights(q, k, 16, 2)
    torch.testing.assert_close(weights[..., 3, 7], weights[..., 10, 14])
    core = CosformerCore(16)
    late = torch.arange(20).expand(2, -1) + 10**9
    got = core.query_features(q, late) @ core.key_features(k, late).mT
    torch.testing.assert_close(got, weights)


def test_near_tokens_have_larger_weights():
    x = torch.ones(1, 1, 30, 4)
    row = CosformerCore(64).weights(x, x)[0, 0, 0]
    assert (row.diff() < 0).all()


@pytest.mark.raw
def test_invalid_options_raise():
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        CosformerCore(0)
    with pytest.raises(ValueError, match="power must be 1 or 2, got 3"):
        CosformerCore(8, 3)


@each("is_causal", [False, True])
@each("size", [1e-3, 10.0, 30.0])
def test_outputs_and_gradients_are_finite_at_any_scale(size, is_causal):
    inputs = [(size * t.float()).requires_grad_() for t in _heads(90)]
    y = CosformerCore(32)(*inputs, is_causal=is_causal)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)
