"""ConvertedLayer layers on disk, and what must not be mixed up."""

import json
from pathlib import Path

import pytest
import torch
from tests.surgery.conftest import Encoder, hidden, text

from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.support.files import write_sealed
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    load_converted,
    load_pretrained,
    revert,
    save_converted,
)

pytest.importorskip("transformers")


def trained(name="BertModel", attention="primal-dual", **options):
    """Return a converted model whose new weights are not those of a fresh conversion."""
    model = text(name, **options)
    convert(model, SurgeryConfig(attention, layers="last:2"))
    with torch.no_grad():
        for layer in converted_layers(model).values():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "GPT2Model"])
@pytest.mark.parametrize("attention", ["primal", "favor", "softmax"])
@torch.no_grad()
def test_new_weights_alone_restore_a_conversion(name, attention, tmp_path):
    model = trained(name, attention)
    save_converted(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "SHA256SUMS",
        "conversion.json",
        "conversion.safetensors",
    ]
    assert (tmp_path / "conversion.safetensors").stat().st_size < 4.2 * sum(
        t.numel() for m in converted_layers(model).values() for t in m.state_dict().values()
    ) + 4000
    other = text(name)
    original = hidden(other)
    conversion = load_converted(other, tmp_path)
    assert torch.equal(hidden(other), hidden(model))
    revert(other, conversion)
    assert torch.equal(hidden(other), original)


def test_the_description_is_readable(tmp_path):
    save_converted(trained(), tmp_path)
    content = json.loads((tmp_path / "conversion.json").read_text())
    assert content["config"]["attention"] == "primal-dual"
    assert content["config"]["layers"] == [f"encoder.layer.{i}.attention.self" for i in (1, 2)]
    assert content["model"] == "BertModel"


def swap_weights(folder: Path) -> None:
    other = folder / "other"
    save_converted(trained(attention="linear"), other)
    (other / "conversion.safetensors").replace(folder / "conversion.safetensors")


def cut_weights(folder: Path) -> None:
    data = (folder / "conversion.safetensors").read_bytes()
    write_sealed(folder, {"conversion.safetensors": data[: len(data) // 2]})


def cut_description(folder: Path) -> None:
    text_ = (folder / "conversion.json").read_text()
    write_sealed(folder, {"conversion.json": text_[:40]})


def edit(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "conversion.json").read_text()) | changes
    write_sealed(folder, {"conversion.json": json.dumps(content)})


def future(folder: Path) -> None:
    edit(folder, format=99)


def lose_a_part(folder: Path) -> None:
    edit(folder, layers=None)


def nested(folder: Path) -> None:
    edit(folder, layers=[[1]])


def another_type(folder: Path) -> None:
    edit(folder, config={"attention": 3})


def huge(folder: Path) -> None:
    edit(folder, config={"attention": "primal-dual", "options": {"rank": 10**9}, "layers": "all"})


def foreign(folder: Path) -> None:
    write_sealed(folder, {"conversion.json": "[1, 2]"})


def missing(folder: Path) -> None:
    (folder / "conversion.json").unlink()


@pytest.mark.filterwarnings("ignore:rank=")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_weights, "was changed or damaged"),
        (cut_weights, "is damaged"),
        (cut_description, "is not readable as JSON"),
        (lose_a_part, "is damaged: conversion.json has no valid 'layers'"),
        (nested, "is damaged"),
        (another_type, "is damaged"),
        (huge, "ask for .* numbers"),
        (foreign, "must hold an object"),
        (future, "format 99"),
        (missing, "There is no conversion in"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_files_are_named_and_the_model_left_alone(
    damage, message, tmp_path, same_as_before
):
    save_converted(trained(), tmp_path)
    damage(tmp_path)
    model = text("BertModel")
    unchanged = same_as_before(model)
    with pytest.raises(ConversionError, match=message):
        load_converted(model, tmp_path)
    unchanged()


def retrained():
    model = text("BertModel")
    model.embeddings.word_embeddings.weight.data.mul_(1.1)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: text("GPT2Model"),
            r"conversion in .+ is of another model .BertModel.: this GPT2Model has no module",
        ),
        (lambda: text("BertModel", num_hidden_layers=2), "has no module"),
        (lambda: text("BertModel", hidden_size=64), "other names or shapes"),
        (lambda: text("BertModel", num_attention_heads=2), "other names or shapes"),
        (retrained, "other weights than when the checkpoint was saved"),
    ],
    ids=["architecture", "depth", "width", "heads", "weights"],
)
def test_a_checkpoint_of_another_model_is_refused(build, message, tmp_path, same_as_before):
    save_converted(trained(), tmp_path)
    model = build()
    before, unchanged = hidden(model), same_as_before(model)
    with pytest.raises(ConversionError, match=message):
        load_converted(model, tmp_path)
    assert torch.equal(hidden(model), before)
    if "weights" in message and "names" not in message:
        load_converted(model, tmp_path, check_host=False)
    else:
        unchanged()


def test_a_converted_or_a_plain_model_is_in_the_way(tmp_path):
    model = trained()
    save_converted(model, tmp_path)
    with pytest.raises(ConversionError, match="converted already"):
        load_converted(model, tmp_path)
    with pytest.raises(ConversionError, match="no converted layers"):
        save_converted(text("BertModel"), tmp_path)


@torch.no_grad()
def test_torch_models_are_stored_the_same_way(tmp_path, tokens):
    model = Encoder(batch_first=True)
    convert(model, SurgeryConfig("primal"))
    save_converted(model, tmp_path)
    other = Encoder(batch_first=True)
    load_converted(other, tmp_path)
    assert torch.equal(model(tokens), other(tokens))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "GPT2LMHeadModel"])
@torch.no_grad()
def test_save_pretrained_comes_back_whole(name, tmp_path):
    from tests.surgery.conftest import IDS

    model = trained(name)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert record["config"]["attention"] == "primal-dual"
    other = load_pretrained(type(model), tmp_path)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    assert len(converted_layers(other)) == 2
    plain = text(name)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConversionError, match="not converted; load it with"):
        load_pretrained(type(model), tmp_path / "plain")
