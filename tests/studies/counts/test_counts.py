"""Studies of counts: prediction, low rank, tables, and starts at a corpus."""

import os
import pydoc_data.topics

import numpy as np
import pytest
import torch

from primal_attention.analysis.counts import (
    Cooccurrence,
    DistributionalAttention,
    WordVectors,
    count_factors,
    initialize_from_corpus,
    qk_circuit,
    split_words,
)
from primal_attention.models import CausalDecoder, DecoderConfig, EncoderClassifier, EncoderConfig
from primal_attention.tasks.study import find_study
from primal_studies.counts.analogies import ANALOGIES, evaluate_analogies
from primal_studies.counts.corpus import low_rank_distances
from primal_studies.counts.corpus_init_tables import (
    _half_width,
    corpus_init_tables,
    corpus_init_verdict,
    differences,
)
from primal_studies.counts.prediction import evaluate_prediction, next_word_cases, next_word_scores
from primal_studies.counts.tables import METHODS, counts_tables, counts_verdict

ORDER = ("inverse-distance", "directional", "symmetric", "projection")


@pytest.fixture(scope="module")
def topics():
    """Counts of the first part of the help texts of Python, and the other part as numbers."""
    texts = [split_words(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    counts = Cooccurrence(top_k=400).fit(texts[::2])
    return counts, [counts.encode(text) for text in texts[1::2]]


def test_predictors_agree_with_their_formulas(topics):
    counts, _ = topics
    c = counts.encode(["the", "name", "of", "the", "object", "is", "not"])
    f = counts.forward.toarray()
    s = f + f.T
    m = s[np.ix_(c, c)]
    f_rows, s_rows = f / f.sum(1, keepdims=True), s / s.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        ppmi = np.maximum(np.log(f * f.sum() / np.outer(f.sum(1), f.sum(0))), 0)
    soft = np.exp(ppmi[c[-1], c])
    expected = {
        "projection": (m @ s[c]).mean(0),
        "normalized": (m / m.sum(1, keepdims=True) @ s_rows[c]).mean(0),
        "symmetric": s_rows[c].mean(0),
        "directional": f_rows[c].mean(0),
        "association": soft / soft.sum() @ f_rows[c],
        "inverse-distance": 1 / np.arange(len(c), 0, -1) @ f_rows[c],
        "last-word": f_rows[c[-1]],
    }
    for method, scores in expected.items():
        got = next_word_scores(counts, c[None], method)[0]
        np.testing.assert_allclose(got, scores, rtol=1e-9, err_msg=method)


def test_order_of_refinements_on_an_offline_corpus(topics):
    counts, held_out = topics
    found = evaluate_prediction(counts, next_word_cases(held_out, count=1000))
    mrr = [found[name].mrr for name in ORDER]
    assert mrr == sorted(mrr, reverse=True)


# T13
@pytest.mark.slow
def test_order_of_refinements_on_a_million_tokens():
    if "PRIMAL_DATA" not in os.environ:
        pytest.skip("needs PRIMAL_DATA")
    from primal_studies.counts.corpus import imdb_cases, imdb_counts

    counts = imdb_counts(4000, 5000)
    assert counts.num_tokens > 1_000_000
    found = evaluate_prediction(counts, imdb_cases(counts, 3000))
    mrr = [found[name].mrr for name in ORDER]
    assert mrr == sorted(mrr, reverse=True)
    assert found["projection"].mrr == pytest.approx(found["unigram"].mrr, abs=0.01)
    assert found["last-word"].mrr == max(score.mrr for score in found.values())


def test_distances_are_those_of_the_attention_layer(topics):
    counts, held_out = topics
    contexts = next_word_cases(held_out, count=20).contexts
    n = len(counts)
    found = low_rank_distances(counts, contexts, (8, n), words=n)
    assert found[str(n)] < 1e-9
    assert found[str(n)] < found["8"] < found["uniform"]
    ids, exact = torch.from_numpy(contexts), counts.forward.toarray() + 0.5
    exact = exact[contexts[:, :, None], contexts[:, None, :]]
    exact = exact / exact.sum(-1, keepdims=True)
    layer = DistributionalAttention(counts, rank=8, smoothing=0.5, dtype=torch.float64)
    weights = layer(ids, return_weights=True).weights.numpy()
    expected = np.abs(weights - exact).sum(-1).mean() / 2
    assert found["8"] == pytest.approx(expected, rel=1e-6)


# analogies


def test_analogies_are_well_formed_and_scored_over_known_words():
    assert all(len(set(question)) == 4 for question in ANALOGIES)
    unknown = WordVectors(("a", "b"), np.eye(2))
    assert np.isnan(evaluate_analogies(unknown).accuracy)


# starts at a corpus


@pytest.fixture(scope="module")
def factors(topics):
    return count_factors(topics[0], 64, transform="ppmi")


def test_factors_are_balanced_and_the_best_of_their_rank(topics, factors):
    ppmi = topics[0].transform("ppmi", directional=True).toarray()
    rest = np.linalg.norm(ppmi - (factors.query @ factors.key.T).numpy())
    sigma = np.linalg.svd(ppmi, compute_uv=False)
    assert rest == pytest.approx(np.sqrt((sigma[64:] ** 2).sum()), rel=1e-9)
    for side in factors[:2]:
        np.testing.assert_allclose(side.square().sum(0), sigma[:64], rtol=1e-9)


def test_softmax_logits_are_the_association(topics, factors):
    n = len(topics[0])
    config = DecoderConfig(
        vocab_size=n, dim=64, num_heads=2, attention="softmax", positions="none", norm="post"
    )
    model = CausalDecoder(config)
    # one dimension for every token is more than enough: the fit is exact on a part of them
    few = factors._replace(query=factors.query[:50], key=factors.key[:50])
    small = CausalDecoder(DecoderConfig(**{**vars(config), "vocab_size": 50}))
    assert initialize_from_corpus(small, few) == pytest.approx((1, 1), abs=1e-6)
    logits = qk_circuit(small, 0, None, range(50))
    torch.testing.assert_close(
        logits.sum(0), few.query @ few.key.T, rtol=1e-3, atol=1e-3, check_dtype=False
    )
    # heads take the directions in turn
    q, k = (f[:, 1::2] for f in few[:2])
    torch.testing.assert_close(logits[1], q @ k.T, rtol=1e-3, atol=1e-3, check_dtype=False)
    # random embeddings of width c explain c of n tokens
    assert initialize_from_corpus(model, factors).queries == pytest.approx(65 / n, abs=0.05)


def test_embeddings_from_counts_carry_the_factors(topics, factors):
    n = len(topics[0])
    config = EncoderConfig(num_classes=2, vocab_size=n, dim=64, num_heads=2, attention="primal")
    model = EncoderClassifier(config)
    size = model.embed.weight.square().mean()
    keys = model.blocks[0].attention.k_proj(torch.ones(1, 64))
    before = qk_circuit(model, 0, None, range(n)).std()
    fit = initialize_from_corpus(model, factors, embeddings=True)
    assert min(fit) > 0.5
    torch.testing.assert_close(model.embed.weight.square().mean(), size, rtol=0.02, atol=0)
    assert not torch.equal(keys, model.blocks[0].attention.k_proj(torch.ones(1, 64)))
    assert qk_circuit(model, 0, None, range(n)).std() != before
    assert all(p.requires_grad for p in model.parameters())


def test_size_of_primal_queries_stays(topics, factors):
    n = len(topics[0])
    config = EncoderConfig(num_classes=2, vocab_size=n, dim=64, num_heads=2, positions="none")
    model = EncoderClassifier(config)
    layer, x = model.blocks[0].attention, model.blocks[0].attention_norm(model.embed.weight)
    before = layer.q_proj(x).square().mean()
    initialize_from_corpus(model, factors)
    torch.testing.assert_close(layer.q_proj(x).square().mean(), before, rtol=1e-3, atol=0)


@pytest.mark.raw
def test_factors_must_suit_the_model(factors):
    wide = DecoderConfig(vocab_size=len(factors.key), dim=128)
    with pytest.raises(ValueError, match="rank 64, but the model has width 128"):
        initialize_from_corpus(CausalDecoder(wide), factors)
    with pytest.raises(ValueError, match="but the model has 30 tokens"):
        initialize_from_corpus(CausalDecoder(DecoderConfig(vocab_size=30, dim=64)), factors)
    with pytest.raises(TypeError, match="no model of this library"):
        initialize_from_corpus(torch.nn.Linear(2, 2), factors)


# tables


def _rows():
    """Rows as the study writes them, with easy numbers."""
    mrr = {"unigram": 0.12, "projection": 0.121, "normalized": 0.12, "symmetric": 0.13}
    mrr |= {"directional": 0.143, "association": 0.15, "inverse-distance": 0.18, "last-word": 0.23}
    first = {"table": "prediction", "words": 4000, "cases": 10, "tokens": 99, "coverage": 0.9}
    rows = [
        {**first, "predictor": name, "mrr": value, "top10": 0.3, "median_rank": 5.0}
        for name, value in mrr.items()
    ]
    keys = ("asymmetry of counts", "asymmetry of PPMI", "share of 50", "share of 100")
    rows.append({"table": "operator", "words": 4000, **dict.fromkeys((*keys, "share of 300"), 0.5)})
    for source in ("drawn", "text"):
        names = ("uniform", "key bias only", "symmetric counts", "1", "1000")
        rows += [{"table": "rank", "sequences": source, "k": k, "distance": 0.2} for k in names]
    names = ("symmetric", "forward", "backward", "content_symmetric", "content_forward")
    names += ("content_backward", "asymmetry", "null_mean", "null_spread")
    for model, more, value in (
        ("MiniLM", {"positions": "5-14"}, 0.25),
        ("MiniLM, untrained", {"positions": "5-14"}, 0.01),
        ("SmolLM2", {"offset": 1}, 0.2),
    ):
        shared = {"table": "heads", "probed": 9, "model": model, "pairs": 7, "directional pairs": 6}
        shared |= more
        for head in (0, 1, "embeddings"):
            row = shared | dict.fromkeys(names, value / (2 if head else 1)) | {"head": head}
            rows.append(row | {"evident": value > 0.1, "content": head == 0 and value > 0.1})
    for number, method in enumerate(METHODS):
        scores = {"WordSim-353": 0.5 + number / 100, "SimLex-999": 0.2, "built-in pairs": 0.8}
        counts = {"WordSim-353 pairs": "2/3", "SimLex-999 pairs": "4/9", "built-in analogies": 0.9}
        shared = {"table": "similarity", "words": 99, "method": method, "seconds": 1.0}
        rows.append(shared | scores | counts)
    return rows


def test_tables_and_verdict_come_from_the_rows():
    files = counts_tables(_rows())
    assert {"prediction.md", "rank.md", "operator.md", "heads.md", "similarity.md"} <= set(files)
    assert files["picture.png"].startswith(b"\x89PNG")
    text = counts_verdict(_rows())
    assert "no better than the unigram: MRR 0.121 against 0.120" in text
    assert "Direction adds +10%" in text
    assert "raw projection holds" in text
    assert "2 of 2 heads in the first layer of MiniLM" in text
    assert "1 of 2 without key effects, and 0 of 2 heads of the untrained model" in text
    worse = [
        {**row, "mrr": 0.2} if row.get("predictor") == "projection" else row for row in _rows()
    ]
    assert "is better than the unigram" in counts_verdict(worse)
    assert "raw projection does not hold" in counts_verdict(worse)
    assert "| unigram " in files["prediction.md"]
    assert "0.115" in files["prediction.md"]
    # a study that was stopped
    assert set(counts_tables(_rows()[:8])) == {"prediction.md"}
    assert "verdict.md" not in counts_tables(_rows()[:-1])


def test_gains_are_paired_by_seed():
    shared = {"words": 9, "steps": [5, 10], "seconds": 1.0}
    gains = {"random": 0.0, "projections": 0.02, "embeddings": 0.1, "both": 0.1}
    rows = [
        {"task": task, "attention": "primal", "start": start, "seed": seed, **shared}
        | {"curve": [0.5, 0.6, (0.7 + gain + seed / 10) * sign], "fit": [0.5, 0.4]}
        for task, sign in (("imdb", 1.0), ("wikitext-2", -1.0))
        for start, gain in gains.items()
        for seed in (0, 1, 2)
    ]
    found = differences(rows, "projections", "random", 2)
    assert found["imdb, primal"] == pytest.approx([0.02] * 3)
    assert found["wikitext-2, primal"] == pytest.approx([0.02] * 3)  # a smaller loss is a gain
    text = corpus_init_verdict(rows)
    assert "Embeddings from counts are better in 0 of 2 comparisons after 5 steps and in 2" in text
    assert "are better in 0 of 4 comparisons after 5 steps and in 2 of 4 after 10" in text
    assert "the largest mean difference of projections at the end is 0.020" in text
    files = corpus_init_tables(rows)
    assert "+0.020 ± 0.000" in files["gains.md"]
    assert files["picture.png"].startswith(b"\x89PNG")
    assert "0.820 ± 0.100" in files["table.md"]


def test_intervals_are_those_of_the_t_distribution():
    # 1, 2, 3: mean 2, standard error 1/√3, 4.303 for two degrees of freedom
    assert _half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert _half_width([1.0]) == np.inf


def test_studies_list_their_cells():
    counts = find_study("counts", "repro")
    tables = {cell["table"] for cell in counts.cells(counts.Options())}
    assert tables == {"prediction", "operator", "rank", "heads", "similarity"}
    starts = find_study("corpus-init", "repro")
    cells = starts.cells(starts.Options(seeds=2))
    assert len(cells) == 2 * 2 * 2 * 4
