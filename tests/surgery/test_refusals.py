"""Bad input: a clear error, and the model exactly as it was."""

import copy

import pytest
import torch
from tests.surgery.conftest import IDS, Encoder, hidden, text
from torch import nn

from primal_attention.attention import PrimalAttention
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.surgery import SurgeryConfig, convert, inspect_targets, revert

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"attention": "linear", "layer": "all"}, "no setting 'layer'. Did you mean 'layers'"),
        ({"layers": "all"}, "'attention' is missing"),
        ({"attention": "primel"}, "Did you mean 'primal'"),
        ({"attention": "primal", "options": {"rnk": 4}}, "no option 'rnk'. Did you mean 'rank'"),
        ({"attention": "primal", "options": {"dim": 4}}, "'dim' is determined by the model"),
        (
            {"attention": "favor", "options": {"generator": torch.Generator()}},
            "be JSON values",
        ),
        ({"attention": "linear", "layers": "*bad("}, "not a regular expression"),
        ({"attention": "linear", "layers": []}, "layers must be"),
        ({"attention": "linear", "layers": [1.5]}, "layers must be"),
    ],
)
def test_wrong_settings_are_named(content, message):
    with pytest.raises(ValueError, match=message):
        SurgeryConfig.from_dict(content)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="got dict; write SurgeryConfig"):
        convert(text("BertModel"), {"attention": "linear"})
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got str"):
        inspect_targets("bert", SurgeryConfig("linear"))
    with pytest.raises(TypeError, match="options must be a mapping"):
        SurgeryConfig("linear", ["rank"])
    with pytest.raises(TypeError, match="attention must be a name"):
        SurgeryConfig(PrimalAttention)


def test_settings_survive_a_plain_mapping():
    config = SurgeryConfig("primal", {"rank": 4}, layers=[0, "x.*"])
    assert SurgeryConfig.from_dict(config.to_dict()) == config
    assert hash(config) == hash(SurgeryConfig.from_dict(config.to_dict()))


def meta(model):
    return model.to("meta")


def half(model):
    return model.half()


def partly_bfloat16(model):
    model.encoder.layer[1].attention.self.key.bfloat16()
    return model


def partly_meta(model):
    model.encoder.layer[1].attention.self.key.to("meta")
    return model


def tied_modules(model):
    model.encoder.layer[2].attention.self = model.encoder.layer[0].attention.self
    return model


def tied_weights(model):
    first, last = (model.encoder.layer[i].attention.self for i in (0, 2))
    last.query.weight = first.query.weight
    return model


def hooked(model):
    model.encoder.layer[1].attention.self.register_forward_hook(lambda *_: None)
    return model


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.encoder.layer[1].attention.self.query)
    return model


def already_ours(model):
    model.encoder.layer[1].attention.self = PrimalAttention(32, 4)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (meta, "on the meta device and have no values"),
        (half, r"torch.float16; convert in float32 \(model.float\(\)\)"),
        (partly_bfloat16, r"key.weight is torch.bfloat16"),
        (partly_meta, "meta device"),
        (tied_modules, "the same module is also 'encoder.layer.2.attention.self'"),
        (tied_weights, "'query.weight' is shared with"),
        (hooked, "a hook .* that would be lost"),
        (parametrized, "query is not a plain nn.Linear"),
        (already_ours, "an attention of this library already"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_models_in_a_bad_state_are_refused_and_left_alone(change, message, same_as_before):
    model = change(text("BertModel"))
    runs = change in (tied_modules, tied_weights, hooked, parametrized)
    before = hidden(model) if runs else None
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError, match=message):
        convert(model, SurgeryConfig("linear"))
    unchanged()
    if before is not None:
        assert torch.equal(hidden(model), before)


def test_one_bad_layer_is_enough_and_can_be_left_out(same_as_before):
    model = tied_weights(text("BertModel"))
    before = hidden(model)
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError) as caught:
        convert(model, SurgeryConfig("linear"))
    assert "encoder.layer.0" in str(caught.value)
    assert "encoder.layer.2" in str(caught.value)
    assert "encoder.layer.1" not in str(caught.value)
    assert "layers=" in str(caught.value)
    unchanged()
    assert torch.equal(hidden(model), before)
    convert(model, SurgeryConfig("linear", layers=1))
    assert list(converted_layers(model)) == ["encoder.layer.1.attention.self"]


