"""Adaptive sums: fast, dense and naive agree; what moments promise."""

import itertools

import pytest
import torch
from tests.house.rows import cover, each

from primal_attention.functional import (
    adaptive_chosen,
    adaptive_far,
    adaptive_keys,
    naive_adaptive,
)
from primal_attention.functional.adaptive import adaptive_attention, neglected_mass
from primal_attention.functional.adaptive_blocks import BlockPlan, block_moments
from primal_attention.functional.adaptive_dense import dense_adaptive

F64 = torch.float64
PLANS = [
    BlockPlan(block=4, window=1, top=3, sinks=2, rank=2, exact=0),
    BlockPlan(block=3, window=0, top=1, sinks=0, rank=1, exact=0),
    BlockPlan(block=2, window=2, top=2, sinks=3, rank=0, exact=0),
    BlockPlan(block=8, window=1, top=0, sinks=4, rank=3, exact=0),
    BlockPlan(block=5, window=2, top=2, sinks=7, rank=1, exact=0),
    BlockPlan(block=4, window=1, top=None, sinks=1, rank=2, error=0.1, exact=0),
    BlockPlan(block=3, window=0, top=None, sinks=0, rank=1, error=0.0, exact=0),
    BlockPlan(block=4, window=0, top=1, sinks=2, rank=2, exact=30),
    BlockPlan(block=3, window=1, top=None, sinks=1, rank=1, error=0.2, exact=20),
]
LENGTHS = [(131, 131), (42, 42), (7, 7), (1, 1), (41, 23), (5, 41), (200, 41), (41, 200), (0, 7)]
"""Numbers of queries and keys."""


def _heads(n, m, b=1, h=2, g=2, d=8, v=8, size=2.0):
    q = size * torch.randn(b, h, n, d, dtype=F64)
    k, values = size * torch.randn(b, g, m, d, dtype=F64), torch.randn(b, g, m, v, dtype=F64)
    return [t.requires_grad_() for t in (q, k, values)]


