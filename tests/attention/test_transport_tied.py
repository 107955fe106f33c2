"""Attention that is an optimal map, and the Monge gap as a term of the loss."""

import copy

import pytest
import torch
from tests.house.rows import each
from torch import nn
from torch.testing import assert_close

from primal_attention.attention import MongeGapTerm, TiedSoftmaxAttention, create_attention
from primal_attention.functional.transport import (
    cost_matrix,
    monge_gap,
    optimal_assignment,
    pair_costs,
)
from primal_attention.models import EncoderClassifier, EncoderConfig

F64 = torch.float64


def matching(x, y):
    order = optimal_assignment(cost_matrix(x, y))
    return float((order == torch.arange(len(x))).double().mean())


def relative_gap(x, y):
    return float((monge_gap(x, y) / pair_costs(x, y).mean()).detach())


def one_head(x, form, value):
    """Return ``Σ_j softmax_j(xᵀ M x_j / τ) V x_j`` for every row of ``x``."""
    return (x @ form @ x.T / x.shape[1] ** 0.5).softmax(1) @ x @ value.T


def forms(d):
    root = torch.randn(d, d, dtype=F64)
    return {
        "random": torch.randn(d, d, dtype=F64),
        "positive": root @ root.T / d,
        "skew": root - root.T,
        "negative": -torch.eye(d, dtype=F64),
        "rank one": root[:, :1] @ root[:1],
        "large": 10 * root,
    }


# O5
@each("residual", [False, True])
@pytest.mark.parametrize("name", forms(2))
def test_a_head_with_tied_values_has_no_gap_for_any_form(name, residual):
    x = torch.randn(150, 5, dtype=F64)
    form = forms(5)[name]
    y = one_head(x, form, form) + (x if residual else 0)
    assert relative_gap(x, y) <= 1e-9
    # a form of rank one maps to a line, where images may coincide up to rounding
    if residual or name not in ("rank one", "large"):
        assert matching(x, y) == 1


# O5
def test_untied_values_lose_it_as_in_the_table_of_the_specification():
    # section 3.3: gap over cost, plain and with residual
    x = torch.randn(200, 4, dtype=F64)
    form, free = torch.randn(2, 4, 4, dtype=F64)
    one = torch.eye(4, dtype=F64)
    positive = one / 2 + form @ form.T / 4
    assert relative_gap(x, one_head(x, one, one)) <= 1e-9
    # an identity as value is nearly tied to a positive form
    small = relative_gap(x, one_head(x, positive, one))
    assert 0 < small < 0.05
    assert matching(x, one_head(x, positive, one)) > 0.5
    for value in (free, -form):
        y = one_head(x, form, value)
        assert relative_gap(x, y) > 0.3
        assert matching(x, y) < 0.1
        assert 0 < relative_gap(x, x + y) < 1


# O5
@each("residual", [False, True])
@each("num_heads", [1, 2, 4])
def test_the_tied_layer_has_no_gap_with_any_number_of_heads(num_heads, residual):
    layer = TiedSoftmaxAttention(8, num_heads, dtype=F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(3, 80, 8, dtype=F64)
    y = (layer(x) + (x if residual else 0)).detach()
    for a, b in zip(x, y, strict=True):
        assert relative_gap(a, b) <= 1e-9
        assert matching(a, b) == 1
    # the context of another sequence is another map
    assert relative_gap(x.flatten(0, 1), y.flatten(0, 1)) > 0


def test_a_free_layer_has_a_gap_with_and_without_residual():
    layer, x = create_attention("softmax", 8, 2, dtype=F64), torch.randn(1, 80, 8, dtype=F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    y = layer(x).detach()
    assert relative_gap(x[0], y[0]) > 0.1
    assert relative_gap(x[0], x[0] + y[0]) > 0.05


def test_output_is_the_gradient_of_the_potential_which_is_convex():
    layer = TiedSoftmaxAttention(8, 2, dtype=F64)
    x, context = torch.randn(2, 6, 8, dtype=F64), torch.randn(2, 9, 8, dtype=F64)
    keep = torch.arange(9) < torch.tensor([[9], [4]])
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer.potential(leaf, context, key_mask=keep).sum(), leaf)
    assert_close(grad, layer(x, context, key_mask=keep))
    ends = [layer.potential(t, context) for t in (x, -x, torch.zeros_like(x))]
    assert (ends[0] + ends[1] >= 2 * ends[2]).all()


def test_values_are_keys_and_the_output_map_is_that_of_the_queries():
    tied = TiedSoftmaxAttention(16, 4)
    free = create_attention("softmax", 16, 4)
    with torch.no_grad():
        tied.out_bias.normal_()
        for name, weight in (
            ("q_proj", tied.q_proj.weight),
            ("k_proj", tied.k_proj.weight),
            ("v_proj", tied.k_proj.weight),
            ("out_proj", tied.q_proj.weight.T),
        ):
            getattr(free, name).weight.copy_(weight)
        free.q_proj.bias.copy_(tied.q_proj.bias)
        for projection in (free.k_proj, free.v_proj):
            projection.bias.copy_(tied.k_proj.bias)
        free.out_proj.bias.copy_(tied.out_bias)
    x, keep = torch.randn(2, 9, 16), torch.arange(9) < torch.tensor([[9], [5]])
    context = torch.randn(2, 4, 16)
    poisoned = x.masked_fill(~keep[:, :, None], torch.nan)
    assert_close(tied(poisoned, key_mask=keep), free(x, key_mask=keep))
    assert_close(tied(x, is_causal=True), free(x, is_causal=True))
    assert_close(tied(x, context), free(x, context))
    assert "out_bias" not in TiedSoftmaxAttention(16, 4, bias=False).state_dict()


@pytest.mark.raw
def test_what_the_tied_layer_cannot_do_is_refused():
    layer, x = TiedSoftmaxAttention(16, 4), torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="cannot decode step by step"):
        layer.init_state(1)
    with pytest.raises(ValueError, match="cannot return an auxiliary loss"):
        layer(x, return_aux=True)


