"""Kernel attention with relative positions as a layer."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.attention import KernelizedAttention
from primal_attention.attention.positions import RelativePosition
from primal_attention.functional import naive_family
from primal_attention.functional import naive_toeplitz as naive

KINDS = [
    {"position": "window", "window": 3},
    {"position": "log"},
    {"position": "grid", "window": 2, "width": 4},
]


def layer(kind, **options):
    torch.manual_seed(0)
    built = KernelizedAttention(16, 2, num_features=8, **kind, **options).double().eval()
    with torch.no_grad():
        built.core.position.table.normal_()
    return built


def heads(attn, x):
    return [attn._split(p(x)) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda k: k["position"])
@each("is_causal", [False, True])
def test_the_core_is_the_dense_formula(kind, is_causal):
    attn, x = layer(kind, temperature=True), torch.randn(2, 9, 16, dtype=torch.float64)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    q, k, v = heads(attn, x)
    core = attn.core
    bias = lambda lag: core.position.weight(torch.tensor(lag)).log()  # noqa: E731
    expected = naive.kernelized_attention(
        core.map_features(q), core.map_features(k), v, bias, keep, is_causal
    )
    got = core(q, k, v, key_mask=keep, is_causal=is_causal)
    assert_close(got[0], expected[0])
    assert_close(got[1, :, :5], expected[1, :, :5])


def test_the_grid_weighs_row_and_column_lags():
    attn, x = layer(KINDS[2]), torch.randn(1, 11, 16, dtype=torch.float64)
    q, k, v = heads(attn, x)
    core, c = attn.core, attn.core.position.levels().exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)

    def weight(u, w):
        return c[:, min(max(u, -2), 2) + 2, min(max(w, -2), 2) + 2]

    sums = naive.grid_sums(core.map_features(q), core.map_features(k), v, weight, 4)
    assert_close(core(q, k, v[..., :-1]), sums[..., :-1] / sums[..., -1:])


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["position"])
def test_a_constant_table_is_linear_attention_and_constants_cancel(kind):
    attn, x = layer(kind), torch.randn(2, 20, 16, dtype=torch.float64)
    y = attn(x, is_causal=True)
    table = attn.core.position.table
    with torch.no_grad():
        table += 3
    assert_close(attn(x, is_causal=True), y, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        table.zero_()
    q, k, v = heads(attn, x)
    maps = attn.core.map_features
    for is_causal in (False, True):
        expected = naive_family.feature_attention(maps(q), maps(k), v, is_causal=is_causal)
        assert_close(attn.core(q, k, v, is_causal=is_causal), expected)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda k: k["position"])
def test_shifting_the_content_inside_padding_shifts_the_outputs(kind):
    attn, x = layer(kind), torch.randn(1, 30, 16, dtype=torch.float64)
    keep = torch.zeros(1, 30, dtype=torch.bool)
    keep[:, 4:15] = True
    moved, moved_keep = x.roll(9, 1), keep.roll(9, 1)
    y, z = attn(x, key_mask=keep), attn(moved, key_mask=moved_keep)
    assert_close(y.roll(9, 1), z, atol=1e-5, rtol=1e-5)


@each("is_causal", [False, True])
def test_a_masked_patch_does_not_move_the_others(is_causal):
    attn, x = layer(KINDS[2]), torch.randn(1, 11, 16, dtype=torch.float64)
    keep = torch.rand(1, 11) > 0.4
    q, k, v = heads(attn, x)
    core = attn.core
    at = torch.arange(11)
    rows, columns = (((t - t[:, None]).clamp(-2, 2) + 2) for t in (at // 4, at % 4))
    weights = (
        core.map_features(q)
        @ core.map_features(k).mT
        * core.position.levels().exp()[:, rows, columns]
    )
    weights = torch.where(keep[:, None, None, :], weights, 0.0)
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    expected = weights @ v / torch.where(total > 0, total, 1.0)
    expected = attn.out_proj(attn._merge(expected))[keep]
    assert_close(attn(x, key_mask=keep, is_causal=is_causal)[keep], expected)
    if is_causal:
        state, outputs = attn.init_state(1), []
        for a, b in zip(x.split([5, 1, 3, 2], 1), keep.split([5, 1, 3, 2], 1), strict=True):
            y, state = attn.step(a, state, key_mask=b)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1)[keep], expected)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda k: k["position"])
def test_steps_with_padding_anywhere_equal_the_run_without(kind):
    attn, x = layer(kind), torch.randn(2, 14, 16, dtype=torch.float64)
    keep = torch.rand(2, 14) > 0.4
    state, outputs = attn.init_state(2), []
    for a, b in zip(x.split([5, 1, 6, 2], 1), keep.split([5, 1, 6, 2], 1), strict=True):
        y, state = attn.step(a, state, key_mask=b)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    for i in range(2):
        alone = attn(x[i : i + 1, keep[i]], is_causal=True)[0]
        assert_close(y[i, keep[i]], alone, atol=1e-10, rtol=1e-10)
    grows = state.numel > attn.init_state(2).numel
    assert grows == (kind["position"] != "window")


def test_a_window_decodes_from_a_constant_state_far_beyond_it():
    attn, x = layer({"window": 8}), torch.randn(1, 150, 16, dtype=torch.float64)
    state, outputs = attn.init_state(1), []
    for piece in x.split(1, 1):
        y, state = attn.step(piece, state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), attn(x, is_causal=True), atol=1e-10, rtol=1e-10)
    assert state.numel == attn.init_state(1).numel


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["position"])
def test_gradients_of_table_and_temperature_match_finite_differences(kind):
    attn, x = layer(kind, temperature=True), torch.randn(1, 6, 16, dtype=torch.float64)
    core = attn.core
    names = ["position.table", "temperature"]

    def run(*values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(core, given, tuple(heads(attn, x)))

    inputs = tuple(core.get_parameter(n).detach().clone().requires_grad_() for n in names)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_the_log_table_has_one_knot_per_near_lag_and_is_constant_at_the_end():
    position = RelativePosition(1, "log", dtype=torch.float64)
    with torch.no_grad():
        position.table.copy_(torch.arange(299.0))
    near = position.weight(torch.arange(-16, 17))[0].log()
    assert_close(near.diff(), torch.ones(32, dtype=torch.float64))
    far = position.weight(torch.tensor([1000, 1001, 65536, 70000]))[0].log()
    assert 0 < far[1] - far[0] < 0.02
    assert far[2] == far[3]


def test_features_are_saved_and_redrawn_only_on_request():
    attn, x = layer(KINDS[0]), torch.randn(1, 6, 16, dtype=torch.float64)
    y = attn(x)
    twin = KernelizedAttention(16, 2, num_features=8, **KINDS[0]).double().eval()
    twin.load_state_dict(attn.state_dict())
    assert torch.equal(twin(x), y)
    attn.core.redraw_(torch.Generator().manual_seed(1))
    assert not torch.allclose(attn(x), y)


def test_invalid_options_raise():
    with pytest.raises(ValueError, match="position must be one of"):
        KernelizedAttention(16, 2, position="t5")
    with pytest.raises(ValueError, match="needs a width"):
        KernelizedAttention(16, 2, position="grid")
    with pytest.raises(ValueError, match="window must be at least 1"):
        KernelizedAttention(16, 2, window=0)
    with pytest.raises(ValueError, match="window is 8, but"):
        KernelizedAttention(16, 2, position="log", window=8)


@pytest.mark.raw
def test_a_numeric_temperature_raises():
    with pytest.raises(TypeError, match=r"must be True .* or False, got 0\.5"):
        KernelizedAttention(16, 2, temperature=0.5)
