"""The registered attention that starts at counts."""

import pytest
import torch

from primal_attention.analysis.counts import (
    DistributionalAttention,
    attention_from_counts,
    normalize_rows,
    split_directions,
)

F64 = torch.float64


# the identity: one-hot tokens and factors of counts are count attention
def test_one_hot_tokens_and_full_rank_are_count_attention(positive):
    table = torch.eye(30, 32, dtype=F64)
    layer, explained = attention_from_counts(positive, table, 1)
    assert explained == pytest.approx(1)
    ids = torch.tensor([[3, 1, 4, 15, 9, 2, 6, 5]])
    q, k = (layer._split(p(table[ids])) for p in (layer.q_proj, layer.k_proj))
    m = positive.forward.toarray()[ids[0]][:, ids[0]]
    torch.testing.assert_close(
        layer.core.weights(q, k)[0, 0].detach(), torch.from_numpy(normalize_rows(m))
    )
    # the module on token numbers, through the layer's own values
    exact = DistributionalAttention(positive, dtype=F64)
    expected = layer.out_proj(exact.weights(ids) @ layer.v_proj(table[ids]))
    torch.testing.assert_close(layer(table[ids]), expected)


def test_heads_have_the_directions_in_turn(positive):
    table = torch.eye(30, 40, dtype=F64)
    layer, _ = attention_from_counts(positive, table, 4, rank=3, weighting=None)
    whole = DistributionalAttention(positive, rank=12, dtype=F64)
    ids = torch.tensor([[3, 1, 4, 15, 9]])
    q, k = (layer._split(p(table[ids])) for p in (layer.q_proj, layer.k_proj))
    for h, head in enumerate(whole.heads(4)):
        torch.testing.assert_close(layer.core.weights(q, k)[:, h].detach(), head.weights(ids))
    assert split_directions(torch.arange(6.0)[None], 3).tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_a_narrow_embedding_fits_in_part_and_training_goes_on(positive):
    torch.manual_seed(0)
    layer, explained = attention_from_counts(positive, torch.randn(30, 8), 2)
    assert 0.1 < explained < 0.9
    layer(torch.randn(1, 4, 8)).square().sum().backward()
    assert layer.core.direction.grad.abs().sum() > 0


def test_wrong_sizes_are_named(positive):
    with pytest.raises(ValueError, match="31 rows for 30 words"):
        attention_from_counts(positive, torch.zeros(31, 8), 2)
    with pytest.raises(ValueError, match="from 1 to 3"):
        attention_from_counts(positive, torch.zeros(30, 8), 2, rank=4)