def test_a_tied_layer_takes_the_place_of_another_in_a_model():
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2, attention="softmax")
    model = EncoderClassifier(config)
    for block in model.blocks:
        block.attention = TiedSoftmaxAttention(16, 2)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    model(torch.randn(2, 9, 3), key_mask=keep).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# the term


def test_the_term_is_the_gap_of_the_real_tokens():
    layer = create_attention("softmax", 8, 2)
    x, keep = torch.randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [5]])
    with MongeGapTerm(layer) as gap:
        y = layer(x, key_mask=keep)
        assert_close(gap.collect(), monge_gap(x[keep], y[keep]))
        with pytest.raises(RuntimeError, match="found no forward"):
            gap.collect()
        layer.eval()(x)
        with pytest.raises(RuntimeError, match=r"Call model\.train"):
            gap.collect()
    layer.train()(x)
    assert not layer._forward_hooks


def test_samples_are_small_and_repeat_with_the_seed():
    layer, x = create_attention("softmax", 8, 2), torch.randn(4, 50, 8)
    values = []
    for seed in (0, 0, 1):
        with MongeGapTerm(layer, num_points=32, seed=seed) as gap:
            layer(x)
            first = gap.collect()
            layer(x)
            values.append((float(first.detach()), float(gap.collect().detach())))
    assert values[0] == values[1]
    assert values[0] != values[2]
    assert values[0][0] != values[0][1]


def test_descending_the_term_removes_the_gap_of_a_layer():
    layer = create_attention("softmax", 4, 1, dtype=F64)
    x = torch.randn(1, 60, 4, dtype=F64)
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.randn(4, 4) * 3)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    gaps = []
    with MongeGapTerm(layer) as gap:
        for _ in range(120):
            size = layer(x).square().mean()
            term = gap.collect()
            # a constant output has no gap either: keep the size
            (term + (size - 1).square()).backward()
            optimizer.step()
            optimizer.zero_grad()
            gaps.append(float(term.detach()))
    assert gaps[-1] < 0.1 * gaps[0]


def test_all_modules_of_a_list_count_and_a_copy_of_the_model_has_no_tensors():
    config = EncoderConfig(num_classes=2, num_features=3, dim=16, num_heads=2)
    model = EncoderClassifier(config)
    x = torch.randn(2, 9, 3)
    with MongeGapTerm(model.blocks) as gap:
        model(x)
        copy.deepcopy(model)(x)
        total = gap.collect()
        parts = []
        for block in model.blocks:
            with MongeGapTerm(block) as one:
                model(x)
                parts.append(one.collect())
                gap.collect()
        assert_close(total, torch.stack(parts).mean())


@pytest.mark.raw
def test_modules_that_are_no_maps_of_tokens_are_refused():
    linear = nn.Linear(3, 4)
    with MongeGapTerm(linear), pytest.raises(ValueError, match=r"maps \(5, 3\) to \(5, 4\)"):
        linear(torch.randn(5, 3))
    with pytest.raises(ValueError, match="at least one module"):
        MongeGapTerm([])


def test_a_linear_map_with_positive_weights_has_no_gap():
    # section 10: a primal map with identity features and W_o W_eᵀ positive is linear and monotone
    w_e = torch.randn(6, 3, dtype=F64)
    x = torch.randn(100, 6, dtype=F64)
    assert relative_gap(x, x @ w_e @ w_e.T) <= 1e-9
    assert relative_gap(x, x @ w_e @ torch.randn(3, 6, dtype=F64)) > 0.1


def test_softmax_with_tied_values_is_this_layer():
    layer = create_attention("softmax", 16, 4, value="tied", bias=False)
    assert isinstance(layer, TiedSoftmaxAttention)
    with pytest.raises(ValueError, match="value must be 'free' or 'tied', got 'half'"):
        create_attention("softmax", 16, 4, value="half")
