"""Shares, chance and lift on attentions that are given."""

import pytest
import torch

from primal_attention.analysis.flow import FlowDetails, SampleFlow, average_shares, modality_flow

TEXT, IMAGE = 8, 49
IDS = torch.tensor([0] * TEXT + [1] * IMAGE)
N = TEXT + IMAGE


def random_attention(b=3, h=2, n=N, scale=2.0):
    return torch.softmax(scale * torch.randn(b, h, n, n, dtype=torch.float64), -1)


def by_hand(weights, ids, count):
    """Return received shares and IMF of one sample, token by token."""
    sums = torch.zeros(count, count, dtype=torch.float64)
    for i, a in enumerate(ids.tolist()):
        for j, c in enumerate(ids.tolist()):
            sums[a, c] += weights[:, i, j].mean()
    crossing = sum(sums[a, c] for a in range(count) for c in range(count) if a != c)
    return sums / sums.sum(1, keepdim=True), crossing / sums.sum()


def test_shares_are_those_counted_token_by_token():
    attention, ids = random_attention(2, 3, 9), torch.tensor([[0] * 4 + [1] * 3 + [2] * 2] * 2)
    found = modality_flow([attention, attention.flip(0)], ids)
    want = [by_hand(sample, ids[0], 3) for sample in attention]
    torch.testing.assert_close(found.flow[0], (want[0][0] + want[1][0]) / 2, atol=1e-10, rtol=0)
    torch.testing.assert_close(found.imf[0], (want[0][1] + want[1][1]) / 2, atol=1e-10, rtol=0)
    torch.testing.assert_close(found.flow[1], found.flow[0], atol=1e-10, rtol=0)
    # head by head, and the mean of heads is the whole
    alone = modality_flow(attention[:, 1:2], ids)
    torch.testing.assert_close(found.by_head[0, 1], alone.flow[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(found.by_head[0].mean(0), found.flow[0], atol=1e-10, rtol=0)


def test_rows_sum_to_one_and_imf_and_intra_add_up():  # F1
    found = modality_flow(random_attention(), IDS)
    torch.testing.assert_close(found.flow.sum(-1), torch.ones(1, 2).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(found.chance.sum(-1), torch.ones(1, 2).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(found.imf + found.intra, torch.ones(1).double())


def test_uniform_attention_has_the_imf_of_token_counts_and_lift_one():  # F2
    found = modality_flow([torch.full((2, 2, N, N), 1 / N, dtype=torch.float64)], IDS)
    assert float(found.imf) == pytest.approx(2 * TEXT * IMAGE / N**2, abs=1e-10)
    assert float(found.flow[0, 0, 1]) == pytest.approx(IMAGE / N, abs=1e-10)
    assert round(float(found.flow[0, 0, 1]), 2) == 0.86  # 8 words beside 49 image tokens
    torch.testing.assert_close(found.lift, torch.ones(1, 2, 2).double(), atol=1e-10, rtol=0)
    assert float(found.imf_lift) == pytest.approx(1, abs=1e-10)
    assert float(found.imf_chance) == pytest.approx(float(found.imf), abs=1e-10)


@pytest.mark.parametrize("same", [True, False])
def test_block_diagonal_attention_crosses_not_and_cross_attention_completely(same):  # F3
    allowed = (IDS[:, None] == IDS) == same
    attention = (allowed / allowed.sum(1, keepdim=True)).expand(2, 2, -1, -1)
    found = modality_flow([attention], IDS)
    assert float(found.imf) == pytest.approx(0.0 if same else 1.0, abs=1e-10)
    # the chance level counts all tokens, whatever has weight zero
    assert float(found.chance[0, 0, 1]) == pytest.approx(IMAGE / N, abs=1e-10)


def test_order_inside_a_modality_does_not_matter():  # F4
    attention = random_attention()
    order = torch.cat([torch.randperm(TEXT), TEXT + torch.randperm(IMAGE)])
    turned = attention[:, :, order][..., order]
    first, second = modality_flow(attention, IDS), modality_flow(turned, IDS)
    torch.testing.assert_close(first.flow, second.flow, atol=1e-10, rtol=0)
    torch.testing.assert_close(first.imf, second.imf, atol=1e-10, rtol=0)


@pytest.mark.parametrize("weighting", ["attention", "energy"])
def test_padding_changes_nothing_even_if_it_is_nan(weighting):  # F5
    attention = random_attention(n=9)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])
    padded = torch.full((3, 2, 12, 12), torch.nan, dtype=torch.float64)
    where = torch.tensor([1, 2, 3, 4, 5, 7, 8, 9, 10])  # left, interior and right padding
    padded[:, :, where[:, None], where] = attention
    long = torch.full((12,), -1)
    long[where] = ids
    want = modality_flow(attention, ids, weighting=weighting)
    keep = (long >= 0).expand(3, -1)
    for found in (
        modality_flow(padded, long, weighting=weighting),
        modality_flow(padded, long.clamp_min(0), keep=keep, weighting=weighting),
    ):
        for name in ("flow", "lift", "chance", "imf", "by_head"):
            torch.testing.assert_close(
                getattr(found, name), getattr(want, name), atol=1e-10, rtol=0
            )


def test_swapped_labels_transpose_the_matrix():  # F6
    attention = random_attention()
    first, second = modality_flow(attention, IDS), modality_flow(attention, 1 - IDS)
    assert torch.equal(first.flow.flip(1, 2), second.flow)
    assert torch.equal(first.lift.flip(1, 2), second.lift)


def test_rollout_of_the_identity_stays_zero_and_of_uniform_layers_grows():  # F10
    eye = torch.eye(N).expand(2, 2, -1, -1)
    assert float(modality_flow([eye] * 4, IDS, mode="rollout").imf.abs().max()) < 1e-10
    uniform = torch.full((2, 2, N, N), 1 / N, dtype=torch.float64)
    found = modality_flow([uniform] * 6, IDS, mode="rollout")
    steps = 1 - 0.5 ** torch.arange(1, 7).double()  # ½(A + I) leaves half where it was
    torch.testing.assert_close(found.imf, steps * found.imf_chance, atol=1e-10, rtol=0)
    assert bool((found.imf.diff() > 0).all())


def test_rollout_is_the_product_of_the_matrices():
    layers = [random_attention(1, 2, 6), random_attention(1, 2, 6)]
    ids = torch.tensor([0, 0, 1, 1, 1, 1])
    product = torch.eye(6).double()
    for layer in layers:
        product = (layer[0].mean(0) + torch.eye(6)) / 2 @ product
    want, imf = by_hand(product[None], ids, 2)
    found = modality_flow(layers, ids, mode="rollout")
    torch.testing.assert_close(found.flow[1], want, atol=1e-10, rtol=0)
    assert float(found.imf[1]) == pytest.approx(float(imf), abs=1e-10)


def test_six_random_layers_approach_the_published_chance():
    # 2 of 7 tokens: chance 0.408; the numbers are those of six random layers
    ids = torch.tensor([0] * 4 + [1] * 10)
    layers = [random_attention(4, 2, 14, 0.3) for _ in range(6)]
    found = modality_flow(layers, ids, mode="rollout")
    assert float(found.imf_chance[0]) == pytest.approx(0.408, abs=5e-4)
    want = torch.tensor([0.21, 0.32, 0.36, 0.39, 0.40, 0.41]).double()
    assert float((found.imf - want).abs().max()) < 0.02


def test_a_modality_that_is_empty_in_some_samples_makes_no_nan():  # F11
    ids = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    attention = random_attention(n=6)
    for weighting in ("attention", "energy"):
        for mode in ("layer", "rollout"):
            found = modality_flow([attention], ids, weighting=weighting, mode=mode)
            for name in ("flow", "lift", "chance", "imf", "imf_chance", "imf_lift", "by_head"):
                assert bool(getattr(found, name).isfinite().all()), name
    # a row counts the samples that have it, and its shares still sum to one
    found = modality_flow([attention], ids)
    torch.testing.assert_close(found.flow.sum(-1), torch.ones(1, 3).double(), atol=1e-10, rtol=0)
    alone = modality_flow([attention[:1]], ids[:1]).flow[0, 2]
    torch.testing.assert_close(found.flow[0, 2], (alone + torch.tensor([0, 0, 1.0])) / 2)
    # a modality that no sample has: zero, and no lift
    never = modality_flow(attention, torch.tensor([0, 0, 1, 1, 1, 1]), names=["a", "b", "c"])
    assert not never.has_lift[0, 2].any()
    assert not never.flow[0, 2].any()


def test_samples_count_equally_whatever_their_length():
    long = SampleFlow(
        torch.tensor([[[90.0, 10.0], [0.0, 100.0]]]).double(), torch.ones(2, 2).double()
    )
    short = SampleFlow(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]).double(), torch.ones(2, 2).double())
    short = short._replace(expected=torch.tensor([[3.0, 1.0], [1.0, 1.0]]).double())
    found = average_shares([long, short])
    assert float(found.flow[0, 1]) == pytest.approx((0.1 + 1.0) / 2)
    assert float(found.lift[0, 1]) == pytest.approx((0.1 / 0.5 + 1.0 / 0.25) / 2)
    assert float(found.chance[0, 1]) == pytest.approx((0.5 + 0.25) / 2)


