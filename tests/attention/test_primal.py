"""Primal-Attention as a layer: against the textbook, its symmetries, its regulariser."""

import itertools
import math
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.house.rows import each
from torch import nn
from torch.testing import assert_close

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.functional import naive

few = settings(max_examples=20, deadline=None, derandomize=True)


def _layer(dim=8, num_heads=2, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rank=.* exceeds")
        return PrimalAttention(dim, num_heads, dtype=torch.float64, **options)


def _randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# parity with the textbook, from the layer's own parameters


def _split(layer, x):
    return x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


def _standardized(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()


def _codes(layer, at):
    """Return the codes of both sides at the given points of the basis, or at table rows."""
    if layer.codes == "table":
        rows = at.long()
        return layer.w_e[:, rows], layer.w_r[:, rows]
    columns = [
        torch.cos(math.pi * j * at) * ((1 if j == 0 else 2) / layer.num_samples) ** 0.5
        for j in range(layer.w_e.shape[1])
    ]
    basis = torch.stack(columns, dim=-1)
    return basis @ layer.w_e, basis @ layer.w_r


def _textbook(layer, x, context=None, is_causal=False):
    """Return output and regulariser of the layer, every step as the formulas have it."""
    memory = x if context is None else context
    q, k = _split(layer, layer.q_proj(x)), _split(layer, layer.k_proj(x))
    mq, mk = _split(layer, layer.q_proj(memory)), _split(layer, layer.k_proj(memory))
    n, samples = x.shape[1], layer.num_samples
    if layer.weights == "static":
        w_e, w_r = layer.w_e, layer.w_r
        if is_causal:
            q, k = naive.prefix_mean(q, layer.decay), naive.prefix_mean(k, layer.decay)
        e, r = naive.primal_scores(q, w_e[None]), naive.primal_scores(k, w_r[None])
        side_e, side_r = e, r
    elif layer.weights == "dual":
        dual_e, dual_r = _split(layer, layer.dual_e(memory)), _split(layer, layer.dual_r(memory))
        w_e = naive.dual_weights(naive.cosine(mk), dual_r)
        w_r = naive.dual_weights(naive.cosine(mq), dual_e)
        if is_causal:
            e, r = naive.causal_dual_scores(q, k, dual_r), naive.causal_dual_scores(k, q, dual_e)
            side_e, side_r = e, r
        else:
            e, r = naive.primal_scores(q, w_e), naive.primal_scores(k, w_r)
            side_e, side_r = naive.primal_scores(mq, w_e), naive.primal_scores(mk, w_r)
    elif is_causal:
        steps = torch.arange(n, dtype=x.dtype)
        if layer.codes == "table":
            at = steps.clamp_max(samples - 1)
        else:
            at = torch.log1p(steps) / math.log1p(2.0**16)
        codes_e, codes_r = _codes(layer, at)
        f = _split(layer, _standardized(x))
        e = naive.causal_data_scores(q, f, codes_e, samples)
        r = naive.causal_data_scores(k, f, codes_r, samples)
        w_e, w_r, side_e, side_r = layer.w_e, layer.w_r, e, r
    else:
        steps = torch.arange(samples, dtype=x.dtype)
        at = steps if layer.codes == "table" else (steps + 0.5) / samples
        w_e, w_r = _codes(layer, at)
        rows = memory[:, naive.even_indices(memory.shape[1], samples)]
        f = _split(layer, _standardized(rows))
        by_e, by_r = naive.data_weights(f, w_e), naive.data_weights(f, w_r)
        e, r = naive.primal_scores(q, by_e), naive.primal_scores(k, by_r)
        side_e, side_r = e, naive.primal_scores(mk, by_r)
    y = naive.primal_output(
        e, r, layer.concat.weight, layer.concat.bias, layer.out_proj.weight, layer.out_proj.bias
    )
    ell = torch.nn.functional.softplus(layer.lam)
    # the two sides may have different lengths: the objective is a sum of their energies
    objective = naive.ksvd_objective(side_e, side_e[:, :, :1] * 0, ell, w_e, w_r)
    objective = objective + naive.ksvd_objective(side_r, side_r[:, :, :1] * 0, ell, w_e * 0, w_r)
    return y, objective.mean(1).square().mean()


def _naive_layer(layer, x, key_mask=None):
    """Return output and loss of the default layer in one call of the textbook."""
    maps = {
        name: (getattr(layer, name).weight, getattr(layer, name).bias)
        for name in ("q_proj", "k_proj", "concat", "out_proj")
    }
    codes, ell = (layer.w_e, layer.w_r), torch.nn.functional.softplus(layer.lam)
    return naive.primal_layer(
        x, codes=codes, ell=ell, num_samples=layer.num_samples, key_mask=key_mask, **maps
    )


@each("masked", [False, True])
@each("n", [1, 3, 19, 20, 60])
@each("rank, bias", [(2, True), (4, True), (2, False), (4, False)])
def test_the_default_layer_is_the_naive_layer(n, masked, rank, bias):
    layer, x = _layer(rank=rank, bias=bias), _randn(3, n, 8).requires_grad_()
    keep = None
    if masked:
        keep = torch.rand(3, n) < 0.6
        keep[0], keep[1] = True, False  # a full and an empty sequence
    y, aux = layer(x, key_mask=keep, return_aux=True)
    expected, loss = _naive_layer(layer, x, keep)
    assert_close(y, expected, atol=1e-10, rtol=1e-10)
    assert_close(aux.loss, loss, atol=1e-10, rtol=1e-10)
    leaves, probe = [x, *layer.parameters()], torch.randn_like(y)
    for got, truth in ((y * probe, expected * probe), (aux.loss, loss)):
        by_layer, by_book = (
            torch.autograd.grad(t.sum(), leaves, retain_graph=True, materialize_grads=True)
            for t in (got, truth)
        )
        for a, b in zip(by_layer, by_book, strict=True):
            assert_close(a, b, atol=1e-9, rtol=1e-9)


@each("codes", ["basis", "table"])
@each("n", [7, 40])
def test_one_head_with_padding_has_gradients(codes, n):
    layer, x = PrimalAttention(16, 1, rank=3, codes=codes), torch.randn(2, n, 16)
    keep = torch.arange(n) < torch.tensor([[n], [n - 3]])
    (layer(x.requires_grad_(), key_mask=keep).sum() + ksvd_loss(layer)).backward()
    assert x.grad.isfinite().all()
    assert (x.grad[keep] != 0).any()


def test_the_first_product_is_at_most_five_frames_away(monkeypatch):
    layer, x = PrimalAttention(64, 4, rank=8), torch.randn(2, 50, 64)
    keep = torch.arange(50) < torch.tensor([[50], [31]])
    depths = []

    def counting(product):
        def call(*args, **kwargs):
            frame, depth = sys._getframe(1), 0
            while frame is not None:
                depth += frame.f_globals.get("__name__", "").startswith("primal_attention")
                frame = frame.f_back
            depths.append(depth)
            return product(*args, **kwargs)

        return call

    for name in ("bmm", "baddbmm", "mm", "matmul", "einsum"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    layer(x, key_mask=keep)
    assert 0 < depths[0] <= 5


SOURCES = [
    {"weights": "data"},
    {"weights": "data", "codes": "table"},
    {"weights": "static"},
    {"weights": "static", "decay": 0.7},
    {"weights": "dual"},
]
CALLS = [
    pytest.param(options, call, id="-".join([*map(str, options.values()), call]))
    for options in SOURCES
    for call in ("bidirectional", "causal", "cross")
    if not (call == "cross" and options["weights"] == "static")
]
SIZES = [(8, 2, 2), (8, 2, 4), (8, 2, 6), (6, 1, 3), (9, 3, 2)]
"""Width, heads and rank: below, at and above the head width, one head, odd head width."""


@pytest.mark.filterwarnings("ignore:static weights without is_causal")
@each("dim, num_heads, rank", SIZES)
@pytest.mark.parametrize(("options", "call"), CALLS)
def test_the_layer_is_the_textbook_in_values_and_gradients(options, call, dim, num_heads, rank):
    layer = _layer(dim, num_heads, rank=rank, **options)
    arguments = {"x": _randn(2, 7, dim).requires_grad_()}
    if call == "cross":
        arguments["context"] = _randn(2, 5, dim).requires_grad_()
    if call == "causal":
        arguments["is_causal"] = True
    tokens = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    leaves = tokens + [p for p in layer.parameters() if p.requires_grad]
    y, aux = layer(**arguments, return_aux=True)
    expected, loss = _textbook(layer, **arguments)
    assert_close(y, expected, atol=1e-10, rtol=1e-10)
    assert_close(aux.loss, loss, atol=1e-10, rtol=1e-10)
    probe = torch.randn_like(y)
    for got, truth in ((y * probe, expected * probe), (aux.loss, loss)):
        by_layer = torch.autograd.grad(got.sum(), leaves, retain_graph=True, allow_unused=True)
        by_book = torch.autograd.grad(truth.sum(), leaves, retain_graph=True, allow_unused=True)
        for a, b, leaf in zip(by_layer, by_book, leaves, strict=True):
            a, b = (torch.zeros_like(leaf) if g is None else g for g in (a, b))
            assert_close(a, b, atol=1e-9, rtol=1e-9)


@each("n", [1, 3, 20, 60])
@each("is_causal", [False, True])
def test_parity_holds_shorter_and_longer_than_the_sample(n, is_causal):
    layer, x = _layer(rank=2), _randn(2, n, 8)
    y, aux = layer(x, is_causal=is_causal, return_aux=True)
    expected, loss = _textbook(layer, x, is_causal=is_causal)
    assert_close(y, expected, atol=1e-10, rtol=1e-10)
    assert_close(aux.loss, loss, atol=1e-10, rtol=1e-10)


@few
@given(
    n=st.integers(0, 30),
    b=st.integers(0, 3),
    rank=st.integers(1, 4),
    weights=st.sampled_from(["data", "dual"]),
    is_causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padding_is_invisible_for_any_mask(n, b, rank, weights, is_causal, seed):
    torch.manual_seed(seed)
    layer, x = _layer(rank=rank, weights=weights), _randn(b, n, 8)
    keep = torch.rand(b, n) < 0.6
    y, aux = layer(
        x.masked_fill(~keep[:, :, None], math.nan),
        key_mask=keep,
        is_causal=is_causal,
        return_aux=True,
    )
    assert (y[~keep] == 0).all()
    losses = []
    for i in range(b):
        alone = layer(x[i : i + 1, keep[i]], is_causal=is_causal, return_aux=True)
        assert_close(y[i, keep[i]], alone[0][0], atol=1e-10, rtol=1e-10)
        if keep[i].any():
            losses.append(alone[1].loss)
    expected = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
    assert_close(aux.loss, expected, atol=1e-10, rtol=1e-10)


# the worked example, through the whole layer


class _Fixed(nn.Module):
    """Returns the projections of the worked example, whatever comes in."""

    def __init__(self, rows):
        super().__init__()
        self.weight = torch.eye(2, dtype=torch.float64)
        self.rows = torch.tensor(rows, dtype=torch.float64)[None]

    def forward(self, x):
        return self.rows


def _golden(variant, **parameters):
    layer = PrimalAttention.reference(variant, 2, 1, rank=1, num_samples=3, dtype=torch.float64)
    layer.q_proj = _Fixed([[3, 4], [1, 0], [0, 2], [-1, 1]])
    layer.k_proj = _Fixed([[0, 1], [1, 1], [2, 0], [3, -4]])
    with torch.no_grad():
        for name, value in parameters.items():
            getattr(layer, name).copy_(torch.tensor(value).view_as(getattr(layer, name)))
        for module in (layer.concat, layer.out_proj):
            module.weight.copy_(torch.eye(2))
            module.bias.zero_()
    return layer


def test_t01_golden_example_through_the_bidirectional_layer():
    layer = _golden("uea", w_e=[1.0, -1.0, 0.5], w_r=[0.5, 1.0, 0.0], lam=[0.5])
    x = torch.tensor([[[1.0, 0], [2, 1], [0, -1], [1, 3]]], dtype=torch.float64)
    y, aux = layer(x, return_aux=True)
    e, r = [0.1, -0.5, 0.5, 0.70710678], [1.0, 2.47487373, 2.5, 0.7]
    assert_close(y[0].T, torch.tensor([e, r], dtype=torch.float64), atol=1e-7, rtol=0)
    assert aux.loss.item() == pytest.approx(0.93092346, abs=1e-7)
    assert layer.diagnose(x).objective.item() == pytest.approx(0.96484375, abs=1e-7)


def test_t01_golden_example_through_the_causal_layer():
    layer = _golden("d4rl", w_e=[1.0, 2.0], w_r=[-1.0, 1.0], lam=[0.5])
    y = layer(_randn(1, 4, 2), is_causal=True)
    e = [2.2, 2.12132034, 2.21880078, 2.23220936]
    r = [1.0, 0.44721360, -0.27735010, -1.26491106]
    assert_close(y[0].T, torch.tensor([e, r], dtype=torch.float64), atol=1e-7, rtol=0)


# who sees whom


def _influence(layer, n=6, **flags):
    """Return ``[output token, input token]``: whether any entry of the Jacobian is not zero."""
    x = _randn(1, n, 8)
    jacobian = torch.autograd.functional.jacobian(lambda t: layer(t, **flags), x)
    return (jacobian[0, :, :, 0] != 0).any(1).any(-1)


@each("weights", ["data", "static", "dual"])
def test_t07_causal_outputs_see_exactly_their_prefix(weights):
    seen = _influence(_layer(rank=3, weights=weights), is_causal=True)
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.filterwarnings("ignore:static weights without is_causal")
def test_t11_static_weights_without_order_see_only_themselves():
    layer = _layer(rank=3, weights="static")
    assert torch.equal(_influence(layer), torch.eye(6, dtype=torch.bool))
    x, order = _randn(2, 6, 8), torch.randperm(6)
    assert_close(layer(x[:, order]), layer(x)[:, order])


@each("weights", ["data", "dual"])
def test_t11_data_and_dual_weights_see_every_token(weights):
    assert _influence(_layer(rank=3, weights=weights)).all()


def test_t11_position_codes_tell_orders_apart_and_dual_weights_do_not():
    x, order = _randn(2, 6, 8), torch.tensor([3, 0, 5, 1, 4, 2])
    data, dual = _layer(rank=3), _layer(rank=3, weights="dual")
    assert (data(x[:, order]) - data(x)[:, order]).abs().max() > 1e-3
    assert_close(dual(x[:, order]), dual(x)[:, order])


def test_static_weights_without_order_warn():
    with pytest.warns(UserWarning, match="mix no tokens"):
        PrimalAttention(8, 2, weights="static")(torch.randn(1, 3, 8))


# symmetries


def _without_bias(layer):
    with torch.no_grad():
        for module in (layer.q_proj, layer.k_proj, layer.concat, layer.out_proj):
            module.bias.zero_()
    return layer


def _published(variant, **options):
    return _without_bias(
        PrimalAttention.reference(variant, 8, 2, rank=3, dtype=torch.float64, **options)
    )


@few
@given(scale=st.floats(0.01, 100), n=st.integers(1, 12))
def test_t12_published_data_weights_are_even_and_homogeneous(scale, n):
    layer, x = _published("uea", num_samples=5), _randn(2, n, 8)
    y = layer(x)
    assert_close(layer(-x), y, atol=1e-10, rtol=1e-10)
    assert_close(layer(scale * x), scale * y, atol=1e-10, rtol=1e-10)


@few
@given(scale=st.floats(0.01, 100), n=st.integers(1, 12))
def test_t12_published_causal_layers_are_odd_and_scale_free(scale, n):
    layer, x = _published("d4rl"), _randn(2, n, 8)
    y = layer(x, is_causal=True)
    assert_close(layer(-x, is_causal=True), -y, atol=1e-10, rtol=1e-10)
    assert_close(layer(scale * x, is_causal=True), y, atol=1e-10, rtol=1e-10)


@few
@given(scale=st.floats(0.01, 100))
def test_t12_the_default_layer_does_not_see_the_scale_of_its_input(scale):
    layer, x = _layer(rank=3, bias=False), _randn(2, 9, 8)
    y, aux = layer(x, return_aux=True)
    scaled, other = layer(scale * x, return_aux=True)
    assert_close(scaled, y, atol=1e-6, rtol=1e-6)
    assert_close(other.loss, aux.loss, atol=1e-6, rtol=1e-6)


def test_cross_scores_depend_on_the_context_alone():
    layer, context = _layer(rank=3), _randn(1, 6, 8)
    x = _randn(1, 5, 8)
    alone = torch.cat([layer(x[:, i : i + 1], context) for i in range(5)], dim=1)
    assert_close(layer(x, context), alone)


@each("weights", ["data", "dual"])
@each("length", [0, 1, 7, 200])
def test_a_remembered_context_answers_as_the_context_itself(weights, length):
    layer, x, context = (
        _layer(rank=3, weights=weights).eval(),
        _randn(3, 5, 8),
        _randn(3, length, 8),
    )
    keep = torch.rand(3, length) < 0.7
    context[~keep] = float("nan")
    memory = layer.remember(context, key_mask=keep)
    assert_close(layer.recall(x, memory), layer(x, context, key_mask=keep))
    assert_close(memory.seen, keep.sum(1))
    assert memory.numel == 3 * (2 * 8 * 3 + 1)
    chosen = torch.tensor([2, 2])
    assert_close(
        layer.recall(x[chosen], memory.reorder(chosen)),
        layer(x[chosen], context[chosen], key_mask=keep[chosen]),
    )


def test_a_context_is_not_remembered_where_it_has_no_meaning():
    with pytest.raises(ValueError, match="cannot attend to a context"):
        _layer(rank=3, weights="static").remember(_randn(1, 4, 8))
    layer = _layer(rank=3)
    with pytest.raises(ValueError, match="same batch size"):
        layer.recall(_randn(2, 1, 8), layer.remember(_randn(1, 4, 8)))
    with pytest.raises(ValueError, match="comes from init_state or step; pass one from remember"):
        layer.recall(_randn(1, 1, 8), layer.init_state(1))
    with pytest.raises(ValueError, match="comes from remember; pass one from init_state or step"):
        layer.step(_randn(1, 1, 8), layer.remember(_randn(1, 4, 8)))


# adapters and hooks


@each("rank", [3, 4])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "concat", "out_proj"])
def test_a_wrapped_projection_is_called_not_bypassed(name, rank):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = _layer(rank=rank), _randn(2, 5, 8)
    plain = getattr(layer, name)
    doubled = Doubled(plain.in_features, plain.out_features, dtype=torch.float64)
    doubled.load_state_dict(plain.state_dict())
    expected = _layer(rank=rank)
    expected.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for parameter in getattr(expected, name).parameters():
            parameter.mul_(2)
    setattr(layer, name, doubled)
    for flags in ({}, {"is_causal": True}):
        assert_close(layer(x, **flags), expected(x, **flags))


@each("rank", [3, 4])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "concat", "out_proj"])
def test_hooks_on_projections_fire(name, rank):
    layer, calls = _layer(rank=rank), []
    getattr(layer, name).register_forward_hook(lambda *_: calls.append(name))
    layer(_randn(1, 4, 8))
    assert calls


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "concat", "out_proj"])
def test_hooks_of_backward_and_of_all_modules_fire(name):
    layer, calls, x = _layer(), [], _randn(1, 4, 8).requires_grad_()
    handle = getattr(layer, name).register_full_backward_pre_hook(lambda *_: calls.append(name))
    layer(x).sum().backward()
    assert calls == [name]
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *found: calls.append(found[0]))
    try:
        layer(x)
    finally:
        handle.remove()
    assert getattr(layer, name) in calls


