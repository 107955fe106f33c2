"""Attention with times against dense formulas of all gaps, and its streaming form.

T numbers are those of the list of invariants of time features.
"""

import pytest
import torch
from tests.house.rows import each
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention.attention import Rotary, TimeOptions, create_attention
from primal_attention.attention.time_fusions import StationaryBias
from primal_attention.functional import naive, naive_time
from primal_attention.kernels import BochnerTime, MercerTime
from primal_attention.kernels.time_base import waves
from primal_attention.models import BlockStack, DecoderConfig, StackConfig

F64 = torch.float64
N = 23


def _times(b=2, n=N):
    return torch.rand(b, n, dtype=F64).mul(3).cumsum(1)


def _heads(layer, x):
    inner = layer.inner
    return [inner._split(getattr(inner, f"{name}_proj")(x)) for name in "qkv"]


def _elu(x):
    return torch.where(x > 0, x + 1, x.exp())


def _fast(layer, x, times, is_causal):
    return layer(x, times=times, is_causal=is_causal)


def _dense_softmax(layer, x, times, is_causal):
    """Softmax of dense logits that know every gap."""
    q, k, v = _heads(layer, x)
    gap, omega = naive_time.gaps(times, times), layer.features.frequencies()
    if layer.fusion == "rotary":
        logits = naive_time.rotary_products(q, k, gap, omega) / q.shape[-1] ** 0.5
    else:
        bias = naive_time.bias_logits(gap, omega, layer.turn.even, layer.turn.odd)
        logits = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if is_causal:
        logits = logits.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    return layer.inner.out_proj(layer.inner._merge(logits.softmax(-1) @ v))


def _dense_linear(layer, x, times, is_causal):
    """Sums with dense weights that know every gap, over the sums of those that do not."""
    q, k, v = _heads(layer, x)
    q, k = _elu(q), _elu(k)
    gap, weights = naive_time.gaps(times, times), q @ k.mT
    if layer.fusion == "rotary":
        timed = naive_time.rotary_products(q, k, gap, layer.features.frequencies())
    else:
        timed = weights * naive_time.time_kernel(gap, *layer.features.spectrum())
    if is_causal:
        weights, timed = weights.tril(), timed.tril()
    return layer.inner.out_proj(layer.inner._merge(naive_time.timed_average(weights, timed, v)))


def _dense_primal(layer, x, times, is_causal):
    """Scores from dense kernels that know every gap."""
    inner = layer.inner
    q, k = (inner._split(p(x)) for p in (inner.q_proj, inner.k_proj))
    q, k = naive.cosine(q), naive.cosine(k)
    dual_e, dual_r = (inner._split(p(x)) for p in (inner.dual_e, inner.dual_r))
    gap = naive_time.gaps(times, times)

    def kernel(a, b):
        if layer.fusion == "rotary":
            return naive_time.rotary_products(a, b, gap, layer.features.frequencies())
        return a @ b.mT * naive_time.time_kernel(gap, *layer.features.spectrum())

    scores = []
    for asks, answers, duals in ((q, k, dual_r), (k, q, dual_e)):
        if is_causal:
            scores.append(naive_time.causal_means(kernel(asks, answers), duals))
        else:
            scores.append(kernel(asks, answers) @ duals / N)
    return inner.out_proj(inner._merge(inner.concat(torch.cat(scores, dim=-1))))


DENSE = {
    ("softmax", "rotary"): _dense_softmax,
    ("softmax", "stationary-bias"): _dense_softmax,
    ("softmax-explicit", "stationary-bias"): _dense_softmax,
    ("linear", "rotary"): _dense_linear,
    ("linear", "product"): _dense_linear,
    ("primal-dual", "rotary"): _dense_primal,
    ("primal-dual", "product"): _dense_primal,
}


@each("is_causal", [False, True])
@pytest.mark.parametrize(("name", "fusion"), DENSE)
def test_fast_attention_is_the_dense_formula_in_values_and_gradients(name, fusion, is_causal):
    layer = create_attention(name, 12, 2, time=fusion, dtype=F64).eval()
    with torch.no_grad():
        for parameter in layer.turn.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, times = torch.randn(2, N, 12, dtype=F64, requires_grad=True), _times()
    weight, results = torch.randn(2, N, 12, dtype=F64), []
    for attend in (_fast, DENSE[name, fusion]):
        layer.zero_grad()
        x.grad = None
        y = attend(layer, x, times, is_causal)
        (y * weight).sum().backward()
        grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), "x": x.grad, **grads})
    got, expected = results
    assert "turn.features.quantile.omega" in got
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-10, msg=key)


