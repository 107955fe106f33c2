"""Converting with measurements: what is exact, what is lost, which layers, nothing useless."""

import copy
from html import escape

import pytest
import torch
from tests.surgery.conftest import sharpen, text
from torch import nn

from primal_attention.attention import create_attention
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    convert_and_compare,
    extend_positions,
    fit_outputs,
    inspect_targets,
    layer_r2,
    output_r2,
    start_at_clusters,
)
from primal_attention.surgery.config import conversion_defaults
from primal_attention.surgery.fidelity import Original

transformers = pytest.importorskip("transformers")
FEW = {"block": 4, "window": 0, "top": 1, "sinks": 1, "exact": 0}
"""Options of an adaptive layer that is exact up to nine tokens."""


def batches(count=4, tokens=40, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 50, (2, tokens), generator=draw)} for _ in range(count)]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM", "GPT2LMHeadModel", "ViTModel"])
def test_convert_without_a_name_keeps_the_model(name):
    if name == "ViTModel":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=32, **sizes)
        model, given = transformers.ViTModel(config).eval(), torch.randn(2, 3, 16, 16)
    else:
        model, given = text(name), batches()[0]["input_ids"]
    before = model(given)[0]
    conversion = convert(model)
    assert conversion.config.attention == "adaptive"
    assert len(conversion.names) == len(inspect_targets(text(name))) if name != "ViTModel" else 2
    torch.testing.assert_close(model(given)[0], before, atol=1e-4, rtol=1e-4)


def test_convert_without_a_name_keeps_torch_and_timm_models():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    pairs = [
        (nn.TransformerEncoder(layer, 2), torch.randn(2, 30, 16)),
        (timm.create_model("vit_tiny_patch16_224", depth=2), torch.randn(1, 3, 224, 224)),
    ]
    for model, given in pairs:
        before = model.eval()(given)
        assert len(convert(model).names) == 2
        torch.testing.assert_close(model(given), before, atol=1e-4, rtol=1e-4)


def test_default_options_have_one_home():
    for name in ("BertModel", "LlamaForCausalLM"):
        model = text(name)
        convert(model)
        plan = next(iter(converted_layers(model).values())).attention.core.plan
        options = conversion_defaults("adaptive")
        assert plan == create_attention("adaptive", 16, 2, **options).core.plan


def test_the_result_says_what_is_exact_and_what_was_lost():
    model = text("BertModel")
    teacher = copy.deepcopy(model)
    found = convert_and_compare(model, batches(), SurgeryConfig("adaptive", FEW), length=50)
    tests = batches()[2:]
    assert found.reach == 9
    assert found.all_layers == len(found.layers) == 3
    assert found.output_r2 == pytest.approx(output_r2(model, teacher, tests), abs=1e-6)
    for name, r2 in layer_r2(model, teacher, tests).items():
        assert found.layers[name] == pytest.approx(r2, abs=1e-6)
    with torch.no_grad():
        vectors = [torch.cat([m(**b)[0].mean(1) for b in tests]) for m in (model, teacher)]
    cosines = torch.cosine_similarity(*vectors)
    assert found.fidelity.cosine == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert found.fidelity.lowest_cosine == pytest.approx(float(cosines.min()), abs=1e-6)
    assert "Up to 9 tokens its output is that of the original" in found.verdict()
    assert "On 4 held-out inputs of 40 tokens" in found.verdict()
    # the inputs were shorter than the costs, and the model would take more
    assert "gave inputs of 40 tokens only" in found.verdict()
    assert all(len(heads) == 4 for heads in found.neglected.values())
    layer = converted_layers(model)["encoder.layer.0.attention.self"].attention
    with torch.no_grad():
        hidden = model.embeddings(tests[0]["input_ids"])
    mass = layer.diagnose(hidden).mass.mean(0)
    expected = found.neglected["encoder.layer.0.attention.self"]
    torch.testing.assert_close(mass, torch.tensor(expected))
    page = found.report().html()
    for sentence in found.verdict().split(". "):
        assert escape(sentence) in page
    assert page.count("data:image/png") == 2


