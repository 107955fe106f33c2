"""Adaptive layers: softmax while all fits, padding, shared heads of keys, decoding, diagnosis."""

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention import AdaptiveAttention, Rotary, create_attention
from primal_attention.functional.adaptive import adaptive_attention

F64 = torch.float64
SMALL = {"block": 4, "window": 1, "top": 2, "sinks": 3, "rank": 2, "exact": 0}
"""Reads 19 tokens exactly."""
OPTIONS = [
    SMALL,
    {"block": 3, "window": 0, "top": 1, "sinks": 0, "rank": 1, "exact": 0},
    {"block": 4, "window": 1, "top": 0, "sinks": 2, "rank": 1, "exact": 0},
    {"block": 4, "window": 0, "top": "auto", "error": 0.1, "sinks": 1, "exact": 0},
    {"block": 4, "window": 0, "top": 1, "sinks": 2, "rank": 1, "exact": 45},
]


def _layer(**options):
    torch.manual_seed(0)
    layer = AdaptiveAttention(16, 2, **options).double().eval()
    with torch.no_grad():  # sharper than a new layer, so that choices matter
        layer.q_proj.weight.mul_(4)
    return layer


def _decode(layer, x, sizes, keep=None):
    state, found = layer.init_state(len(x)), []
    masks = [None] * len(sizes) if keep is None else keep.split(sizes, 1)
    for piece, mask in zip(x.split(sizes, 1), masks, strict=True):
        y, state = layer.step(piece, state, key_mask=mask)
        found.append(y)
    return torch.cat(found, 1), state


@each("is_causal, dtype", [(c, t) for c in (False, True) for t in (F64, torch.float32)])
def test_s1_by_default_it_is_softmax_on_a_page_of_text(is_causal, dtype):
    layer = AdaptiveAttention(16, 2).to(dtype)
    softmax = create_attention("softmax", 16, 2).to(dtype)
    softmax.load_state_dict(layer.state_dict())
    reach = layer.core.plan.reach
    assert reach > 256
    x, keep = torch.randn(3, reach, 16, dtype=dtype), torch.rand(3, reach) > 0.3
    for flags in ({}, {"key_mask": keep}, {"key_mask": keep & False}):
        expected = softmax(x, is_causal=is_causal, **flags)
        torch.testing.assert_close(layer(x, is_causal=is_causal, **flags), expected)
    if not is_causal:
        torch.testing.assert_close(
            layer(x[:, :50], x, key_mask=keep), softmax(x[:, :50], x, key_mask=keep)
        )


@each("is_causal, options", [(c, o) for c in (False, True) for o in OPTIONS])
def test_a_padded_batch_is_its_sequences_also_around_the_reach(is_causal, options):
    layer = _layer(**options)
    reach = layer.core.plan.reach
    lengths = [0, 1, reach - 1, reach, reach + 1, reach + 2 * layer.core.plan.block, 60]
    x = torch.randn(len(lengths), 70, 16, dtype=F64)
    keep = torch.zeros(len(lengths), 70, dtype=torch.bool)
    for row, length in zip(keep, lengths, strict=True):  # anywhere in the sequence
        row[torch.randperm(70)[:length]] = True
    poisoned = torch.where(keep[:, :, None], x, torch.nan).requires_grad_()
    y = layer(poisoned, key_mask=keep, is_causal=is_causal)
    y.square().sum().backward()
    assert poisoned.grad.isfinite().all()
    for i, row in enumerate(keep):
        alone = x[i : i + 1, row].requires_grad_()
        expected = layer(alone, is_causal=is_causal)
        torch.testing.assert_close(y[i, row], expected[0])
        expected.square().sum().backward()
        torch.testing.assert_close(poisoned.grad[i, row], alone.grad[0])
        assert (y[i, ~row] == 0).all()


def test_s5_no_output_depends_on_a_later_token_of_its_block_or_group():
    layer, n = _layer(**SMALL), 130
    x = torch.randn(1, n, 16, dtype=F64)
    y = layer(x, is_causal=True)
    for t in range(17, n, 7):
        later = torch.cat([x[:, :t], 50 * torch.randn(1, n - t, 16, dtype=F64)], 1)
        assert torch.equal(layer(later, is_causal=True)[:, :t], y[:, :t])


