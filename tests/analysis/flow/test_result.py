"""The result of flow: words, table, pictures, JSON, page; and the analysis of the command."""

import json

import pytest
import torch
from tests.analysis.flow import models

import primal_attention
from primal_attention.analysis import FlowOptions, analysis_entry
from primal_attention.analysis.flow import (
    FlowDetails,
    FlowResult,
    modality_flow,
    plot_directions,
    special_token_ids,
)
from primal_attention.models import EncoderClassifier, EncoderConfig

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def mixed():
    """Return the flow of a model with a softmax and a primal layer, with blind scores."""
    torch.manual_seed(0)
    config = EncoderConfig(
        num_classes=2, num_features=4, dim=16, attention="primal-dual", num_layers=2
    )
    model = EncoderClassifier(config).eval()
    x, ids = torch.randn(4, 9, 4), torch.tensor([0] * 4 + [1] * 5)
    labels = torch.tensor([0, 1, 0, 1])
    return modality_flow(
        model, {"x": x}, ids, names=["sound", "sight"], details=FlowDetails(labels=labels)
    )


def test_both_names_lead_to_the_function():
    assert primal_attention.analysis.flow.modality_flow is modality_flow


def test_the_verdict_begins_with_lift_and_keeps_imf():
    uniform = torch.full((1, 1, 4, 4), 0.25)
    words = modality_flow([uniform, uniform], torch.tensor([0, 1, 1, 1])).verdict()
    assert words.startswith("Text tokens receive 1.00 times the chance level from image")
    assert "flow is 0.38, and 0.38 would be chance" in words


def test_table_json_and_page_hold_all_numbers(mixed, tmp_path):
    header, rows = mixed.table()
    assert header[:4] == ["layer", "read by", "sound ← sight", "sight ← sound"]
    assert [len(row) for row in rows] == [len(header)] * 2
    content = json.loads(mixed.to_json())
    torch.testing.assert_close(torch.tensor(content["flow"]), mixed.flow.float())
    assert content["modalities"] == ["sound", "sight"]
    assert content["primal"][0]["alignment_share"] == mixed.primal[0].alignment_share
    assert len(content["blind"]) == 2
    mixed.to_html(tmp_path / "flow.html")
    page = (tmp_path / "flow.html").read_text()
    for words in ("Blind scores", "Primal layers", "spectrum on alignment", "Attention is not use"):
        assert words in page
    assert page.count("data:image/png") == 2


def test_pictures_are_drawn(mixed):
    pytest.importorskip("matplotlib")
    assert mixed.plot().startswith(PNG)
    plain = modality_flow([torch.full((1, 3, 4, 4), 0.25)], torch.tensor([0, 1, 2, 2]))
    assert plain.plot().startswith(PNG)
    assert "no blind score" in plain.limits()
    with pytest.raises(ValueError, match="no primal layer"):
        plot_directions(plain)


def test_the_analysis_finds_modalities_and_special_tokens():
    model, batch = models.vilt()
    entry = analysis_entry("flow")
    assert entry.needs_tokenizer
    assert not entry.needs_our_layers

    class Tokenizer:
        all_special_ids = (int(batch["input_ids"][0, 0]), models.IMAGE_TOKEN)

    state = torch.random.get_rng_state()
    found = entry.run(model, [batch], FlowOptions(sequences=1), tokenizer=Tokenizer())
    assert isinstance(found, FlowResult)
    assert found.samples == 1
    assert found.names == ("text", "image", "special")
    assert torch.equal(torch.random.get_rng_state(), state)
    dropped = entry.run(model, [batch], FlowOptions(special="drop", mode="rollout"))
    assert dropped.names == ("text", "image")
    assert dropped.mode == "rollout"


@pytest.mark.raw
def test_a_model_of_one_modality_is_refused_in_one_sentence():
    entry = analysis_entry("flow")
    tf = pytest.importorskip("transformers")
    config = tf.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = models.randomize(tf.BertModel(config))
    batch = {"input_ids": torch.randint(3, 40, (2, 6))}
    with pytest.raises(ValueError, match="BertModel has one modality only") as error:
        entry.run(model, [batch])
    assert str(error.value).count(".") == 1
    with pytest.raises(ValueError, match="batches is empty"):
        entry.run(model, [])
    with pytest.raises(ValueError, match="needs token_type_ids with two segments"):
        entry.run(model, [batch], FlowOptions(modalities="segments"))
    pairs = {**batch, "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)}
    found = entry.run(model, [pairs], FlowOptions(modalities="segments"))
    assert found.names == ("segment 0", "segment 1")
    with pytest.raises(ValueError, match="sequences must be at least 1"):
        FlowOptions(sequences=0)


def test_special_ids_come_from_configuration_and_tokenizer():
    model, _ = models.llava()
    assert special_token_ids(model.config) == [1, 2]

    class Bert:
        vocab_size, text_config, eos_token_id = 30522, None, [7, 9]

    assert special_token_ids(Bert()) == [7, 9, 101, 102]
    assert special_token_ids(None) == []