def test_short_inputs_lose_nothing():
    found = convert_and_compare(text("LlamaForCausalLM"), batches(2, 20))
    assert found.output_r2 > 1 - 1e-6
    assert max(max(heads) for heads in found.neglected.values()) == 0
    fidelity = found.fidelity
    assert fidelity.perplexity == pytest.approx(fidelity.original_perplexity, rel=1e-5)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_perplexity_is_that_of_the_loss_in_parts_and_behind_a_cap(name, monkeypatch):
    from primal_attention.surgery import fidelity

    monkeypatch.setattr(fidelity, "_PART", 7)
    model, data = text(name), batches(2, 20)
    with torch.no_grad():
        loss = torch.stack([model(**b, labels=b["input_ids"]).loss for b in data]).mean()
    found = Original(model, data, is_causal=True)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    # logits that the head does not return as they are
    whole = model.forward

    def capped(*args, **kwargs):
        output = whole(*args, **kwargs)
        output.logits = 0.5 * output.logits
        return output

    monkeypatch.setattr(model, "forward", capped)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(
                model(**b).logits[:, :-1].flatten(0, 1), b["input_ids"][:, 1:].flatten()
            )
            for b in data
        ]
    found = Original(model, data, is_causal=True)
    assert found.perplexity == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)


def test_padding_counts_in_no_number():
    data = batches(2)
    keep = torch.arange(40) < torch.tensor([[40], [25]])
    padded = [{**b, "attention_mask": keep.long()} for b in data]
    changed = [{**b, "input_ids": torch.where(keep, b["input_ids"], 7)} for b in padded]
    results = []
    for inputs in (padded, changed):
        model = text("LlamaForCausalLM")
        original = Original(model, inputs, is_causal=True)
        convert(model, SurgeryConfig("adaptive", FEW))
        results.append(original.compare(model))
    assert results[0].r2 == pytest.approx(results[1].r2, abs=1e-6)
    assert results[0].perplexity == pytest.approx(results[1].perplexity, rel=1e-5)


def test_a_layer_worse_than_its_mean_is_refused_and_nothing_changes():
    model = text("BertModel")
    before, config = weights(model), model.config.to_dict()
    for layers in ("all", "auto"):
        with pytest.raises(ConversionError, match="below 0") as error:
            convert_and_compare(model, batches(), SurgeryConfig("primal", layers=layers))
        assert "distillation" in str(error.value)
    assert not converted_layers(model)
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())


def test_layers_are_chosen_by_their_loss_and_the_curve_marks_them():
    model = text("BertModel")
    teacher = copy.deepcopy(model)
    data = batches(8)
    found = convert_and_compare(model, data, SurgeryConfig("linear", layers="auto"), threshold=0.5)
    taken = len(found.layers)
    curve = {point.layers: point.r2 for point in found.curve}
    assert taken > 0
    assert curve[taken] >= 0.5
    assert taken == 3 or curve[taken + 1] < 0.5
    assert sorted(curve) == [0, 1, 2, 3]
    assert found.threshold == 0.5
    # what was handed out is what was measured, with the weights that were fitted
    assert found.output_r2 == pytest.approx(output_r2(model, teacher, data[6:]), abs=1e-6)
    assert list(converted_layers(model)) == list(found.layers)
    assert found.report().html().count("data:image/png") == 1


