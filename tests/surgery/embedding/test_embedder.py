"""Vectors of texts: those of the model itself, whatever the batches."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.surgery.embedding.models import make_texts, save_model, save_modules
from torch.nn.functional import normalize

import primal_attention as pa
from primal_attention.hosts import ConversionError, converted_layers
from primal_attention.surgery import SurgeryConfig, convert, extend_positions, save_converted
from primal_attention.surgery.loading import load_any
from primal_attention.training.memory import PeakMemory


@torch.no_grad()
def hidden_of(folder, text, **options):
    """Return what transformers says of one text, ``[n c]``."""
    loaded = load_any(folder, **options)
    tokens = loaded.tokenizer(text, return_tensors="pt")
    return loaded.model(**tokens).last_hidden_state[0]


def test_a_vector_is_the_mean_over_the_tokens_in_the_order_of_the_texts(bert):
    texts = [*make_texts(20, 40), "", "a"]
    vectors = pa.Embedder(bert, batch_tokens=100).encode(texts)
    assert vectors.dtype == np.float32
    expected = torch.stack([hidden_of(bert, text).mean(0) for text in texts])
    torch.testing.assert_close(torch.from_numpy(vectors), expected, atol=1e-5, rtol=1e-5)


def test_no_texts_give_no_vectors(bert):
    assert pa.Embedder(bert).encode([]).shape == (0, 32)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True}, lambda h: h[0]),
        ({"pooling_mode_max_tokens": True}, lambda h: h.amax(0)),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, lambda h: h.sum(0) / len(h) ** 0.5),
        ({"pooling_mode": ["mean", "cls"]}, lambda h: torch.cat([h[0], h.mean(0)])),
        ({}, lambda h: h.mean(0)),
    ],
    ids=["cls", "max", "root", "joined", "mean"],
)
def test_the_pooling_is_that_of_the_folder(tmp_path, pooling, expected):
    folder = save_model(tmp_path / "model")
    save_modules(folder, "Pooling", "Normalize", **pooling)
    texts = make_texts(5, 30)
    embedder = pa.Embedder(folder)
    wanted = torch.stack([expected(hidden_of(folder, text)) for text in texts])
    vectors = torch.from_numpy(embedder.encode(texts))
    torch.testing.assert_close(vectors, normalize(wanted, dim=-1), atol=1e-5, rtol=1e-5)
    assert embedder.dim == vectors.shape[1]


def test_vectors_equal_those_of_sentence_transformers(tmp_path):
    st = pytest.importorskip("sentence_transformers")
    folder = save_model(tmp_path / "model")
    save_modules(folder, "Pooling", "Normalize", pooling_mode="mean")
    texts = make_texts(9, 40)
    modules = [
        st.sentence_transformer.modules.Transformer(str(folder)),
        st.sentence_transformer.modules.Pooling(32),
        st.sentence_transformer.modules.Normalize(),
    ]
    expected = st.SentenceTransformer(modules=modules, device="cpu").encode(texts)
    np.testing.assert_allclose(pa.Embedder(folder).encode(texts), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["Dense", "LSTM"])
def test_modules_that_are_not_understood_are_refused(tmp_path, kind):
    folder = save_model(tmp_path / "model")
    save_modules(folder, "Pooling", kind)
    with pytest.raises(ConversionError, match=rf"module '{kind}'; a pooling .* Embed with"):
        pa.Embedder(folder)


def test_a_pooling_that_is_not_understood_is_refused(tmp_path):
    folder = save_model(tmp_path / "model")
    save_modules(folder, "Pooling", pooling_mode_lasttoken=True)
    with pytest.raises(ConversionError, match=r"pooling 'lasttoken'; cls, max, .* understood"):
        pa.Embedder(folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForMaskedLM", {}),
        ("RobertaModel", {"pad_token_id": 0, "max_position_embeddings": 49}),
        ("ModernBertModel", {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}),
        ("ElectraModel", {"embedding_size": 16}),
    ],
)
def test_any_encoder_embeds_texts_as_long_as_its_positions(tmp_path, name, options):
    folder = save_model(tmp_path / "model", name, **options)
    embedder = pa.Embedder(folder)
    assert embedder.max_tokens == 48
    # 46 words and two special tokens
    vectors = embedder.encode([" ".join("ab" * 23), "a b"])
    alone = embedder.encode(["a b"])
    np.testing.assert_allclose(vectors[1], alone[0], atol=1e-5)
    with pytest.raises(ValueError, match=r"text 2 has 49 tokens, .* positions for 48\. Embed p"):
        embedder.encode(["a", "a " * 47])


@pytest.mark.parametrize(
    ("name", "options"), [("GPT2Model", {}), ("LlamaForCausalLM", {"num_key_value_heads": 2})]
)
def test_a_decoder_is_refused(tmp_path, name, options):
    folder = save_model(tmp_path / "model", name, **options)
    with pytest.raises(ConversionError, match=r"is a decoder: .* Only encoders .* give the folder"):
        pa.Embedder(folder)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    folder = save_model(tmp_path / "model", "T5Model", **sizes)
    with pytest.raises(ConversionError, match="an encoder and a decoder"):
        pa.Embedder(folder)


def test_a_model_without_a_tokenizer_is_refused(bert):
    with pytest.raises(ConversionError, match="no tokenizer, so texts cannot be read"):
        pa.Embedder(load_any(bert).model)


def test_a_model_in_memory_needs_its_tokenizer_and_gives_the_same(bert):
    loaded = load_any(bert)
    texts = make_texts(3, 9)
    found = pa.Embedder(loaded.model, loaded.tokenizer).encode(texts)
    np.testing.assert_array_equal(found, pa.Embedder(bert).encode(texts))


def test_a_converted_folder_embeds_like_the_converted_model(bert, tmp_path):
    texts = make_texts(6, 40)
    loaded = load_any(bert)
    convert(loaded.model, SurgeryConfig("linear", layers="last:1"))
    save_converted(loaded.model, tmp_path / "linear")
    wanted = torch.stack(
        [hidden_of(tmp_path / "linear", text, original=bert).mean(0) for text in texts]
    )
    found = pa.Embedder(tmp_path / "linear").encode(texts)
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=1e-5)
    assert not np.allclose(found, pa.Embedder(bert).encode(texts), atol=1e-3)


def test_pieces_are_averaged_by_their_numbers_of_tokens(bert):
    words = make_texts(1, 1000, seed=3)[0].split()[:100]
    pieces = [" ".join(words[start : start + 46]) for start in (0, 46, 92)]
    embedder = pa.Embedder(bert, chunk="average")
    parts = embedder.encode(pieces)
    expected = np.average(parts, axis=0, weights=[48, 48, 10])
    np.testing.assert_allclose(embedder.encode([" ".join(words)])[0], expected, atol=1e-5)
    # texts that fit stay whole
    np.testing.assert_array_equal(parts, pa.Embedder(bert).encode(pieces))


@pytest.mark.parametrize("tokens", [1, 60, 100_000])
def test_batches_stay_within_the_budget(bert, tokens, monkeypatch):
    embedder = pa.Embedder(bert, batch_tokens=tokens)
    shapes = []
    run = embedder.model.forward
    monkeypatch.setattr(
        embedder.model, "forward", lambda **i: shapes.append(i["input_ids"].shape) or run(**i)
    )
    vectors = embedder.encode(make_texts(30, 40))
    assert len(vectors) == sum(rows for rows, _ in shapes) == 30
    assert all(rows * longest <= tokens or rows == 1 for rows, longest in shapes)
    # batches are of like length: sorted by it, a text pads at most as the longest of its batch
    if tokens == 60:
        slots = sum(rows * longest for rows, longest in shapes)
        assert slots < 1.3 * sum(len(ids) for ids in embedder.tokenize(make_texts(30, 40)))
    # not one text at a time: the budget is used
    assert (len(shapes) == 30) == (tokens == 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("longest", [30, 1500])
def test_a_batch_stays_below_the_bound_of_the_memory(tmp_path, implementation, longest):
    folder = save_model(tmp_path / "model", max_position_embeddings=2048)
    embedder = pa.Embedder(folder, batch_tokens=2000)
    embedder.model.set_attn_implementation(implementation)
    bound = embedder.memory(longest).batch(longest, 2000)
    texts = [" ".join("a" * (longest - 2)), *make_texts(40, longest - 2)]
    ids = list(embedder.tokenize(texts))
    with PeakMemory() as memory:
        embedder.encode_tokens(ids)
    assert bound / 5 < memory.peak <= bound


GROWS = """
import resource, sys
import numpy as np, psutil, torch
torch.set_num_threads(1)
import primal_attention as pa
embedder = pa.Embedder(sys.argv[1], batch_tokens=32768, attention=sys.argv[2] or None)
ids = [np.full(4096, 7, np.int32)] * 8
embedder.encode_tokens([ids[0][:50]])
bound = embedder.memory(4096).batch(4096, 32768)
before = psutil.Process().memory_info().rss
embedder.encode_tokens(ids)
print(bound, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["", "adaptive"])
def test_a_process_grows_by_less_than_the_bound(tmp_path, attention):
    pytest.importorskip("psutil")
    folder = save_model(tmp_path / "model", max_position_embeddings=4096, hidden_size=64)
    command = [sys.executable, "-c", GROWS, str(folder), attention]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    bound, grown = map(int, done.stdout.split())
    # large enough that what Python needs for itself does not matter
    assert 20e6 < grown <= bound