def test_chance_of_a_decoder_counts_what_each_row_can_see():
    n, ids = 6, torch.tensor([1, 1, 1, 0, 0, 0])  # an image prefix, then words
    uniform = torch.ones(n, n).double().tril()
    uniform = (uniform / uniform.sum(1, keepdim=True)).expand(1, 2, -1, -1)
    found = modality_flow([uniform], ids)
    want = (3 / 4 + 3 / 5 + 3 / 6) / 3
    assert float(found.chance[0, 0, 1]) == pytest.approx(want, abs=1e-10)
    assert float(found.lift[0, 0, 1]) == pytest.approx(1, abs=1e-10)
    assert not found.has_lift[0, 1, 0]  # the prefix cannot see the words
    energy = modality_flow([uniform], ids, weighting="energy")
    assert float(energy.lift[0, 0, 1]) == pytest.approx(1, abs=1e-10)


def test_special_tokens_are_a_modality_words_or_left_out():
    attention, ids = random_attention(1, 2, 6), torch.tensor([0, 0, 0, 1, 1, 1])
    special = torch.tensor([[True, False, False, False, False, False]])
    plain = modality_flow(attention, ids)
    as_text = modality_flow(attention, ids, special_ids=special, special="text")
    torch.testing.assert_close(as_text.flow, plain.flow)
    apart = modality_flow(attention, ids, special_ids=special)
    assert apart.names == ("text", "image", "special")
    third = modality_flow(attention, torch.tensor([2, 0, 0, 1, 1, 1]))
    torch.testing.assert_close(apart.flow, third.flow)
    dropped = modality_flow(attention, ids, special_ids=special, special="drop")
    rest = attention[..., 1:, 1:]
    want = modality_flow(rest / rest.sum(-1, keepdim=True), ids[1:])
    torch.testing.assert_close(dropped.flow, want.flow, atol=1e-10, rtol=0)
    torch.testing.assert_close(dropped.lift, want.lift, atol=1e-10, rtol=0)
    both = [attention, attention]
    rolled = modality_flow(both, ids, special_ids=special, special="drop", mode="rollout")
    rest = rest / rest.sum(-1, keepdim=True)
    want = modality_flow([rest, rest], ids[1:], mode="rollout")
    torch.testing.assert_close(rolled.flow, want.flow, atol=1e-10, rtol=0)
    # the verdict speaks of words and image only
    assert "special" not in apart.verdict()


