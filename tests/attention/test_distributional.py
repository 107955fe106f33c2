"""Softmax with a key bias: its start, its fit to tables, its positions."""

import pytest
import torch
from tests.house.rows import each

from primal_attention.attention import DistributionalTokenAttention, SoftmaxAttention
from primal_attention.attention.rotary import Rotary
from primal_attention.functional.naive_family import key_bias_attention
from primal_attention.surgery import SurgeryConfig, convert

F64 = torch.float64


def fitted(words=9, dim=12, rank=4, heads=2, *, bias=True):
    table = torch.eye(words, dim, dtype=F64)
    layer = DistributionalTokenAttention(dim, heads, bias=bias, dtype=F64)
    query, key = torch.randn(2, words, heads, rank, dtype=F64)
    key_bias = torch.randn(words, dtype=F64)
    explained = layer.fit_tables_(table, query, key, key_bias)
    return layer, table, (query, key, key_bias), explained


@each("bias", [True, False])
def test_one_hot_tokens_give_the_tables(bias):
    layer, table, (query, key, key_bias), explained = fitted(bias=bias)
    assert float(explained) == pytest.approx(1)
    ids = torch.tensor([[2, 0, 5, 5, 8]])
    q, k = (t[ids].transpose(1, 2) for t in (query, key))
    v = layer._split(layer.v_proj(table[ids]))
    b = key_bias[ids][:, None].expand(-1, 2, -1)
    # products of the tables are logits at temperature 1
    expected = layer.out_proj(layer._merge(key_bias_attention(q * q.shape[-1] ** 0.5, k, b, v)))
    torch.testing.assert_close(layer(table[ids]), expected)


def test_least_squares_prefers_frequent_words():
    torch.manual_seed(0)
    layer = DistributionalTokenAttention(4, 1, dtype=F64)
    table, query = torch.randn(30, 4, dtype=F64), torch.randn(30, 1, 3, dtype=F64)
    often = torch.ones(30)
    often[:3] = 1e6
    shares = []
    errors = []
    for frequency in (None, often):
        shares.append(
            float(layer.fit_tables_(table, query, query, query[:, 0, 0], frequency=frequency))
        )
        found = layer.k_proj(table)[:3, :3].detach()
        errors.append(float((found - query[:3, 0]).abs().max()))
    assert 0 < shares[0] < 0.5
    assert errors[1] < 1e-3 < 0.1 < errors[0]
    assert shares[1] > 0.99


def test_explained_share_is_that_of_the_residuals():
    torch.manual_seed(0)
    layer = DistributionalTokenAttention(4, 1, dtype=F64)
    table, query = torch.randn(30, 4, dtype=F64), torch.randn(30, 1, 3, dtype=F64)
    key, key_bias = torch.randn(30, 1, 3, dtype=F64), torch.randn(30, dtype=F64)
    found = float(layer.fit_tables_(table, query, key, key_bias))
    wanted = torch.cat([2 * query[:, 0], torch.zeros(30, 1), key[:, 0], key_bias[:, None]], 1)
    got = torch.cat([layer.q_proj(table), layer.k_proj(table)], 1).detach()
    residual, size = (got - wanted).square().sum(), (wanted - wanted.mean(0)).square().sum()
    assert found == pytest.approx(float(1 - residual / size))


def test_conversion_of_softmax_is_exact():
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = torch.nn.Sequential(theirs)
    x = torch.randn(2, 6, 16)
    expected = model(x)
    convert(model, SurgeryConfig("distributional"))
    found = [m for m in model.modules() if isinstance(m, DistributionalTokenAttention)]
    assert len(found) == 1
    torch.testing.assert_close(model(x), expected)


def test_it_starts_as_softmax_starts():
    torch.manual_seed(0)
    ours = DistributionalTokenAttention(16, 2)
    torch.manual_seed(0)
    theirs = SoftmaxAttention(16, 2)
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def angles(start, n=5, pairs=3):
    at = (start + torch.arange(n, dtype=F64)[:, None]) / 3 ** torch.arange(pairs, dtype=F64)
    return Rotary(*(f(at).repeat(1, 2)[None] for f in (torch.cos, torch.sin)))


def test_rotation_leaves_the_key_bias_alone():
    layer, table, _, _ = fitted()
    x = table[torch.tensor([[2, 0, 5, 5, 8]])]
    first, later = (layer(x, rotary=angles(start), is_causal=True) for start in (0, 7))
    # only differences of positions matter, to the products and to the bias
    torch.testing.assert_close(first, later)
    assert (first - layer(x, is_causal=True)).abs().max() > 1e-3
    state, rows = layer.init_state(1), []
    for t in range(5):
        y, state = layer.step(x[:, t : t + 1], state, rotary=angles(t, 1))
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), first)


def test_wrong_tables_are_named():
    layer = DistributionalTokenAttention(12, 2)
    wide = torch.zeros(9, 2, 6)
    with pytest.raises(ValueError, match="s at most 5"):
        layer.fit_tables_(torch.zeros(9, 12), wide, wide, torch.zeros(9))
    with pytest.raises(ValueError, match=r"must be \[words 12\]"):
        layer.fit_tables_(torch.zeros(9, 11), wide[..., :3], wide[..., :3], torch.zeros(9))
