"""A constant memory: softmax while it holds everything, and what far keys add beyond."""

import pytest
import torch

from primal_attention.attention import Rotary, create_attention
from primal_attention.attention.windowed import FavorFar, LearnedFar, WindowedCore

FAR = ["learned", "favor", "none"]


def heads(n, d=8, scale=1.0):
    return (scale * torch.randn(3, 2, 2, n, d, dtype=torch.float64)).unbind(0)


def softmax(q, k, v, is_causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    n = q.shape[2]
    if is_causal:
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("n", [1, 10, 40, 45])
def test_it_is_softmax_while_window_and_first_keys_hold_everything(far, n):
    core, (q, k, v) = WindowedCore(2, 8, 40, 5, far, dtype=torch.float64), heads(n, scale=3.0)
    torch.testing.assert_close(core(q, k, v, is_causal=True), softmax(q, k, v, True))
    if n <= 40:
        torch.testing.assert_close(core(q, k, v), softmax(q, k, v, False))


@pytest.mark.parametrize("far", FAR)
def test_beyond_that_it_is_not(far):
    core, (q, k, v) = WindowedCore(2, 8, 40, 5, far, dtype=torch.float64), heads(46)
    y, exact = core(q, k, v, is_causal=True), softmax(q, k, v, True)
    torch.testing.assert_close(y[:, :, :45], exact[:, :, :45])
    assert not torch.allclose(y[:, :, 45], exact[:, :, 45])


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_slot_for_every_key_is_softmax_at_any_length(is_causal):
    """Every key is its own cluster, so a query reads it with its own score."""
    q, k, v = heads(30)
    k = k[:1].expand(2, -1, -1, -1)
    core = WindowedCore(2, 8, 3, 1, "learned", 30, dtype=torch.float64)
    core.features.place_centers(k[0], torch.full((2,), 1e-4))
    torch.testing.assert_close(core(q, k, v, is_causal=is_causal), softmax(q, k, v, is_causal))


def test_many_random_features_approach_softmax():
    q, k, v = heads(30, scale=0.7)
    exact = softmax(q, k, v, True)
    errors = []
    for count in (8, 4096):
        generator = torch.Generator().manual_seed(0)
        core = WindowedCore(2, 8, 3, 1, "favor", count, generator=generator, dtype=torch.float64)
        errors.append(float((core(q, k, v, is_causal=True) - exact).norm() / exact.norm()))
    assert errors[1] < min(0.05, errors[0] / 5)


def test_without_far_keys_it_is_softmax_over_the_window_and_the_first_keys():
    q, k, v = heads(20)
    lag = torch.arange(20)[:, None] - torch.arange(20)
    keep = ((lag < 4) | (torch.arange(20) < 2)) & (lag >= 0)
    scores = (q @ k.mT / 8**0.5).masked_fill(~keep, -torch.inf)
    for far in FAR:
        core = WindowedCore(2, 8, 4, 2, far, dtype=torch.float64)
        core.reads_far = False
        torch.testing.assert_close(core(q, k, v, is_causal=True), scores.softmax(-1) @ v)
        y, state = core.step(q, k, v, core.init_state(k[:, :, :0], v[:, :, :0]))
        torch.testing.assert_close(y, scores.softmax(-1) @ v)
        assert state.tensors[4].abs().sum() == 0


@pytest.mark.parametrize("far", FAR)
def test_huge_scores_near_or_far_give_neither_overflow_nor_a_lost_row(far):
    for near_scale, far_scale in ((1e3, 1.0), (1.0, 1e3), (1e3, 1e3)):
        q, k, v = heads(50)
        k = torch.cat([far_scale * k[:, :, :40], near_scale * k[:, :, 40:]], dim=2)
        core = WindowedCore(2, 8, 5, 1, far, dtype=torch.float32)
        q, k, v = (t.float().requires_grad_() for t in (q, k, v))
        y = core(q, k, torch.ones_like(v), is_causal=True)
        torch.testing.assert_close(y, torch.ones_like(y))
        core(q, k, v, is_causal=True).sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("far", FAR)
def test_the_state_does_not_grow_and_holds_what_the_page_says(far):
    layer = create_attention(
        "window-linear", 16, 2, window=6, sinks=3, far=far, num_features=5
    ).eval()
    _, state = layer.step(torch.randn(1, 300, 16), layer.init_state(1))
    p = 0 if far == "none" else 5
    assert state.numel == 1 + 2 * (2 * 8 * (6 + 3) + p * (8 + 2))
    assert layer.init_state(1).numel == state.numel


def test_rotary_positions_reach_near_and_far_keys():
    layer = create_attention("window-linear", 16, 2, window=4, sinks=1, num_features=4).eval()
    x = torch.randn(2, 30, 16)
    angle = torch.arange(30.0)[None, :, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    rotary = Rotary(angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))
    y, state = layer(x, is_causal=True, rotary=rotary), layer.init_state(2)
    assert not torch.allclose(y, layer(x, is_causal=True))
    parts = []
    for at in range(0, 30, 10):
        now = Rotary(*(t[:, at : at + 10] for t in rotary))
        part, state = layer.step(x[:, at : at + 10], state, rotary=now)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0; raise it"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"num_features": 0}, "num_features must be at least 1"),
        ({"far": "primal"}, "one of learned, favor, none, got 'primal'"),
    ],
)
@pytest.mark.raw
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create_attention("window-linear", 16, 2, **options)


def test_print_shows_the_options():
    shown = str(create_attention("window-linear", 16, 2, window=8, sinks=2, num_features=6))
    assert "window=8, sinks=2, far='learned'" in shown
    assert "num_features=6" in shown


def test_a_seed_gives_the_same_features():
    for kind, far in ((LearnedFar, "learned"), (FavorFar, "favor")):
        cores = [
            WindowedCore(2, 8, 4, 1, far, 6, generator=torch.Generator().manual_seed(5))
            for _ in range(2)
        ]
        assert all(isinstance(core.features, kind) for core in cores)
        first, second = (core.features.state_dict() for core in cores)
        assert all(torch.equal(first[name], second[name]) for name in first)
