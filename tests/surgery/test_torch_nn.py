"""``nn.MultiheadAttention`` and the layers around it, with both mask conventions."""

import pytest
import torch
from tests.house.rows import each
from tests.surgery.conftest import Encoder, sharpen
from torch import nn

from primal_attention.attention import ksvd_loss
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.surgery import SurgeryConfig, convert, inspect_targets, revert

CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)
ADDED = torch.zeros(9, 9).masked_fill(CAUSAL, -torch.inf)
# on the right only: torch answers NaN to a query without any real key before it
RIGHT = torch.arange(9) < torch.tensor([[9], [6], [3]])
PADDING = torch.zeros(3, 9).masked_fill(~RIGHT, -torch.inf)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": ~RIGHT},
    "padding-added": {"src_key_padding_mask": PADDING},
    "causal": {"mask": CAUSAL},
    "causal-added": {"mask": ADDED},
    "both": {"mask": CAUSAL, "src_key_padding_mask": ~RIGHT},
    "both-hinted": {"mask": ADDED, "is_causal": True, "src_key_padding_mask": PADDING},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masks", MASKS)
@each(
    "options, training",
    [
        # evaluation has a fused path for batch_first alone
        ({"batch_first": True}, False),
        ({"batch_first": True}, True),
        ({}, False),
        ({"batch_first": True, "norm_first": True}, True),
        ({"bias": False}, True),
    ],
)
@torch.no_grad()
def test_softmax_in_an_encoder_changes_nothing(tokens, options, masks, training):
    model = Encoder(**options).train(training)
    before = model(tokens, **MASKS[masks])
    for layers in ("all", "last:1", 0):
        conversion = convert(model, SurgeryConfig("softmax", layers=layers))
        got = model(tokens, **MASKS[masks])
        torch.testing.assert_close(got[RIGHT], before[RIGHT], atol=1e-5, rtol=1e-5)
        revert(model, conversion)
    assert torch.equal(model(tokens, **MASKS[masks]), before)


@torch.no_grad()
def test_the_fused_path_of_evaluation_does_not_go_around_the_attention(tokens):
    model = Encoder(batch_first=True)
    assert model.encoder.use_nested_tensor
    calls = []
    conversion = convert(model, SurgeryConfig("linear"))
    for layer in converted_layers(model).values():
        layer.register_forward_hook(lambda *_: calls.append(1))
    y = model(tokens, src_key_padding_mask=~RIGHT)
    assert y.shape == tokens.shape  # a packed batch would come back shorter
    assert len(calls) == 2
    revert(model, conversion)
    assert model.encoder.use_nested_tensor


@torch.no_grad()
def test_attention_alone_with_one_or_many_sequences(tokens):
    for batch_first in (True, False):
        model = nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=batch_first))
        sharpen(model).eval()
        before = [model[0](t, t, t, need_weights=False)[0] for t in (tokens, tokens[0])]
        convert(model, SurgeryConfig("softmax"))
        for x, expected in zip((tokens, tokens[0]), before, strict=True):
            got, weights = model[0](x, x, x, need_weights=False)
            assert weights is None
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_decoder_layers_keep_their_cross_attention(tokens):
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    sharpen(model).eval()
    memory = torch.randn(3, 5, 32)
    masks = {"tgt_mask": CAUSAL, "memory_key_padding_mask": torch.arange(5).expand(3, -1) > 2}
    before = model(tokens, memory, **masks)
    conversion = convert(model, SurgeryConfig("softmax"))
    assert conversion.names == ["self_attn", "multihead_attn"]
    torch.testing.assert_close(model(tokens, memory, **masks), before, atol=1e-5, rtol=1e-5)
    revert(model, conversion)
    convert(model, SurgeryConfig("linear", layers="multihead_attn"))
    assert model(tokens, memory, **masks).isfinite().all()


def test_what_cannot_be_honoured_is_refused_in_the_call(tokens):
    model = Encoder(batch_first=True)
    convert(model, SurgeryConfig("linear"))
    for mask in (CAUSAL.flip(0), ADDED + 0.5, torch.ones(9, 9).tril(-2).bool()):
        with pytest.raises(ConversionError, match="not causal order"):
            model.encoder.layers[0](tokens, src_mask=mask)
    with pytest.raises(ConversionError, match="finite bias"):
        model.encoder.layers[0](tokens, src_key_padding_mask=torch.full((3, 9), -0.5))
    attention = model.encoder.layers[0].self_attn
    with pytest.raises(ValueError, match="need_weights=False"):
        attention(tokens, tokens, tokens)
    with pytest.raises(ValueError, match="the same tensor as key and value"):
        attention(tokens, tokens, tokens.clone(), need_weights=False)
    with pytest.raises(ValueError, match="needs attn_mask"):
        attention(tokens, tokens, tokens, need_weights=False, is_causal=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kdim": 16, "vdim": 16}, "another width than queries"),
        ({"add_bias_kv": True}, "adds a key and a value"),
        ({"add_zero_attn": True}, "adds a key and a value"),
    ],
)
def test_variants_that_ours_cannot_be_are_refused(options, reason, same_as_before):
    model = nn.Sequential(nn.MultiheadAttention(32, 4, **options))
    unchanged = same_as_before(model)
    (target,) = inspect_targets(model, SurgeryConfig("linear"))
    assert reason in target.reason
    with pytest.raises(ConversionError, match=reason):
        convert(model, SurgeryConfig("linear"))
    unchanged()


def test_the_loss_term_reaches_the_training_loop(tokens):
    model = Encoder(batch_first=True).train()
    convert(model, SurgeryConfig("primal"))
    model(tokens, src_key_padding_mask=~RIGHT)
    loss = ksvd_loss(model)
    loss.backward()
    assert all(layer.attention.w_e.grad is not None for layer in converted_layers(model).values())
