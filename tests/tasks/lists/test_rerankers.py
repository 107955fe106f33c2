"""Every re-ranker keeps the contract of lists; each equals its formula."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from primal_attention.tasks.lists import (
    AlphaQE,
    Chain,
    DatabaseAugmentation,
    DiffusionReranker,
    KReciprocal,
    NeighbourRefine,
    Reranker,
    diffuse,
    list_graph,
)

METHODS = {
    "expansion": AlphaQE(4, 3),
    "augmentation": DatabaseAugmentation(3),
    "refine": NeighbourRefine(4),
    "diffusion": DiffusionReranker(5),
    "gallery": DiffusionReranker(5, scope="gallery"),
    "reciprocal": KReciprocal(6, 3),
    "chain": Chain([DatabaseAugmentation(2), AlphaQE(3)]),
    "context": Reranker.pretrained(),
}


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture
def search():
    rng = np.random.default_rng(0)
    centres = unit(rng, 5, 12)
    xb = centres[rng.integers(5, size=60)] + 0.25 * rng.standard_normal((60, 12))
    xb = (xb / np.linalg.norm(xb, axis=1, keepdims=True)).astype(np.float32)
    xq = unit(rng, 3, 12) * 0.2 + centres[:3]
    xq = (xq / np.linalg.norm(xq, axis=1, keepdims=True)).astype(np.float32)
    ids = np.argsort(-xq @ xb.T, axis=1, kind="stable")[:, :40]
    return xq, xb, ids


@pytest.mark.parametrize("name", METHODS)
def test_the_contract_of_lists(name, search):
    xq, xb, ids = search
    method = METHODS[name]
    found, scores = method.rerank(xq, xb, ids)
    assert found.shape == scores.shape == ids.shape
    np.testing.assert_array_equal(np.sort(found, 1), np.sort(ids, 1))  # T7
    assert (np.diff(scores, axis=1) <= 0).all()
    assert not (found == ids).all()
    # T3: only inner products count
    turn, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((12, 12)))
    turned = method.rerank((xq @ turn).astype("f4"), (xb @ turn).astype("f4"), ids)
    np.testing.assert_allclose(turned.scores, scores, atol=1e-5)
    # T6: one list at a time, through little memory
    single = method.rerank(xq, xb, ids, max_memory=2**15 if name == "gallery" else 1)
    np.testing.assert_allclose(single.scores, scores, atol=1e-5)
    # T5: empty slots change nothing and stay last
    gaps = np.insert(ids, [0, 7, 40], -1, axis=1)
    padded = method.rerank(xq, xb, gaps)
    np.testing.assert_array_equal(padded.ids[:, :40], found)
    np.testing.assert_allclose(padded.scores[:, :40], scores, atol=1e-6)
    assert (padded.ids[:, 40:] == -1).all()
    # T7: results beyond the candidates stay
    partial = method.rerank(xq, xb, ids, candidates=15)
    np.testing.assert_array_equal(partial.ids[:, 15:], ids[:, 15:])
    assert np.isneginf(partial.scores[:, 15:]).all()
    # T20
    fresh = Reranker.pretrained() if name == "context" else clone(method)
    again = fresh.rerank(xq, xb, ids)
    np.testing.assert_array_equal(again.ids, found)


@pytest.mark.parametrize("name", METHODS)
def test_small_and_odd_lists(name, search):  # T8
    xq, xb, ids = search
    method = METHODS[name]
    for width in (0, 1, 2):
        found = method.rerank(xq, xb, ids[:, :width])
        np.testing.assert_array_equal(np.sort(found.ids, 1), np.sort(ids[:, :width], 1))
    assert (method.rerank(xq, xb, np.full((3, 4), -1)).ids == -1).all()
    same = method.rerank(xq, np.repeat(xb[:1], 60, 0), ids).ids
    if name in ("gallery", "reciprocal", "context"):  # equal items have arbitrary neighbours
        same, ids = np.sort(same, 1), np.sort(ids, 1)
    np.testing.assert_array_equal(same, ids)


def test_every_kind_of_gallery_and_list(search, tmp_path):
    xq, xb, ids = search
    want = AlphaQE().rerank(xq, xb, ids)
    np.save(tmp_path / "x.npy", xb)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    asked = []

    def function(wanted):
        asked.append(wanted)
        return xb[wanted]

    for source in (mapped, torch.from_numpy(xb), function):
        np.testing.assert_array_equal(AlphaQE().rerank(xq, source, ids).ids, want.ids)
    assert len(np.concatenate(asked)) == len(np.unique(ids))
    found = AlphaQE().rerank(torch.from_numpy(xq), xb, torch.from_numpy(ids))
    assert isinstance(found.ids, torch.Tensor)
    np.testing.assert_array_equal(found.ids.numpy(), want.ids)
    ragged = [ids[0], ids[1, :7], ids[2, :0]]
    short = AlphaQE().rerank(xq, xb, ragged)
    np.testing.assert_array_equal(short.ids[0], want.ids[0])
    assert (short.ids[1, 7:] == -1).all()
    np.testing.assert_array_equal(
        AlphaQE().rerank(3 * xq, 2 * xb, ids, normalize=True).ids, want.ids
    )
    # int32 ids, as some indexes return them
    np.testing.assert_array_equal(AlphaQE().rerank(xq, xb, ids.astype("i4")).ids, want.ids)


def test_a_faiss_index_is_a_gallery(search):
    faiss = pytest.importorskip("faiss")
    xq, xb, _ = search
    index = faiss.IndexFlatIP(12)
    index.add(xb)
    _, ids = index.search(xq, 40)
    np.testing.assert_array_equal(
        AlphaQE().rerank(xq, index, ids).ids, AlphaQE().rerank(xq, xb, ids).ids
    )


def test_query_expansion_is_its_formula(search):  # T12
    xq, xb, ids = search
    np.testing.assert_array_equal(AlphaQE(0).rerank(xq, xb, ids).ids, ids)
    positive = np.abs(xb)
    query = np.abs(xq[:1])
    order = np.argsort(-query @ positive.T, axis=1, kind="stable")
    full = query + query @ positive.T @ positive  # (I + XᵀX) q
    full /= np.linalg.norm(full)
    got = AlphaQE(60, 1).rerank(query, positive, order)
    np.testing.assert_allclose(got.scores[0], np.sort(-(full @ positive.T)[0]) * -1, atol=1e-6)
    mean = query[0] + positive[order[0, :5]].sum(0)
    got = AlphaQE(5, 0).rerank(query, positive, order)
    want = np.sort(positive @ mean / np.linalg.norm(mean))[::-1]
    np.testing.assert_allclose(got.scores[0], want, atol=1e-6)


def test_diffusion_is_the_dense_solution(search):  # T14
    x = torch.from_numpy(search[1])[None].double()
    keep = torch.ones(1, 60, dtype=torch.bool)
    graph = list_graph(x, keep, k=6)
    # the graph, written out
    cosines = (x @ x.transpose(1, 2))[0].fill_diagonal_(-2)
    near = torch.zeros(60, 60, dtype=torch.bool).scatter(1, cosines.topk(6, 1).indices, True)
    w = torch.where(near & near.T, cosines.clamp_min(0) ** 3, 0.0)
    d = w.sum(1).clamp_min(1e-300).rsqrt() * (w.sum(1) > 0)
    s = d[:, None] * w * d
    y = torch.rand(1, 60, 2, dtype=torch.float64)
    torch.testing.assert_close(graph.smooth(y)[0], s @ y[0])
    for alpha in (0.5, 0.99):
        want = torch.linalg.solve(torch.eye(60, dtype=torch.float64) - alpha * s, y[0])
        torch.testing.assert_close(diffuse(graph, y, alpha=alpha)[0], want, rtol=1e-5, atol=1e-7)
    # the truncated series stays within its bound
    series, term = y.clone(), y.clone()
    for _ in range(99):
        term = 0.95 * graph.smooth(term)
        series += term
    error = (series - diffuse(graph, y, alpha=0.95, tol=1e-12)).norm()
    assert 0 < error <= 0.95**100 * y.norm() / 0.05


def test_reciprocal_distance_is_the_published_one(search):
    """The same numbers from sets and loops, for one list."""
    xq, xb, ids = search
    k1, k2, weight = 6, 3, 0.3
    x = np.concatenate([xq[:1], xb[ids[0]]]).astype(np.float64)
    n = len(x)
    squared = 2 - 2 * x @ x.T
    largest = squared[0].max()
    order = np.argsort(squared, 1, kind="stable")

    def mutual(i, k):
        near = order[i, : k + 1]
        return {j for j in near if i in order[j, : k + 1]}

    codes = np.zeros((n, n))
    for i in range(n):
        own = mutual(i, k1)
        extended = set(own)
        for j in own:
            theirs = mutual(j, round(k1 / 2))
            if len(theirs & own) > 2 / 3 * len(theirs):
                extended |= theirs
        limit = squared[i, order[i, k1]]
        for j in extended:
            codes[i, j] = np.exp(-min(squared[i, j], limit) / largest)
        codes[i] /= codes[i].sum()
    codes = np.stack([codes[order[i, :k2]].mean(0) for i in range(n)])
    shared = np.minimum(codes[0], codes[1:]).sum(1)
    want = 0.7 * (1 - shared / (2 - shared)) + weight * squared[0, 1:] / largest
    got = KReciprocal(k1, k2, weight).rerank(xq[:1], xb, ids[:1])
    np.testing.assert_allclose(got.scores[0], np.sort(-want)[::-1], atol=1e-5)


def test_blend_goes_from_one_order_to_the_other(search):
    xq, xb, ids = search
    np.testing.assert_array_equal(AlphaQE().rerank(xq, xb, ids, blend=1.0).ids, ids)
    half = AlphaQE().rerank(xq, xb, ids, blend=0.5).scores
    assert abs(half.mean()) < 1e-5


def test_a_chain_passes_refined_vectors_on(search):
    xq, xb, ids = search
    augmented = DatabaseAugmentation(2)
    chained = Chain([augmented, AlphaQE(0)]).rerank(xq, xb, ids)
    np.testing.assert_allclose(chained.scores, augmented.rerank(xq, xb, ids).scores, atol=1e-6)


@pytest.mark.raw
def test_mistakes_are_told(search):
    xq, xb, ids = search
    for arguments, words in (
        ((2 * xq, xb, ids), "holds a vector of norm 2; .* normalize=True"),
        ((xq, 2 * xb, ids), "the gallery holds a vector of norm 2"),
        ((xq, xb[:10], ids), "the gallery has 10 items"),
        ((xq[:2], xb, ids), "2 queries and ids 3 lists"),
        ((xq, xb, ids.astype(float)), "must be integers, got float64"),
        ((xq, xb, ids - 2), "an id is at least 0"),
        ((xq[:, :5] / np.linalg.norm(xq[:, :5], axis=1)[:, None], xb, ids), "width 5 and the gal"),
        ((np.full_like(xq, np.nan), xb, ids), "not finite"),
        ((xq, xb[0], ids), r"shape \[items, width\], got \(12,\)"),
        ((xq, lambda wanted: xb[wanted][:-1], ids), "one vector for each id"),
    ):
        with pytest.raises(ValueError, match=words):
            AlphaQE().rerank(*arguments)
    with pytest.raises(ValueError, match="blend must be between 0 and 1"):
        AlphaQE().rerank(xq, xb, ids, blend=2)
    with pytest.raises(ValueError, match="more than max_memory"):
        DiffusionReranker(scope="gallery").rerank(xq, xb, ids, max_memory=1000)
    with pytest.raises(ValueError, match="size is not known"):
        DiffusionReranker(scope="gallery").rerank(xq, lambda i: xb[i], ids)
