"""Word vectors: singular value decompositions, GloVe, checks and files."""

import warnings

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from primal_attention.analysis.counts import (
    SIMILAR_WORDS,
    Cooccurrence,
    WordPair,
    WordVectors,
    association_svd,
    evaluate_similarity,
    glove_fit,
    ksvd_embeddings,
    pmi_svd,
    read_pairs,
)
from primal_attention.functional.ksvd import kkt_residual, ksvd_objective


def zipf_counts(n, tokens=4000, seed=0, **options):
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, n + 1)
    return Cooccurrence(n, **options).fit([rng.choice(n, tokens, p=p / p.sum())])


# T8
def test_ksvd_scores_solve_the_shifted_eigenvalue_equations():
    counts = zipf_counts(60)
    kernel = counts.transform("ppmi").toarray()
    found = ksvd_embeddings(counts, 20)
    sigma = found.singular_values
    h_e, h_r = found.vectors / sigma, found.contexts / sigma
    np.testing.assert_allclose(h_e.T @ h_e, np.eye(20), atol=1e-8)
    np.testing.assert_allclose(kernel @ h_r, h_e * sigma, atol=1e-8)
    np.testing.assert_allclose(kernel.T @ h_e, h_r * sigma, atol=1e-8)
    # the scores are the projections e = κ h_r and r = κᵀ h_e
    np.testing.assert_allclose(found.vectors, kernel @ h_r, atol=1e-8)


# T8: J = ½ Tr(E Λ Eᵀ) + ½ Tr(R Λ Rᵀ) − Tr(W_eᵀ W_r) with Φ_q = I, Φ_k = S♯ᵀ and Λ = Σ⁻¹
def test_the_primal_regularizer_is_zero_at_word_vectors():
    counts = zipf_counts(60)
    kernel = torch.from_numpy(counts.transform("ppmi").toarray())
    found = ksvd_embeddings(counts, 20)
    e, r, sigma = (
        torch.from_numpy(a) for a in (found.vectors, found.contexts, found.singular_values)
    )
    h_e, h_r = e / sigma, r / sigma
    w_e, w_r = kernel @ h_r, h_e  # Φ_kᵀ H_r and Φ_qᵀ H_e
    trace = (w_e * w_r).sum()
    direct = (e.square() / sigma).sum() / 2 + (r.square() / sigma).sum() / 2 - trace
    assert abs(float(direct)) < 1e-8
    # the same with the function that trains primal layers, whose lam² is n Λ
    moments = (t.square().mean(0)[None, None] for t in (e, r))
    layer = ksvd_objective(*moments, (len(e) / sigma).sqrt()[None], trace[None])
    assert abs(float(layer)) < 1e-8
    # J = 0 is one equation; the KKT residual is zero at singular directions only
    gram_q, gram_k = torch.eye(len(e), dtype=e.dtype) / len(e), kernel @ kernel.T / len(e)
    each = (t[None, None] for t in (gram_q, gram_k, w_e, w_r))
    assert float(kkt_residual(*each, (len(e) / sigma).sqrt()[None])) < 1e-16


# T8
def test_truncation_error_is_the_sum_of_the_other_singular_values():
    counts = zipf_counts(60)
    kernel = counts.transform("pmi")
    every = np.linalg.svd(kernel, compute_uv=False)
    left, sigma, right = (t.numpy() for t in association_svd(kernel, 7))
    error = np.linalg.norm(kernel - left * sigma @ right.T)
    assert error == pytest.approx(np.sqrt((every[7:] ** 2).sum()), rel=1e-8)


# peer: our solvers and scipy's agree up to the sign of a direction
@pytest.mark.parametrize("n", [80, 2100])
def test_vectors_equal_those_of_scipy(n):
    counts = zipf_counts(n, 20 * n)
    ppmi = counts.transform("ppmi", directional=False, context_smoothing=0.75, shift=2)
    k = 5
    u, sigma, vt = svds(csr_array(ppmi), k=k, random_state=0)
    order = np.argsort(-sigma)
    u, sigma, vt = u[:, order], sigma[order], vt[order]
    found = pmi_svd(counts, k, shift=2, symmetric_power=1)
    np.testing.assert_allclose(found.singular_values, sigma, rtol=1e-6)
    sign = np.sign((found.vectors * u).sum(0))
    np.testing.assert_allclose(found.vectors * sign, u * sigma, atol=1e-3)
    np.testing.assert_allclose(found.contexts * sign, vt.T, atol=1e-3)