def _assert_same(found, expected, leaves):
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(expected)
    grads = [torch.autograd.grad((y * probe).sum(), leaves) for y in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def _softmax(q, k, v, is_causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


@each("plan, size, is_causal", cover(2, PLANS, LENGTHS, [False, True]))
def test_the_dense_sum_is_the_naive_one_in_values_gradients_and_neglected_mass(
    plan, size, is_causal
):
    n, m = (max(1, min(x, 60)) for x in size)
    q, k, v = _heads(m if is_causal else n, m, v=5)
    expected = naive_adaptive.adaptive_attention(q, k, v, is_causal=is_causal, **plan._asdict())
    found = dense_adaptive(q, k, v, plan, is_causal=is_causal)
    torch.testing.assert_close(found.mass, expected.mass)
    torch.testing.assert_close(found.spread, expected.spread)
    _assert_same(found.y, expected.y, (q, k, v))


@each(
    "plan, size, is_causal, width, masked",
    cover(3, PLANS, LENGTHS, [False, True], [8, 5, 13], [False, True]),
)
def test_the_fast_sum_is_the_dense_one_in_values_and_gradients(
    plan, size, is_causal, width, masked
):
    n, m = size if not is_causal else (size[1], size[1])
    q, k, v = _heads(n, m, b=2, h=4, v=width)
    keep = torch.arange(m) < torch.tensor([[m], [max(m // 2, 1)]]) if masked else None
    flags = {"key_mask": keep, "is_causal": is_causal}
    found = adaptive_attention(q, k, v, plan, **flags)
    expected = dense_adaptive(q, k, v, plan, **flags).y
    if masked and is_causal:  # rows of padding are never read
        found, expected = (torch.where(keep[:, None, :, None], y, 0.0) for y in (found, expected))
    _assert_same(found, expected, (q, k, v))


@each("is_causal, plan", [(c, p) for c in (False, True) for p in PLANS[:5]])
def test_s1_it_is_softmax_up_to_its_reach_and_no_further(is_causal, plan):
    for n in (1, plan.reach - 1, plan.reach):
        q, k, v = _heads(n, n)
        # the dense sum does not decide by the length
        for y in (
            adaptive_attention(q, k, v, plan, is_causal=is_causal),
            dense_adaptive(q, k, v, plan, is_causal=is_causal).y,
        ):
            _assert_same(y, _softmax(q, k, v, is_causal), (q, k, v))
    far = 2 * plan.reach + 3 * plan.block
    q, k, v = _heads(far, far)
    y = adaptive_attention(q, k, v, plan, is_causal=is_causal)
    assert not torch.allclose(y, _softmax(q, k, v, is_causal), atol=1e-4)


def test_s1_without_an_allowed_error_auto_is_softmax_at_every_length():
    plan = BlockPlan(block=4, window=1, top=None, sinks=1, rank=2, error=0.0, exact=0)
    q, k, v = _heads(90, 90)
    for is_causal in (False, True):
        found = adaptive_attention(q, k, v, plan, is_causal=is_causal)
        _assert_same(found, _softmax(q, k, v, is_causal), (q, k, v))


@each("error", [0.3, 0.1, 0.02])
def test_auto_leaves_no_more_than_the_allowed_share_of_the_estimated_mass(error):
    plan = BlockPlan(block=4, window=0, top=None, sinks=0, rank=2, error=error, exact=0)
    q, k, v = (t.detach() for t in _heads(120, 120, size=1.0))
    mass, _ = neglected_mass(q, k, v, plan)
    # reading a block replaces its estimate, so the share of some queries ends a little above
    assert 0.5 * error < mass.mean() < 1.1 * error
    none = neglected_mass(q, k, v, plan._replace(top=0))[0]
    assert none.mean() > 2 * error


def test_s3_the_mass_of_gaussian_keys_is_within_its_sampling_error():
    torch.manual_seed(1)
    count, d, misses, total = 4096, 6, 0, 0
    for _ in range(8):
        shape = torch.randn(d, d, dtype=F64) * 0.3
        k = torch.randn(count, d, dtype=F64) @ shape + torch.randn(d, dtype=F64)
        q = torch.randn(20, d, dtype=F64)
        found = block_moments(k, k, BlockPlan(block=count, sinks=0, rank=d))
        square = torch.einsum("nd,jsd->nj", q, found.axes * 0) + torch.einsum(
            "nd,jsd->njs", q, found.axes
        ).square().sum(-1)
        estimate = (q @ found.mean.T + square / 2).exp()[:, 0]
        scores = (q @ k.T).exp()
        error = scores.std(1) / count**0.5
        misses += int(((scores.mean(1) - estimate).abs() > 4 * error).sum())
        total += len(q)
    assert misses <= 0.05 * total
    # without the covariance it is not
    assert ((scores.mean(1) - (q @ found.mean.T).exp()[:, 0]).abs() > 4 * error).sum() > 10


def test_the_first_moment_is_exact_for_values_that_are_linear_in_gaussian_keys():
    torch.manual_seed(0)
    k = torch.randn(20_000, 3, dtype=F64) * torch.tensor([1.0, 0.5, 0.2])
    v = k @ torch.randn(3, 4, dtype=F64)
    q = 0.5 * torch.randn(5, 3, dtype=F64)
    found = block_moments(k, v, BlockPlan(block=len(k), sinks=0, rank=3))
    steps = torch.einsum("nd,jsd->njs", q, found.axes)[:, 0]
    estimate = found.value + steps @ found.slopes[0]
    expected = (q @ k.T).softmax(-1) @ v
    torch.testing.assert_close(estimate, expected, atol=0.05, rtol=0)
    assert not torch.allclose(found.value.expand_as(expected), expected, atol=0.05, rtol=0)


@each("num, finite", [(n, f) for n in (5, 130, 167, 400) for f in (0, 1, 3, 60, 400)])
def test_the_largest_scores_are_those_of_a_sort_and_none_is_found_twice(num, finite):
    for count in (1, 4, 5):
        x = torch.full((7, num), -torch.inf)
        for row in x:
            some = torch.randperm(num)[:finite]
            row[some] = torch.randn(len(some))
        values, places = adaptive_far._largest(x.clone(), count)
        torch.testing.assert_close(values.sort(-1).values, x.topk(count).values.flip(-1))
        for row, best, place in zip(x, values, places, strict=True):
            found = place[best > -torch.inf]
            assert torch.equal(row[found], best[best > -torch.inf])
            assert len(set(found.tolist())) == len(found)


@each("is_causal, plan", [(c, p) for c in (False, True) for p in PLANS[::2]])
def test_work_in_many_small_parts_gives_the_same_values_and_gradients(is_causal, plan, monkeypatch):
    for module, name, size in (
        (adaptive_keys, "_BLOCK_KEYS", 10),
        (adaptive_far, "_TILE", 100),
        (adaptive_far, "_GROUPS", 4),
        (adaptive_chosen, "_CHUNK", 4),
        (adaptive_chosen, "_CHUNKS", 3),
        (adaptive_chosen, "_PARTS", 50),
    ):
        monkeypatch.setattr(module, name, size)
    q, k, v = _heads(131, 131, h=2, g=1)
    found = adaptive_attention(q, k, v, plan, is_causal=is_causal)
    _assert_same(found, dense_adaptive(q, k, v, plan, is_causal=is_causal).y, (q, k, v))


def test_directions_beyond_the_rank_of_the_keys_are_zero_not_rounding():
    torch.manual_seed(0)
    for size, rank in ((3, 4), (16, 6)):  # two directions in both
        plan = BlockPlan(block=size, sinks=0, rank=rank)
        k = torch.randn(40 * size, 2) @ torch.randn(2, 8) + 3
        found = block_moments(k, torch.randn(40 * size, 5), plan)
        assert (found.axes[:, 2:].abs() < 1e-3 * found.axes[:, :1].norm(dim=-1)[..., None]).all()
        expected = block_moments(k.double(), torch.zeros(40 * size, 5, dtype=F64), plan)
        torch.testing.assert_close(found.axes.double(), expected.axes, atol=2e-3, rtol=1e-3)


@each("is_causal, plan", [(c, p) for c in (False, True) for p in PLANS])
def test_s4_the_neglected_mass_is_that_of_the_dense_sum(is_causal, plan):
    q, k, v = (t.detach() for t in _heads(131, 131, b=2, h=4))
    flags = {"key_mask": torch.arange(131) < torch.tensor([[131], [60]]), "is_causal": is_causal}
    mass, spread = neglected_mass(q, k, v, plan, **flags)
    dense = dense_adaptive(q, k, v, plan, **flags)
    for found, expected in ((mass, dense.mass), (spread, dense.spread)):
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1, :, :60], expected[1, :, :60])
    assert (mass[0, :, -1] > 0).all() or plan.error == 0
    assert (mass < 1).all()


def test_s4_the_spread_covers_the_error_of_the_mass():
    torch.manual_seed(3)
    q, k, v = (t.detach() for t in _heads(300, 300, size=1.0))
    plan = BlockPlan(block=30, window=0, top=0, sinks=0, rank=8, exact=0)
    mass, spread = neglected_mass(q, k, v, plan)
    near = (torch.arange(300)[:, None] // 30) == (torch.arange(300) // 30)
    weights = _softmax(q, k, torch.eye(300, dtype=F64), False)
    true = (weights * ~near).sum(-1)
    assert ((true - mass).abs() < 3 * spread).double().mean() > 0.95
    assert spread.mean() < 0.2


def test_s6_permuted_blocks_change_nothing_where_nothing_is_near():
    plan = BlockPlan(block=4, window=0, top=2, sinks=2, rank=2, exact=0)
    q, k, v = (t.detach() for t in _heads(6, 62))
    # queries of the sinks' block and of the first block have these near
    order = torch.cat(
        [torch.arange(6), 6 + (torch.randperm(14)[:, None] * 4 + torch.arange(4)).flatten()]
    )
    found = adaptive_attention(q, k[:, :, order], v[:, :, order], plan)
    expected = adaptive_attention(q, k, v, plan)
    torch.testing.assert_close(found, expected)
    inside = torch.cat([torch.arange(6), torch.randperm(56) + 6])
    moved = adaptive_attention(q, k[:, :, inside], v[:, :, inside], plan)
    assert not torch.allclose(moved, expected, atol=1e-3)


def test_s9_the_error_falls_with_the_number_of_blocks_and_ends_at_zero():
    n, errors = 160, []
    for top in (0, 1, 2, 4, 8, 16, 20):
        plan = BlockPlan(block=8, window=0, top=top, sinks=0, rank=2, exact=0)
        total = 0.0
        for seed in range(6):
            torch.manual_seed(seed)
            q, k, v = (t.detach() for t in _heads(n, n, size=1.7))
            expected = _softmax(q, k, v, False)
            y = adaptive_attention(q, k, v, plan)
            total += float((y - expected).square().mean().sqrt())
        errors.append(total)
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1e-12


@each("is_causal", [False, True])
def test_every_key_counts_once(is_causal):
    # equal keys and values: each block's estimate is exact, so is the sum if nothing counts twice
    q, v = torch.randn(1, 1, 90, 4, dtype=F64), torch.randn(1, 1, 90, 4, dtype=F64)
    k = torch.randn(1, 1, 1, 4, dtype=F64).expand(-1, -1, 90, -1).contiguous()
    blocks = v[:, :, 2:].unflatten(2, (22, 4)).mean(3, keepdim=True).expand(-1, -1, -1, 4, -1)
    v = torch.cat([v[:, :, :2], blocks.flatten(2, 3)], 2)
    for plan in (PLANS[0], PLANS[0]._replace(top=0), PLANS[0]._replace(top=None, error=0.4)):
        y = adaptive_attention(q, k, v, plan, is_causal=is_causal)
        torch.testing.assert_close(y, _softmax(q, k, v, is_causal), atol=1e-6, rtol=1e-6)


def test_far_scores_beyond_the_range_of_exp_stay_finite():
    q, k, v = (300 * t.detach().float() for t in _heads(150, 150))
    for is_causal in (False, True):
        y = adaptive_attention(q, k, v, PLANS[0], is_causal=is_causal)
        assert y.isfinite().all()
        assert (y.abs() <= 8 * v.abs().amax()).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_memory_of_forward_and_backward_is_linear(is_causal):
    from primal_attention.training.memory import PeakMemory

    peaks, plan = [], BlockPlan(block=16, window=1, top=2, sinks=2, rank=2, exact=0)
    for n in (1024, 4096):
        q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
        with PeakMemory() as memory:
            adaptive_attention(q, k, v, plan, is_causal=is_causal).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] < 5 * peaks[0]
