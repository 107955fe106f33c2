"""Attention with times: every allowed combination keeps the contract, every other one is refused.

T numbers are those of the list of invariants of time features.
"""

import copy
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.cases import every_time
from tests.house.rows import each

from primal_attention.attention import (
    Rotary,
    TimeOptions,
    attention_entry,
    create_attention,
    list_attentions,
)
from primal_attention.attention.base import JOINED_TIME
from primal_attention.attention.time import Fusion
from primal_attention.kernels import TimeScaler

F64 = torch.float64
N = 9
KEEP = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0, 0]]).bool()


def _times(b=2, n=N):
    return torch.rand(b, n, dtype=F64).mul(3).cumsum(1)


def _modes(case):
    return [{}, {"is_causal": True}] if case.capabilities.causal else [{}]


def _decode(layer, x, times, sizes, key_mask=None):
    state, outputs = layer.init_state(x.shape[0]), []
    masks = [None] * len(sizes) if key_mask is None else key_mask.split(sizes, dim=1)
    pieces = zip(x.split(sizes, 1), times.split(sizes, 1), masks, strict=True)
    for tokens, when, keep in pieces:
        y, state = layer.step(tokens, state, times=when, key_mask=keep)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("name", list_attentions())
@each("fusion", get_args(Fusion))
def test_a_way_is_allowed_or_refused_with_the_reason_and_the_alternatives(name, fusion):
    allowed = attention_entry(name).capabilities.time
    assert allowed >= JOINED_TIME
    if fusion in allowed:
        assert create_attention(name, 16, 2, time=fusion).fusion == fusion
        return
    with pytest.raises(ValueError, match=f"{name} cannot use time='{fusion}': ") as caught:
        create_attention(name, 16, 2, time=fusion)
    for word in (*allowed, *list_attentions(time=fusion)):
        assert word in str(caught.value)


@every_time
def test_t12_nothing_in_a_padded_slot_reaches_output_or_gradient(time_case):
    layer = time_case.build().train()
    x, times = torch.randn(2, N, 16), _times()
    # NaN, infinity and a large number in turn
    turn = torch.arange(N) % 3
    poison = torch.tensor([float("nan"), float("inf"), 1e30], dtype=F64)[turn].expand(2, N)
    dirty = (
        torch.where(KEEP[:, :, None], x, poison.to(x.dtype)[:, :, None]),
        torch.where(KEEP, times, poison),
    )
    for flags in _modes(time_case):
        results = []
        for tokens, when in ((x, times), dirty):
            layer.zero_grad()
            torch.manual_seed(2)
            y = layer(tokens, times=when, key_mask=KEEP, **flags)
            y.square().sum().backward()
            grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
            results.append([y.detach(), *grads])
        for clean, poisoned in zip(*results, strict=True):
            assert poisoned.isfinite().all()
            assert torch.equal(clean, poisoned)


@every_time
def test_t12_appended_padding_changes_nothing(time_case):
    layer = time_case.build().eval()
    x, times = torch.randn(1, 6, 16), _times(1, 6)
    longer = torch.cat([x, torch.full((1, 5, 16), float("nan"))], dim=1)
    later = torch.cat([times, torch.tensor([[float("nan"), 1e30, 0.0, -1.0, 5.0]])], dim=1)
    keep = torch.arange(11)[None] < 6
    for flags in _modes(time_case):
        alone = layer(x, times=times, **flags)
        y = layer(longer, times=later, key_mask=keep, **flags)
        torch.testing.assert_close(y[:, :6], alone, atol=1e-6, rtol=1e-5)
        assert (y[:, 6:] == 0).all()


@every_time
def test_t13_no_output_depends_on_a_later_event(time_case):
    if not time_case.capabilities.causal:
        return
    layer = time_case.build().eval()
    x, times = torch.randn(2, 70, 16), _times(2, 70)
    y = layer(x, times=times, is_causal=True)
    x[:, 40:], times[:, 40:] = torch.randn(2, 30, 16) * 100, times[:, 40:] * 17
    assert torch.equal(layer(x, times=times, is_causal=True)[:, :40], y[:, :40])


