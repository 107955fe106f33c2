"""Re-ranking by affinities alone, against the formula."""

import numpy as np
import pytest

from primal_attention.tasks.lists import AffinityReranker


def _unit(rng, *shape):
    x = rng.standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype("float32")


@pytest.mark.parametrize("width", [6, 40], ids=["primal", "dual"])
@pytest.mark.parametrize("normalize", ["both", "query"])
def test_scores_are_those_of_the_second_moment_of_the_anchors(width, normalize):
    # T13: a_i · a_j = x_iᵀ M x_j, whichever of the two is computed
    rng = np.random.default_rng(0)
    xq, xb = _unit(rng, 2, width), _unit(rng, 30, width)
    ids = np.argsort(-xq @ xb.T, axis=1)[:, :20]
    found = AffinityReranker(anchors=12, normalize=normalize).rerank(xq, xb, ids)
    for q, (query, row) in enumerate(zip(xq.astype(float), ids, strict=True)):
        anchors = np.concatenate([query[None], xb[row[:11]]]).astype(float)
        moment = anchors.T @ anchors
        products = xb[row].astype(float) @ moment @ query / np.sqrt(query @ moment @ query)
        if normalize == "both":
            products /= np.sqrt(np.einsum("kd,de,ke->k", xb[row], moment, xb[row]))
        order = np.argsort(-products, kind="stable")
        np.testing.assert_array_equal(found.ids[q], row[order])
        np.testing.assert_allclose(found.scores[q], products[order], atol=1e-5)


def test_empty_slots_stay_last_and_change_nothing():
    rng = np.random.default_rng(1)
    xq, xb = _unit(rng, 1, 5), _unit(rng, 9, 5)
    ids = np.argsort(-xq @ xb.T, axis=1)
    for anchors in (3, 50):
        plain = AffinityReranker(anchors).rerank(xq, xb, ids)
        longer = np.pad(ids, ((0, 0), (0, 4)), constant_values=-1)
        padded = AffinityReranker(anchors).rerank(xq, xb, longer)
        np.testing.assert_array_equal(padded.ids[0, :9], plain.ids[0])
        np.testing.assert_allclose(padded.scores[0, :9], plain.scores[0], atol=1e-6)
        assert (padded.ids[0, 9:] == -1).all()


def test_wrong_options_are_refused():
    x = np.eye(3, dtype="float32")
    with pytest.raises(ValueError, match="anchors must be at least 1"):
        AffinityReranker(0).rerank(x, x, [[0, 1]] * 3)
    with pytest.raises(ValueError, match="'both' or 'query', got 'no'"):
        AffinityReranker(normalize="no").rerank(x, x, [[0, 1]] * 3)
