"""The probe of heads: queries and keys of single words, and their correlation with counts."""

import json
import os
import pydoc_data.topics

import numpy as np
import pytest
import torch
from torch import nn

from primal_attention.analysis import CountsOptions, analysis_entry
from primal_attention.analysis.counts import (
    Cooccurrence,
    count_weights,
    plot_head_beside_counts,
    probe_heads,
    qk_circuit,
    transform_counts,
    word_weights,
)
from primal_attention.analysis.counts.association import Targets, asymmetry, spearman
from primal_attention.analysis.counts.probe_models import (
    is_rotary,
    queries_keys,
    token_ids,
)
from primal_attention.cli.main import main
from primal_attention.hosts import capture
from primal_attention.models import CausalDecoder, DecoderConfig, EncoderClassifier, EncoderConfig
from primal_attention.report import to_png
from primal_attention.support.command import UserError

VOCABULARY = 30


def bert(implementation="sdpa"):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        attn_implementation=implementation,
    )
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():  # biases and positions start at zero or small
        nn.init.normal_(parameter, std=0.5)
    return model


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=2, n_head=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).eval()


def ours(positions, attention="softmax", kind=EncoderClassifier):
    options = {"dim": 16, "num_heads": 2, "attention": attention, "vocab_size": VOCABULARY}
    options |= {"positions": positions, "max_length": 24 if positions == "learned" else None}
    if kind is CausalDecoder:
        return CausalDecoder(DecoderConfig(**options)).eval()
    return EncoderClassifier(EncoderConfig(num_classes=2, **options)).eval()