def test_power_moves_singular_values_between_words_and_contexts():
    counts = zipf_counts(40)
    products = [
        (found := pmi_svd(counts, 6, symmetric_power=p)).vectors @ found.contexts.T
        for p in (0, 0.5, 1)
    ]
    np.testing.assert_allclose(products[0], products[1], atol=1e-10)
    np.testing.assert_allclose(products[0], products[2], atol=1e-10)
    balanced = pmi_svd(counts, 6)
    np.testing.assert_allclose(
        (balanced.vectors**2).sum(0), (balanced.contexts**2).sum(0), rtol=1e-10
    )
    scores = ksvd_embeddings(counts, 6, directional=False, context_smoothing=0.75)
    np.testing.assert_allclose(
        scores.vectors, balanced.vectors * np.sqrt(balanced.singular_values), atol=1e-10
    )


# T3
def test_exact_glove_is_count_attention():
    rng = np.random.default_rng(0)
    counts = Cooccurrence.from_counts(rng.integers(1, 200, (30, 30)))
    fit = glove_fit(counts, 30, solver="lbfgs", epochs=3, directional=True)
    ids = rng.integers(0, 30, 9)
    m = counts.forward.toarray()[np.ix_(ids, ids)]
    logits = (fit.vectors @ fit.contexts.T + fit.context_bias)[np.ix_(ids, ids)]
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, m / m.sum(1, keepdims=True), atol=1e-8)


def glove_loss(counts, fit, x_max=100, alpha=0.75):
    """The objective of the paper, pair by pair."""
    total = 0.0
    c = counts.symmetric.toarray()
    for i, j in np.argwhere(c > 0):
        model = fit.vectors[i] @ fit.contexts[j] + fit.word_bias[i] + fit.context_bias[j]
        total += min(1, (c[i, j] / x_max) ** alpha) * (model - np.log(c[i, j])) ** 2
    return total


def test_both_glove_solvers_reduce_the_objective():
    counts = zipf_counts(40, 2000)
    assert counts.symmetric.max() > 50
    options = {"x_max": 20, "alpha": 0.5}

    def loss(**also):
        return glove_loss(counts, glove_fit(counts, 4, **options, **also), **options)

    start, precise = loss(epochs=1, lr=1e-9), loss(epochs=1, solver="lbfgs")
    steps = loss(epochs=150, batch_size=100)
    assert precise < 0.03 * start
    assert precise <= steps < 2 * precise
    again = [glove_fit(counts, 4, epochs=2).vectors for _ in range(2)]
    np.testing.assert_array_equal(*again)


def test_a_step_of_adagrad_follows_the_gradient():
    counts, x_max = zipf_counts(20, 1000), 5.0
    start, after = (
        glove_fit(counts, 3, x_max=x_max, epochs=1, lr=lr, batch_size=10**6) for lr in (1e-12, 0.1)
    )
    names = ("vectors", "contexts", "word_bias", "context_bias")
    w, c, b, d = (torch.from_numpy(getattr(start, name)).requires_grad_() for name in names)
    count = torch.from_numpy(counts.symmetric.toarray())
    weight, known = (count / x_max).pow(0.75).clamp_max(1), count > 0
    error = torch.where(known, w @ c.T + b[:, None] + d - count.clamp_min(1e-9).log(), 0.0)
    assert (count > x_max).any()
    (weight * error.square()).sum().div(2).backward()
    for name, old in zip(names, (w, c, b, d), strict=True):
        step = 0.1 * old.grad / (1 + old.grad.square()).sqrt()
        np.testing.assert_allclose(getattr(after, name), (old - step).detach(), atol=1e-10)


def test_neighbors_and_analogies():
    rows = np.array([[0, 1.0], [0, 2], [3, 1], [3, 2.2], [0, 0]])
    found = WordVectors(("man", "woman", "king", "queen", "zero"), rows)
    near = found.neighbors("king", 2)
    assert [each.word for each in near] == ["queen", "man"]
    assert near[0].similarity == pytest.approx(found.similarity("king", "queen"))
    assert found.similarity("man", "zero") == 0
    royal = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 1, 1], [0.3, 1, -0.7]])
    people = WordVectors(("man", "woman", "king", "queen", "servant"), royal)
    assert [each.word for each in people.analogy("man", "king", "woman", 2)] == ["queen", "servant"]
    assert people.analogy("king", "man", "woman")[0].word == "servant"
    assert "king" in found
    assert "car" not in found
    with pytest.raises(KeyError, match="Did you mean 'king'"):
        found.neighbors("kings")
    with pytest.raises(ValueError, match="no context vectors"):
        found.joined()
    both = WordVectors(("a",), np.ones((1, 2)), np.full((1, 2), 2.0))
    np.testing.assert_array_equal(both.joined().vectors, [[1, 1, 2, 2]])
    np.testing.assert_array_equal(both.summed().vectors, [[3, 3]])
    with pytest.raises(ValueError, match="one row for each word"):
        WordVectors(("a", "b"), np.ones((1, 2)))