def test_offloaded_weights_are_fetched():
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(_layer()).eval(), _randn(2, 5, 8)
    expected = model(x)
    assert_close(accelerate.cpu_offload(model)(x), expected)


# transforms of functions


@each("rank", [3, 4])
@each("weights", ["data", "dual"])
@each("is_causal", [False, True])
def test_function_transforms_see_through_the_layer(rank, weights, is_causal):
    layer, x = _layer(rank=rank, weights=weights), _randn(3, 7, 8)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        flags = {"is_causal": is_causal, "return_aux": True}
        y, aux = torch.func.functional_call(layer, parameters, (x,), flags)
        return y.square().sum() + aux.loss

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    for i in range(len(x)):
        layer.zero_grad()
        y, aux = layer(x[i : i + 1], is_causal=is_causal, return_aux=True)
        (y.square().sum() + aux.loss).backward()
        for name, parameter in layer.named_parameters():
            assert_close(each[name][i], parameter.grad)


# regulariser


@each("regularizer", ["ksvd", "kkt"])
def test_t17_a_zero_weight_gives_zero_gradients_not_none(regularizer):
    layer = _layer(rank=3, regularizer=regularizer)
    y, aux = layer(_randn(2, 6, 8), return_aux=True)
    (y.sum() + 0.0 * aux.loss).backward()
    assert torch.equal(layer.lam.grad, torch.zeros_like(layer.lam))