def test_energy_and_gradient_weigh_as_they_say():
    attention, ids = random_attention(1, 2, 5), torch.tensor([0, 0, 1, 1, 1])
    energy = modality_flow(attention, ids, weighting="energy")
    want, imf = by_hand(attention[0].square(), ids, 2)
    torch.testing.assert_close(energy.flow[0], want, atol=1e-10, rtol=0)
    assert float(energy.imf) == pytest.approx(float(imf), abs=1e-10)
    slope = torch.randn_like(attention)
    found = modality_flow(
        attention, ids, weighting="gradient", details=FlowDetails(gradients=[slope])
    )
    want, _ = by_hand((attention * slope).clamp_min(0)[0], ids, 2)
    torch.testing.assert_close(found.flow[0], want, atol=1e-10, rtol=0)


def test_queries_after_a_cache_are_the_last_tokens():
    attention = random_attention(1, 2, 7).tril()
    attention = attention / attention.sum(-1, keepdim=True)
    ids = torch.tensor([1, 1, 1, 0, 0, 0, 0])
    found = modality_flow([attention[:, :, 4:]], ids)
    rows = attention[0, :, 4:, :3].sum(-1).mean()
    assert float(found.flow[0, 0, 1]) == pytest.approx(float(rows), abs=1e-10)
    want = (3 / 5 + 3 / 6 + 3 / 7) / 3
    assert float(found.chance[0, 0, 1]) == pytest.approx(want, abs=1e-10)


def test_a_weight_just_above_the_diagonal_is_not_causal():
    attention = random_attention(1, 1, 4).tril()
    attention[..., 1, 2] = 0.1
    found = modality_flow([attention], torch.tensor([0, 0, 1, 1]))
    assert float(found.chance[0, 0, 1]) == pytest.approx(0.5)


def test_layers_may_have_different_numbers_of_heads():
    found = modality_flow([random_attention(1, 2, 5), random_attention(1, 4, 5)], IDS[6:11])
    assert found.num_heads == (2, 4)
    assert found.by_head.shape == (2, 4, 2, 2)
    assert not found.by_head[0, 2:].any()


@pytest.mark.raw
def test_wrong_inputs_are_explained():
    attention, ids = random_attention(1, 2, 5), torch.tensor([0, 0, 1, 1, 1])
    for options, words in (
        ({"modality_ids": ids[:4]}, "has 4 tokens"),
        ({"modality_ids": ids * 0}, "one modality only"),
        ({"modality_ids": ids.double()}, "must be an integer tensor"),
        ({"modality_ids": ids, "weighting": "norm"}, "needs values"),
        ({"modality_ids": ids, "weighting": "gradient"}, "needs gradients="),
        ({"modality_ids": ids, "mode": "all"}, "mode must be one of"),
        ({"modality_ids": ids, "names": ["a"]}, "names must be 2"),
        ({"modality_ids": ids, "special_ids": [101]}, "boolean mask"),
    ):
        with pytest.raises(ValueError, match=words):
            modality_flow([attention], **options)
    with pytest.raises(ValueError, match="fused attention"):
        modality_flow([None], ids)
    with pytest.raises(ValueError, match="below zero"):
        modality_flow([attention - 0.5], ids)
    with pytest.raises(ValueError, match="There is no modality 'sound'"):
        modality_flow([attention], ids).direction("text", "sound")
