"""Flow attention: the dense reference, conservation of flow, causal order and masks."""

import torch
from tests.house.rows import each

from primal_attention.attention import FlowAttention
from primal_attention.attention.flow import FlowCore
from primal_attention.functional import naive_family


def _heads(n, m=None, size=1.0, dtype=torch.float64):
    m = n if m is None else m
    sizes = ((n, 6), (m, 6), (m, 4))
    return [size * torch.randn(2, 2, length, width, dtype=dtype) for length, width in sizes]


def _same(fast, slow, inputs):
    torch.testing.assert_close(fast, slow)
    probe = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@each("n, m", [(1, 1), (7, 7), (5, 9), (9, 5)])
def test_core_agrees_with_its_dense_reference(n, m):
    inputs = [t.requires_grad_() for t in _heads(n, m)]
    _same(FlowCore()(*inputs), naive_family.flow_attention(*inputs), inputs)


@each("n", [1, 2, 40, 70])
def test_causal_core_agrees_with_the_running_reference(n):
    inputs = [t.requires_grad_() for t in _heads(n)]
    fast = FlowCore()(*inputs, is_causal=True)
    _same(fast, naive_family.causal_flow_attention(*inputs), inputs)


def test_padded_queries_and_keys_have_no_influence():
    q, k, v = _heads(12)
    keep = torch.arange(12).expand(2, -1) < 8
    short = [t[:, :, :8] for t in (q, k, v)]
    for is_causal in (False, True):
        got = FlowCore()(q, k, v, key_mask=keep, is_causal=is_causal)[:, :, :8]
        torch.testing.assert_close(got, FlowCore()(*short, is_causal=is_causal))


def test_cross_attention_of_equal_length_masks_keys_only():
    layer = FlowAttention(16, 2, dtype=torch.float64)
    x, context = torch.randn(2, 2, 6, 16, dtype=torch.float64)
    keep = torch.tensor([[True] * 4 + [False] * 2] * 2)
    torch.testing.assert_close(layer(x, context, key_mask=keep), layer(x, context[:, :4]))


def test_flow_is_conserved():
    # if the outflow of each source is one, the total flow is their number; the same for sinks
    q, k, _ = _heads(20, 30)
    query, key = q.sigmoid(), k.sigmoid()
    incoming, outgoing = query @ key.sum(2)[..., None], key @ query.sum(2)[..., None]
    sink, source = (
        query @ (key / outgoing).sum(2)[..., None],
        key @ (query / incoming).sum(2)[..., None],
    )
    torch.testing.assert_close(sink.sum(2), torch.full((2, 2, 1), 30.0, dtype=torch.float64))
    torch.testing.assert_close(source.sum(2), torch.full((2, 2, 1), 20.0, dtype=torch.float64))


def test_permuted_tokens_give_permuted_outputs():
    q, k, v = _heads(15)
    order = torch.randperm(15)
    expected = FlowCore()(q, k, v)[:, :, order]
    torch.testing.assert_close(FlowCore()(q[:, :, order], k[:, :, order], v[:, :, order]), expected)


@each("is_causal", [False, True])
@each("size", [1e-3, 10.0, 30.0])
def test_outputs_and_gradients_are_finite_at_any_scale(size, is_causal):
    inputs = [t.requires_grad_() for t in _heads(90, size=size, dtype=torch.float32)]
    y = FlowCore()(*inputs, is_causal=is_causal)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)


@each("is_causal", [False, True])
def test_gradients_match_finite_differences(is_causal):
    inputs = [t.requires_grad_() for t in _heads(4)]

    def run(*tensors):
        return FlowCore()(*tensors, is_causal=is_causal)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