@each("regularizer", [None, "balance"])
def test_t17_lam_is_frozen_where_nothing_uses_it(regularizer):
    layer = _layer(rank=3, regularizer=regularizer)
    assert not layer.lam.requires_grad
    assert layer.capabilities.aux_loss == (regularizer is not None)


def test_lam_starts_between_a_tenth_and_one():
    ell = _layer(64, 2, rank=32).ell
    assert ell.min() > 0.1
    assert ell.max() < 1
    assert ell.std() > 0.2


@pytest.mark.parametrize("options", SOURCES, ids=lambda o: "-".join(map(str, o.values())))
@each("regularizer", ["ksvd", "kkt", "balance"])
def test_regularizers_are_scalars_that_reach_the_weights(options, regularizer):
    layer = _layer(rank=3, regularizer=regularizer, **options)
    is_causal = options["weights"] == "static"
    _, aux = layer(_randn(2, 6, 8), is_causal=is_causal, return_aux=True)
    assert aux.loss.shape == ()
    assert aux.loss >= 0
    aux.loss.backward()
    weight = layer.dual_e.weight if options["weights"] == "dual" else layer.w_e
    assert weight.grad.abs().sum() > 0


def test_causal_data_weights_have_no_kkt_residual():
    layer = _layer(rank=3, regularizer="kkt")
    with pytest.raises(ValueError, match="their kernel changes with every token"):
        layer(_randn(1, 5, 8), is_causal=True)
    with pytest.raises(ValueError, match="Call diagnose without is_causal"):
        layer.diagnose(_randn(1, 5, 8), is_causal=True)