def test_the_test_part_neither_fits_nor_chooses():
    config = SurgeryConfig("linear", layers="auto")
    first, second = text("BertModel"), text("BertModel")
    data, other = batches(8), batches(8, seed=5)
    one = convert_and_compare(first, data, config, threshold=0.5)
    two = convert_and_compare(second, [*data[:6], *other[6:]], config, threshold=0.5)
    assert list(one.layers) == list(two.layers)
    assert one.output_r2 != two.output_r2
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_loss_of_longer_positions_is_that_of_the_original():
    model = text("BertModel")
    original = copy.deepcopy(model)
    data = batches(2, 100)
    done = extend_positions(model, 128)
    extended = copy.deepcopy(model)
    found = convert_and_compare(
        model, data, SurgeryConfig("adaptive", FEW), length=100, extension=done
    )
    loss = found.extension
    assert (loss.before, loss.after, loss.short_tokens) == (64, 128, 64)
    short = [{"input_ids": b["input_ids"][:, :64]} for b in data]
    assert loss.short.r2 == pytest.approx(output_r2(extended, original, short), abs=1e-5)
    # beside the extended model, the conversion is measured alone
    assert found.output_r2 == pytest.approx(output_r2(model, extended, data[1:]), abs=1e-6)
    assert "no original to compare with" in found.verdict()
    assert model.config.max_position_embeddings == 128


def test_a_hybrid_is_reported_without_its_linear_part():
    model = text("LlamaForCausalLM")
    options = {"window": 8, "sinks": 2, "far": "favor"}
    found = convert_and_compare(model, batches(), SurgeryConfig("window-linear", options))
    assert found.linear_off is not None
    assert "With the linear part off" in found.verdict()


def test_learned_slots_start_at_clusters_and_train_with_the_projections_as_they_were():
    original = text("LlamaForCausalLM")
    options = {"window": 8, "sinks": 2, "num_features": 4}
    slots = {}
    for steps in (0, 2):
        model = copy.deepcopy(original)
        found = convert_and_compare(
            model, batches(), SurgeryConfig("window-linear", options), distill_steps=steps
        )
        assert found.linear_off is not None
        slots[steps] = weights(model)
    expected = copy.deepcopy(original)
    convert(expected, SurgeryConfig("window-linear", options))
    start_at_clusters(expected, batches()[: len(batches()) // 2])
    features = [name for name in slots[0] if ".features." in name]
    assert features
    started = weights(expected)
    assert all(torch.equal(slots[0][name], started[name]) for name in features)
    assert any(not torch.equal(slots[2][name], started[name]) for name in features)


@pytest.mark.parametrize("attention", ["linformer", "linear", "skyformer", "primal-dual"])
def test_the_closed_form_fits_a_bert_and_names_what_it_changed(attention):
    model = text("BertModel")
    keep = torch.arange(40) < torch.tensor([[40], [25]])
    data = [{**b, "attention_mask": keep.long()} for b in batches(24)]
    student = copy.deepcopy(model)
    convert(student, SurgeryConfig(attention))
    before, r2 = weights(student), layer_r2(student, model, data[20:])
    fitted = fit_outputs(student, model, data[:20])
    changed = [n for n, t in weights(student).items() if not torch.equal(t, before[n])]
    assert fitted == [f"encoder.layer.{i}.attention.self" for i in range(3)]
    assert all(any(n.startswith(f"{name}.") for n in changed) for name in fitted)
    after = layer_r2(student, model, data[20:])
    assert all(after[name] > r2[name] for name in fitted)


def test_a_layer_that_no_fit_helps_is_not_named():
    model = text("BertModel")
    student = copy.deepcopy(model)
    convert(student, SurgeryConfig("softmax"))
    before = weights(student)
    assert fit_outputs(student, model, batches()) == []
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(student).items())


def test_equal_reasons_are_told_once():
    with pytest.raises(ConversionError) as error:
        convert(text("BertModel"), SurgeryConfig("adaptive", {"block": 0}))
    assert str(error.value).count("block must be at least 1") == 1
    assert "encoder.layer.2.attention.self" in str(error.value)


def test_vision_models_and_plain_tensors_are_compared_too():
    torch.manual_seed(0)
    model = sharpen(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    data = [torch.randn(2, 30, 16) for _ in range(2)]
    found = convert_and_compare(model.eval(), data, SurgeryConfig("adaptive", FEW))
    assert 0 < found.output_r2 < 1
    assert found.whole