@every_time
def test_t14_shifting_all_timestamps_changes_nothing(time_case):
    layer, scaler = time_case.build().eval(), TimeScaler(60.0)
    x, seconds = torch.randn(2, N, 16), 1.7e9 + 60 * _times()
    for flags in _modes(time_case):
        outputs = []
        for shift in (0.0, 86_400.0 * 777):
            stamps = seconds + shift
            if layer.fusion in JOINED_TIME:
                # general weights see the time itself: give elapsed times
                times = scaler(stamps, stamps[:, -1])
            else:
                times = scaler.scale(stamps)
            outputs.append(layer(x, times=times, **flags))
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@every_time
def test_t15_events_can_be_exchanged_where_order_plays_no_part(time_case):
    layer = time_case.build(dtype=F64).eval()
    inner = layer.inner
    ordered = getattr(getattr(inner, "core", None), "ordered", False)
    has_order = layer.capabilities.relative_position or time_case.name in ("primal", "linformer")
    if has_order or (ordered and time_case.name != "skyformer-learned"):
        return  # it knows the order of its tokens
    x, times, order = torch.randn(2, N, 16, dtype=F64), _times(), torch.randperm(N)
    times[:, 4] = times[:, 5]  # two events at the same time
    found = layer(x[:, order], times=times[:, order])
    torch.testing.assert_close(found, layer(x, times=times)[:, order])


@every_time
def test_t18_the_unit_of_time_changes_nothing(time_case):
    layer, x, hours = time_case.build().eval(), torch.randn(2, N, 16), _times()
    flags = _modes(time_case)[-1]
    outputs = [
        layer(x, times=TimeScaler(unit).scale(hours * unit), **flags) for unit in (1.0, 3600.0)
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:static weights without is_causal")
@every_time
def test_times_change_the_output(time_case):
    layer, x, times = time_case.build().eval(), torch.randn(2, N, 16), _times()
    flags = _modes(time_case)[-1]
    swapped = times[:, torch.randperm(N)]
    assert not torch.allclose(layer(x, times=times, **flags), layer(x, times=swapped, **flags))


@every_time
@each("sizes", [[1] * 12, [5, 1, 6], [0, 12]])
def test_decoding_equals_the_causal_forward(time_case, sizes):
    layer, x, times = time_case.build().eval(), torch.randn(3, 12, 16), _times(3, 12)
    if not time_case.capabilities.stateful:
        with pytest.raises(ValueError, match="cannot decode step by step"):
            layer.init_state(3)
        return
    y, state = _decode(layer, x, times, sizes)
    torch.testing.assert_close(y, layer(x, times=times, is_causal=True), atol=1e-6, rtol=1e-5)
    assert state.seen.tolist() == [12, 12, 12]


@every_time
def test_left_padded_prompts_decode_like_unpadded_ones(time_case):
    if not time_case.capabilities.stateful:
        return
    layer, x, times = time_case.build().eval(), torch.randn(1, 7, 16), _times(1, 7)
    nan = float("nan")
    padded = torch.cat([torch.full((1, 3, 16), nan), x], dim=1)
    when = torch.cat([torch.full((1, 3), nan, dtype=F64), times], dim=1)
    y, _ = _decode(layer, padded, when, [6, 1, 3], torch.arange(10)[None] >= 3)
    torch.testing.assert_close(
        y[:, 3:], layer(x, times=times, is_causal=True), atol=1e-6, rtol=1e-5
    )


@every_time
def test_gradients_match_finite_differences(time_case):
    layer = time_case.build(dtype=F64)
    x, times = torch.randn(1, 5, 16, dtype=F64), _times(1, 5)
    flags = _modes(time_case)[-1]
    names, values = zip(*layer.named_parameters(), strict=True)

    def outputs(x, *values):
        torch.manual_seed(2)
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (x,), {"times": times, **flags})

    leaves = [t.detach().clone().requires_grad_() for t in (x, *values)]
    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


@every_time
def test_every_parameter_receives_a_gradient(time_case):
    layer, flags = time_case.build().train(), _modes(time_case)[-1]
    arguments = {"times": _times(), **flags}
    if layer.capabilities.aux_loss:
        y, aux = layer(torch.randn(2, N, 16), return_aux=True, **arguments)
        (y.square().sum() + aux.loss).backward()
    else:
        layer(torch.randn(2, N, 16), **arguments).square().sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []
    assert all(p.grad.abs().max() > 0 for p in layer.features.parameters())


@every_time
def test_copies_and_files_agree(time_case, tmp_path):
    layer, twin = time_case.build().eval(), time_case.build(seed=1).eval()
    arguments = {"times": _times(), **_modes(time_case)[-1]}
    x = torch.randn(2, N, 16)
    save_file({k: v.contiguous() for k, v in layer.state_dict().items()}, tmp_path / "layer")
    twin.load_state_dict(load_file(tmp_path / "layer"))
    y = layer(x, **arguments)
    assert torch.equal(twin(x, **arguments), y)
    assert torch.equal(copy.deepcopy(layer)(x, **arguments), y)


@every_time
def test_half_precision_stays_close(time_case):
    layer, x = time_case.build().eval(), torch.randn(2, N, 16)
    arguments = {"times": _times() + 1000, **_modes(time_case)[-1]}
    y = layer(x, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x, **arguments).float(), y, atol=0.05, rtol=0.1)