# initialisation


@each("weights", ["data", "static"])
def test_directions_of_a_head_start_orthogonal_with_unit_frobenius_norm(weights):
    layer = _layer(16, 2, rank=4, weights=weights)
    for w in (layer.w_e, layer.w_r):
        gram = w.transpose(-1, -2) @ w
        assert_close(gram, (torch.eye(4, dtype=torch.float64) / 4).expand(2, 4, 4))


def test_the_basis_is_orthonormal_over_the_sampled_rows():
    basis = _layer(rank=3).basis
    assert basis.shape == (6, 30)
    assert_close(basis @ basis.T, torch.eye(6, dtype=torch.float64), atol=1e-12, rtol=0)


@each("codes", ["basis", "table"])
def test_no_parameter_depends_on_a_sequence_length(codes):
    layer = _layer(rank=2, codes=codes)
    before = {name: p.shape for name, p in layer.named_parameters()}
    for n in (1, 19, 20, 21, 500):
        layer(_randn(1, n, 8))
    assert before == {name: p.shape for name, p in layer.named_parameters()}


def test_a_smooth_code_suits_every_length():
    layer = _layer(rank=2)
    slow = torch.linspace(0, 3, 4001, dtype=torch.float64)
    signal = torch.stack([torch.sin(slow * (i + 1)) for i in range(8)], dim=-1)[None]
    coarse, fine = layer(signal[:, ::10]), layer(signal)
    assert (coarse - fine[:, ::10]).abs().max() < 0.05 * fine.abs().max()


