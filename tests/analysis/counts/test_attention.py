"""Count attention: exact, of low rank, at the edges, trained."""

import copy
import itertools

import numpy as np
import pytest
import torch

from primal_attention.analysis.counts import (
    Cooccurrence,
    DistributionalAttention,
    normalize_rows,
    position_terms,
    select,
)
from primal_attention.ksvd.solvers import dense_svd, feature_svd

EXACT = {"dtype": torch.float64}


def sequences(n=30, count=4, length=9, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, n, (count, length)))


def exact_weights(counts, ids):
    return torch.from_numpy(np.stack([normalize_rows(counts[np.ix_(row, row)]) for row in ids]))


# T2: the central identity
@pytest.mark.parametrize("directional", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context_smoothing": 0.75, "shift": 5},
        {"transform": "log"},
        {"transform": "counts"},
        {"transform": "probability"},
    ],
)
def test_normalized_counts_are_a_softmax_of_pmi_with_key_bias(positive, directional, options):
    attention = DistributionalAttention(positive, directional=directional, **options, **EXACT)
    counts = (positive.forward if directional else positive.symmetric).toarray()
    ids = sequences()
    torch.testing.assert_close(
        attention.weights(ids), exact_weights(counts, ids), rtol=0, atol=1e-12
    )


# T2 with pairs that never occur: their logit is −∞
def test_unseen_pairs_have_weight_zero_without_a_floor(sparse_counts):
    attention = DistributionalAttention(sparse_counts, pmi_min=-float("inf"), **EXACT)
    ids = sequences(50)
    expected = exact_weights(sparse_counts.forward.toarray(), ids)
    assert (expected == 0).any()
    torch.testing.assert_close(attention.weights(ids), expected, rtol=0, atol=1e-12)
    # with the floor they are small
    floored = DistributionalAttention(sparse_counts, **EXACT).weights(ids)
    assert float(floored[expected == 0].min()) > 0
    without = DistributionalAttention(sparse_counts, key_bias=None, **EXACT).logits(ids)
    np.testing.assert_allclose(without[0], sparse_counts.transform("pmi")[np.ix_(ids[0], ids[0])])


# T9
def test_full_rank_is_exact_and_error_falls_with_rank(sparse_counts):
    counts = Cooccurrence.from_counts(sparse_counts.forward, smoothing=0.5)
    ids = sequences(50, count=60, length=8)
    exact = exact_weights(counts.forward.toarray() + 0.5, ids)
    distance = []
    for rank in (1, 10, 25, 40, 50):
        found = DistributionalAttention(counts, rank=rank, **EXACT).weights(ids)
        distance.append(float((found - exact).abs().sum(-1).mean() / 2))
    assert distance[-1] < 1e-8
    assert all(far > near for far, near in itertools.pairwise(distance))


# T9: queries, keys and bias alone
def test_low_rank_stores_tables_of_its_width(positive):
    attention = DistributionalAttention(positive, rank=4, **EXACT)
    shapes = {name: tuple(t.shape) for name, t in attention.state_dict().items()}
    assert shapes == {
        "query_table": (30, 4),
        "key_table": (30, 4),
        "key_bias": (30,),
        "values": (30, 4),
    }
    left, sigma, right = dense_svd(torch.from_numpy(positive.transform("pmi")), 4)
    torch.testing.assert_close(attention.query_table, left * sigma.sqrt())
    torch.testing.assert_close(attention.key_table, right * sigma.sqrt())
    torch.testing.assert_close(attention.values, left * sigma)


def test_output_is_the_mean_of_the_values(positive):
    ids = sequences()
    rows = DistributionalAttention(positive, **EXACT)
    found = rows(ids, return_weights=True)
    profile = normalize_rows(positive.forward.toarray())[ids]
    torch.testing.assert_close(found.output, found.weights @ torch.from_numpy(profile))
    torch.testing.assert_close(rows(ids), found.output)
    table = torch.randn(30, 3, dtype=torch.float64)
    own = DistributionalAttention(positive, values=table, **EXACT)
    torch.testing.assert_close(own(ids), found.weights @ table[ids])


# T1 through the module: a word does not attend to itself
def test_diagonal_of_zeros(example, positive):
    attention = DistributionalAttention(example, transform="counts", directional=False, **EXACT)
    words, weights = attention.attend("River bank flooded")
    assert words == ["river", "bank", "flooded"]
    torch.testing.assert_close(weights[2], torch.tensor([5 / 8, 3 / 8, 0], dtype=torch.float64))
    zero = positive.forward.toarray()
    np.fill_diagonal(zero, 0)
    ids = torch.tensor([[3, 5, 3, 7]])
    found = DistributionalAttention(positive, diag="zero", **EXACT).weights(ids)
    torch.testing.assert_close(found, exact_weights(zero, ids))