def test_mercer_features_multiply_the_kernel_too():
    time = TimeOptions("product", "mercer", 14)
    layer = create_attention("linear", 12, 2, time=time, dtype=F64).eval()
    x, times = torch.randn(2, N, 12, dtype=F64), _times()
    torch.testing.assert_close(layer(x, times=times), _dense_linear(layer, x, times, False))


def test_joined_features_are_seen_by_every_projection():
    layer = create_attention("softmax", 12, 2, time=TimeOptions(num_features=8), dtype=F64)
    x, times = torch.randn(2, N, 12, dtype=F64), _times()
    wide = torch.cat([x, layer.features(times)], dim=-1)
    assert layer.inner.q_proj.weight.shape == (20, 20)
    assert layer.inner.out_proj.weight.shape == (12, 20)
    q, k, v = _heads(layer, wide)
    expected = layer.inner.out_proj(layer.inner._merge(naive.softmax_attention(q, k, v)))
    torch.testing.assert_close(layer(x, times=times), expected)


def test_added_features_are_mapped_to_the_width_of_the_tokens():
    layer = create_attention("softmax", 12, 2, time=TimeOptions("add", num_features=8), dtype=F64)
    x, times = torch.randn(2, N, 12, dtype=F64), _times()
    known = x + layer.features(times) @ layer.time_proj.weight.T
    q, k, v = _heads(layer, known)
    expected = layer.inner.out_proj(layer.inner._merge(naive.softmax_attention(q, k, v)))
    torch.testing.assert_close(layer(x, times=times), expected)


def test_joined_features_pass_one_hidden_layer_with_a_residual():
    time = TimeOptions("concat-mlp", num_features=8)
    layer = create_attention("softmax", 12, 2, time=time, dtype=F64)
    x, times = torch.randn(2, N, 12, dtype=F64), _times()
    wide = torch.cat([x, layer.features(times)], dim=-1)
    w1, b1, w2, b2 = layer.mlp.parameters()
    q, k, v = _heads(layer, wide + (wide @ w1.T + b1).clamp_min(0) @ w2.T + b2)
    expected = layer.inner.out_proj(layer.inner._merge(naive.softmax_attention(q, k, v)))
    torch.testing.assert_close(layer(x, times=times), expected)


def test_t10_the_bias_is_stationary_and_equals_its_formula():
    bias = StationaryBias(BochnerTime(16, dtype=F64), 3, dtype=F64)
    for parameter in (bias.even, bias.odd):
        torch.nn.init.normal_(parameter)
    x, times = torch.zeros(2, 3, N, 0, dtype=F64), _times()
    grams = []
    for shift in (0.0, 777.0):
        turn = bias(times + shift)
        grams.append(turn.queries(x) @ turn.keys(x).mT)
    gap, omega = naive_time.gaps(times, times), bias.features.frequencies()
    formula = naive_time.bias_logits(gap, omega, bias.even, bias.odd)
    torch.testing.assert_close(grams[0], formula, rtol=0, atol=1e-12)
    torch.testing.assert_close(grams[0], grams[1], rtol=0, atol=1e-11)
    torch.testing.assert_close(bias.logits(gap).transpose(0, 1), formula, rtol=0, atol=1e-12)
    # odd coefficients tell the past from the future
    assert (formula - formula.mT).abs().max() > 0.1


def test_a_general_form_of_time_features_is_not_stationary():
    phi, t, m = BochnerTime(16, dtype=F64), _times(1), torch.randn(16, 16, dtype=F64)
    forms = [phi(t + s)[0] @ m @ phi(t + s)[0].T for s in (0.0, 777.0)]
    assert (forms[0] - forms[1]).abs().max() > 0.1


