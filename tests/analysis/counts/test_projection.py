"""The projection of counts onto a sequence: the published example and its algebra."""

import numpy as np
import pytest

from primal_attention.analysis.counts import (
    normalize_rows,
    position_terms,
    position_types,
    project,
    select,
)


def projected(example, text, **options):
    selector = select(example.encode(text), len(example))
    return project(example.counts.toarray(), selector, **options)


# T1
def test_river_bank_flooded(example):
    found = projected(example, "river bank flooded", normalize=False)
    np.testing.assert_array_equal(found.m, [[0, 4, 5], [4, 0, 3], [5, 3, 0]])
    norm = normalize_rows(found.m)
    np.testing.assert_allclose(norm[:2], [[0, 0.44, 0.56], [0.57, 0, 0.43]], atol=0.005)
    np.testing.assert_array_equal(norm[2], [5 / 8, 3 / 8, 0])
    np.testing.assert_allclose(found.scores, [22.7, 20.0, 14.0, 11.7, 22.0, 40.3, 9.3], atol=0.05)
    # the profiles behind the means: those of the matrices
    np.testing.assert_array_equal(found.profiles[:, example.words.index("shore")], [40, 36, 45])
    np.testing.assert_array_equal(found.profiles[:, example.words.index("loan")], [24, 0, 18])
    assert example.words[found.probability.argmax()] == "shore"
    assert found.probability.max() > 0.999


# T1
def test_bank_loan(example):
    found = projected(example, "bank loan", normalize=False)
    np.testing.assert_array_equal(normalize_rows(found.m), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(found.scores, [12, 18, 18, 36, 9, 15, 18])
    assert example.words[found.probability.argmax()] == "money"


# T1
@pytest.mark.parametrize(
    ("text", "word", "probability"),
    [("river bank flooded", "shore", 0.74), ("bank loan", "money", 0.83)],
)
def test_normalized_rows_predict_the_same_words_with_doubt(example, text, word, probability):
    found = projected(example, text)
    assert example.words[found.probability.argmax()] == word
    assert found.probability.max() == pytest.approx(probability, abs=0.005)
    assert projected(example, text, temperature=5).probability.max() < probability


# T4
def test_four_terms_add_up(positive):
    rng = np.random.default_rng(0)
    s = positive.counts.toarray()
    q, p = select(rng.integers(0, 30, 6), 30), rng.random((6, 30))
    terms = position_terms(s, q, p)
    np.testing.assert_allclose(terms.combine(), (q + p) @ s @ (q + p).T, rtol=1e-12)
    both = np.vstack([q, p])
    np.testing.assert_allclose(terms.combine("stack"), both @ s @ both.T, rtol=1e-12)
    with pytest.raises(ValueError, match="'add' or 'stack'"):
        terms.combine("mean")


# T5
def test_projection_moves_with_the_tokens_unless_they_have_positions(positive):
    rng = np.random.default_rng(0)
    s, q = positive.counts.toarray(), select(rng.integers(0, 30, 6), 30)
    order = rng.permutation(6)
    np.testing.assert_array_equal(
        project(s, q[order], normalize=False).m, project(s, q, normalize=False).m[order][:, order]
    )
    p = rng.random((6, 30))
    moved = position_terms(s, q[order], p).combine()
    assert abs(moved - position_terms(s, q, p).combine()[order][:, order]).max() > 1


# T5
def test_symmetric_counts_give_a_reversible_chain(positive):
    ids = [3, 1, 4, 15, 9, 2]
    m = project(positive.symmetric.toarray(), select(ids, 30), normalize=False).m
    np.testing.assert_array_equal(m, m.T)
    norm = normalize_rows(m)
    assert abs(norm - norm.T).max() > 1e-3
    root = np.sqrt(m.sum(1))
    balanced = root[:, None] * norm / root
    np.testing.assert_allclose(balanced, balanced.T, atol=1e-12)
    np.testing.assert_allclose(norm.sum(1), 1, atol=1e-12)
    stationary = m.sum(1) / m.sum()
    np.testing.assert_allclose(stationary @ norm, stationary, atol=1e-12)
    flow = stationary[:, None] * norm
    np.testing.assert_allclose(flow, flow.T, atol=1e-12)


def test_rows_without_counts_are_uniform_and_negative_entries_an_error():
    np.testing.assert_array_equal(normalize_rows([[0, 0], [1, 3]]), [[0.5, 0.5], [0.25, 0.75]])
    with pytest.raises(ValueError, match=r"negative entry -1, .*softmax"):
        normalize_rows([[1, -1]])


def test_positions_of_a_corpus_are_mixtures_of_words():
    documents = [np.array([0, 1, 2]), np.array([1, 1]), np.array([-1, 2])]
    found = position_types(documents, 3, 4)
    expected = [[1 / 2, 1 / 2, 0], [0, 2 / 3, 1 / 3], [0, 0, 1], [0, 0, 0]]
    np.testing.assert_allclose(found, expected, atol=1e-15)