# T10
def test_causal_padded_unknown_and_single_tokens(positive):
    attention = DistributionalAttention(positive, causal=True, **EXACT)
    ids = sequences(count=1, length=6)
    full = attention.weights(ids)
    assert (full.triu(1) == 0).all()
    torch.testing.assert_close(full.sum(-1), torch.ones(1, 6, dtype=torch.float64))
    for t in range(1, 6):
        torch.testing.assert_close(attention.weights(ids[:, :t]), full[:, :t, :t])

    plain = DistributionalAttention(positive, positional="inverse-distance", **EXACT)
    padded = torch.tensor([[4, 999, 7, -5, 2]])
    keep = torch.tensor([[True, False, True, False, True]])
    real = plain.weights(torch.tensor([[4, 7, 2]]))
    found = plain.weights(padded, key_mask=keep)
    torch.testing.assert_close(found[:, ::2, ::2], real)
    assert float(found[:, 1::2].abs().sum() + found[..., 1::2].abs().sum()) == 0
    assert (plain(padded, key_mask=keep)[:, 1::2] == 0).all()

    unknown = DistributionalAttention(positive, **EXACT).weights(torch.tensor([[-1, 5, 30]]))
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(unknown[0, 0], third)
    torch.testing.assert_close(unknown[0, 2], third)
    assert unknown[0, 1].tolist() == [0, 1, 0]
    for diag in ("keep", "zero"):
        alone = DistributionalAttention(positive, diag=diag, **EXACT)
        assert alone.weights(torch.tensor([[8], [-1]])).tolist() == [[[1.0]], [[1.0]]]
    assert (attention.weights(ids, key_mask=torch.zeros(1, 6, dtype=torch.bool)) == 0).all()
    assert attention(torch.tensor([[-1, -1]])).isfinite().all()


# T10: words of the vocabulary that the corpus never has
def test_words_without_counts_are_unknown():
    counts = Cooccurrence.from_counts([[0, 2, 0], [2, 1, 0], [0, 0, 0]])
    for options in ({}, {"rank": 2}, {"transform": "counts"}):
        found = DistributionalAttention(counts, **options, **EXACT)
        weights = found.weights(torch.tensor([[0, 1, 2]]))[0]
        assert weights.isfinite().all()
        assert weights[2].tolist() == [1 / 3, 1 / 3, 1 / 3]
        assert (weights[:2, 2] == 0).all()
        assert found(torch.tensor([[0, 1, 2]])).isfinite().all()


def test_distance_divides_the_weights(positive):
    ids = sequences()
    far = DistributionalAttention(positive, positional="inverse-distance", **EXACT)
    away = (torch.arange(9)[:, None] - torch.arange(9)).abs().clamp_min(1)
    expected = DistributionalAttention(positive, **EXACT).weights(ids) / away
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(far.weights(ids), expected)
    learned = DistributionalAttention(positive, positional="learned", **EXACT)
    torch.testing.assert_close(learned.weights(ids), expected)
    assert [name for name, _ in learned.named_parameters()] == ["distance_bias"]
    with torch.no_grad():
        learned.distance_bias[64 + 2] += 50  # the key two places later
    assert (learned.weights(ids)[:, range(7), range(2, 9)] > 0.99).all()


def test_temperature_is_a_power_of_the_weights(positive):
    ids = sequences()
    plain = DistributionalAttention(positive, **EXACT).weights(ids)
    cold = DistributionalAttention(positive, temperature=0.5, **EXACT).weights(ids)
    torch.testing.assert_close(cold, plain**2 / (plain**2).sum(-1, keepdim=True))


def test_cross_attention_selects_queries_and_keys(positive):
    attention = DistributionalAttention(positive, **EXACT)
    ids, context = sequences(length=3), sequences(length=5, seed=1)
    counts = torch.from_numpy(positive.forward.toarray())
    m = counts[ids[:, :, None], context[:, None, :]]
    torch.testing.assert_close(attention.weights(ids, context), m / m.sum(-1, keepdim=True))
    assert attention(ids, context).shape == (4, 3, 30)
    with pytest.raises(ValueError, match="no order"):
        DistributionalAttention(positive, causal=True).weights(ids, context)