def test_a_model_is_converted_once(same_as_before):
    model = text("GPT2Model")
    convert(model, SurgeryConfig("linear", layers=0))
    before, unchanged = hidden(model), same_as_before(model)
    for layers in ("all", 1):
        with pytest.raises(ConversionError, match="converted already"):
            convert(model, SurgeryConfig("primal", layers=layers))
    unchanged()
    assert torch.equal(hidden(model), before)


def test_reverting_wants_the_same_model_once(same_as_before):
    model = text("BertModel")
    unchanged = same_as_before(model)
    with torch.random.fork_rng():
        conversion = convert(model, SurgeryConfig("primal"))
    with pytest.raises(ConversionError, match="not a copy"):
        revert(copy.deepcopy(model), conversion)
    model.encoder.layer[0].attention.self.attention.q_proj.weight.data.zero_()
    revert(model, conversion)
    unchanged()
    with pytest.raises(ConversionError, match="only once"):
        revert(model, conversion)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("decoder.*", "matches no attention module; the model has: encoder.layer.0"),
        (["encoder.layer.0.attention.self", "nothing"], "'nothing' matches no"),
        (7, "the index 7, but the model has 3"),
        ("last:4", "the last 4 attention modules, but the model has 3"),
        ("auto", "pass data="),
    ],
)
def test_layers_that_match_nothing_are_an_error(layers, message, same_as_before):
    model = text("BertModel")
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError, match=message):
        convert(model, SurgeryConfig("linear", layers=layers))
    unchanged()


def test_an_attention_by_itself_has_nowhere_to_go():
    with pytest.raises(ConversionError, match="the whole model"):
        convert(nn.MultiheadAttention(32, 4), SurgeryConfig("linear"))


def test_a_model_without_attention_is_an_error():
    with pytest.raises(ConversionError, match="none at all"):
        convert(nn.Sequential(nn.Linear(2, 2)), SurgeryConfig("linear"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MistralModel", {"sliding_window": 4, "num_key_value_heads": 4}, "window of 4 tokens"),
        ("Qwen3Model", {"head_dim": 8}, "q_norm, k_norm"),
        ("LlamaModel", {"head_dim": 16}, "do not add up to the model width 32"),
        ("BertModel", {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
        ("GPT2Model", {"add_cross_attention": True}, "cross-attention"),
        ("T5EncoderModel", {"d_model": 32, "d_kv": 8, "num_heads": 4}, "unknown signature|parts"),
        ("GPTNeoXModel", {}, "unknown signature"),
        ("BartModel", {"d_model": 32}, "does not say when"),
        (
            "Gemma2Model",
            {"head_dim": 8, "num_key_value_heads": 4},
            "sliding window|plain softmax",
        ),
    ],
)
def test_attention_that_ours_cannot_be_is_refused(name, options, message, same_as_before):
    model = text(name, **options)
    unchanged = same_as_before(model)
    assert inspect_targets(model, SurgeryConfig("linear"))
    with pytest.raises(ConversionError, match=message):
        convert(model, SurgeryConfig("linear"))
    unchanged()


def test_self_attention_beside_cross_attention_can_be_chosen():
    model = text("GPT2Model", add_cross_attention=True)
    convert(model, SurgeryConfig("linear", layers=r"h\.\d+\.attn"))
    assert list(converted_layers(model)) == [f"h.{i}.attn" for i in range(3)]
    y = model(IDS, encoder_hidden_states=torch.randn(3, 4, 32)).last_hidden_state
    assert y.isfinite().all()


def test_torch_encoders_are_left_alone_too(tokens, same_as_before):
    model = Encoder(batch_first=True)
    shared = model.encoder.layers[0].self_attn.out_proj.weight
    model.encoder.layers[1].self_attn.out_proj.weight = shared
    before, unchanged = model(tokens), same_as_before(model)
    with pytest.raises(ConversionError, match="is shared with"):
        convert(model, SurgeryConfig("linear"))
    unchanged()
    assert model.encoder.use_nested_tensor
    assert torch.equal(model(tokens), before)
