"""The readable truth itself, against closed forms and torch's own functions."""

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive


def test_cosine_gives_unit_vectors_and_keeps_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert_close(naive.cosine(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@each(
    "length, num, expected",
    [(4, 3, [0, 1, 3]), (5, 1, [0]), (1, 3, [0, 0, 0]), (3, 5, [0, 0, 1, 1, 2]), (6, 2, [0, 5])],
)
def test_even_indices(length, num, expected):
    assert naive.even_indices(length, num) == expected


def test_softmax_attention_is_torchs():
    q, k, v = (torch.randn(2, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert_close(naive.softmax_attention(q, k, v), sdpa(q, k, v))
    assert_close(naive.softmax_attention(q, k, v, is_causal=True), sdpa(q, k, v, is_causal=True))
    keep = torch.tensor([[True] * 5, [True, True, False, True, False]])
    expected = sdpa(q, k, v, attn_mask=keep[:, None, None])
    assert_close(naive.softmax_attention(q, k, v, key_mask=keep), expected)


@each("attend", [naive.linear_attention, naive.softmax_attention])
def test_dense_attention_averages_values(attend):
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    ones = torch.ones(1, 2, 5, 1)
    keep = torch.tensor([[False, True, True, False, True]])
    assert_close(attend(q, k, ones), ones)
    assert_close(attend(q, k, ones, key_mask=keep), ones)
    seen = attend(q, k, ones, key_mask=keep, is_causal=True).flatten(0, 1)
    assert_close(seen[:, :, 0], torch.tensor([[0.0, 1, 1, 1, 1]]).expand(2, 5))


def test_prefix_means():
    x = torch.tensor([1.0, 3.0, 8.0])[None, None, :, None]
    assert naive.prefix_mean(x).flatten().tolist() == [1.0, 2.0, 4.0]
    assert naive.prefix_mean(x, 0.5).flatten().tolist() == [0.5, 1.75, 4.875]


def test_causal_dual_scores_of_one_token():
    q, k, h = torch.randn(1, 1, 1, 3), torch.randn(1, 1, 1, 3), torch.randn(1, 1, 1, 2)
    expected = torch.cosine_similarity(q, k, dim=-1)[..., None] * h
    assert_close(naive.causal_dual_scores(q, k, h), expected)


def test_causal_data_scores_scale_with_the_root_before_the_mean():
    q = torch.ones(1, 1, 6, 1)
    codes = torch.ones(1, 6, 1)
    scores = naive.causal_data_scores(q, q, codes, num_samples=4).flatten()
    steps = torch.arange(1.0, 7.0)
    assert_close(scores, torch.where(steps < 4, (4 / steps).sqrt(), 4 / steps) * steps)


def test_objective_of_orthonormal_scores():
    e = torch.eye(2)[None, None]
    lam, w = torch.tensor([[1.0, 2.0]]), torch.ones(1, 3, 2)
    objective = naive.ksvd_objective(e, e, lam, w, w)
    assert objective.item() == pytest.approx((1 + 4) / 2 / 2 * 2 - 6)


def test_valid_positions():
    assert naive.valid_positions(torch.tensor([False, True, True, False])).tolist() == [1, 2]
