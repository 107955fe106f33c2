"""Blocks and their stack: what the configuration says is what is built and run."""

import pytest
import torch
from tests.house.rows import each
from torch import nn

import primal_attention as pa
from primal_attention.models import EncoderBlock, EncoderClassifier, EncoderConfig, stack
from primal_attention.models.config import StackConfig
from primal_attention.models.positions import rotary_positions
from primal_attention.models.stack import BlockStack


def test_the_perceptron_is_two_maps_with_gelu_between():
    mlp, x = EncoderBlock(8, 2, attention="softmax").mlp, torch.randn(3, 8)
    first, last = (m for m in mlp if isinstance(m, nn.Linear))
    assert first.weight.shape == (32, 8)
    torch.testing.assert_close(mlp(x), last(nn.functional.gelu(first(x))))


@each("norm", ["pre", "post"])
def test_each_branch_has_its_own_norm(norm):
    block, x = EncoderBlock(8, 2, attention="softmax", norm=norm), torch.randn(2, 5, 8)
    for p in (*block.attention_norm.parameters(), *block.mlp_norm.parameters()):
        nn.init.normal_(p)
    first, second = block.attention_norm, block.mlp_norm
    if norm == "pre":
        middle = x + block.attention(first(x))
        expected = middle + block.mlp(second(middle))
    else:
        middle = first(x + block.attention(x))
        expected = second(middle + block.mlp(middle))
    torch.testing.assert_close(block(x), expected)


def test_dropout_acts_on_the_attention_inside_and_after_the_perceptron():
    block = EncoderBlock(8, 2, attention="softmax", dropout=0.25)
    assert block.attention.dropout.p == 0.25
    assert [type(m) for m in block.mlp][2::2] == [nn.Dropout, nn.Dropout]
    assert [m.p for m in block.mlp if isinstance(m, nn.Dropout)] == [0.25, 0.25]


def test_a_stack_builds_what_its_configuration_says():
    made = BlockStack(
        StackConfig(
            dim=8,
            num_heads=2,
            num_layers=2,
            attention="softmax",
            hidden_dim=12,
            norm="post",
            dropout=0.25,
            time_fusion="add",
        )
    )
    assert len(made) == 2
    for block in made:
        assert block.mlp[0].out_features == 12
        assert block.norm == "post"
        assert block.mlp[2].p == 0.25
        assert block.attention.takes_times


def test_blocks_are_checkpointed_in_training_only(monkeypatch):
    calls = []

    def count(block, *args, use_reentrant, **options):
        calls.append(block)
        return block(*args, **options)

    monkeypatch.setattr(stack, "checkpoint", count)
    model = BlockStack(StackConfig(dim=8, num_heads=2, num_layers=3, checkpointing=True))
    x = torch.randn(2, 5, 8)
    model.eval()(x)
    assert calls == []
    assert len(model.train()(x).terms) == 3
    assert calls == list(model)
    assert model.eval()(x).terms == {}


@each("what", ["positions", "mask"])
def test_a_stack_takes_positions_and_masks_in_both_forms(what):
    model = BlockStack(
        StackConfig(dim=8, num_heads=2, num_layers=2, attention="softmax", dropout=0.0)
    ).eval()
    x, at = torch.randn(2, 6, 8), 3 * torch.arange(6)[None]
    keep = torch.arange(6).expand(2, -1) != 1

    def options(part):
        if what == "mask":
            return {"key_mask": keep[:, part]}
        return {"rotary": rotary_positions(at[:, part], 4)}

    whole = model(x, is_causal=True, **options(slice(None))).hidden
    assert (whole - model(x, is_causal=True).hidden)[:, 2:].abs().max() > 1e-4
    states, rows = model.init_state(2), []
    for part in (slice(0, 4), slice(4, 6)):
        y, states = model.step(x[:, part], states, **options(part))
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1)[:, 2:], whole[:, 2:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["primal", "primal-dual"])
@each("tokens", ["one", "one real", "equal", "zero"])
def test_the_kkt_term_of_a_model_is_finite_for_single_tokens(name, tokens):
    config = EncoderConfig(
        num_classes=3,
        num_features=2,
        dim=16,
        num_heads=2,
        attention=name,
        attention_options={"regularizer": "kkt"},
    )
    model, keep = EncoderClassifier(config), None
    x = torch.randn(2, 1 if tokens == "one" else 4, 2)
    if tokens == "one real":
        keep = torch.arange(4) < torch.tensor([[1], [4]])
    elif tokens in ("equal", "zero"):
        x = x[:, :1].expand(-1, 4, -1) * (tokens == "equal")
    loss = model(x, key_mask=keep).logits.square().mean() + pa.ksvd_loss(model)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
