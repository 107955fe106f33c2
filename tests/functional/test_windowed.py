"""Sums over windows are those of a dense mask, and parts join under one normaliser."""

import pytest
import torch

from primal_attention.functional.windowed import (
    PartialSums,
    join_sums,
    softmax_sums,
    window_sums,
)


def _dense(q, k, values, keep, reach):
    """Return the weighted sums with one explicit matrix of weights."""
    n, m = q.shape[2], k.shape[2]
    lag = torch.arange(m) - torch.arange(n)[:, None]
    allowed = keep[:, None, None] & (lag >= 0) & (lag <= reach)
    return torch.where(allowed, (q @ k.mT).exp(), 0.0) @ values


@pytest.mark.parametrize("n", [1, 31, 63, 100, 257])
@pytest.mark.parametrize("reach", [0, 1, 40, 130])
def test_window_sums_are_those_of_a_dense_mask(n, reach):
    q, k = torch.randn(2, 3, n, 4).double(), torch.randn(2, 3, n + reach, 4).double()
    values, keep = torch.randn(2, 3, n + reach, 5).double(), torch.rand(2, n + reach) > 0.3
    q, k, values = (t.requires_grad_() for t in (q, k, values))
    sums, level = window_sums(q, k, values, keep, reach)
    got, expected = level.exp() * sums, _dense(q, k, values, keep, reach)
    torch.testing.assert_close(got, expected)
    probe = torch.randn_like(got)
    mine, theirs = (torch.autograd.grad(y, [q, k, values], probe) for y in (got, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_without_keys_is_zero_beside_rows_with_keys():
    q, k, values = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.ones(1, 1, 3, 2)
    nothing = softmax_sums(q, k, values, torch.tensor([[False] * 3, [True] * 3]))
    assert torch.equal(join_sums([nothing])[0, 0], torch.tensor([[0.0], [1.0]]))
    # the level of nothing is below any other, so it takes no mass away
    tiny = PartialSums(torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 1), -1e20))
    assert torch.equal(join_sums([nothing, tiny]), torch.ones(1, 1, 2, 1))


@pytest.mark.parametrize("height", [-1e4, 0.0, 90.0, 1e6])
def test_parts_join_as_if_they_were_one_set_of_keys(height):
    q, k = torch.randn(1, 2, 3, 4).double(), torch.randn(1, 2, 9, 4).double()
    values = torch.cat([torch.randn(1, 2, 9, 5), torch.ones(1, 2, 9, 1)], dim=-1).double()
    every = torch.ones(3, 9, dtype=torch.bool)
    first = torch.arange(9) < 4
    parts = [softmax_sums(q, k, values, every & part) for part in (first, ~first)]
    raised = [PartialSums(p.sums, p.level + height) for p in parts]
    whole = (q @ k.mT).softmax(-1) @ values[..., :-1]
    torch.testing.assert_close(join_sums(raised), whole)
