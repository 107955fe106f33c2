"""Causal sums in linear time against dense products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import causal_sums
from primal_attention.functional.linear import from_chunks, to_chunks

few = settings(max_examples=25, deadline=None, derandomize=True)


def _inputs(b, h, n, p, v, m=None):
    m = n if m is None else m
    shapes = ((b, h, n, p), (b, h, m, p), (b, h, m, v))
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def _same_with_gradients(got, expected, leaves):
    assert_close(got, expected, atol=1e-10, rtol=1e-10)
    probe = torch.randn_like(expected)
    by_fast = torch.autograd.grad((got * probe).sum(), leaves)
    by_truth = torch.autograd.grad((expected * probe).sum(), leaves)
    for a, b in zip(by_fast, by_truth, strict=True):
        assert_close(a, b, atol=1e-10, rtol=1e-10)


@each("n", [1, 5, 63, 64, 65, 130])
@each("chunk", [1, 16, 64])
def test_causal_sums_are_triangular_products(n, chunk):
    q, k, v = _inputs(2, 2, n, 3, 4)
    expected = (q @ k.transpose(-1, -2)).tril() @ v
    values, state = causal_sums(q, k, v, chunk=chunk)
    _same_with_gradients(values, expected, (q, k, v))
    assert_close(state, k.transpose(-1, -2) @ v)


@few
@given(n=st.integers(0, 30), cut=st.integers(0, 30), chunk=st.integers(1, 9))
def test_causal_sums_continue_from_their_state(n, cut, chunk):
    q, k, v = _inputs(1, 2, n, 3, 2)
    cut = min(cut, n)
    whole = causal_sums(q, k, v, chunk=chunk)
    first = causal_sums(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], chunk=chunk)
    second = causal_sums(
        q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], state=first.state, chunk=chunk
    )
    values = torch.cat([first.values, second.values], dim=2)
    assert_close(values, whole.values, atol=1e-10, rtol=1e-10)
    assert_close(second.state, whole.state, atol=1e-10, rtol=1e-10)


def test_a_huge_later_key_adds_no_rounding_error():
    q, k, v = (t.detach().float() for t in _inputs(1, 1, 128, 3, 2))
    values = causal_sums(q, k, v).values[:, :, :100]
    k[:, :, 100:] *= 1e12
    assert torch.equal(causal_sums(q, k, v).values[:, :, :100], values)


def test_the_state_of_half_precision_sums_is_float32():
    q, k, v = (t.detach().bfloat16() for t in _inputs(1, 1, 70, 3, 2))
    values, state = causal_sums(q, k, v)
    assert values.dtype == torch.bfloat16
    assert state.dtype == torch.float32


@few
@given(n=st.integers(0, 20), chunk=st.integers(1, 9))
def test_chunks_are_joined_to_the_sequence(n, chunk):
    x = torch.randn(2, 3, n, 4)
    groups = to_chunks(x, chunk)
    assert groups.shape[-2] <= chunk
    assert torch.equal(from_chunks(groups, n), x)


def test_causal_sums_can_be_differentiated_twice():
    sizes = (3, 3, 2)
    q, k, v = (torch.randn(1, 2, 5, w, dtype=torch.float64, requires_grad=True) for w in sizes)
    start = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)

    def sums(*given):
        return tuple(causal_sums(*given[:3], state=given[3], chunk=2))

    assert torch.autograd.gradcheck(sums, (q, k, v, start))
    assert torch.autograd.gradgradcheck(sums, (q, k, v, start))
    assert torch.autograd.gradgradcheck(lambda q: sums(q, k.detach(), v.detach(), start), q)


@pytest.mark.parametrize("again", [False, True])
def test_backward_under_autocast_stays_in_full_precision(again):
    q, k, v = (torch.randn(1, 2, 70, w, requires_grad=True) for w in (3, 3, 2))
    values = causal_sums(q, k, v).values
    expected = torch.autograd.grad(values.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(values.sum(), (q, k, v), create_graph=again)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
