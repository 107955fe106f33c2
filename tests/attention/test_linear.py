"""Linear attention and the core it shares with every feature map."""

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention import FeatureCore, KernelCore, LinearAttention
from primal_attention.functional import naive
from primal_attention.kernels import Cosine, PositiveFeatures


def _heads(n, m=None, size=1.0, dtype=torch.float64):
    m = n if m is None else m
    sizes = ((n, 6), (m, 6), (m, 4))
    return [size * torch.randn(2, 2, length, width, dtype=dtype) for length, width in sizes]


@each("is_causal", [False, True])
@each("masked", [False, True])
def test_core_agrees_with_the_reference_in_values_and_gradients(masked, is_causal):
    core, inputs = LinearAttention(12, 2).core, [t.requires_grad_() for t in _heads(70)]
    mask = torch.rand(2, 70) < 0.6 if masked else None
    fast = core(*inputs, key_mask=mask, is_causal=is_causal)
    slow = naive.linear_attention(*inputs, mask, is_causal)
    torch.testing.assert_close(fast, slow)
    probe = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@each("is_causal", [False, True])
@each("size", [1e-3, 10.0, 30.0])
def test_outputs_and_gradients_are_finite_at_any_scale(size, is_causal):
    inputs = [t.requires_grad_() for t in _heads(90, size=size, dtype=torch.float32)]
    y = LinearAttention(12, 2).core(*inputs, is_causal=is_causal)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)


def test_any_feature_map_makes_a_core():
    q, k, v = _heads(9, 7)
    phi = PositiveFeatures(6, 32, scale=0.2, dtype=torch.float64)
    weights = phi.approximate(q, k)
    expected = weights @ v / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(KernelCore(phi)(q, k, v), expected)


def test_a_map_without_a_draw_cannot_be_redrawn():
    with pytest.raises(ValueError, match="Cosine has no random features"):
        KernelCore(Cosine(6)).redraw_()


def test_features_may_differ_between_queries_and_keys():
    class Lopsided(FeatureCore):
        def query_features(self, x, position):
            return x.exp()

        def key_features(self, x, position):
            return x.square()

    q, k, v = _heads(9, 7)
    weights = q.exp() @ k.square().mT
    torch.testing.assert_close(Lopsided()(q, k, v), weights @ v / weights.sum(-1, keepdim=True))


def test_queries_whose_features_underflow_keep_their_weights():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    q = q - 200  # e^-200 is zero in float32
    got = LinearAttention(8, 2).core(q, k, v)
    wide = k.double()
    weights = q.double().exp() @ (wide.clamp_max(0).exp() + wide.relu()).mT
    expected = weights @ v.double() / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
