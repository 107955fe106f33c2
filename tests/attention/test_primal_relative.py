"""Primal-Attention with relative positions, and what it can do that neither parent can."""

from pathlib import Path

import pytest
import torch
from tests.house.rows import each
from torch.testing import assert_close

from primal_attention.attention import PrimalAttention, PrimalRelativeAttention
from primal_attention.attention.positions import RelativePosition
from primal_attention.functional import naive_toeplitz as naive
from primal_studies.core.relative import RelativeOptions, RelativeStudy


def layer(**options):
    torch.manual_seed(0)
    attn = PrimalRelativeAttention(16, 2, rank=3, window=3, **options).double().eval()
    with torch.no_grad():
        attn.position_e.table.normal_()
        attn.position_r.table.normal_()
    return attn


@each("is_causal", [False, True])
@each("masked", [False, True])
def test_the_layer_is_the_formula_in_values_and_gradients(is_causal, masked):
    attn = layer()
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(1, 9) > 0.4 if masked else torch.ones(1, 9, dtype=torch.bool)
    fast = attn(x, key_mask=keep if masked else None, is_causal=is_causal)[keep]
    slow = formula(attn, x[keep][None], is_causal)[0]
    assert_close(fast, slow)
    leaves, probe = [x, *attn.parameters()], torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad((fast * probe).sum(), leaves),
        torch.autograd.grad((slow * probe).sum(), leaves),
        strict=True,
    ):
        assert_close(a, b, atol=1e-8, rtol=1e-6)


def formula(attn, x, is_causal):
    """Return the layer's output, one pair of tokens at a time."""
    q, k = attn._split(attn.q_proj(x)), attn._split(attn.k_proj(x))
    scores = []
    for position, a, b, duals in (
        (attn.position_e, q, k, attn.dual_r),
        (attn.position_r, k, q, attn.dual_e),
    ):

        def weight(lag, position=position):
            return position.weight(torch.tensor(lag))

        h = attn._split(duals(x))
        scores.append(naive.primal_relative_scores(a, b, h, weight, is_causal))
    heads = attn.concat(torch.cat(scores, dim=-1))
    return attn.out_proj(attn._merge(heads))


def test_with_equal_weights_it_is_dual_tied_primal_attention():
    attn, x = layer(), torch.randn(2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        attn.position_e.table.zero_()
        attn.position_r.table.zero_()
    primal = PrimalAttention(16, 2, rank=3, weights="dual", regularizer=None).double().eval()
    state = {k: v for k, v in attn.state_dict().items() if not k.startswith("position")}
    primal.load_state_dict({**primal.state_dict(), **state})
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    for arguments in ({}, {"is_causal": True}, {"key_mask": keep}):
        assert_close(attn(x, **arguments), primal(x, **arguments), atol=1e-6, rtol=1e-5)


@each("m", [1, 4, 20])
def test_totals_are_the_sums_of_the_weights(m):
    position = RelativePosition(2, window=3, dtype=torch.float64)
    with torch.no_grad():
        position.table.normal_()
    at = torch.arange(12)
    lag = torch.arange(m) - at[:, None]
    expected = position.weight(lag).sum(-1)
    assert_close(position.totals(at[None], m)[0, ..., 0], expected)
    count = torch.full((1, 1), m)
    assert_close(position.totals(at[None], count)[0, ..., 0], expected)
    causal = torch.where(at - at[:, None] <= 0, position.weight(at - at[:, None]), 0.0).sum(-1)
    assert_close(position.totals(at[None], None)[0, ..., 0], causal)


def test_the_state_is_constant_and_steps_equal_the_causal_forward():
    attn, x = layer(), torch.randn(2, 30, 16, dtype=torch.float64)
    keep = torch.rand(2, 30) > 0.3
    state, outputs = attn.init_state(2), []
    for a, b in zip(x.split([7, 1, 2, 20], 1), keep.split([7, 1, 2, 20], 1), strict=True):
        y, state = attn.step(a, state, key_mask=b)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    for i in range(2):
        alone = attn(x[i : i + 1, keep[i]], is_causal=True)[0]
        assert_close(y[i, keep[i]], alone, atol=1e-10, rtol=1e-10)
    assert state.numel == attn.init_state(2).numel


def test_steps_are_finite_where_every_weight_so_far_vanishes():
    attn, x = layer().float(), torch.randn(1, 6, 16)
    with torch.no_grad():
        attn.position_e.table[:, 3] = -200  # of a token with itself
    state, outputs = attn.init_state(1), []
    for piece in x.split(1, 1):
        y, state = attn.step(piece, state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), attn(x, is_causal=True), atol=1e-5, rtol=1e-5)


def test_invalid_options_raise():
    with pytest.raises(ValueError, match="rank must be at least 1"):
        PrimalRelativeAttention(16, 2, rank=0)


@pytest.mark.slow
def test_relative_positions_solve_the_copy_that_plain_features_do_not():
    study = RelativeStudy()

    def accuracy(name):
        cell = {"part": "copy", "attention": name, "seed": 0, "steps": 600}
        return study.run(cell, RelativeOptions(), Path())["accuracy"]

    # spec 05 §6: 0.20 without positions in the weights, 1.00 with
    assert accuracy("primal-relative") > 0.9
    assert accuracy("kernelized") > 0.9
    assert accuracy("primal-dual") < 0.5
    assert accuracy("linear") < 0.5