def test_rank_correlation_over_known_pairs():
    angles = np.array([0.0, 0.3, 0.9, 1.5])
    found = WordVectors(tuple("abcd"), np.stack([np.cos(angles), np.sin(angles)], 1))
    pairs = [WordPair("a", w, s) for w, s in (("b", 9), ("c", 5), ("d", 2), ("x", 1))]
    assert evaluate_similarity(found, pairs) == (pytest.approx(1), 3, 4)
    backwards = [pair._replace(score=-pair.score) for pair in pairs]
    assert evaluate_similarity(found, backwards).spearman == pytest.approx(-1)
    # ties share their rank: ranks 3, 2, 1 against 2.5, 2.5, 1
    tied = [WordPair("a", w, s) for w, s in (("b", 5), ("c", 5), ("d", 2))]
    assert evaluate_similarity(found, tied).spearman == pytest.approx(np.sqrt(3) / 2)
    for few in (pairs[:1], [pair._replace(score=5) for pair in pairs]):
        assert np.isnan(evaluate_similarity(found, few).spearman)
    same = WordVectors(found.words, np.ones((4, 2)))
    assert np.isnan(evaluate_similarity(same, pairs).spearman)


def test_built_in_sets_are_well_formed():
    assert len({frozenset(pair[:2]) for pair in SIMILAR_WORDS}) == len(SIMILAR_WORDS) == 48


def test_files_of_pairs(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text(
        "Word 1,Word 2,Human (mean)\nLove,sex,6.77\n\n# note\ntiger, cat, 7.35, extra\n"
    )
    assert read_pairs(path) == (("love", "sex", 6.77), ("tiger", "cat", 7.35))
    path.write_text("a b 1\nc d\n")
    with pytest.raises(ValueError, match="line 2: 'c d'"):
        read_pairs(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no word pairs"):
        read_pairs(path)


def test_gensim_reads_our_vectors_and_we_its_pairs(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("gensim")
        from gensim.models import KeyedVectors
        from gensim.test.utils import datapath
    found = pmi_svd(zipf_counts(50), 8)
    found.to_word2vec(tmp_path / "vectors.txt")
    theirs = KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert tuple(theirs.index_to_key) == found.words
    np.testing.assert_allclose(theirs.vectors, found.vectors, rtol=1e-6, atol=1e-7)
    assert [w for w, _ in theirs.most_similar("3", topn=4)] == [
        each.word for each in found.neighbors("3", 4)
    ]
    pairs = read_pairs(datapath("wordsim353.tsv"))
    assert len(pairs) == 353
    words = tuple(sorted({word for pair in pairs[::2] for word in pair[:2]}))
    other = WordVectors(words, np.random.default_rng(0).standard_normal((len(words), 8)))
    theirs = KeyedVectors(8)
    theirs.add_vectors(list(words), other.vectors)
    _, correlation, lost = theirs.evaluate_word_pairs(datapath("wordsim353.tsv"))
    found = evaluate_similarity(other, pairs)
    assert found.spearman == pytest.approx(correlation.statistic, abs=1e-12)
    assert 1 - found.used / found.total == pytest.approx(lost / 100)
    assert len(read_pairs(datapath("simlex999.txt"))) == 999
    with pytest.raises(ValueError, match="has a space"):
        WordVectors(("a b",), np.ones((1, 1))).to_word2vec(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: pmi_svd(c, 41), "from 1 to the number of words, 40"),
        (lambda c: pmi_svd(c, 0), "rank is 0"),
        (lambda c: glove_fit(c, solver="sgd"), "solver must be one of"),
        (lambda c: glove_fit(c, epochs=0), "epochs=0"),
        (lambda c: glove_fit(Cooccurrence(3)), "no counts"),
    ],
)
def test_wrong_options_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(zipf_counts(40, 300))
