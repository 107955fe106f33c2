"""Longer inputs: tables of positions are stretched, rotary angles scaled, and folders keep it."""

import pytest
import torch
from tests.surgery.conftest import text

from primal_attention.hosts import ConversionError
from primal_attention.surgery import extend_positions, position_limit

transformers = pytest.importorskip("transformers")
SHORT = torch.randint(3, 50, (2, 40), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(3, 50, (1, 200), generator=torch.Generator().manual_seed(2))
TABLES = {
    "BertModel": {},
    "RobertaModel": {"pad_token_id": 1},
    "DistilBertModel": {},
    "ElectraModel": {},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}
ROTARY = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "Qwen2ForCausalLM": {"num_key_value_heads": 2},
    "ModernBertModel": {"cls_token_id": 1, "sep_token_id": 2},
}
PAIRS = [(n, m) for n in TABLES for m in ("interpolate", "repeat")]
PAIRS += [(n, m) for n in ROTARY for m in ("linear", "ntk", "dynamic")]


@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.no_grad()
def test_an_extended_model_takes_long_inputs_and_a_folder_keeps_it(name, method, tmp_path):
    model = text(name, **{**TABLES, **ROTARY}[name])
    before, limit = model(SHORT)[0], position_limit(model)
    done = extend_positions(model, 200, method=method)
    assert (done.method, done.before, done.after) == (method, limit, 200)
    after, long = model(SHORT)[0], model(LONG)[0]
    assert long.isfinite().all()
    assert torch.equal(after, before) == (method in ("repeat", "dynamic"))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert position_limit(again) == 200
    assert torch.equal(again(SHORT)[0], after)
    assert torch.equal(again(LONG)[0], long)
    done.undo()
    assert position_limit(model) == limit
    assert torch.equal(model(SHORT)[0], before)


def test_an_interpolated_table_keeps_both_ends_and_lies_between_its_rows():
    model = text("RobertaModel", pad_token_id=1)
    old = model.embeddings.position_embeddings.weight.detach()
    extend_positions(model, 2 * 62 - 1)
    new = model.embeddings.position_embeddings.weight
    assert torch.equal(new[:2], old[:2])  # rows of padding
    torch.testing.assert_close(new[2::2], old[2:])
    torch.testing.assert_close(new[3::2], (old[2:-1] + old[3:]) / 2)


def test_raising_the_base_divides_the_slowest_angle_and_keeps_the_fastest():
    model = text("LlamaForCausalLM")
    old = model.model.rotary_emb.inv_freq.clone()
    extend_positions(model, 4 * 64, method="ntk")
    new = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(new[0], old[0])
    torch.testing.assert_close(new[-1], old[-1] / 4)


def test_layers_with_a_window_keep_their_angles():
    model = text("ModernBertModel", cls_token_id=1, sep_token_id=2)
    old = model.rotary_emb.sliding_attention_inv_freq.clone()
    extend_positions(model, 200, method="linear")
    assert torch.equal(model.rotary_emb.sliding_attention_inv_freq, old)


def test_two_models_with_one_config_are_extended_separately():
    first = text("BertModel")
    second = transformers.BertModel(first.config)
    extend_positions(first, 100)
    assert (position_limit(first), position_limit(second)) == (100, 64)


def test_a_model_that_takes_enough_is_not_changed():
    model = text("LlamaForCausalLM")
    done = extend_positions(model, 50)
    assert "not changed" in done.verdict()
    assert not hasattr(model.config, "extended_positions")


@pytest.mark.raw
@pytest.mark.parametrize(
    ("name", "options", "method", "message"),
    [
        ("BertModel", {}, "ntk", "does not fit BertModel.*interpolate, repeat"),
        ("LlamaForCausalLM", {}, "repeat", "rotary positions; choose one of ntk, linear"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "ntk",
            "scaled already",
        ),
        ("LlamaForCausalLM", {"head_dim": 2}, "ntk", "needs four; choose 'linear'"),
        ("T5EncoderModel", {"d_model": 32, "d_kv": 8}, "auto", "neither a learned table"),
    ],
)
def test_what_cannot_be_extended_is_said_and_not_changed(name, options, method, message):
    model = text(name, **options)
    before = model.config.to_dict()
    with pytest.raises(ConversionError, match=message):
        extend_positions(model, 200, method=method)
    assert model.config.to_dict() == before


def test_wrong_arguments_are_said():
    model = text("BertModel")
    with pytest.raises(ValueError, match="method must be one of"):
        extend_positions(model, 200, method="stretch")
    with pytest.raises(ValueError, match="length must be at least 1"):
        extend_positions(model, 0)