# diagnostics


@each("codes", ["basis", "table"])
def test_diagnosed_singular_values_are_those_of_the_dense_kernel(codes):
    layer, x = _layer(rank=3, codes=codes), _randn(2, 12, 8)
    report = layer.diagnose(x)
    steps = torch.arange(30, dtype=torch.float64)
    w_e, _ = _codes(layer, steps if codes == "table" else (steps + 0.5) / 30)
    rows = _split(layer, _standardized(x[:, naive.even_indices(12, 30)]))
    phi_q = naive.cosine(_split(layer, layer.q_proj(x)))
    phi_k = naive.cosine(_split(layer, layer.k_proj(x)))
    if codes == "basis":
        rows = layer.basis @ rows
    kernel = phi_q @ rows.transpose(-1, -2) @ rows @ phi_k.transpose(-1, -2)
    assert_close(
        report.singular_values, torch.linalg.svdvals(kernel)[..., :4], rtol=1e-6, atol=1e-6
    )
    assert report.effective_rank.shape == (2, 2)
    assert w_e.shape == (2, 30, 3)


def test_a_layer_set_to_singular_directions_is_diagnosed_as_stationary():
    # one sequence, static weights: K = Φ_q Φ_kᵀ, ℓ² = n/σ, W_e = Φ_kᵀ H_r, W_r = Φ_qᵀ H_e
    layer, x = _layer(8, 1, rank=3, weights="static"), _randn(1, 20, 8)
    phi_q, phi_k = naive.cosine(layer.q_proj(x))[0], naive.cosine(layer.k_proj(x))[0]
    u, s, vt = torch.linalg.svd(phi_q @ phi_k.T)
    with torch.no_grad():
        layer.w_e.copy_(phi_k.T @ vt[:3].T)
        layer.w_r.copy_(phi_q.T @ u[:, :3])
        layer.lam.copy_((20 / s[:3]).sqrt().expm1().log())
    report = layer.diagnose(x)
    assert report.kkt.item() < 1e-18
    assert abs(report.objective.item()) < 1e-10
    assert report.balance.item() < 1e-18
    assert report.off_diagonality.item() < 1e-18
    assert_close(report.singular_values[0, 0], s[:8], rtol=1e-6, atol=1e-6)
    assert _layer(rank=3).diagnose(_randn(1, 20, 8)).kkt.min() > 0.3


