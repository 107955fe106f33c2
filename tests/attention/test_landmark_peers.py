"""Nyströmformer and Linformer-style attention as layers."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.attention import (
    LinformerAttention,
    NystromformerAttention,
    SoftmaxAttention,
)
from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.landmarks import segment_means
from primal_attention.functional.nystromformer import nystromformer_attention

F64 = {"dtype": torch.float64}


def heads(attn, x, context=None):
    memory = x if context is None else context
    return attn._split(attn.q_proj(x)), *(
        attn._split(p(memory)) for p in (attn.k_proj, attn.v_proj)
    )


@each("masked", [False, True])
def test_nystromformer_matches_naive_in_values_and_gradients(masked):
    q, k, v = (torch.randn(2, 3, n, 4, **F64, requires_grad=True) for n in (9, 7, 7))
    keep = torch.arange(7) < torch.tensor([[7], [4]]) if masked else None
    q_l, k_l = segment_means(q, 3), segment_means(k, 3, keep)
    fast = nystromformer_attention(q, k, v, q_l, k_l, key_mask=keep)
    slow = naive.nystromformer_attention(q, k, v, q_l, k_l, key_mask=keep)
    assert_close(fast, slow)
    weight = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), (q, k, v), retain_graph=True),
        torch.autograd.grad((slow * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert_close(a, b)


def test_nystromformer_inverts_each_matrix_separately():
    q, k, v = (torch.randn(2, 3, 9, 4) for _ in range(3))
    q_l, k_l = segment_means(q, 3), segment_means(k, 3)
    y = nystromformer_attention(q, k, v, q_l, k_l)
    loud = [torch.cat([t[:1], 30 * t[1:]]) for t in (q, k, v, q_l, k_l)]
    assert_close(nystromformer_attention(*loud)[:1], y[:1], atol=1e-6, rtol=1e-6)


def test_nystromformer_with_a_landmark_per_token_is_softmax():
    attn = NystromformerAttention(16, 2, num_landmarks=6, kernel_size=None, **F64)
    exact = SoftmaxAttention(16, 2, **F64)
    exact.load_state_dict(attn.state_dict())
    x = torch.randn(2, 6, 16, **F64)
    # exact up to the pseudo-inverse, which converges in twenty steps
    q, k, v = heads(attn, x)
    y = nystromformer_attention(q, k, v, q, k, steps=20)
    assert_close(attn.out_proj(attn._merge(y)), exact(x), atol=1e-6, rtol=1e-6)
    assert_close(attn(x), exact(x), atol=0.1, rtol=0)


def test_the_convolution_adds_neighbouring_values():
    attn = NystromformerAttention(16, 2, kernel_size=3, **F64)
    x = torch.randn(1, 8, 16, **F64)
    q, k, v = heads(attn, x)
    with_conv = attn.core(q, k, v)
    conv, attn.core.conv = attn.core.conv.detach(), None
    difference = (with_conv - attn.core(q, k, v)).detach()
    padded = torch.nn.functional.pad(v.detach(), (0, 0, 1, 1))
    expected = sum(conv[:, i, None, None] * padded[:, :, i : i + 8] for i in range(3))
    assert_close(difference, expected)


def test_the_convolution_does_not_allow_cross_attention():
    x, context = torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    with pytest.raises(ValueError, match="cannot attend to a context"):
        NystromformerAttention(16, 2)(x, context)
    attn = NystromformerAttention(16, 2, kernel_size=None)
    assert attn(x, context).shape == x.shape


@each("cls", [NystromformerAttention, LinformerAttention])
def test_neither_runs_causally(cls):
    with pytest.raises(ValueError, match="cannot run causally"):
        cls(16, 2)(torch.randn(1, 5, 16), is_causal=True)
    with pytest.raises(ValueError, match="cannot decode"):
        cls(16, 2).init_state(1)


@each("m", [3, 20])
def test_linformer_is_softmax_over_projected_keys(m):
    attn = LinformerAttention(16, 2, num_projections=5, **F64)
    with torch.no_grad():
        attn.core.e_k.normal_()
        attn.core.e_v.normal_()
    q, k, v = heads(attn, torch.randn(2, 6, 16, **F64), torch.randn(2, m, 16, **F64))
    at = (torch.arange(m, **F64) + 0.5) / m
    waves = torch.stack([(2**0.5 if i else 1) * torch.cos(torch.pi * i * at) for i in range(5)])
    waves[m:] = 0
    e_k, e_v = ((e @ waves / m).expand(2, -1, -1, -1) for e in (attn.core.e_k, attn.core.e_v))
    assert_close(attn.core(q, k, v), naive.linformer_attention(q, k, v, e_k, e_v))


@each("bias", [True, False])
def test_linformer_calls_projections_with_hooks(bias):
    attn = LinformerAttention(16, 2, num_projections=5, bias=bias, **F64)
    x = torch.randn(2, 9, 16, **F64)
    expected = attn(x)
    # the same map by way of the module: a hook that changes nothing
    handle = attn.k_proj.register_forward_hook(lambda module, given, y: y)
    assert_close(attn(x), expected)
    handle.remove()
    # and one that changes something
    attn.k_proj.register_forward_hook(lambda module, given, y: -y)
    assert not torch.allclose(attn(x), expected)


def test_linformer_starts_as_local_averages_that_keep_constants():
    attn = LinformerAttention(16, 2, num_projections=8, **F64)
    core = attn.core
    e = core.e_k @ core.project(torch.eye(100, **F64)[None], None)[0]  # [h s m]
    assert_close(e.sum(-1), torch.ones(2, 8, **F64))
    centre = (e[0].argmax(-1).double() + 0.5) / 100
    assert_close(centre, (torch.arange(8, **F64) + 0.5) / 8, atol=0.07, rtol=0)


def test_linformer_projections_scale_with_the_length():
    # a sequence and the same one with every token doubled project to nearly the same keys
    core = LinformerAttention(16, 1, num_projections=4, **F64).core
    x = torch.cumsum(torch.randn(1, 64, 3, **F64), 1)
    short = core.project(x, None)[0]
    long = core.project(x.repeat_interleave(2, 1), None)[0]
    assert_close(short, long, atol=1e-2, rtol=1e-2)


def test_invalid_options_raise():
    with pytest.raises(ValueError, match="num_landmarks must be at least 1"):
        NystromformerAttention(16, 2, num_landmarks=0)
    with pytest.raises(ValueError, match="it must be odd"):
        NystromformerAttention(16, 2, kernel_size=4)
    with pytest.raises(ValueError, match="num_projections must be at least 1"):
        LinformerAttention(16, 2, num_projections=0)
