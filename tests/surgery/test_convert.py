"""Conversion to softmax changes nothing: the shells are right, whatever is put into them."""

import pytest
import torch
from tests.surgery.conftest import IDS, KEEP, hidden, text

from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    converted_layers,
    revert,
)

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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", ["all", "last:1"])
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
