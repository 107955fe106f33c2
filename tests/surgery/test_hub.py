"""Converted models in plain ``from_pretrained``: whole, as ordinary models, never half random."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.surgery.conftest import IDS, text

from primal_attention.attention import list_attentions
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.hosts.transformers import IMPORT_FIRST
from primal_attention.support.files import SealedFolder
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    fold_output,
    load_pretrained,
    revert,
)
from primal_attention.surgery.hub import save_for_hub
from primal_attention.surgery.loading import load_any

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:rank=")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def converted(name="BertModel", attention="primal-dual", layers="last:2", options=None):
    """Return a converted model whose new weights are not those of a fresh conversion."""
    model = text(name)
    convert(model, SurgeryConfig(attention, options or {}, layers=layers))
    with torch.no_grad():
        for layer in converted_layers(model).values():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model


def output(model):
    with torch.no_grad():
        return model(IDS)[0]


CAUSAL = set(list_attentions(causal=True))


@pytest.mark.parametrize("attention", list_attentions())
def test_every_mechanism_comes_back_from_plain_from_pretrained(attention, tmp_path):
    name = "LlamaForCausalLM" if attention in CAUSAL else "BertModel"
    try:
        model = converted(name, attention, 1)
    except ConversionError as error:
        pytest.skip(f"is not converted to: {error}")
    model.save_pretrained(tmp_path)
    again = getattr(transformers, name).from_pretrained(tmp_path)
    assert list(converted_layers(again)) == list(converted_layers(model))
    assert torch.equal(output(again), output(model))


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("BertModel", "AutoModel"),
        ("BertForMaskedLM", "AutoModelForMaskedLM"),
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("ViTModel", "AutoModel"),
    ],
)
@pytest.mark.parametrize("layers", ["all", "last:1"])
def test_auto_classes_load_and_save_again(name, auto, layers, tmp_path):
    if name == "ViTModel":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.ViTConfig(image_size=8, patch_size=4, intermediate_size=32, **sizes)
        model, inputs = transformers.ViTModel(config).eval(), torch.randn(2, 3, 8, 8)
        convert(model, SurgeryConfig("linear", layers=layers))
    else:
        model, inputs = converted(name, layers=layers), IDS
    model.save_pretrained(tmp_path / "first")
    again = getattr(transformers, auto).from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    third = getattr(transformers, auto).from_pretrained(tmp_path / "second")
    assert type(third) is type(model)
    with torch.no_grad():
        assert torch.equal(third(inputs)[0], again(inputs)[0])
        # maps that were cut from one of GPT-2 lie differently in memory before they are saved
        torch.testing.assert_close(third(inputs)[0], model(inputs)[0])
    first, second = (
        json.loads((tmp_path / part / "config.json").read_text()) for part in ("first", "second")
    )
    assert first == second


def test_the_inner_model_of_a_folder_with_a_head_and_the_reverse(tmp_path):
    model = converted("BertForMaskedLM")
    model.save_pretrained(tmp_path / "head")
    inner = transformers.BertModel.from_pretrained(tmp_path / "head", add_pooling_layer=False)
    assert list(converted_layers(inner)) == [f"encoder.layer.{i}.attention.self" for i in (1, 2)]
    assert torch.equal(output(inner), output(model.bert))
    inner.save_pretrained(tmp_path / "inner")
    whole = transformers.BertForMaskedLM.from_pretrained(tmp_path / "inner")
    assert torch.equal(output(whole.bert), output(model.bert))


def test_a_loaded_model_is_an_ordinary_model(tmp_path):
    converted("LlamaForCausalLM").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not model.training
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model, "quantization_method")
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].parameters())
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


PLAIN = """
import sys, transformers
transformers.utils.logging.set_verbosity_error()
for name in ("AutoModel", "BertModel"):
    for options in ({}, {"attn_implementation": "eager"}, {"ignore_mismatched_sizes": True}):
        try:
            getattr(transformers, name).from_pretrained(sys.argv[1], **options)
            print("loaded")
        except ValueError as error:
            print("import primal_attention first" in str(error))
