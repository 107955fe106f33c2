"""FAVOR+: equal to its dense form, close to softmax, strictly causal, no overflow."""

import torch
from tests.house.rows import each

from primal_attention.attention import FavorAttention
from primal_attention.functional import naive, naive_family


def _heads(n, m=None, size=1.0, d=8, dtype=torch.float64):
    m = n if m is None else m
    return (
        size * torch.randn(2, 2, n, d, dtype=dtype),
        size * torch.randn(2, 2, m, d, dtype=dtype),
        torch.randn(2, 2, m, 4, dtype=dtype),
    )


def _core(p=64, seed=0, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(seed)
    return FavorAttention(16, 2, num_features=p, generator=generator, dtype=dtype, **options).core


@each("is_causal", [False, True])
@each("masked", [False, True])
def test_core_agrees_with_its_dense_reference_in_values_and_gradients(masked, is_causal):
    core, inputs = _core(), [t.requires_grad_() for t in _heads(70)]
    mask = torch.rand(2, 70) < 0.7 if masked else None
    if masked:
        mask[:, 0] = True
    fast = core(*inputs, key_mask=mask, is_causal=is_causal)
    logs = [core.features.log_features(t) for t in inputs[:2]]
    slow = naive_family.exponential_attention(*logs, inputs[2], mask, is_causal)
    torch.testing.assert_close(fast, slow)
    weight = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * weight).sum(), inputs),
        torch.autograd.grad((slow * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@each("is_causal", [False, True])
def test_many_features_approximate_softmax(is_causal):
    q, k, v = _heads(20, size=0.5)
    exact = naive.softmax_attention(q, k, v, is_causal=is_causal)
    few, many = (_core(p)(q, k, v, is_causal=is_causal) - exact for p in (64, 16384))
    assert many.abs().max() < 0.05
    assert many.norm() < few.norm() / 6


def test_antithetic_features_have_a_smaller_error():
    q, k, v = _heads(40, size=0.5)
    exact = naive.softmax_attention(q, k, v)

    def error(**options):
        return sum((_core(32, s, **options)(q, k, v) - exact).norm() for s in range(20))

    assert error(antithetic=True) < error()


@each("is_causal", [False, True])
def test_rows_sum_to_one(is_causal):
    q, k, _ = _heads(30)
    weights = _core().weights(q, k, is_causal=is_causal)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights >= 0).all()


def test_permuted_tokens_give_permuted_outputs():
    q, k, v = _heads(30)
    core, order = _core(), torch.randperm(30)
    expected = core(q, k, v)[:, :, order]
    torch.testing.assert_close(core(q[:, :, order], k[:, :, order], v[:, :, order]), expected)


@each("n", [1, 5, 40])
def test_large_tokens_decode_as_they_compute(n):
    # queries and keys of one large token prefer different features
    core = _core(dtype=torch.float32)
    q, k, v = (t.requires_grad_() for t in _heads(n, size=60.0, dtype=torch.float32))
    exact = [core.features.log_features(q, up_to_rows=True), core.features.log_features(k), v]
    slow = naive_family.exponential_attention(*(t.double() for t in exact), is_causal=True)
    state, rows = core.init_state(k[:, :, :0], v[:, :, :0]), []
    for t in range(n):
        y, state = core.step(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
        rows.append(y)
    probe = torch.randn_like(slow)
    expected = torch.autograd.grad((slow * probe).sum(), (q, k, v))
    for fast in (core(q, k, v, is_causal=True), torch.cat(rows, dim=2)):
        torch.testing.assert_close(fast.double(), slow, rtol=1e-2, atol=1e-2)
        found = torch.autograd.grad((fast * probe).sum(), (q, k, v))
        for got, correct in zip(found, expected, strict=True):
            assert (got - correct).norm() <= 1e-2 * correct.norm() + 1e-2


def test_an_empty_context_gives_the_bias_of_the_output_with_finite_gradients():
    layer = FavorAttention(16, 2, num_features=32)
    x = (1e3 * torch.randn(2, 3, 16)).requires_grad_()
    y = layer(x, torch.zeros(2, 0, 16))
    torch.testing.assert_close(y, layer.out_proj.bias.expand_as(y))
    y.square().sum().backward()
    assert (x.grad == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@each("is_causal", [False, True])
@each("size", [1e-3, 10.0, 30.0])
def test_outputs_and_gradients_are_finite_at_any_scale(size, is_causal):
    inputs = [t.requires_grad_() for t in _heads(90, size=size, dtype=torch.float32)]
    y = _core(dtype=torch.float32)(*inputs, is_causal=is_causal)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)


def test_half_precision_inputs_do_not_overflow():
    q, k, v = (t.half() for t in _heads(40, size=30.0, dtype=torch.float32))
    for is_causal in (False, True):
        y = _core(dtype=torch.float32)(q, k, v, is_causal=is_causal)
        assert y.dtype == torch.float16
        assert y.isfinite().all()


@each("factor", [1.0, 10.0, 100.0])
def test_large_future_keys_do_not_change_past_outputs_bitwise(factor):
    # the defect of the public package: a maximum over the whole sequence and an epsilon
    q, k, v = _heads(100, dtype=torch.float32)
    core = _core(dtype=torch.float32)
    past = core(q, k, v, is_causal=True)[:, :, :40]
    k[:, :, 40:] *= factor
    v[:, :, 40:] += 1
    assert torch.equal(core(q, k, v, is_causal=True)[:, :, :40], past)


def test_masked_keys_are_not_in_the_denominator():
    q, k, v = _heads(20)
    mask = torch.arange(20).expand(2, -1) < 13
    got = _core()(q, k, v, key_mask=mask)
    torch.testing.assert_close(got, _core()(q, k[:, :, :13], v[:, :, :13]))


def test_redraw_changes_the_layer_and_eval_does_not():
    layer, x = FavorAttention(16, 2, num_features=32), torch.randn(1, 6, 16)
    before = layer.eval()(x)
    assert torch.equal(layer(x), before)
    layer.core.redraw_(torch.Generator().manual_seed(5))
    assert not torch.equal(layer(x), before)


def test_a_loaded_layer_has_the_same_features():
    first, second = (FavorAttention(16, 2, num_features=32) for _ in range(2))
    x = torch.randn(1, 6, 16)
    assert "core.features.directions" in first.state_dict()
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