@each("is_causal", [False, True])
def test_heads_of_keys_may_serve_several_heads_of_queries(is_causal):
    core = AdaptiveAttention(16, 2, **SMALL).core
    q = torch.randn(2, 6, 90, 8, dtype=F64, requires_grad=True)
    k, v = (torch.randn(2, 2, 90, 8, dtype=F64, requires_grad=True) for _ in range(2))
    found = core(q, k, v, is_causal=is_causal)
    repeated = (t.repeat_interleave(3, dim=1) for t in (k, v))
    expected = core(q, *repeated, is_causal=is_causal)
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(found)
    grads = [torch.autograd.grad((y * probe).sum(), (q, k, v)) for y in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@each(
    "options, sizes",
    [(o, s) for o in OPTIONS for s in ([1] * 90, [40, *[1] * 50], [90], [7, 33, 50])],
)
def test_s7_decoding_equals_the_forward_over_every_boundary(options, sizes):
    layer = _layer(**options)
    x = torch.randn(2, 90, 16, dtype=F64)
    y, state = _decode(layer, x, sizes)
    torch.testing.assert_close(y, layer(x, is_causal=True))
    assert state.seen.tolist() == [90, 90]


@each("top", [{"top": 1}, {"top": "auto", "error": 0.1}])
def test_s7_more_directions_than_keys_of_a_block_decode_alike_in_single_precision(top):
    layer = AdaptiveAttention(16, 2, block=3, window=1, sinks=1, rank=4, exact=0, **top)
    for _ in range(5):
        x = torch.randn(3, 40, 16)
        y, _ = _decode(layer, x, [1] * 40)
        torch.testing.assert_close(y, layer(x, is_causal=True), atol=1e-5, rtol=1e-4)


@each("options", OPTIONS)
def test_s7_sequences_of_different_length_decode_together(options):
    layer, n = _layer(**options), 110
    x, keep = torch.randn(3, n, 16, dtype=F64), torch.rand(3, n) > 0.2
    keep[0, :60], keep[1] = False, True
    sizes = [50, *[1] * 60]
    y, _ = _decode(layer, x.masked_fill(~keep[:, :, None], torch.nan), sizes, keep)
    torch.testing.assert_close(y, layer(x, key_mask=keep, is_causal=True))


def test_s7_a_step_does_not_copy_the_old_keys():
    layer = _layer(**SMALL)
    _, state = layer.step(torch.randn(1, 300, 16, dtype=F64), layer.init_state(1))
    _, after = layer.step(torch.randn(1, 1, 16, dtype=F64), state)
    before = {t.data_ptr() for t in state.tensors if t.numel()}
    shared = sum(t.numel() for t in after.tensors if t.data_ptr() in before)
    assert shared > 0.6 * after.numel


@each("options", OPTIONS)
def test_s8_cropped_and_reordered_states_continue_like_new_ones(options):
    layer, n = _layer(**options), 120
    x, keep = torch.randn(3, n, 16, dtype=F64), torch.rand(3, n) > 0.2
    keep[1] = True
    expected = layer(x, key_mask=keep, is_causal=True)
    _, state = _decode(layer, x, [50, *[1] * 70], keep)
    held = [t.clone() for t in state.tensors]
    for length in (119, 100, 57, 20, 2, 0):
        cropped = layer.core.crop(state, length)
        assert torch.equal(cropped.seen, keep[:, :length].sum(1))
        y, _ = layer.step(x[:, length:], cropped, key_mask=keep[:, length:])
        torch.testing.assert_close(y, expected[:, length:])
        beams = torch.tensor([2, 0, 0])
        y, _ = layer.step(x[beams, length:], cropped.reorder(beams), key_mask=keep[beams, length:])
        torch.testing.assert_close(y, expected[beams, length:])
    assert all(torch.equal(a, b) for a, b in zip(held, state.tensors, strict=True))


def test_a_crop_never_adds_tokens():
    layer = _layer(**SMALL)
    _, state = layer.step(torch.randn(1, 30, 16, dtype=F64), layer.init_state(1))
    for length in (31, -1):
        with pytest.raises(
            ValueError, match=f"between 0 and the 30 tokens of the state, got {length}"
        ):
            layer.core.crop(state, length)


def test_rotary_positions_turn_queries_and_keys_before_blocks_are_made():
    layer, n = _layer(**SMALL), 80
    angle = torch.arange(n, dtype=F64)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.02])
    rotary = Rotary(angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))
    x = torch.randn(1, n, 16, dtype=F64)
    q, k, v = (layer._split(p(x)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = adaptive_attention(rotary.turn(q), rotary.turn(k), v, layer.core.plan, is_causal=True)
    expected = layer.out_proj(layer._merge(heads))
    torch.testing.assert_close(layer(x, is_causal=True, rotary=rotary), expected)
    shares = layer.diagnose(x, is_causal=True, rotary=rotary)
    assert not torch.allclose(shares.mass, layer.diagnose(x, is_causal=True).mass)


@each("is_causal", [False, True])
def test_the_diagnosis_is_the_mean_over_real_queries(is_causal):
    layer = _layer(**SMALL)
    x, keep = torch.randn(2, 60, 16, dtype=F64), torch.rand(2, 60) > 0.3
    keep[0] = True
    found = layer.diagnose(x, key_mask=keep, is_causal=is_causal)
    for i, row in enumerate(keep):
        alone = layer.diagnose(x[i : i + 1, row], is_causal=is_causal)
        torch.testing.assert_close(found.mass[i], alone.mass[0])
        torch.testing.assert_close(found.spread[i], alone.spread[0])
    assert (found.mass > 0).all()
    fits = layer.diagnose(x[:, :15], is_causal=is_causal)
    assert (fits.mass == 0).all()
    assert (fits.spread == 0).all()


def test_training_learns_through_the_moments():
    torch.manual_seed(0)
    layer = AdaptiveAttention(8, 1, block=8, window=0, top=0, sinks=0, rank=2, exact=0)
    x = torch.randn(4, 64, 8)
    target = x.mean(1, keepdim=True).expand_as(x)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 0.02), []
    for _ in range(40):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@each(
    "options, message",
    [
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"rank": -1}, "rank must be at least 0, got -1"),
        ({"exact": -1}, "exact must be at least 0, got -1"),
        ({"sinks": -2}, "sinks must be at least 0, got -2"),
        ({"top": -1}, "top must be at least 0, got -1"),
        ({"top": "all"}, "top must be a number or 'auto', got 'all'"),
        ({"top": "auto"}, "error and top='auto' belong together"),
        ({"error": 0.1}, "error and top='auto' belong together"),
        ({"top": "auto", "error": 1.0}, "at least 0 and below 1, got 1.0"),
    ],
)
def test_options_without_meaning_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveAttention(16, 2, **options)
