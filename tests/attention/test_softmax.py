"""Softmax attention against torch's multi-head attention and the formula."""

import pytest
import torch
from tests.house.rows import each
from torch import nn
from torch.testing import assert_close

from primal_attention.attention import ExplicitSoftmaxAttention, SoftmaxAttention
from primal_attention.functional import naive
from primal_attention.training.memory import PeakMemory

SOFTMAX = (SoftmaxAttention, ExplicitSoftmaxAttention)


def _twins():
    ours = SoftmaxAttention(12, 3, dtype=torch.float64)
    torchs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        parts = (ours.q_proj, ours.k_proj, ours.v_proj)
        torchs.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        torchs.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    torchs.out_proj.load_state_dict(ours.out_proj.state_dict())
    return ours, torchs


def _randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_it_is_torchs_multi_head_attention():
    ours, torchs = _twins()
    x, context = _randn(2, 5, 12), _randn(2, 7, 12)
    assert_close(ours(x), torchs(x, x, x)[0])
    assert_close(ours(x, context), torchs(x, context, context)[0])
    order = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    assert_close(ours(x, is_causal=True), torchs(x, x, x, attn_mask=order)[0])


def test_key_mask_is_the_negation_of_torchs_padding_mask():
    ours, torchs = _twins()
    x, context = _randn(2, 5, 12), _randn(2, 7, 12)
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    expected = torchs(x, context, context, key_padding_mask=~keep)[0]
    assert_close(ours(x, context, key_mask=keep), expected)


@each("is_causal", [False, True])
def test_the_core_is_the_textbook_in_values_and_gradients(is_causal):
    core = SoftmaxAttention(12, 3).core
    q, k, v = (_randn(2, 3, 6, 4).requires_grad_() for _ in range(3))
    keep = torch.tensor([[True] * 6, [False, True, True, False, True, False]])
    got = core(q, k, v, key_mask=keep, is_causal=is_causal)
    expected = torch.nan_to_num(naive.softmax_attention(q, k, v, keep, is_causal))
    assert_close(got, expected)
    rows = expected.isfinite().all(-1) & (expected != 0).any(-1)
    by_core = torch.autograd.grad(got[rows].square().sum(), (q, k, v))
    reference = naive.softmax_attention(q, k, v, keep, is_causal)
    by_book = torch.autograd.grad(reference[rows].square().sum(), (q, k, v))
    for a, b in zip(by_core, by_book, strict=True):
        assert a.isfinite().all()
        assert_close(a, torch.nan_to_num(b))


def test_weights_are_probabilities():
    core = SoftmaxAttention(12, 3).core
    weights = core.weights(_randn(2, 3, 4, 4), _randn(2, 3, 6, 4))
    assert_close(weights.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
    assert (weights > 0).all()


def test_the_cache_holds_every_key_and_value():
    layer = SoftmaxAttention(12, 3)
    _, state = layer.step(torch.randn(2, 5, 12), layer.init_state(2))
    assert state.numel == 2 * (2 * 5 * 12 + 5 + 1)


@each("flags", [{}, {"is_causal": True}])
@each("masked", [False, True])
def test_the_explicit_form_equals_the_fused_one_in_values_and_gradients(flags, masked):
    fused, explicit = (cls(12, 3, dtype=torch.float64) for cls in SOFTMAX)
    explicit.load_state_dict(fused.state_dict())
    x = _randn(2, 6, 12).requires_grad_()
    keep = torch.arange(6) < torch.tensor([[6], [4]]) if masked else None
    y, z = (layer(x, key_mask=keep, **flags) for layer in (fused, explicit))
    assert_close(z, y)
    assert_close(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (z, y)))


def test_explicit_weights_may_be_dropped_in_training_only():
    layer = ExplicitSoftmaxAttention(12, 3, weight_dropout=0.5)
    assert not layer.capabilities.deterministic
    x = torch.randn(2, 6, 12)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    with pytest.raises(ValueError, match="weight_dropout must be at least 0"):
        ExplicitSoftmaxAttention(12, 3, weight_dropout=1.0)


def test_a_padding_mask_needs_no_n_by_n_memory():
    n, attn = 512, SoftmaxAttention(8, 2)
    x, keep = torch.randn(1, n, 8), torch.arange(n)[None] < 300
    with PeakMemory() as memory:
        attn(x, key_mask=keep)
    assert memory.peak < n * n