def test_a_folder_runs_its_own_attention_and_adaptive_when_asked(tmp_path):
    folder = save_model(tmp_path / "model", max_position_embeddings=1500)
    own, adaptive = pa.Embedder(folder), pa.Embedder(folder, attention="adaptive")
    assert not converted_layers(own.model)
    assert len(converted_layers(adaptive.model)) == 2
    short = make_texts(5, 200)
    np.testing.assert_allclose(adaptive.encode(short), own.encode(short), atol=1e-4)
    long = make_texts(1, 5000, seed=1)[0].split()[:1400]
    whole, near = (e.encode([" ".join(long)])[0] for e in (own, adaptive))
    assert not np.allclose(near, whole, atol=1e-5)
    assert float(whole @ near) > 0.9 * float(np.linalg.norm(whole) * np.linalg.norm(near))


@torch.no_grad()
@pytest.mark.parametrize("attention", [None, "adaptive"])
def test_more_positions_let_long_texts_stay_whole(bert, attention):
    loaded = load_any(bert)
    embedder = pa.Embedder(loaded.model, loaded.tokenizer, extend=200, attention=attention)
    assert embedder.max_tokens == 200
    text = make_texts(1, 1000, seed=3)[0]
    text = " ".join(text.split()[:150])
    model = load_any(bert).model
    extend_positions(model, 200)
    wanted = model(**loaded.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(embedder.encode([text])[0], wanted, atol=1e-4)
    # the model of the caller is not changed
    assert not converted_layers(loaded.model)
    assert pa.Embedder(loaded.model, loaded.tokenizer).max_tokens == 48
    with pytest.raises(ValueError, match=r"has 202 tokens, .* positions for 200\. .*--extend 256"):
        embedder.encode(["a " * 200])


def test_vectors_that_are_not_finite_are_an_error(bert):
    loaded = load_any(bert)
    embedder = pa.Embedder(loaded.model, loaded.tokenizer)
    with torch.no_grad():
        loaded.model.embeddings.word_embeddings.weight[7] = 3e38
        loaded.model.embeddings.LayerNorm.weight.fill_(3e38)
    with pytest.raises(ConversionError, match="answers with NaN or infinity"):
        embedder.encode(["a b c"])


@pytest.mark.raw
def test_wrong_arguments_are_told(bert):
    with pytest.raises(ValueError, match="chunk must be None or 'average', got 'mean'"):
        pa.Embedder(bert, chunk="mean")
    with pytest.raises(ValueError, match="attention must be None or 'adaptive', got 'linear'"):
        pa.Embedder(bert, attention="linear")
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        pa.Embedder(bert, extend=0)
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        pa.Embedder(bert, batch_tokens=0)
    with pytest.raises(TypeError, match=r"got one text; write encode\(\[text\]\)"):
        pa.Embedder(bert).encode("a b")
    with pytest.raises(TypeError, match="text 2 is NoneType; every text must be str"):
        pa.Embedder(bert).encode(["a", None])
