"""The Gaussian kernel and exact attention with it: naive parity, offsets, spread, masks."""

import torch
from tests.functional.points import F64, draw, gradients, masks
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.functional import naive_nystrom as naive
from primal_attention.functional.gaussian import gaussian_attention, gaussian_gram
from primal_attention.functional.landmarks import kmeans_landmarks
from primal_attention.functional.nystrom import (
    nystrom_attention,
    windowed_nystrom,
)


def test_kernel_is_softmax_scores_normalized_from_both_sides():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k = draw(9, 7, d=8, dtype=dtype)
        a = torch.exp(q @ k.mT / 8**0.5)
        d_q, d_k = (torch.exp(t.square().sum(-1) / 8**0.5) for t in (q, k))
        expected = d_q[..., :, None] ** -0.5 * a * d_k[..., None, :] ** -0.5
        got = gaussian_gram(q * 8**-0.25, k * 8**-0.25)
        assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_gram_matches_naive_in_values_and_gradients():
    x, y = (t.requires_grad_() for t in draw(9, 7))
    fast, slow = gaussian_gram(x, y), naive.gaussian_gram(x, y)
    assert_close(fast, slow)
    for a, b in zip(gradients(fast, (x, y)), gradients(slow, (x, y)), strict=True):
        assert_close(a, b)
    assert torch.autograd.gradcheck(gaussian_gram, (x, y))


def test_gram_is_at_most_one_for_large_norms():
    x = torch.randn(1, 1, 50, 8) * 1e4
    gram = gaussian_gram(x, x)
    assert gram.isfinite().all()
    assert gram.max() <= 1


@each("normalize", [False, True])
@each("is_causal", [False, True])
@each("masked", [False, True])
@each("width", [3, 11])
def test_exact_attention_matches_naive_in_values_and_gradients(normalize, is_causal, masked, width):
    q, k = (t.requires_grad_() for t in draw(9, 9))
    v = torch.randn(2, 3, 9, width, **F64, requires_grad=True)
    keep = masks(2, 9) if masked else None
    fast = gaussian_attention(q, k, v, key_mask=keep, is_causal=is_causal, normalize=normalize)
    slow = naive.gaussian_attention(q, k, v, keep, is_causal, normalize)
    assert_close(fast, slow)
    for a, b in zip(gradients(fast, (q, k, v)), gradients(slow, (q, k, v)), strict=True):
        assert_close(a, b)


@each("normalize", [False, True])
def test_exact_attention_holds_for_rectangular_pairs_and_pair_masks(normalize):
    q, k, v = draw(6, 9, 9)
    pairs = torch.rand(2, 6, 9) > 0.4
    pairs[0, 2] = False
    weights = torch.where(pairs[:, None], naive.gaussian_gram(q, k), 0.0)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    assert_close(gaussian_attention(q, k, v, pair_mask=pairs, normalize=normalize), weights @ v)


def test_row_sums_range_from_zero_to_n_in_float32():
    # both ends of the range: no key near the query, and all keys at the query
    ones = torch.ones(1, 1, 4096, 1)
    x = torch.randn(1, 1, 1, 8).expand(-1, -1, 4096, -1)
    assert_close(gaussian_attention(x, x, ones), 4096 * ones, rtol=1e-5, atol=0)
    assert_close(gaussian_attention(x + 20, x, ones), 0 * ones)


@each("normalize", [False, True])
@each("is_causal", [False, True])
@each("masked", [False, True])
def test_an_offset_common_to_queries_and_keys_costs_no_accuracy(normalize, is_causal, masked):
    # points that float32 represents exactly at 3,000, so both precisions use the same points
    q, k = ((t * 1024).round() / 1024 for t in draw(50, 50, dtype=torch.float32))
    (v,) = draw(50, dtype=torch.float32)
    options = {"is_causal": is_causal, "normalize": normalize}
    keep = masks(2, 50) if masked else None
    got = gaussian_attention(q + 3000, k + 3000, v, key_mask=keep, **options)
    exact = naive.gaussian_attention(q.double(), k.double(), v.double(), keep, **options)
    assert_close(got.double(), exact, atol=1e-4, rtol=1e-4)


def test_an_offset_costs_no_accuracy_through_landmarks_and_in_windows_either():
    q, k, z = ((t * 1024).round() / 1024 for t in draw(50, 50, 8, dtype=torch.float32))
    v = torch.randn(2, 3, 50, 4)
    got = nystrom_attention(q + 3000, k + 3000, v, z + 3000, ridge=0.1)
    assert_close(got, nystrom_attention(q, k, v, z, ridge=0.1), atol=1e-4, rtol=1e-4)
    moved = kmeans_landmarks(k + 3000, z + 3000, steps=1) - 3000
    assert_close(moved, kmeans_landmarks(k, z, steps=1), atol=1e-3, rtol=0)
    expected = windowed_nystrom(q, k, v, z[0], window=7, ridge=0.1)
    pieces, state = [], None
    for i in range(0, 50, 5):
        t = slice(i, i + 5)
        given = (x[:, :, t] + 3000 for x in (q, k))
        y, state = windowed_nystrom(
            *given, v[:, :, t], z[0] + 3000, window=7, ridge=0.1, state=state
        )
        pieces.append(y)
    assert_close(torch.cat(pieces, dim=2), expected.values, atol=1e-4, rtol=1e-4)
    got = windowed_nystrom(q + 3000, k + 3000, v, z[0] + 3000, window=7, ridge=0.1).values
    assert_close(got, expected.values, atol=1e-4, rtol=1e-4)


@each("is_causal", [False, True])
@each("d", [8, 64, 128])
def test_spread_points_keep_weights_accurate_while_float32_can(d, is_causal):
    direction = torch.randn(1, 2, 200, d)
    x = 50 * direction / direction.norm(dim=-1, keepdim=True)
    near = x + 0.3 * torch.randn_like(x) / d**0.5
    ones = torch.ones(1, 2, 200, 1)
    got = gaussian_attention(x, near, ones, is_causal=is_causal)
    exact = naive.gaussian_attention(x.double(), near.double(), ones.double(), None, is_causal)
    assert_close(got.double(), exact, atol=0, rtol=1e-2)


@each("scale", [1e3, 1e4, 1e6])
@each("is_causal", [False, True])
def test_no_weight_exceeds_one_for_distant_points(scale, is_causal):
    # every point is near only itself, so each row sum is one weight
    x = (scale * torch.randn(1, 2, 200, 32)).requires_grad_()
    total = gaussian_attention(x, x, torch.ones(1, 2, 200, 1), is_causal=is_causal)
    assert total.max() <= 1.02
    total.sum().backward()
    assert x.grad.isfinite().all()
    # every point twice: each row has two equal weights
    pair = torch.cat([x, x], dim=2).detach()
    assert gaussian_attention(pair, pair, torch.ones(1, 2, 400, 1)).max() <= 2.04
