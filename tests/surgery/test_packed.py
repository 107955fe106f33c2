"""Converted models read the packed batches of transformers like their documents one by one."""

import copy

import pytest
import torch
from tests.surgery.conftest import sharpen, text

from primal_attention.attention import ksvd_loss, list_attentions
from primal_attention.hosts import ConversionError
from primal_attention.surgery import SurgeryConfig, convert

transformers = pytest.importorskip("transformers")

LENGTHS = (5, 1, 9, 3)
DOCUMENTS = [
    {"input_ids": torch.randint(3, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist()}
    for n in LENGTHS
]
COLLATORS = {
    "positions": {},
    "bounds": {"return_flash_attn_kwargs": True},
    "numbers": {"return_seq_idx": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}
ATTENTIONS = ["softmax", "adaptive", "window-linear", "linear", "favor", "primal-dual"]


def pack(**options):
    """Return the documents as one row, without labels."""
    batch = transformers.DataCollatorWithFlattening(**options)(DOCUMENTS)
    del batch["labels"]
    return batch


def smollm2():
    """Return the shape of SmolLM2-135M with three layers and a small vocabulary."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=576,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        rope_theta=100_000,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return sharpen(transformers.LlamaModel(config)).eval()


def llama(**options):
    return text("LlamaModel", num_key_value_heads=2, **options)


def alone(model, **also):
    """Return the hidden states of every document by itself, joined."""
    ids = [torch.tensor([d["input_ids"]]) for d in DOCUMENTS]
    return torch.cat([model(i, **also).last_hidden_state for i in ids], dim=1)


def check(got, want):
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("build", [llama, smollm2])
@torch.no_grad()
def test_softmax_equals_what_transformers_makes_of_packed_rows(build, collator):
    model, batch = build(), pack(**COLLATORS[collator])
    want = model(**batch, use_cache=False).last_hidden_state
    check(want, alone(model, use_cache=False))
    convert(model, SurgeryConfig("softmax"))
    check(model(**batch, use_cache=False).last_hidden_state, want)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("build", [llama, smollm2])
@torch.no_grad()
def test_packed_rows_are_the_documents_one_by_one(build, attention):
    model = build()
    convert(model, SurgeryConfig(attention))
    want = alone(model, use_cache=False)
    whole = model(pack()["input_ids"], use_cache=False).last_hidden_state
    assert not torch.allclose(whole, want, atol=1e-2)
    for options in COLLATORS.values():
        check(model(**pack(**options), use_cache=False).last_hidden_state, want)


@pytest.mark.parametrize("layers", ["last:1", "all"])
@pytest.mark.parametrize("own", ["sdpa", "eager"])
@torch.no_grad()
def test_layers_that_stay_do_not_matter(own, layers):
    model = llama(attn_implementation=own)
    convert(model, SurgeryConfig("linear", layers=layers))
    want = alone(model, use_cache=False)
    check(model(**pack(), use_cache=False).last_hidden_state, want)


@pytest.mark.parametrize("name", ["GPT2Model", "MistralModel", "Qwen2Model"])
@torch.no_grad()
def test_other_decoders_too(name):
    model = text(name, num_key_value_heads=2, sliding_window=None)
    convert(model, SurgeryConfig("adaptive"))
    check(model(**pack(), use_cache=False).last_hidden_state, alone(model, use_cache=False))


@pytest.mark.parametrize("attention", ["softmax", "adaptive", "linear", "nystromformer"])
@torch.no_grad()
def test_encoders_take_documents_from_their_bounds(attention):
    model = text("BertModel")
    convert(model, SurgeryConfig(attention))
    for name in ("bounds", "numbers"):
        check(model(**pack(**COLLATORS[name])).last_hidden_state, alone(model))


@torch.no_grad()
def test_several_rows_of_packed_positions():
    model = llama()
    convert(model, SurgeryConfig("linear"))
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
    got = model(ids, position_ids=positions, use_cache=False).last_hidden_state
    for row, parts in enumerate([(4, 5), (1, 6, 2)]):
        pieces = [model(i[None]).last_hidden_state[0] for i in ids[row].split(parts)]
        check(got[row], torch.cat(pieces))


@torch.no_grad()
def test_masks_over_pairs_of_packed_rows_are_read():
    model = llama()
    convert(model, SurgeryConfig("softmax"))
    number = torch.tensor([[0] * 4 + [1] * 5, [0] * 3 + [1] * 6])
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 7:] = False  # padding behind the last document
    pairs = (number[:, :, None] == number[:, None, :]) & real[:, None, :]
    pairs = pairs.tril()[:, None]
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 5]])
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for mask in (pairs, added):
        got = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        check(got[0, :4], model(ids[:1, :4]).last_hidden_state[0])
        check(got[0, 4:], model(ids[:1, 4:]).last_hidden_state[0])
        check(got[1, 3:7], model(ids[1:, 3:7]).last_hidden_state[0])


@pytest.mark.parametrize("collator", COLLATORS)
@torch.no_grad()
def test_a_cache_does_not_join_documents_and_cannot_be_continued(collator):
    model = llama()
    convert(model, SurgeryConfig("primal-dual"))
    output = model(**pack(**COLLATORS[collator]), use_cache=True)
    check(output.last_hidden_state, alone(model))
    with pytest.raises(RuntimeError, match="over packed documents, which keeps no state of its 18"):
        model(torch.tensor([[5]]), past_key_values=output.past_key_values)
    cache = model(torch.tensor([[5, 6]]), use_cache=True).past_key_values
    if collator in ("bounds", "all"):
        with pytest.raises(ConversionError, match="holds 2 tokens of a document"):
            model(**pack(**COLLATORS[collator]), past_key_values=cache)


@pytest.mark.parametrize("attention", ["softmax", "adaptive", "primal-dual"])
def test_gradients_and_the_regularizer_are_those_of_the_documents(attention):
    model = llama().double().train()
    convert(model, SurgeryConfig(attention))
    other = copy.deepcopy(model)
    weight = torch.randn(1, sum(LENGTHS), 32, dtype=torch.float64)
    # the cache is on by default
    loss = (model(**pack(**COLLATORS["all"])).last_hidden_state * weight).sum()
    parts = weight.split(LENGTHS, dim=1)
    for document, part in zip(DOCUMENTS, parts, strict=True):
        ids = torch.tensor([document["input_ids"]])
        y = (other(ids).last_hidden_state * part).sum()
        if attention == "primal-dual":
            # the regulariser is the mean over documents
            y = y + ksvd_loss(other) / len(LENGTHS)
        y.backward()
    if attention == "primal-dual":
        loss = loss + ksvd_loss(model)
    loss.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_a_language_model_trains_on_the_collator_of_transformers():
    model = text("LlamaForCausalLM", num_key_value_heads=2).train()
    convert(model, SurgeryConfig("adaptive"))
    batch = transformers.DataCollatorWithFlattening()(DOCUMENTS)
    loss = model(**batch, use_cache=False).loss
    total, count = 0.0, 0
    for document in DOCUMENTS:
        ids = torch.tensor([document["input_ids"]])
        if ids.shape[1] > 1:
            total = total + model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    torch.testing.assert_close(loss, total / count)


@pytest.mark.raw
@torch.no_grad()
def test_what_packs_no_row_is_refused_in_words():
    model = llama()
    convert(model, SurgeryConfig("linear"))
    ids = torch.randint(3, 50, (2, 6))
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ConversionError, match="packed into one row, and the batch has 2 rows"):
        model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ConversionError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(ids[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds + 1)
    with pytest.raises(ValueError, match="have 6 tokens and the row only 5"):
        model(ids[:1, :5], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match=r"document_ids must have shape .* = \(1, 6\), got"):
        model(ids[:1], seq_idx=torch.zeros(1, 4, dtype=torch.long))


def test_every_causal_attention_that_pads_keeps_documents_apart():
    assert set(ATTENTIONS) - {"linear"} <= set(list_attentions(causal=True, documents=True))