class TorchEncoder(nn.Module):
    """Embedding without positions, and layers of torch.nn."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.embed(ids))


MODELS = {
    "bert": bert,
    "bert, eager": lambda: bert("eager"),
    "gpt2": gpt2,
    "llama": llama,
    "torch": lambda: TorchEncoder().eval(),
    "sinusoidal": lambda: ours("sinusoidal"),
    "learned": lambda: ours("learned", kind=CausalDecoder),
    "rotary": lambda: ours("rotary", kind=CausalDecoder),
}


@pytest.mark.parametrize("name", MODELS)
def test_first_layer_equals_the_attention_of_the_model(name):
    model, ids = MODELS[name](), torch.randint(VOCABULARY, (1, 7))
    layer = capture(model, ids, layers=0)[0]
    weights = layer.weights()  # [h n n]
    last = 6
    logits = torch.stack(
        [
            queries_keys(model, ids[0], positions=[j], offset=last - j).logits()[:, last, j]
            for j in range(7)
        ],
        dim=-1,
    )
    torch.testing.assert_close(logits.softmax(-1), weights[:, last], atol=1e-6, rtol=1e-5)
    assert queries_keys(model, ids[0]).name == layer.name


def test_words_have_the_mean_position_and_the_input_norm():
    model, ids = bert(), [3, 8, 21]
    part, attention = model.embeddings, model.encoder.layer[0].attention.self
    with torch.no_grad():
        position = part.position_embeddings.weight[5:15].mean(0)
        kind = part.token_type_embeddings.weight[0]
        h = part.LayerNorm(part.word_embeddings.weight[ids] + position + kind)
        q, k = attention.query(h)[:, 8:].double(), attention.key(h)[:, 8:].double()
    expected = q @ k.T / 8**0.5
    torch.testing.assert_close(qk_circuit(model, 0, 1, ids), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(qk_circuit(model, 0, None, ids)[1], expected, atol=1e-6, rtol=1e-5)


def test_deeper_layers_see_the_single_token_after_the_layers_before():
    model, ids = ours("none"), torch.arange(9)
    inputs = model.blocks[0](model.embed(ids[:, None]))
    x, attention = model.blocks[1].attention_norm(inputs), model.blocks[1].attention
    q, k = (p(x)[:, 0, :8].double() for p in (attention.q_proj, attention.k_proj))
    got = qk_circuit(model, 1, 0, ids)
    torch.testing.assert_close(got, (q @ k.T / 8**0.5).detach(), atol=1e-6, rtol=1e-5)


def test_primal_layers_give_cosines():
    model = ours("none", attention="primal")
    found = qk_circuit(model, 0, None, range(VOCABULARY))
    x = model.blocks[0].attention_norm(model.embed.weight)
    layer = model.blocks[0].attention
    q, k = (p(x).unflatten(-1, (2, -1)).transpose(0, 1) for p in (layer.q_proj, layer.k_proj))
    expected = nn.functional.cosine_similarity(q[:, :, None], k[:, None], dim=-1)
    torch.testing.assert_close(found.float(), expected.detach(), atol=1e-6, rtol=1e-5)


def test_the_model_is_not_changed():
    model = bert("eager").train()
    before, hooks = model(torch.arange(4)[None]).last_hidden_state.shape, _hooks(model)
    qk_circuit(model, 1, 0, range(4))
    assert model.config._attn_implementation == "eager"
    assert model.training
    assert _hooks(model) == hooks
    assert model(torch.arange(4)[None]).last_hidden_state.shape == before


def _hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_offset_is_one_for_rotary_positions_only():
    assert is_rotary(llama(), [1])
    assert is_rotary(ours("rotary"), [1])
    for model in (bert(), gpt2(), ours("learned")):
        assert not is_rotary(model, [1])
    model, ids = llama(), range(5)
    by_default = qk_circuit(model, 0, 0, ids)
    assert torch.equal(by_default, qk_circuit(model, 0, 0, ids, offset=1))
    assert not torch.allclose(by_default, qk_circuit(model, 0, 0, ids, offset=2))


# correlations


def counts(n=60, seed=0):
    rng = np.random.default_rng(seed)
    rate = rng.gamma(0.5, size=(n, n)) * rng.gamma(2.0, size=n) * rng.gamma(2.0, size=(n, 1))
    return Cooccurrence.from_counts(rng.poisson(10 * rate))


def test_spearman_agrees_with_scipy_also_for_ties():
    from scipy.stats import spearmanr

    a, b = np.random.default_rng(0).integers(9, size=(2, 400))
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    assert spearman(a, np.zeros(400)) == 0


def compare(b, cooccurrence, words=None, *, min_count=8.0, **options):
    chosen = range(len(b)) if words is None else words
    return Targets(cooccurrence, chosen, min_count).compare(b, **options)


def test_pmi_itself_has_correlation_one():
    cooccurrence = counts()
    pmi = transform_counts(cooccurrence.forward, "pmi")
    found = compare(pmi, cooccurrence, min_count=3)
    assert found.forward == pytest.approx(1, abs=1e-6)
    assert found.content_forward == pytest.approx(1, abs=1e-6)
    back = compare(pmi.T, cooccurrence, min_count=3)
    assert back.backward == pytest.approx(1, abs=1e-6)
    assert abs(found.content_backward) < 0.2
    assert abs(back.content_forward) < 0.2
    assert back.asymmetry == found.asymmetry


def test_symmetric_pmi_from_its_formula():
    cooccurrence = counts()
    s = cooccurrence.forward.toarray() + cooccurrence.forward.toarray().T
    with np.errstate(divide="ignore"):
        pmi = np.log(s * s.sum() / np.outer(s.sum(1), s.sum(0)))
    keep = s >= 4
    b = np.random.default_rng(1).normal(size=s.shape)

    def center(x):
        return np.concatenate([x[i, keep[i]] - x[i, keep[i]].mean() for i in range(len(x))])

    from scipy.stats import spearmanr

    found = compare(b, cooccurrence, min_count=4)
    expected = spearmanr(center(b), center(pmi)).statistic
    # whole numbers as counts make near ties
    assert found.symmetric == pytest.approx(expected, abs=1e-5)


def test_what_softmax_cannot_see_changes_nothing():
    cooccurrence, rng = counts(), np.random.default_rng(1)
    b = rng.normal(size=(60, 60))
    rows, columns = 5 * rng.normal(size=(60, 1)), 5 * rng.normal(size=60)
    plain = compare(b, cooccurrence, min_count=3)
    shifted = compare(b + rows, cooccurrence, min_count=3)
    assert shifted.symmetric == pytest.approx(plain.symmetric, abs=1e-9)
    assert shifted.forward == pytest.approx(plain.forward, abs=1e-9)
    keyed = compare(b + rows + columns, cooccurrence, min_count=3)
    assert keyed[3:6] == pytest.approx(plain[3:6], abs=1e-4)
    assert abs(keyed.symmetric - plain.symmetric) > 0.01


def test_key_effects_alone_have_no_content():
    cooccurrence = counts()
    b = np.tile(np.log(1 + cooccurrence.unigram), (60, 1))
    found = compare(b, cooccurrence, min_count=3)
    assert abs(found.symmetric) > 0.1
    assert abs(found.content_symmetric) < 0.1


def test_asymmetry_from_its_formula():
    b = np.array([[1.0, 2.0], [4.0, 3.0]])
    assert asymmetry(b) == pytest.approx(np.sqrt(8) / np.sqrt(4 + 36 + 36 + 36))
    assert asymmetry(b - b.T) == np.inf


def test_words_choose_and_order_rows():
    cooccurrence, rng = counts(), np.random.default_rng(2)
    chosen = rng.permutation(60)[:40]
    pmi = np.log(cooccurrence.symmetric.toarray() + 1e-9)
    a = compare(pmi[np.ix_(chosen, chosen)], cooccurrence, chosen, min_count=3)
    names = [cooccurrence.words[i] for i in chosen]
    b = compare(pmi[np.ix_(chosen, chosen)], cooccurrence, names, min_count=3)
    assert a == b
    assert a.content_symmetric > 0.9


# T11
def test_permuted_words_have_no_correlation():
    cooccurrence = counts(300)
    b = np.log(cooccurrence.forward.toarray() + 0.5)
    found = compare(b, cooccurrence, min_count=2, permutations=40)
    assert found.content_forward > 0.9
    assert abs(found.null_mean) < 0.02
    order = np.random.default_rng(3).permutation(300)
    permuted = compare(b[np.ix_(order, order)], cooccurrence, min_count=2)
    assert abs(permuted.content_symmetric) < 0.02
    assert abs(permuted.symmetric) < 4 * found.null_spread


def test_result_has_all_faces(tmp_path):
    model = ours("rotary", kind=CausalDecoder)
    corpus = np.random.default_rng(0).integers(VOCABULARY, size=4000)
    cooccurrence = Cooccurrence(VOCABULARY).fit(corpus)
    result = probe_heads(model, None, cooccurrence, min_count=3, offsets=(1, 2), layers=(0, 1))
    assert [(h.layer, h.head, h.offset) for h in result.heads[:3]] == [
        ("blocks.0.attention", 0, 1),
        ("blocks.0.attention", 1, 1),
        ("blocks.0.attention", 0, 2),
    ]
    assert len(result.at(2)) == 4
    assert result.verdict().startswith("0 of 4 heads")
    header, rows = result.table()
    assert len(rows) == 8 + 1
    assert {len(row) for row in rows} == {len(header)}
    content = json.loads(result.to_json())
    assert content["heads"][3]["association"]["forward"] == result.heads[3].association.forward
    assert content["pairs"]["symmetric"] == result.pairs[0]
    result.to_html(tmp_path / "page.html")
    assert "not the one the model was trained on" in (tmp_path / "page.html").read_text("utf-8")
    one = probe_heads(model, None, cooccurrence, min_count=3)
    assert one.offsets == (1,)
    assert one.plot().startswith(b"\x89PNG")
    again = probe_heads(model, None, cooccurrence, min_count=3)
    assert again.heads == one.heads


@pytest.mark.raw
def test_errors_say_what_to_do():
    model, cooccurrence = ours("learned"), counts(VOCABULARY)
    with pytest.raises(ValueError, match="no attention layer 7"):
        qk_circuit(model, 7, 0, range(3))
    with pytest.raises(ValueError, match="no head 2; the layer has 2"):
        qk_circuit(model, 0, 2, range(3))
    with pytest.raises(ValueError, match="no tokenizer"):
        qk_circuit(model, 0, 0, ["river", "bank"])
    with pytest.raises(ValueError, match="table of 24 positions"):
        qk_circuit(model, 0, 0, range(3), positions=[30])
    with pytest.raises(ValueError, match="none negative"):
        qk_circuit(model, 0, 0, range(3), offset=-6)
    with pytest.raises(ValueError, match="lower min_count"):
        compare(np.eye(VOCABULARY), cooccurrence, min_count=1e6)
    with pytest.raises(ValueError, match="must be 9 × 9"):
        Targets(cooccurrence, range(9), 1e-3).compare(np.eye(4))
    with pytest.raises(ValueError, match="not in the counts"):
        compare(np.eye(2), cooccurrence, ["river", "bank"])
    with pytest.raises(ValueError, match="words must be at least 2"):
        probe_heads(model, None, cooccurrence, words=1)


# the analysis of ``primal analyze``


def test_analysis_counts_the_inputs_of_a_model_without_tokenizer():
    ids = torch.randint(VOCABULARY, (40, 50))
    keep = torch.arange(50) < torch.randint(20, 51, (40, 1))
    entry = analysis_entry("counts")
    options = entry.load_options()(words=20, layers=(1,), min_count=1.0)
    result = entry.run(ours("learned"), [{"x": ids, "key_mask": keep}], options)
    assert {head.layer for head in result.heads} == {"blocks.1.attention"}
    assert result.corpus == "the inputs"
    counted = Cooccurrence(VOCABULARY).fit([r[k].numpy() for r, k in zip(ids, keep, strict=True)])
    first = np.argsort(-counted.unigram, kind="stable")[:20]
    assert result.words == tuple(counted.words[i] for i in first)
    with pytest.raises(ValueError, match="needs a model of text"):
        entry.run(ours("learned"), [torch.randn(2, 5, 3)])


def test_analysis_reads_a_file_of_counts(tmp_path):
    cooccurrence = counts(VOCABULARY)
    cooccurrence.save(tmp_path / "counts.npz")
    options = CountsOptions(file=tmp_path / "counts.npz", min_count=1.0)
    model = ours("none")
    result = analysis_entry("counts").run(model, [], options)
    assert result.corpus == "counts.npz"
    assert result.heads == probe_heads(model, None, cooccurrence, min_count=1.0).heads


@pytest.mark.raw
def test_options_are_checked():
    for wrong in ({"words": 1}, {"min_count": 0.0}, {"layers": ()}, {"layers": (-1,)}):
        with pytest.raises(ValueError, match="words must be at least 2"):
            CountsOptions(**wrong)


# pretrained models


@pytest.fixture(scope="module")
def minilm():
    from primal_studies.kit.pretrained import minilm

    try:
        return minilm()
    except UserError as missing:
        pytest.skip(str(missing))


def test_words_are_read_as_inside_a_text(minilm):
    tokenizer = minilm[1]
    ids = token_ids(tokenizer, ["bank", "zyzzyva", "river"])
    assert ids[1] == -1
    assert tokenizer.convert_ids_to_tokens(ids[[0, 2]].tolist()) == ["bank", "river"]
    assert token_ids(tokenizer, ["##ing", "bank"])[0] == tokenizer.get_vocab()["##ing"]
    assert token_ids(None, ["7", "8"]).tolist() == [0, 1]


def test_heads_of_a_pretrained_model_know_an_offline_corpus(minilm):
    texts = pydoc_data.topics.topics.values()
    cooccurrence = Cooccurrence.from_corpus(texts, top_k=1500)
    result = probe_heads(*minilm, cooccurrence, words=400, min_count=2, permutations=8)
    heads = [head.association for head in result.heads]
    assert len(heads) == 12
    assert len(result.words) == 400
    assert max(head.content_symmetric for head in heads) > 0.05
    assert sum(head.is_evident for head in result.heads) >= 2
    # T11
    assert abs(np.mean([head.null_mean for head in heads])) < 0.02


def test_analysis_of_a_pretrained_model_says_which_corpus(minilm):
    model, tokenizer = minilm
    batch = dict(tokenizer(["the river bank flooded"] * 3, return_tensors="pt"))
    result = analysis_entry("counts").run(model, [batch], tokenizer=tokenizer)
    assert len(result.words) == 500
    assert "the inputs and the help texts of Python" in result.verdict()


def test_words_of_a_head_beside_counts(minilm):
    model, tokenizer = minilm
    text = "The zyzzyva river-bank flooded."
    words, weights = word_weights(model, tokenizer, text, layer=2, head=5)
    assert words == ["the", "zyzzyva", "river", "bank", "flooded"]
    batch = tokenizer(text, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    full = capture(model, dict(batch), layers=2)[0].weights(heads=5).numpy()
    river, bank, the = (tokens.index(token) for token in ("river", "bank", "the"))
    parts = list(range(the + 1, river))
    assert len(parts) > 1
    # sums over the tokens of a key, means over those of a query
    expected = full[parts][:, [river]].mean() / full[parts][:, [bank]].mean()
    assert weights[1, 2] / weights[1, 3] == pytest.approx(expected)
    assert weights[0, 1] / weights[0, 2] == pytest.approx(full[the, parts].sum() / full[the, river])
    np.testing.assert_allclose(weights.sum(1), 1)
    known = Cooccurrence.from_corpus(["the river bank flooded the bank"])
    assert count_weights(known, words)[1].tolist() == [0.2] * 5
    figure = plot_head_beside_counts(model, tokenizer, known, text, layer=2, head=5)
    assert [axis.get_title() for axis in figure.axes] == ["counts", "layer 2, head 5"]
    to_png(figure)
    with pytest.raises(ValueError, match="no head 12"):
        word_weights(model, tokenizer, text, head=12)


@pytest.mark.slow
def test_figures_of_minilm_on_imdb_are_as_expected(minilm):
    if "PRIMAL_DATA" not in os.environ:
        pytest.skip("needs PRIMAL_DATA")
    from primal_studies.counts.corpus import imdb_counts

    result = probe_heads(*minilm, imdb_counts(4000), words=1500, permutations=20)
    head = [h.association for h in result.heads]
    expected = {  # symmetric, forward, backward, asymmetry; IMDb and Rotten Tomatoes
        2: (0.265, 0.154, 0.189, 0.16),
        6: (0.214, 0.219, -0.008, 1.15),
        3: (0.176, 0.172, -0.079, 0.52),
        9: (0.174, 0.180, -0.045, 1.03),
        1: (0.114, 0.144, 0.004, 0.86),
        5: (-0.014, -0.134, 0.106, 0.57),
    }
    for number, (*correlations, index) in expected.items():
        assert head[number][:3] == pytest.approx(correlations, abs=0.04)
        assert head[number].asymmetry == pytest.approx(index, abs=0.02)
    assert result.embeddings.symmetric == pytest.approx(0.164, abs=0.03)
    assert abs(np.mean([h.null_mean for h in head])) < 0.02


# the command


def test_command_prints_and_writes(tmp_path, capsys):
    model = ours("none")
    model.save_pretrained(tmp_path / "model")
    counts(VOCABULARY).save(tmp_path / "counts.npz")
    base = ["analyze", str(tmp_path / "model"), "counts", "--counts.min-count", "1"]
    base += ["--counts.file", str(tmp_path / "counts.npz")]
    page = tmp_path / "heads.html"
    assert main([*base, "--counts.layers", "0", "1", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "of 4 heads follow the word pairs of counts.npz" in said
    assert "| blocks.1.attention, 1 |" in said
    assert "<table>" in page.read_text("utf-8")
    options = ["--counts.offsets", "0", "2", "--out", str(tmp_path / "heads.json")]
    assert main([*base, *options]) == 0
    content = json.loads((tmp_path / "heads.json").read_text("utf-8"))
    probed = probe_heads(model, None, counts(VOCABULARY), min_count=1.0, offsets=(0, 2))
    assert len(content["heads"]) == len(probed.heads) == 4
    assert content["heads"][1]["association"]["forward"] == pytest.approx(
        probed.heads[1].association.forward
    )
    for wrong, why in (
        (["--counts.layers", "-1"], "layers at least 0"),
        (["--counts.text", "a b"], "belong together"),
        (["--counts.text", "a b", "--counts.head", "0"], "no tokenizer"),
        (["--counts.layers", "5"], "no attention layer 5"),
    ):
        assert main([*base, *wrong]) == 2
        assert why in capsys.readouterr().err


def test_command_draws_a_head(tmp_path, minilm):
    model, tokenizer = minilm
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    Cooccurrence.from_corpus(["the river bank was full of people and their money"]).save(
        tmp_path / "counts.npz"
    )
    command = ["analyze", str(tmp_path / "model"), "counts"]
    command += ["--counts.file", str(tmp_path / "counts.npz"), "--counts.min-count", "0.1"]
    picture = tmp_path / "head.png"
    command += ["--counts.text", "The river bank", "--counts.head", "2", "--out", str(picture)]
    assert main(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