@every_time
@each("n", [0, 1, 130])
def test_any_length_works(time_case, n):
    layer = time_case.build()
    for flags in _modes(time_case):
        y = layer(torch.randn(2, n, 16), times=_times(2, n), **flags)
        assert y.shape == (2, n, 16)


@every_time
def test_a_context_has_times_of_its_own_or_is_refused(time_case):
    layer, x, context = time_case.build().eval(), torch.randn(2, 4, 16), torch.randn(2, N, 16)
    arguments = {"times": _times(2, 4), "context_times": _times(), "key_mask": KEEP}
    if not layer.capabilities.cross:
        with pytest.raises(ValueError, match="cannot attend to a context"):
            layer(x, context, **arguments)
        return
    y = layer(x, context, **arguments)
    arguments["context_times"] = arguments["context_times"].masked_fill(~KEEP, float("nan"))
    assert torch.equal(layer(x, context, **arguments), y)
    arguments["context_times"] = arguments["context_times"] + 1
    assert not torch.allclose(layer(x, context, **arguments), y)
    with pytest.raises(ValueError, match="context_times is missing"):
        layer(x, context, times=_times(2, 4))


def test_what_times_exclude_is_refused_with_a_way_out():
    layer, x = create_attention("linear", 16, 2, time="product"), torch.randn(2, N, 16)
    with pytest.raises(ValueError, match="cannot attend to a context; use time='concat'"):
        layer(x, x, times=_times(), context_times=_times())
    with pytest.raises(ValueError, match="times take the place of positions"):
        layer(x, times=_times(), rotary=Rotary(*torch.randn(2, 1, N, 2)))


@each("fusion", get_args(Fusion))
def test_bad_times_are_refused_in_words(fusion):
    name = list_attentions(time=fusion)[-1]
    layer, x = create_attention(name, 16, 2, time=fusion), torch.randn(2, N, 16)
    with pytest.raises(ValueError, match=r"times is missing; .* times= of shape \(2, 9\)"):
        layer(x)
    with pytest.raises(ValueError, match=r"shape \(2, 9\), got torch.float64 \(2, 8\)"):
        layer(x, times=_times(2, 8))
    with pytest.raises(ValueError, match=r"floating point of shape \(2, 9\), got torch.int64"):
        layer(x, times=torch.zeros(2, N, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "time", "message"),
    [
        ("linear", TimeOptions("product", "log-gap"), "needs features with a stationary kernel"),
        ("linear", TimeOptions("rotary", "mercer"), "num_features must be|one free frequency"),
        ("linear", TimeOptions("rotary", num_features=4), "num_features must be 8, got 4"),
        ("softmax", TimeOptions("stationary-bias", "tgat"), "stationary kernel, got 'tgat'"),
        ("linear", TimeOptions("product", num_features=256), "8 · 256 = 2048 features"),
        ("primal-dual", TimeOptions("product", num_features=256), "more than 1024"),
    ],
)
def test_features_that_do_not_suit_are_refused_in_words(name, time, message):
    with pytest.raises(ValueError, match=message):
        create_attention(name, 16, 2, time=time)


def test_an_unknown_way_is_refused_in_words():
    with pytest.raises(ValueError, match=r"must be one of add, concat, concat-mlp, .* got 'sum'"):
        create_attention("linear", 16, 2, time="sum")


@pytest.mark.parametrize("features", ["bochner-normal", "mercer", "log-gap"])
def test_features_are_chosen_by_name(features):
    time = TimeOptions("concat", features, 14)
    layer = create_attention("linear", 16, 4, time=time)
    y = layer(torch.randn(2, N, 16), times=_times())
    assert y.shape == (2, N, 16)
    assert layer.features.num_features == 14
    assert layer.capabilities.deterministic == (features != "bochner-normal")


@pytest.mark.parametrize(
    ("name", "fusion"),
    [
        ("softmax", "stationary-bias"),
        ("linear", "product"),
        ("primal-dual", "rotary"),
        *(
            pytest.param(name, fusion, marks=pytest.mark.slow)
            for name, fusion in (
                ("softmax", "rotary"),
                *(("linear", f) for f in ("add", "concat", "concat-mlp", "rotary")),
                *(("primal-dual", f) for f in ("concat", "product")),
            )
        ),
    ],
)
def test_one_captured_program_serves_every_length(name, fusion):
    layer = create_attention(name, 16, 2, time=fusion).train()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for i, n in enumerate((7, 70)):
        keep = torch.arange(n) < torch.tensor([[n], [n - 3], [n // 2]])
        arguments = {"x": torch.randn(3, n, 16), "times": _times(3, n), "key_mask": keep}
        torch.manual_seed(2)
        expected = layer(**arguments)
        with torch._dynamo.config.patch(error_on_recompile=bool(i)):
            torch.manual_seed(2)
            torch.testing.assert_close(compiled(**arguments), expected, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()
