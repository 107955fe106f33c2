"""Conversion to softmax changes nothing: the shells are right, whatever is put into them."""

import copy

import pytest
import torch
from tests.house.rows import each
from tests.surgery.conftest import IDS, KEEP, hidden, text
from torch import nn

from primal_attention.attention import attention_entry, list_attentions
from primal_attention.hosts import ConversionError, converted_layers, read_attention
from primal_attention.surgery import SurgeryConfig, convert, inspect_targets, revert

pytest.importorskip("transformers")

MODELS = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {}),
    "electra": ("ElectraModel", {"embedding_size": 32}),
    "distilbert": ("DistilBertModel", {}),
    "bert-decoder": ("BertModel", {"is_decoder": True}),
    "gpt2": ("GPT2Model", {}),
    "gpt2-scaled": ("GPT2Model", {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("LlamaModel", {}),
    "llama-grouped": ("LlamaModel", {"num_key_value_heads": 2, "attention_bias": True}),
    "qwen2": ("Qwen2Model", {"num_key_value_heads": 1}),
    "granite": ("GraniteModel", {"attention_multiplier": 0.3}),
}


@each("layers, implementation", [("all", "sdpa"), ("last:1", "eager")])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_softmax_layers_change_nothing(name, layers, implementation):
    kind, options = MODELS[name]
    model = text(kind, attn_implementation=implementation, **options)
    before = hidden(model)
    conversion = convert(model, SurgeryConfig("softmax", layers=layers))
    assert len(converted_layers(model)) == (3 if layers == "all" else 1)
    torch.testing.assert_close(hidden(model), before, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        # the comparison is not blind: without order or padding the outputs differ
        torch.testing.assert_close(model(IDS).last_hidden_state[KEEP], before, atol=1e-5, rtol=1e-5)
    revert(model, conversion)
    assert torch.equal(hidden(model), before)
    assert not converted_layers(model)


@torch.no_grad()
def test_nystromformer_stands_in_for_softmax_without_an_untrained_convolution():
    model = text("BertModel")
    before = hidden(model)
    convert(model, SurgeryConfig("nystromformer", {"num_landmarks": 9}, layers="last:1"))
    error = (hidden(model) - before).norm() / before.norm()
    assert error < 0.1
    (layer,) = converted_layers(model).values()
    assert [n for n, _ in layer.named_parameters() if "conv" in n] == []
    model = text("BertModel")
    convert(model, SurgeryConfig("nystromformer", {"kernel_size": 3}, layers="last:1"))
    (layer,) = converted_layers(model).values()
    assert [n for n, _ in layer.named_parameters() if "conv" in n]


@pytest.mark.parametrize("name", list_attentions())
@each("kind", ["BertModel", "LlamaModel"])
@torch.no_grad()
def test_every_mechanism_converts_and_ignores_padding(name, kind):
    model = text(kind).double()
    causal = kind == "LlamaModel"
    if causal and not attention_entry(name).capabilities.causal:
        with pytest.raises(ConversionError, match="has no causal form"):
            convert(model, SurgeryConfig(name))
        return
    if name == "primal-static" and not causal:
        with pytest.raises(ConversionError, match="mixes no tokens"):
            convert(model, SurgeryConfig(name))
        return
    convert(model, SurgeryConfig(name))
    y = hidden(model)
    assert y.isfinite().all()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(IDS).last_hidden_state[KEEP], y)
    alone = model(IDS[2:, :3]).last_hidden_state
    torch.testing.assert_close(y[-3:], alone[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rotary_positions_reach_the_layers_that_compare_tokens():
    for name, uses in (("linear", True), ("primal-dual", True), ("primal", False)):
        model = text("LlamaModel")
        (remark,) = {t.note for t in inspect_targets(model, SurgeryConfig(name))}
        convert(model, SurgeryConfig(name))
        assert ("rotary positions are dropped" in remark) is not uses
        far = torch.arange(9)[None] * 7
        moved = model(IDS[:1], position_ids=far, attention_mask=KEEP[:1]).last_hidden_state
        same = torch.allclose(moved, model(IDS[:1]).last_hidden_state, atol=1e-5)
        assert same is not uses


@torch.no_grad()
def test_duals_start_from_the_values():
    model = text("BertModel")
    original = model.encoder.layer[0].attention.self
    convert(model, SurgeryConfig("primal-dual", layers=0))
    layer = model.encoder.layer[0].attention.self.attention
    x = torch.randn(2, 7, 32)
    q, k = (
        nn.functional.normalize(layer._split(p(x)), dim=-1) for p in (original.query, original.key)
    )
    v = layer._split(nn.functional.linear(x, original.value.weight))
    expected = layer._merge((q @ k.mT) @ v / 7)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_duals_of_low_rank_keep_the_widest_directions_of_the_values():
    model = text("BertModel")
    value = model.encoder.layer[0].attention.self.value.weight.unflatten(0, (4, 8))
    convert(model, SurgeryConfig("primal-dual", {"rank": 5}, layers=0))
    layer = model.encoder.layer[0].attention.self.attention
    kept = torch.einsum(
        "ds,hsc->hdc", layer.concat.weight[:, :5], layer.dual_r.weight.unflatten(0, (4, 5))
    )
    side_by_side = value.transpose(0, 1).flatten(1)  # [d h·c]
    sigma = torch.linalg.svdvals(side_by_side)
    lost, least = (kept - value).square().sum(), sigma[5:].square().sum()
    torch.testing.assert_close(lost, least, rtol=1e-4, atol=0)


SELECTIONS = {
    "all": [0, 1, 2],
    "last:2": [1, 2],
    0: [0],
    -1: [2],
    (0, -1): [0, 2],
    "encoder.layer.1.attention.self": [1],
    r"encoder\.layer\.(0|2)\..*": [0, 2],
    ("encoder.layer.1.attention.self", -1): [1, 2],
}


@pytest.mark.parametrize(("layers", "expected"), SELECTIONS.items(), ids=map(str, SELECTIONS))
def test_layers_are_chosen_by_name_pattern_index_or_count(layers, expected):
    model = text("BertModel")
    targets = inspect_targets(model, SurgeryConfig("linear", layers=layers))
    assert [i for i, t in enumerate(targets) if t.selected] == expected
    conversion = convert(model, SurgeryConfig("linear", layers=layers))
    assert conversion.names == [targets[i].name for i in expected]


def test_a_dry_run_counts_and_touches_nothing(same_as_before):
    model = text("LlamaModel", num_key_value_heads=2)
    unchanged = same_as_before(model)
    targets = inspect_targets(model, SurgeryConfig("primal", {"rank": 4}, layers="last:1"))
    unchanged()
    last = targets[-1]
    assert (last.num_heads, last.dim, last.library) == (4, 32, "huggingface")
    assert (last.kind, last.is_causal, last.reason) == ("LlamaAttention", True, "")
    assert "2 groups repeated, exactly" in last.note
    assert last.parameters_before == 2 * 32 * 32 + 2 * 32 * 16
    conversion = convert(model, SurgeryConfig("primal", {"rank": 4}, layers="last:1"))
    layer = converted_layers(model)[last.name]
    assert last.parameters_after == sum(p.numel() for p in layer.parameters())
    table = str(conversion)
    assert "layers.2.self_attn" in table
    assert table.count("LlamaAttention") == 3


def test_modes_and_frozen_weights_carry_over():
    model = text("BertModel").train()
    model.encoder.layer[0].requires_grad_(False)
    model.encoder.layer[1].eval()
    convert(model, SurgeryConfig("primal"))
    first, second, third = converted_layers(model).values()
    assert first.attention.training
    assert not second.attention.training
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for n, p in third.named_parameters())


@torch.no_grad()
def test_models_that_share_a_config_do_not_share_a_conversion():
    model = text("LlamaModel")
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    before = hidden(twin)
    convert(model, SurgeryConfig("linear"))
    assert torch.equal(hidden(twin), before)
    assert not hasattr(twin.config, "primal_attention")


@torch.no_grad()
def test_a_copy_of_a_converted_model_lives_its_own_life():
    model = text("BertModel")
    convert(model, SurgeryConfig("linear"))
    twin = copy.deepcopy(model)
    y = hidden(model)
    assert torch.equal(hidden(twin), y)
    for p in twin.parameters():
        p.zero_()
    assert torch.equal(hidden(model), y)


@torch.no_grad()
def test_a_converted_model_may_be_lowered_in_precision():
    for name in ("BertModel", "LlamaModel"):
        model = text(name)
        convert(model, SurgeryConfig("primal-dual"))
        y = hidden(model)
        low = hidden(model.bfloat16())
        assert low.dtype == torch.bfloat16
        assert (low - y).abs().mean() < 0.05 * y.abs().mean()


@torch.no_grad()
def test_masks_over_pairs_are_read_or_refused():
    model = text("LlamaModel")
    convert(model, SurgeryConfig("softmax"))
    want = hidden(model)
    pairs = KEEP[:, None, None, :].expand(-1, -1, 9, -1).tril()
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for mask in (pairs, added):
        got = model(IDS, attention_mask=mask).last_hidden_state[KEEP]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    window = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-3)
    biased = added + torch.linspace(0, 1, 9)
    for mask in (window, biased, torch.ones(1, 1, 9, 9, dtype=torch.bool)):
        with pytest.raises(ConversionError, match="more than padding and causal order"):
            model(IDS, attention_mask=mask)


def test_weights_that_are_never_formed_are_refused():
    model = text("BertModel", attn_implementation="eager")
    convert(model, SurgeryConfig("linear"))
    with pytest.raises(ValueError, match="no attention weights"):
        model(IDS, output_attentions=True)
    layer = model.encoder.layer[0].attention.self
    with pytest.raises(TypeError, match="head_mask"):
        layer(torch.randn(1, 3, 32), head_mask=torch.ones(4))
    with pytest.raises(ValueError, match="use_cache=False"):
        layer(torch.randn(1, 3, 32), past_key_values=object())


@torch.no_grad()
def test_hidden_states_are_still_captured():
    model = text("BertModel")
    model(IDS, output_hidden_states=True)  # leaves hooks of transformers on every attention
    convert(model, SurgeryConfig("linear"))
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 4


def test_readings_tell_what_a_module_is_made_of():
    parts = read_attention(text("GPT2Model").h[0].attn)
    assert (parts.num_heads, parts.head_dim, parts.is_causal) == (4, 8, True)
    with pytest.raises(ConversionError, match="unknown signature"):
        read_attention(nn.Linear(2, 2))