def test_t11_continuous_rotary_depends_on_differences_alone():
    omega = torch.rand(4, dtype=F64)
    q, k, times = *torch.randn(2, 1, 2, N, 8, dtype=F64), _times(1)
    grams = []
    for shift in (0.0, 777.0):
        cos, sin = waves(times + shift, omega, F64)
        turn = Rotary(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))
        grams.append(turn.queries(q) @ turn.keys(k).mT)
    torch.testing.assert_close(*grams, rtol=0, atol=1e-9)
    gap = naive_time.gaps(times, times)
    torch.testing.assert_close(grams[0], naive_time.rotary_products(q, k, gap, omega))


def test_the_fused_kernel_serves_a_stationary_bias():
    layer = create_attention("softmax", 16, 2, time="stationary-bias").eval()
    x, times = torch.randn(1, 300, 16), _times(1, 300)
    with torch.no_grad():
        expected = layer(x, times=times, is_causal=True)
        # raises if the inputs do not suit the kernel
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = layer(x, times=times, is_causal=True)
    torch.testing.assert_close(got, expected)


@each("features", [BochnerTime(12, dtype=F64), MercerTime(2, 3, dtype=F64)])
def test_an_origin_moves_by_rotation(features):
    times, gap = _times(), torch.tensor([[1.7], [40.3]], dtype=F64)
    moved = features.advance(features(times), gap)
    torch.testing.assert_close(moved, features(times - gap), rtol=0, atol=1e-12)
    # sums move without their events
    total = features.advance(features(times).sum(1), gap[:, 0])
    torch.testing.assert_close(total, features(times - gap).sum(1), rtol=0, atol=1e-11)


def test_an_origin_moves_only_for_stationary_features():
    for features in (MercerTime(tie=False),):
        with pytest.raises(ValueError, match="not stationary"):
            features.advance(features(torch.zeros(3)), torch.ones(3))


@pytest.mark.parametrize("fusion", ["product", "rotary"])
@pytest.mark.parametrize("name", ["cosformer", "linear", "primal-dual"])
def test_a_state_moves_forward_by_a_gap_without_its_history(name, fusion):
    layer = create_attention(name, 12, 2, time=fusion, dtype=F64).eval()
    x, times = torch.randn(2, N, 12, dtype=F64), _times()
    expected = layer(x, times=times, is_causal=True)
    state, outputs, origin = layer.init_state(2), [], torch.zeros(2, dtype=F64)
    for i in range(N):
        # the newest event is always at time zero: all that enters is the gap
        state, origin = layer.advance(state, times[:, i] - origin), times[:, i]
        y, state = layer.step(x[:, i : i + 1], state, times=torch.zeros(2, 1, dtype=F64))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "fusion"), [("softmax", "rotary"), ("linear", "concat")])
def test_a_state_without_rotated_sums_does_not_move(name, fusion):
    layer = create_attention(name, 12, 2, time=fusion)
    with pytest.raises(ValueError, match="cannot move the origin"):
        layer.advance(layer.init_state(2), torch.ones(2))


