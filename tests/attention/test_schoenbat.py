"""SchoenbAt: preparation, kernels, temperature, output scale and the published setting."""

import copy

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention import SchoenbatAttention
from primal_attention.attention.schoenbat import center_l2, signed_power
from primal_attention.functional import naive_family
from primal_attention.kernels import SERIES

KERNELS = sorted(SERIES)


def _heads(n, d=8, dtype=torch.float64):
    return [torch.randn(2, 2, n, width, dtype=dtype) for width in (d, d, d)]


def _core(seed=0, preset=SchoenbatAttention, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(seed)
    return preset(16, 2, generator=generator, dtype=dtype, **options).core


def test_preparation_equals_the_published_one():
    x = torch.randn(20, 8, dtype=torch.float64)
    torch.testing.assert_close(center_l2(x), naive_family.schoenbat_rows(x, 1.0))


def test_prepared_rows_have_mean_zero_length_one_and_ignore_scale_and_shift():
    x = torch.randn(20, 8)
    rows = center_l2(x)
    torch.testing.assert_close(rows.mean(-1), torch.zeros(20), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(20))
    torch.testing.assert_close(center_l2(3 * x + 5), rows, atol=1e-5, rtol=0)


def test_a_constant_row_gives_zero_and_a_finite_gradient():
    x = torch.full((1, 8), 0.25, requires_grad=True)
    rows = center_l2(x)
    rows.sum().backward()
    assert (rows == 0).all()
    assert x.grad.isfinite().all()


def test_signed_power_is_odd_exact_at_one_and_finite():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    assert torch.equal(signed_power(x, torch.ones(())), x)
    for exponent in (0.2, 0.5, 2.0, 3.0):
        y = signed_power(x, torch.tensor(exponent, dtype=torch.float64))
        torch.testing.assert_close(y, x.sign() * x.abs() ** exponent, atol=1e-4, rtol=1e-6)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@each("is_causal", [False, True])
def test_core_agrees_with_its_dense_reference_in_values_and_gradients(kernel, is_causal):
    core, inputs = _core(kernel=kernel), [t.requires_grad_() for t in _heads(70)]
    mask = torch.rand(2, 70) < 0.7
    mask[:, 0] = True
    fast = core(*inputs, key_mask=mask, is_causal=is_causal)
    tau = core.temperature[0].item()
    rows = [naive_family.schoenbat_rows(t, tau) for t in inputs[:2]]
    features = [core.features.query_features(t) for t in rows]
    slow = naive_family.feature_attention(*features, inputs[2], mask, is_causal)
    torch.testing.assert_close(fast, slow, atol=1e-8, rtol=1e-6)
    probe = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_are_close_to_those_of_the_kernel(kernel):
    q, k, _ = _heads(40)
    core = _core(kernel=kernel, num_features=512)
    tau = core.temperature[0].item()
    rows = [naive_family.schoenbat_rows(t, tau) for t in (q, k)]
    exact = core.features.gram(*rows)
    exact = exact / exact.sum(-1, keepdim=True)
    error = (core.weights(q, k) - exact).norm() / exact.norm()
    assert error < 0.05


@each("preset", [SchoenbatAttention, SchoenbatAttention.published])
@each("is_causal", [False, True])
def test_rows_sum_to_one(preset, is_causal):
    q, k, _ = _heads(30)
    weights = _core(preset=preset).weights(q, k, is_causal=is_causal)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@each("preset", [SchoenbatAttention, SchoenbatAttention.published])
def test_past_outputs_are_bitwise_equal_if_the_future_changes(preset):
    q, k, v = _heads(90, dtype=torch.float32)
    core = _core(preset=preset, dtype=torch.float32)
    past = core(q, k, v, is_causal=True)[:, :, :40]
    for t in (q, k, v):
        t[:, :, 40:] = 100 * torch.randn_like(t[:, :, 40:])
    assert torch.equal(core(q, k, v, is_causal=True)[:, :, :40], past)


def test_permuted_tokens_give_permuted_outputs():
    q, k, v = _heads(30)
    core, order = _core(), torch.randperm(30)
    expected = core(q, k, v)[:, :, order]
    torch.testing.assert_close(core(q[:, :, order], k[:, :, order], v[:, :, order]), expected)


def test_temperature_is_learned_and_bounded():
    for kernel, top in (("exp", 1.5), ("inverse", 0.9), ("sqrt", 0.9)):
        core = _core(kernel=kernel)
        assert core.theta.requires_grad
        assert core.temperature.tolist() == pytest.approx([2 / 3 * top] * 2)
        with torch.no_grad():
            core.theta.fill_(100.0)
        assert (core.temperature <= top).all()


def test_a_fixed_temperature_must_lie_where_the_series_converges():
    assert _core(temperature=1.5).temperature.tolist() == [1.5, 1.5]
    with pytest.raises(ValueError, match=r"between 0 and 1, where the series 'logi' converges"):
        _core(kernel="logi", temperature=1.0)
    with pytest.raises(ValueError, match="'scale' or 'power', got 'norm'"):
        _core(post="norm")


@pytest.mark.parametrize(("kernel", "tau", "top"), [("exp", 6.0, 1.5), ("logi", 0.95, 0.9)])
def test_a_fixed_temperature_with_negative_weights_warns(kernel, tau, top):
    with pytest.warns(UserWarning, match=rf"temperature={tau:g} is above {top}; .*can be negative"):
        core = _core(kernel=kernel, temperature=tau)
    assert core.temperature.tolist() == pytest.approx([tau, tau])


def test_the_published_setting_is_the_papers():
    core = _core(preset=SchoenbatAttention.published)
    features = core.features
    assert (features.law, features.exact_degree, features.stratified) == ("geometric", 0, False)
    assert features.num_features == 128
    assert core.temperature.tolist() == pytest.approx([8**-0.5] * 2)
    assert core.post == "power"


def test_published_weights_are_nearly_uniform():
    # at most f(tau)/f(-tau) between two weights of a row
    q, k, _ = _heads(200)
    core = _core(preset=SchoenbatAttention.published)
    core.features = type(core.features)(8, 45, "exp", exact_degree=2, dtype=torch.float64)
    weights = core.weights(q, k)
    ratio = (weights.amax(-1) / weights.amin(-1)).max().item()
    assert ratio < torch.tensor(2 * 8**-0.5).exp().item() + 0.02


def test_power_one_is_multiplication_by_gamma():
    q, k, v = _heads(10)
    plain, power = _core(), _core(post="power")
    power.load_state_dict({**power.state_dict(), **plain.state_dict()})
    with torch.no_grad():
        power.gamma.fill_(2.5)
    torch.testing.assert_close(power(q, k, v), 2.5 * plain(q, k, v))


def test_gradients_reach_every_parameter_and_match_finite_differences():
    core = _core(post="power", num_features=16)
    names, parameters = zip(*core.named_parameters(), strict=True)
    assert set(names) == {"theta", "gamma", "beta"}

    def run(*tensors):
        learned = dict(zip(names, tensors[3:], strict=True))
        return torch.func.functional_call(core, learned, tensors[:3])

    inputs = [t.requires_grad_() for t in (*_heads(5), *(p.detach().clone() for p in parameters))]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@each("preset", [SchoenbatAttention, SchoenbatAttention.published])
def test_a_loaded_layer_has_the_same_features_and_its_state_is_complete(preset):
    first, second = preset(16, 2), preset(16, 2)
    x = torch.randn(1, 6, 16)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(copy.deepcopy(first)(x), first(x))
    state, rows = second.init_state(1), []
    for t in range(6):
        y, state = second.step(x[:, t : t + 1], state)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), first(x, is_causal=True))


def test_denominators_near_zero_keep_their_sign_and_a_minimum():
    core = _core()
    sums = torch.tensor([[[[1.0, 1e-9], [1.0, -1e-9], [0.0, 0.0], [1.0, -2.0]]]])
    assert core.divide(sums).flatten().tolist() == pytest.approx([1e3, -1e3, 0.0, -0.5])


def test_redraw_changes_the_layer_and_eval_does_not():
    layer, x = SchoenbatAttention(16, 2), torch.randn(1, 6, 16)
    before = layer.eval()(x)
    assert torch.equal(layer(x), before)
    layer.core.redraw_(torch.Generator().manual_seed(5))
    assert not torch.equal(layer(x), before)


@each("size", [1e-3, 10.0, 30.0])
def test_outputs_and_gradients_are_finite_at_any_scale(size):
    inputs = [(size * t).requires_grad_() for t in _heads(90, dtype=torch.float32)]
    y = _core(dtype=torch.float32)(*inputs)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)