"""


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_the_import_nothing_loads_with_random_weights(tmp_path):
    save_for_hub(converted(), tmp_path)
    assert run(PLAIN, tmp_path).split() == ["True"] * 6


def test_without_the_import_save_pretrained_alone_is_guarded_too(tmp_path):
    converted().save_pretrained(tmp_path)
    # only a caller who names another attention function gets past the guard of the config
    assert run(PLAIN, tmp_path).split() == ["True", "loaded", "True"] * 2


ORDERS = {
    "before": "import primal_attention, sys; assert 'torch' not in sys.modules\n"
    "assert 'transformers' not in sys.modules\nimport transformers\n",
    "after": "import sys, transformers, transformers.modeling_utils\nimport primal_attention\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_import_may_come_before_or_after_transformers(order, tmp_path):
    model = save_for_hub(converted(), tmp_path)
    code = ORDERS[order] + (
        "model = transformers.AutoModel.from_pretrained(sys.argv[1])\n"
        "print(type(model.encoder.layer[1].attention.self).__name__, len(sys.meta_path))\n"
        "print(sum(type(one).__name__ == '_ImportWatch' for one in sys.meta_path))\n"
    )
    name, _, watching = run(code, model).split()
    assert (name, watching) == ("ConvertedHuggingFace", "0")


def test_the_folder_is_ready_to_be_pushed(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    model = converted("LlamaForCausalLM", "linear")
    model.name_or_path = "somebody/model: large"
    save_for_hub(model, tmp_path, verdict="R² is 0.91 at {length} tokens.")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    SealedFolder(tmp_path).check()
    card = hub.ModelCard.load(tmp_path / "README.md")
    first = card.text.strip().splitlines()[0]
    assert "`import primal_attention` before `from_pretrained`" in first
    assert "R² is 0.91 at {length} tokens." in card.text
    assert "transformers.AutoModelForCausalLM.from_pretrained" in card.text
    assert "| `model.layers.1.self_attn` | 32 | 4 |" in card.text
    data = card.data.to_dict()
    assert data["pipeline_tag"] == "text-generation"
    assert data["base_model"] == "somebody/model: large"
    assert data["tags"] == ["primal-attention", "linear"]
    assert data["library_name"] == "transformers"


def test_only_converted_models_of_transformers_are_written(tmp_path):
    with pytest.raises(ConversionError, match="BertModel is no converted model"):
        save_for_hub(text("BertModel"), tmp_path / "plain")
    folded = converted()
    fold_output(folded)
    with pytest.raises(ConversionError, match="save it before fold_output"):
        save_for_hub(folded, tmp_path / "folded")
    model = text("BertModel")
    revert(model, convert(model, SurgeryConfig("linear")))
    with pytest.raises(ConversionError, match="is no converted model"):
        save_for_hub(model, tmp_path / "reverted")
    assert not any(tmp_path.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_changed_byte_is_an_error_in_plain_from_pretrained(name, tmp_path):
    save_for_hub(converted(), tmp_path)
    transformers.AutoModel.from_pretrained(tmp_path)
    path = tmp_path / name
    if name == "config.json":
        path.write_text(path.read_text().replace("1e-12", "0.5"))
    else:
        flip(path)
    with pytest.raises(ConversionError, match=f"{name} was changed or damaged"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_model_that_is_saved_again_needs_no_checksums(tmp_path):
    save_for_hub(converted(), tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again), output(model))
    assert torch.equal(output(load_any(tmp_path).model), output(model))


def edit_record(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 0}, "has format 0, expected 1; load it with the version"),
        ({"format": None}, "has format None, expected 1"),
        ({"config": None}, "is damaged"),
        ({"config": {"attention": "primal-dul"}}, "is damaged: .*Did you mean 'primal-dual'"),
        ({"config": {"attention": "linear"}}, "lack 4 tensors of the conversion"),
        (
            {"config": {"attention": "primal-dual", "options": {"rank": 10**9}}},
            "describes a model of .* numbers, but the files",
        ),
        ({"layers": []}, "names 0 layers"),
        ({"layers": [{"name": "encoder.layer.9.attention.self"}]}, "does not have"),
        ({"layers": [{"name": "encoder.layer.1"}]}, "is no attention that can be converted"),
        ({"layers": [3]}, "is damaged"),
    ],
)
def test_a_damaged_record_is_told_and_names_the_folder(changes, message, tmp_path):
    converted().save_pretrained(tmp_path)
    edit_record(tmp_path, **changes)
    for load in (
        transformers.AutoModel.from_pretrained,
        transformers.BertModel.from_pretrained,
        load_any,
    ):
        with pytest.raises(ConversionError, match=message) as error:
            load(tmp_path)
        assert str(tmp_path) in str(error.value)


def test_weights_that_are_missing_are_never_drawn_at_random(tmp_path):
    converted().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if ".attention.self.attention." in name)
    save_file({k: v for k, v in tensors.items() if k != lost}, path, {"format": "pt"})
    with pytest.raises(ConversionError, match="lack 1 tensors of the conversion"):
        transformers.AutoModel.from_pretrained(tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ConversionError, match=r"read from \.safetensors only"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_an_earlier_format_and_a_foreign_method_are_told(tmp_path):
    converted().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    record = content.pop("quantization_config")
    path.write_text(json.dumps({**content, "primal_attention": record}))
    with pytest.raises(ConversionError, match=r"by an earlier version .* convert the original"):
        load_any(tmp_path)
    path.write_text(json.dumps({**content, "quantization_config": {"quant_method": "unheard"}}))
    with pytest.raises(ConversionError, match="not converted"):
        load_pretrained(transformers.BertModel, tmp_path)
    with pytest.raises(ConversionError, match=IMPORT_FIRST):
        load_pretrained_plain(tmp_path)


def load_pretrained_plain(folder):
    try:
        return transformers.AutoModel.from_pretrained(folder)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def test_a_plain_model_is_not_converted_by_loading(tmp_path):
    from primal_attention.surgery.quantizer import ConvertedConfig

    text("BertModel").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="require the model to be pre-quantized"):
        transformers.AutoModel.from_pretrained(tmp_path, quantization_config=ConvertedConfig())


def test_a_quantised_model_is_not_converted():
    model = text("BertModel")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConversionError, match="quantised with 'gptq'; convert the model before"):
        convert(model, SurgeryConfig("linear"))


def test_shards_are_one_model(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(output(transformers.AutoModel.from_pretrained(tmp_path)), output(model))
    shutil.rmtree(tmp_path)