def _dense_rows(layer, x, times, rows):
    """Return dense outputs of some rows of one long sequence, in blocks, in float64."""
    layer, outputs = layer.double(), []
    x, inner = x.double(), layer.inner
    q, k = (inner._split(p(x)) for p in (inner.q_proj, inner.k_proj))
    is_primal = hasattr(inner, "dual_e")
    act = naive.cosine if is_primal else _elu
    q, k = act(q), act(k)
    if is_primal:
        sides = [(q, k, inner._split(inner.dual_r(x))), (k, q, inner._split(inner.dual_e(x)))]
    else:
        sides = [(q, k, inner._split(inner.v_proj(x)))]
    for block in rows.split(50):
        past = torch.arange(x.shape[1]) <= block[:, None]
        gap, parts = naive_time.gaps(times[:, block], times), []
        for asks, answers, values in sides:
            weights = (asks[:, :, block] @ answers.mT).masked_fill(~past, 0.0)
            if layer.fusion == "rotary":
                pairs = asks[:, :, block], answers, gap, layer.features.frequencies()
                timed = naive_time.rotary_products(*pairs).masked_fill(~past, 0.0)
            else:
                timed = weights * naive_time.time_kernel(gap, *layer.features.spectrum())
            total = past.sum(1)[:, None] if is_primal else weights.sum(-1, keepdim=True)
            parts.append(timed @ values / total)
        heads = inner.concat(torch.cat(parts, dim=-1)) if is_primal else parts[0]
        outputs.append(inner.out_proj(inner._merge(heads)))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(
    ("name", "fusion"),
    [
        ("linear", "product"),
        ("primal-dual", "rotary"),
        pytest.param("linear", "rotary", marks=pytest.mark.slow),
        pytest.param("primal-dual", "product", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_stream_of_100_000_events_equals_the_dense_computation(name, fusion):
    n, piece = 100_000, 1_000
    time = TimeOptions(fusion, num_features=8 if fusion == "product" else None)
    layer = create_attention(name, 8, 2, time=time).eval()
    x, times = torch.randn(1, n, 8), torch.rand(1, n, dtype=F64).mul(2).cumsum(1)
    rows = torch.arange(99, n, 3_996)
    state, outputs = layer.init_state(1), []
    size = state.numel
    for tokens, when in zip(x.split(piece, 1), times.split(piece, 1), strict=True):
        y, state = layer.step(tokens, state, times=when)
        outputs.append(y)
        assert state.numel == size
        stores = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state.tensors}
        assert sum(s.nbytes() for s in stores.values()) <= 1.1 * sum(
            t.nbytes for t in state.tensors
        )
    streamed = torch.cat(outputs, dim=1)[:, rows]
    assert (streamed - _dense_rows(layer, x, times, rows)).abs().max() <= 1e-5


class _Work(TorchDispatchMode):
    """Counts the elements that operators return."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.total += sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))
        return result


@pytest.mark.parametrize("fusion", ["concat", "product", "rotary"])
@pytest.mark.parametrize("name", ["linear", "primal-dual"])
@torch.no_grad()
def test_one_event_costs_the_same_after_a_long_history(name, fusion):
    layer = create_attention(name, 8, 2, time=fusion).eval()
    x, times = torch.randn(1, 2_000, 8), _times(1, 2_000)
    _, state = layer.step(x, layer.init_state(1), times=times)
    work = []
    for before in (layer.init_state(1), state):
        with _Work() as counter:
            layer.step(x[:, :1], before, times=times[:, -1:] + 1)
        work.append(counter.total)
    assert work[0] == work[1]


@pytest.mark.parametrize("fusion", ["add", "concat", "concat-mlp", "product", "rotary"])
def test_a_stack_gives_times_to_its_attentions(fusion):
    config = StackConfig(
        dim=16, num_heads=2, num_layers=2, attention="primal-dual", time_fusion=fusion, dropout=0.0
    )
    stack = BlockStack(config)
    x, times = torch.randn(2, N, 16), _times()
    hidden, terms = stack(x, times=times, is_causal=True)
    assert list(terms) == ["0.attention", "1.attention"]
    stack.eval()
    states, outputs = stack.init_state(2), []
    for i in range(N):
        y, states = stack.step(x[:, i : i + 1], states, times=times[:, i : i + 1])
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), hidden, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(stack(x, times=2 * times, is_causal=True).hidden, hidden)


def test_a_stack_without_fusion_ignores_times():
    stack = BlockStack(StackConfig(dim=16, num_heads=2, attention="linear")).eval()
    x = torch.randn(2, N, 16)
    assert torch.equal(stack(x, times=_times()).hidden, stack(x).hidden)


def test_a_stack_refuses_a_fusion_that_its_attention_does_not_allow():
    with pytest.raises(ValueError, match="'primal' does not allow time_fusion='rotary'"):
        StackConfig(time_fusion="rotary")
    with pytest.raises(ValueError, match="time_fusion must be one of"):
        StackConfig(time_fusion="sum")


def test_a_model_without_times_refuses_a_fusion():
    with pytest.raises(ValueError, match="time_fusion is 'concat', but this model takes no times"):
        DecoderConfig(vocab_size=5, time_fusion="concat")


def test_a_stack_trains_with_checkpointing_and_times():
    config = StackConfig(
        dim=16, num_heads=2, attention="linear", time_fusion="product", checkpointing=True
    )
    stack = BlockStack(config)
    stack(torch.randn(2, N, 16), times=_times()).hidden.square().sum().backward()
    assert all(p.grad is not None for p in stack.parameters())