def test_diagnostics_ignore_padding_and_gradients():
    layer, x = _layer(rank=3), _randn(1, 9, 8)
    keep = torch.tensor([[True] * 6 + [False] * 3])
    masked = layer.diagnose(x.masked_fill(~keep[:, :, None], math.nan), key_mask=keep)
    for a, b in zip(masked, layer.diagnose(x[:, :6]), strict=True):
        assert_close(a, b)
        assert not a.requires_grad


@pytest.mark.parametrize("options", SOURCES, ids=lambda o: "-".join(map(str, o.values())))
def test_diagnostics_exist_for_every_source_and_agree_with_the_loss(options):
    layer, x = _layer(rank=3, **options), _randn(3, 9, 8)
    # with duals, the causal scores are not those of one set of weights
    is_causal = options["weights"] == "static"
    report = layer.diagnose(x, is_causal=is_causal)
    assert all(field.isfinite().all() for field in report)
    _, aux = layer(x, is_causal=is_causal, return_aux=True)
    assert_close(report.objective.mean(1).square().mean(), aux.loss)


# constructor


@pytest.mark.raw
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"weights": "datta"}, "weights must be one of .* got 'datta'"),
        ({"codes": "fourier"}, "codes must be one of .* got 'fourier'"),
        ({"regularizer": "svd"}, "regularizer must be one of .* got 'svd'"),
        ({"decay": 0.9}, "decay needs weights='static'"),
        ({"weights": "static", "decay": 1.0}, "between 0 and 1"),
        ({"weights": "static", "decay": -0.5}, "between 0 and 1"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        PrimalAttention(16, 2, **options)


def test_a_rank_above_the_head_width_warns():
    with pytest.warns(UserWarning, match="at most 4 directions can be singular"):
        PrimalAttention(8, 2, rank=5)


def test_the_default_rank_fits_the_head():
    assert PrimalAttention(16, 4).rank == 4
    assert PrimalAttention(512, 8).rank == 32


def test_printing_shows_what_was_chosen():
    text = repr(PrimalAttention(16, 2, rank=3))
    assert "16, num_heads=2, rank=3, weights='data', codes='basis', regularizer='ksvd'" in text
    assert "decay=0.9" in repr(PrimalAttention(16, 2, weights="static", decay=0.9))


def test_state_sizes_are_those_promised():
    per_sequence = {"data": 2 * 16 * 3, "dual": 2 * 16 * 3, "static": 2 * 16}
    for weights, size in per_sequence.items():
        state = PrimalAttention(16, 2, rank=3, weights=weights).init_state(5)
        assert state.numel == 5 * (size + 1)


# learning


def _accuracy(options, is_causal, steps=80):
    """Train on: the first token carries a bit, every later token must tell it."""
    torch.manual_seed(0)
    layer = PrimalAttention(16, 2, rank=4, regularizer=None, **options)
    head, sign = nn.Linear(16, 1), torch.ones(16)
    sign[::2] = -1
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)

    def batch(size):
        bit = torch.randint(0, 2, (size, 1)).float()
        x = torch.randn(size, 8, 16)
        x[:, 0] = 3 * (2 * bit - 1) * sign
        return x, bit.expand(-1, 7)

    for _ in range(steps):
        x, bit = batch(64)
        logits = head(layer(x, is_causal=is_causal))[:, 1:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, bit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, bit = batch(1000)
    logits = head(layer.eval()(x, is_causal=is_causal))[:, 1:, 0]
    return ((logits > 0) == bit.bool()).float().mean().item()


@pytest.mark.filterwarnings("ignore:static weights without is_causal")
def test_t26_token_mixing_layers_learn_what_other_tokens_say():
    for weights, is_causal in itertools.product(("data", "dual"), (False, True)):
        assert _accuracy({"weights": weights}, is_causal) > 0.9
    assert _accuracy({"weights": "static"}, is_causal=True) > 0.9
    assert 0.45 < _accuracy({"weights": "static"}, is_causal=False) < 0.55


@each(
    "weights, is_causal",
    [("data", False), ("data", True), ("static", True), ("dual", False), ("dual", True)],
)
@each("autocast", [False, True])
def test_sums_over_many_tokens_fit_into_float16(weights, is_causal, autocast):
    n = 70_000  # more than the largest float16
    layer = PrimalAttention(8, 2, rank=2, weights=weights).eval()
    x = 0.1 * torch.randn(1, n, 8) + 5 * torch.randn(8)  # all alike: sums grow like n
    with torch.no_grad():
        expected = layer(x, is_causal=is_causal)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            if not autocast:
                layer, x = layer.half(), x.half()
            got = layer(x, is_causal=is_causal)
    assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