# T12
def test_frozen_attention_has_no_parameters_and_trained_one_learns(positive):
    assert not list(DistributionalAttention(positive).parameters())
    assert not list(DistributionalAttention(positive, rank=4).parameters())
    attention = DistributionalAttention(positive, rank=4, trainable=True, **EXACT)
    frozen = DistributionalAttention(positive, rank=4, **EXACT)
    ids = sequences()
    torch.testing.assert_close(attention(ids), frozen(ids))
    target = torch.randn(4, 9, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (attention(ids) - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    names = {name for name, p in attention.named_parameters() if p.grad.abs().sum() > 0}
    assert names == {"query_table", "key_table", "key_bias", "values"}
    assert losses[-1] < 0.8 * losses[0]


# T12: −∞ and rows without keys must not send NaN backwards
def test_gradients_are_finite_at_the_edges(sparse_counts):
    attention = DistributionalAttention(
        sparse_counts, transform="counts", trainable=True, diag="zero", temperature=0.1, **EXACT
    )
    ids = torch.tensor([[0, 0, 49, -1], [3, 2, 1, 0]])
    keep = torch.tensor([[True, True, True, True], [True, False, False, True]])
    attention(ids, key_mask=keep).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


def test_module_survives_copies_and_state_dicts(positive):
    attention = DistributionalAttention(positive, rank=3, trainable=True)
    ids = sequences()
    torch.testing.assert_close(copy.deepcopy(attention)(ids), attention(ids))
    other = DistributionalAttention(positive, rank=3, transform="ppmi", trainable=True)
    other.load_state_dict(attention.state_dict())
    torch.testing.assert_close(other(ids), attention(ids))


# logits of heads add up, their weights do not
def test_heads_share_the_singular_directions(positive):
    whole = DistributionalAttention(positive, rank=6, key_bias=None, **EXACT)
    heads = whole.heads(3)
    ids = sequences()
    torch.testing.assert_close(sum(head.logits(ids) for head in heads), whole.logits(ids))
    mean = sum(head.weights(ids) for head in heads) / 3
    assert (mean - whole.weights(ids)).abs().max() > 1e-3
    assert [head.rank for head in heads] == [2, 2, 2]
    with pytest.raises(ValueError, match="a multiple of their number; rank is 6"):
        whole.heads(4)


# the sequence kernel in O(n k²), without the n × n matrix
def test_kernel_tools_see_the_sequence(positive):
    attention = DistributionalAttention(positive, rank=5, **EXACT)
    kernel = attention.as_kernel()
    ids = sequences(count=1, length=40)[0]
    phi_q, phi_k = kernel.query_features(ids), kernel.key_features(ids)
    k_seq = attention.logits(ids[None])[0] - attention.key_bias[ids]
    torch.testing.assert_close(kernel(ids, ids), k_seq)
    torch.testing.assert_close(k_seq @ k_seq.T, phi_q @ (phi_k.T @ phi_k) @ phi_q.T)
    torch.testing.assert_close(
        feature_svd(phi_q, phi_k, 5).singular_values, dense_svd(k_seq, 5).singular_values
    )
    biased = attention.as_kernel(key_bias=True)
    torch.testing.assert_close(biased(ids, ids), attention.logits(ids[None])[0])
    # mixtures of words: positions
    exact = DistributionalAttention(positive, **EXACT).as_kernel()
    p = np.random.default_rng(0).random((40, 30))
    q = select(ids.numpy(), 30)
    expected = position_terms(positive.transform("pmi"), q, p).combine()
    rows = torch.from_numpy(q + p)
    np.testing.assert_allclose(exact(rows, rows), expected, rtol=1e-10)


def test_one_line_from_a_corpus():
    texts = ["the river bank flooded", "the bank gave a loan"]
    attention = DistributionalAttention.from_corpus(texts, str.split, top_k=5, rank=2)
    assert len(attention.words) == 5
    assert attention.weights(attention.encode(["the", "river", "x"])).shape == (1, 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": "counts", "rank": 3}, "negative entries.*softmax"),
        ({"transform": "log", "key_bias": "unigram"}, "twice"),
        ({"key_bias": "bigram"}, "key_bias must be"),
        ({"transform": "sqrt"}, "transform must be one of"),
        ({"positional": "rotary"}, "positional must be one of"),
        ({"diag": "drop"}, "diag must be one of"),
        ({"temperature": 0}, "temperature must be"),
        ({"values": "svd"}, "needs rank="),
        ({"values": "mean"}, "values must be"),
        ({"values": torch.zeros(3, 2)}, "one row for each of 50 words"),
        ({"transform": "log", "rank": 2}, "infinite values"),
        ({"rank": 51}, "rank is 51"),
    ],
)
def test_wrong_options_are_named(sparse_counts, options, message):
    with pytest.raises(ValueError, match=message):
        DistributionalAttention(sparse_counts, **options)


def test_wrong_masks_and_kernels_are_named(sparse_counts):
    attention = DistributionalAttention(sparse_counts, pmi_min=-float("inf"))
    with pytest.raises(ValueError, match="key_mask has shape"):
        attention(torch.zeros(1, 3, dtype=torch.long), key_mask=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="infinite values"):
        attention.as_kernel()
