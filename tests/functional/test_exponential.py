"""Attention with exponential features: equal to the reference, strictly causal, no overflow."""

import torch
from tests.house.rows import each

from primal_attention.functional import naive_family
from primal_attention.functional.exponential import exponential_attention


def _inputs(n=37, m=37, p=6, size=1.0, dtype=torch.float64):
    logs = [size * torch.randn(2, 3, length, p, dtype=dtype) for length in (n, m)]
    return (*logs, torch.randn(2, 3, m, 4, dtype=dtype))


@each("is_causal", [False, True])
@each("masked", [False, True])
@each("n", [1, 2, 37, 64, 100])
def test_agrees_with_the_reference_in_values_and_gradients(n, masked, is_causal):
    inputs = [t.requires_grad_() for t in _inputs(n, n)]
    mask = torch.rand(2, n) < 0.6 if masked else None
    fast = exponential_attention(*inputs, key_mask=mask, is_causal=is_causal, chunk=16).values
    slow = naive_family.exponential_attention(*inputs, mask, is_causal)
    torch.testing.assert_close(fast, slow)
    weight = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * weight).sum(), inputs),
        torch.autograd.grad((slow * weight).nan_to_num().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected.nan_to_num())


def test_queries_and_keys_may_differ_in_number():
    inputs = _inputs(5, 9)
    torch.testing.assert_close(
        exponential_attention(*inputs).values, naive_family.exponential_attention(*inputs)
    )


@each("size", [1e-3, 10.0, 100.0, 1e4])
def test_large_logarithms_are_accurate_over_all_keys(size):
    inputs = _inputs(size=size, dtype=torch.float32)
    got = exponential_attention(*inputs).values
    exact = naive_family.exponential_attention(*(t.double() for t in inputs))
    torch.testing.assert_close(got.double(), exact, atol=1e-4 * max(size / 100, 1), rtol=1e-3)


@each("size", [1e-3, 10.0])
@each("trend", [-20.0, 0.0, 20.0])
def test_causal_order_is_accurate_when_keys_grow_or_shrink(size, trend):
    log_q, log_k, v = _inputs(n=300, m=300, size=size, dtype=torch.float32)
    log_k = log_k + trend * torch.arange(300)[:, None]
    got = exponential_attention(log_q, log_k, v, is_causal=True).values
    exact = naive_family.exponential_attention(
        log_q.double(), log_k.double(), v.double(), is_causal=True
    )
    assert (got - exact).abs().max() < (3e-3 if size > 1 else 1e-4)


@each("size", [30.0, 300.0, 1e4])
@each("sizes", [[1] * 40, [40], [7, 1, 32]])
def test_causal_order_is_exact_where_queries_and_keys_choose_different_features(size, sizes):
    inputs = [t.requires_grad_() for t in _inputs(n=40, m=40, size=size)]
    slow = naive_family.exponential_attention(*inputs, is_causal=True)
    state, rows = None, []
    for part in zip(*(t.split(sizes, dim=2) for t in inputs), strict=True):
        y, *sums = exponential_attention(*part, is_causal=True, state=state, chunk=16)
        state = tuple(sums)
        rows.append(y)
    fast, probe = torch.cat(rows, dim=2), torch.randn_like(slow)
    torch.testing.assert_close(fast, slow)
    for got, expected in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@each("n", [0, 3])
def test_large_queries_without_keys_give_zeros_with_zero_gradients(n):
    log_q, log_k, v = (t.requires_grad_() for t in _inputs(n=n, m=0, size=1e4))
    y = exponential_attention(log_q, log_k, v).values
    assert y.shape == (2, 3, n, 4)
    assert (y == 0).all()
    (grad,) = torch.autograd.grad(y.sum(), log_q)
    assert (grad == 0).all()


def test_a_state_of_all_keys_continues_in_causal_order():
    log_q, log_k, v = _inputs(n=20, m=20, size=100.0)
    _, *state = exponential_attention(*(t[:, :, :13] for t in (log_q, log_k, v)))
    rest = (t[:, :, 13:] for t in (log_q, log_k, v))
    got = exponential_attention(*rest, is_causal=True, state=tuple(state)).values
    expected = naive_family.exponential_attention(log_q, log_k, v, is_causal=True)[:, :, 13:]
    torch.testing.assert_close(got, expected)


def test_huge_logarithms_stay_finite_in_causal_order():
    inputs = [t.requires_grad_() for t in _inputs(n=90, m=90, size=1e4, dtype=torch.float32)]
    y = exponential_attention(*inputs, is_causal=True).values
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)


@each("scale", [1.0, 100.0])
def test_past_outputs_are_bitwise_equal_if_the_future_changes(scale):
    log_q, log_k, v = _inputs(n=200, m=200, dtype=torch.float32)
    past = exponential_attention(log_q, log_k, v, is_causal=True).values[:, :, :70]
    for t in (log_q, log_k, v):
        t[:, :, 70:] = scale * torch.randn_like(t[:, :, 70:])
    again = exponential_attention(log_q, log_k, v, is_causal=True).values[:, :, :70]
    assert torch.equal(past, again)


@each("chunk", [16, 64, 200])
def test_chunk_size_does_not_matter(chunk):
    inputs = _inputs(n=200, m=200, dtype=torch.float32)
    expected = exponential_attention(*inputs, is_causal=True, chunk=32).values
    got = exponential_attention(*inputs, is_causal=True, chunk=chunk).values
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_many_groups_of_chunks_agree_with_the_reference():
    inputs = _inputs(n=600, m=600, p=3)
    fast = exponential_attention(*inputs, is_causal=True, chunk=4).values
    torch.testing.assert_close(fast, naive_family.exponential_attention(*inputs, is_causal=True))


@each("sizes", [[1] * 20, [7, 1, 12], [20]])
def test_calls_continue_from_their_state(sizes):
    log_q, log_k, v = _inputs(n=20, m=20)
    mask = torch.rand(2, 20) < 0.7
    expected = exponential_attention(log_q, log_k, v, key_mask=mask, is_causal=True).values
    state, got = None, []
    pieces = zip(
        *(t.split(sizes, dim=2) for t in (log_q, log_k, v)), mask.split(sizes, 1), strict=True
    )
    for q, k, values, keep in pieces:
        y, *sums = exponential_attention(q, k, values, key_mask=keep, is_causal=True, state=state)
        state = tuple(sums)
        got.append(y)
    torch.testing.assert_close(torch.cat(got, dim=2), expected)


def test_rows_without_keys_are_zero_with_zero_gradient():
    inputs = [t.requires_grad_() for t in _inputs(n=9, m=9)]
    for is_causal in (False, True):
        nothing = torch.zeros(2, 9, dtype=torch.bool)
        y = exponential_attention(*inputs, key_mask=nothing, is_causal=is_causal).values
        assert (y == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), inputs))


@each("is_causal", [False, True])
def test_no_tokens_give_no_output(is_causal):
    inputs = _inputs(n=0, m=0)
    assert exponential_attention(*inputs, is_causal=is_causal).values.shape == (2, 3, 0, 4)


@each("is_causal", [False, True])
def test_gradients_match_finite_differences(is_causal):
    inputs = [t.requires_grad_() for t in _inputs(n=5, m=5, p=3)]

    def run(*tensors):
        return exponential_attention(*tensors, is_causal=is_causal, chunk=2).values

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
