"""Causal outputs know nothing of the future, and decoding step by step repeats them."""

import pickle

import torch
from tests.house.rows import each

from primal_attention.attention import create_attention, list_attentions

GROWING_STATE = {
    "adaptive", "distributional", "gaussian", "kernelized-log", "primal-sparse", "softmax",
    "softmax-explicit",
}  # fmt: skip
"""Mechanisms that remember every token; all others decode from a state of constant size."""


def _close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def _decode(layer, x, sizes, key_mask=None):
    """Return the outputs and the last state of decoding ``x`` in pieces of the given sizes."""
    state, outputs = layer.init_state(x.shape[0]), []
    masks = [None] * len(sizes) if key_mask is None else key_mask.split(sizes, dim=1)
    for piece, keep in zip(x.split(sizes, dim=1), masks, strict=True):
        y, state = layer.step(piece, state, key_mask=keep)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@each("masked", [False, True])
def test_no_gradient_comes_from_the_future(causal_case, masked):
    layer, n = causal_case.build(dtype=torch.float64).eval(), 9
    keep = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0]], dtype=torch.bool) if masked else None
    x = torch.randn(1, n, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x, key_mask=keep, is_causal=True)
    for t in range(n):
        (grad,) = torch.autograd.grad((y[:, t] * torch.randn(16)).sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()


@each("n", [70, 150])
def test_t07_prefix_of_the_output_is_the_output_of_the_prefix(causal_case, n):
    layer = causal_case.build(dtype=torch.float64).eval()
    x = torch.randn(2, n, 16, dtype=torch.float64)
    y = layer(x, is_causal=True)
    changed = torch.cat([x[:, : n // 2], torch.randn(2, n - n // 2, 16) * 100], dim=1)
    assert torch.equal(layer(changed, is_causal=True)[:, : n // 2], y[:, : n // 2])
    for t in (1, 2, n // 2, n - 1):
        torch.testing.assert_close(
            layer(x[:, :t], is_causal=True), y[:, :t], atol=1e-10, rtol=1e-10
        )


@each("sizes", [[1] * 12, [5, 1, 1, 5], [12], [0, 7, 0, 5]])
def test_t08_decoding_equals_the_causal_forward(stateful_case, sizes):
    layer, x = stateful_case.build().eval(), torch.randn(3, 12, 16)
    y, state = _decode(layer, x, sizes)
    _close(y, layer(x, is_causal=True))
    assert state.seen.tolist() == [12, 12, 12]


def test_t08_decoding_over_many_chunks_equals_the_causal_forward(stateful_case):
    layer, x = stateful_case.build().eval(), torch.randn(2, 200, 16)
    y, _ = _decode(layer, x, [70, 1, 1, 64, 63, 1])
    _close(y, layer(x, is_causal=True))


def test_t08_left_padded_prompts_decode_like_unpadded_ones(stateful_case):
    layer, x = stateful_case.build().eval(), torch.randn(2, 10, 16)
    keep = torch.ones(2, 10, dtype=torch.bool)
    keep[0, :4] = False
    poisoned = x.masked_fill(~keep[:, :, None], float("nan"))
    y, state = _decode(layer, poisoned, [6, 1, 1, 1, 1], keep)
    assert state.seen.tolist() == [6, 10]
    assert (y[0, :4] == 0).all()
    _close(y, layer(x, key_mask=keep, is_causal=True))
    if stateful_case.stands_alone(keep[0]):
        _close(y[:1, 4:], _decode(layer, x[:1, 4:], [2, 1, 1, 1, 1])[0])


def test_t08_a_reordered_state_continues_the_chosen_sequences(stateful_case):
    layer, x = stateful_case.build().eval(), torch.randn(3, 8, 16)
    _, state = _decode(layer, x[:, :5], [5])
    beams = torch.tensor([2, 0, 0, 1])
    y, _ = layer.step(x[beams, 5:], state.reorder(beams))
    _close(y, layer(x, is_causal=True)[beams, 5:])


def test_t08_a_saved_state_continues_bit_for_bit(stateful_case, tmp_path):
    layer, x = stateful_case.build().eval(), torch.randn(2, 8, 16)
    _, state = _decode(layer, x[:, :5], [5])
    state = state.detach()
    expected, _ = layer.step(x[:, 5:], state)
    torch.save((state.tensors, state.seen), tmp_path / "state.pt")
    loaded = type(state)(*torch.load(tmp_path / "state.pt"))
    for restored in (pickle.loads(pickle.dumps(state)), loaded, state.to("cpu")):
        assert torch.equal(layer.step(x[:, 5:], restored)[0], expected)


def test_a_step_leaves_the_state_it_was_given_alone(stateful_case):
    layer, x = stateful_case.build().eval(), torch.randn(2, 8, 16)
    _, state = _decode(layer, x[:, :5], [5])
    before = [t.clone() for t in (*state.tensors, state.seen)]
    first, _ = layer.step(x[:, 5:6], state)
    assert all(torch.equal(a, b) for a, b in zip(before, (*state.tensors, state.seen), strict=True))
    assert torch.equal(layer.step(x[:, 5:6], state)[0], first)


@each("b", [0, 1])
def test_small_batches_decode(stateful_case, b):
    layer, x = stateful_case.build().eval(), torch.randn(b, 3, 16)
    y, state = _decode(layer, x, [1, 2])
    _close(y, layer(x, is_causal=True))
    assert state.seen.shape == (b,)


def test_gradients_flow_through_the_state(stateful_case):
    layer = stateful_case.build(dtype=torch.float64).eval()
    x = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    stepped, _ = _decode(layer, x, [4, 2])
    (by_step,) = torch.autograd.grad(stepped.square().sum(), x)
    (at_once,) = torch.autograd.grad(layer(x, is_causal=True).square().sum(), x)
    torch.testing.assert_close(by_step, at_once, atol=1e-10, rtol=1e-8)


def test_only_the_named_mechanisms_have_a_growing_state():
    growing = set()
    for name in list_attentions(stateful=True):
        layer = create_attention(name, 16, 2).eval()
        _, short = layer.step(torch.randn(1, 1, 16), layer.init_state(1))
        _, long = layer.step(torch.randn(1, 90, 16), short)
        assert layer.init_state(1).numel <= short.numel
        if long.numel != short.numel:
            growing.add(name)
    assert growing == GROWING_STATE & set(list_attentions())
