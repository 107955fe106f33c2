"""The trained re-ranker: equivariance, affinities, losses, streaming, folders."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch.nn.functional import normalize

from primal_attention.tasks.lists import ListFitOptions, Reranker
from primal_attention.tasks.lists.affinity import affinities, running_means
from primal_attention.tasks.lists.context_model import (
    ContextConfig,
    ContextEncoder,
    contrastive_loss,
    reconstruction_loss,
)

SETS = ("softmax", "primal-dual", "primal-static")


def encoder(attention="primal-dual", **options):
    torch.manual_seed(0)
    config = ContextConfig(attention=attention, anchors=8, dim=16, num_heads=2, **options)
    model = ContextEncoder(config)
    for parameter in model.parameters():  # larger weights: every path counts
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def lists(n=20, b=2, d=6):
    rng = torch.Generator().manual_seed(1)
    return normalize(torch.randn(b, n, d, generator=rng, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("attention", SETS)
def test_candidates_are_a_set_behind_the_anchors(attention):  # T1
    model, tokens = encoder(attention), lists()
    a = affinities(tokens, torch.ones(2, 20, dtype=torch.bool), 8)
    keep = torch.ones(2, 20, dtype=torch.bool)
    scores = model.score_affinities(a, keep).scores
    order = torch.cat([torch.tensor([0]), 1 + torch.randperm(19)])
    permuted = model.score_affinities(a[:, order], keep).scores
    torch.testing.assert_close(permuted, scores[:, order], rtol=0, atol=1e-12)
    # T2: the order of the anchors counts
    turned = model.score_affinities(a.flip(3), keep).scores
    assert (turned - scores).abs().max() > 1e-3


@pytest.mark.parametrize("attention", SETS)
def test_rotations_padding_and_batches(attention):
    model, tokens = encoder(attention), lists()
    scores = model(tokens).scores
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]  # T3
    torch.testing.assert_close(model(tokens @ turn).scores, scores, rtol=0, atol=1e-10)
    # T5: what stands in empty slots does not matter
    padded = torch.cat([tokens, torch.full((2, 3, 6), math.nan, dtype=torch.float64)], 1)
    keep = torch.arange(23).expand(2, -1) < 20
    found = model(padded, keep).scores[:, :20]
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-10)
    # T6
    single = torch.cat([model(tokens[i : i + 1]).scores for i in range(2)])
    torch.testing.assert_close(single, scores, rtol=0, atol=1e-12)
    # T4: two equal candidates beyond the anchors get equal scores
    twice = torch.cat([tokens, tokens[:, 15:16]], 1)
    inner = encoder(attention, affinity="inner")
    got = inner(twice).scores
    torch.testing.assert_close(got[:, 20], got[:, 15], rtol=0, atol=1e-12)


def test_static_weights_do_not_mix_candidates():  # T15
    a = affinities(lists(), torch.ones(2, 20, dtype=torch.bool), 8).requires_grad_()
    keep = torch.ones(2, 20, dtype=torch.bool)
    encoder("primal-static").score_affinities(a, keep).scores[0, 12].backward()
    touched = a.grad.abs().sum((2, 3))[0].nonzero().flatten().tolist()
    assert touched == [0, 12]
    b = a.detach().requires_grad_()
    encoder("primal-dual").score_affinities(b, keep).scores[0, 12].backward()
    assert (b.grad.abs().sum((2, 3))[0] > 0).all()


def test_the_published_size():  # T11
    config = ContextConfig(
        dim=768, num_heads=12, attention="softmax", affinity="inner", input="linear", anchors=512
    )
    model = ContextEncoder(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == 14_963_456


def test_affinities_are_a_second_moment_metric():  # T13
    tokens = lists()
    a = affinities(tokens, torch.ones(2, 20, dtype=torch.bool), 8, "inner")[:, :, 0]
    anchors = tokens[:, :8]
    moment = anchors.transpose(1, 2) @ anchors
    primal = tokens @ moment @ tokens.transpose(1, 2)
    torch.testing.assert_close(a @ a.transpose(1, 2), primal)


def test_diffusion_affinities_are_columns_of_the_inverse():
    tokens = lists(b=1)
    a = affinities(tokens, torch.ones(1, 20, dtype=torch.bool), 5, "diffusion")[0, :, 0]
    cosines = (tokens @ tokens.transpose(1, 2))[0].fill_diagonal_(-2)
    near = torch.zeros(20, 20, dtype=torch.bool).scatter(1, cosines.topk(10, 1).indices, True)
    w = torch.where(near & near.T, cosines.clamp_min(0) ** 3, 0.0)
    d = w.sum(1).rsqrt()
    inverse = torch.linalg.inv(torch.eye(20, dtype=torch.float64) - 0.95 * d[:, None] * w * d)
    torch.testing.assert_close(a, torch.log1p(100 * inverse[:, :5]) / 3, rtol=1e-4, atol=1e-4)


def test_later_tokens_take_the_mean_of_their_neighbours(monkeypatch):
    tokens, keep = lists(n=30), torch.ones(2, 30, dtype=torch.bool)
    whole = affinities(tokens, keep, 5, "diffusion")
    monkeypatch.setattr("primal_attention.tasks.lists.affinity._GRAPH", 16)
    part = affinities(tokens, keep, 5, "diffusion")
    first = affinities(tokens[:, :16], keep[:, :16], 5, "diffusion")
    torch.testing.assert_close(part[:, :16], first)
    assert part[:, 16:].min() >= 0
    assert part[:, 16:].max() <= first.max()
    assert not torch.allclose(part[:, 16:], whole[:, 16:])


@pytest.mark.parametrize("attention", ["primal-dual", "primal-static"])
def test_a_streamed_list_has_the_same_scores(attention, monkeypatch):  # T16
    monkeypatch.setattr("primal_attention.tasks.lists.affinity._GRAPH", 16)
    tokens = lists(n=50, b=1)
    for model in (encoder(attention), encoder(attention, affinity="inner", input="linear")):
        want = model(tokens).scores[0]
        for sizes in ([16, 16, 18], [20, 30], [50]):
            got = model.score_stream(tokens[0].split(sizes))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="cannot stream"):
        encoder("softmax").score_stream([tokens[0]])


def test_means_do_not_need_a_number_of_anchors():
    a = torch.rand(1, 4, 2, 10)
    means = running_means(a, torch.tensor([10])).unflatten(2, (2, 12))
    torch.testing.assert_close(means[..., 4], a[..., :6].mean(-1))
    torch.testing.assert_close(means[..., 11], a.mean(-1))  # 64 anchors: all there are
    # columns of missing anchors do not count
    longer = torch.cat([a, torch.zeros(1, 4, 2, 54)], -1)
    torch.testing.assert_close(running_means(longer, torch.tensor([10])), means.flatten(2))


def test_contrastive_loss_and_its_bounds():  # T9
    n, positives = 512, 50
    relevant = torch.arange(n)[None] < positives
    keep = torch.ones(1, n, dtype=torch.bool)
    uniform = contrastive_loss(torch.zeros(1, n), relevant, keep)
    assert uniform.item() == pytest.approx(-math.log(positives / n), abs=1e-6)
    best = contrastive_loss(torch.where(relevant, 1.0, -1.0), relevant, keep)
    assert best.item() == pytest.approx(1.48, abs=0.005)
    scores = torch.rand(1, n) * 2 - 1
    p = torch.softmax(scores / 2, 1)
    direct = -p[relevant].sum().log()
    assert contrastive_loss(scores, relevant, keep).item() == pytest.approx(direct.item(), abs=1e-6)
    # empty slots do not count; the query counts as relevant
    half = torch.arange(n)[None] < 256
    cut = contrastive_loss(scores[:, :256], relevant[:, :256], keep[:, :256])
    assert contrastive_loss(scores, relevant, half).item() == pytest.approx(cut.item())
    none = torch.zeros(1, n, dtype=torch.bool)
    assert contrastive_loss(torch.zeros(1, n), none, keep).item() == pytest.approx(math.log(n))


def test_reconstruction_loss_lies_between_its_bounds():  # T10
    a, keep = torch.randn(2, 5, 7), torch.ones(2, 5, dtype=torch.bool)
    assert reconstruction_loss(a, 3 * a, keep).item() == pytest.approx(0.01)
    assert reconstruction_loss(a, -a, keep).item() == pytest.approx(2.0)


def clusters(groups=10, size=8, d=16, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.repeat(rng.standard_normal((groups, d)), size, 0)
    x = centres + 0.7 * rng.standard_normal(centres.shape)
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("f4")
    return x, np.arange(groups * size) // size


def test_training_is_deterministic_and_kept_in_a_folder(tmp_path, monkeypatch):  # T20
    x, y = clusters()
    make = Reranker(dim=16, max_epochs=1, options=ListFitOptions(candidates=30, epoch_steps=5))
    first, second = make.fit(x, y), Reranker(**make.get_params()).fit(x, y)
    ids = np.argsort(-x[:5] @ x.T, axis=1, kind="stable")
    want = first.rerank(x[:5], x, ids)
    np.testing.assert_array_equal(second.rerank(x[:5], x, ids).scores, want.scores)
    first.save(tmp_path / "model")
    again = Reranker.load(tmp_path / "model")
    assert again.get_params() == first.get_params()
    np.testing.assert_array_equal(again.rerank(x[:5], x, ids).scores, want.scores)
    # a list that exceeds max_memory is read in blocks
    monkeypatch.setattr("primal_attention.tasks.lists.affinity._GRAPH", 20)
    monkeypatch.setattr("primal_attention.tasks.lists.context._SMALLEST_BLOCK", 20)
    lists = np.insert(ids, 3, -1, axis=1)
    whole = again.rerank(x[:5], x, lists, blend=0.3)
    blocks = again.rerank(x[:5], x, lists, blend=0.3, max_memory=1000)
    np.testing.assert_allclose(blocks.scores, whole.scores, atol=1e-5)
    monkeypatch.undo()
    # other widths and lengths of lists are no matter
    wide = np.pad(x, ((0, 0), (0, 4)))
    np.testing.assert_allclose(again.rerank(wide[:5], wide, ids).scores, want.scores, atol=1e-5)
    assert again.rerank(x[:5], x, ids[:, :3]).ids.shape == (5, 3)


@pytest.mark.slow
def test_training_improves_groups_that_it_never_saw():
    x, y = clusters(40, 12)
    train = y < 20
    reranker = Reranker(max_epochs=1, options={"candidates": 100, "epoch_steps": 150}).fit(
        x[train], y[train]
    )
    xt, yt = x[~train], y[~train]
    ids = np.argsort(-xt @ xt.T, axis=1, kind="stable")[:, 1:]
    relevant = [np.setdiff1d(np.flatnonzero(yt == g), [i]) for i, g in enumerate(yt)]
    from primal_attention.tasks.lists import mean_average_precision

    before = mean_average_precision(ids, relevant)
    assert reranker.score(xt, xt, ids, relevant) > before + 0.05


@pytest.mark.raw
def test_mistakes_are_told(tmp_path):
    x, y = clusters()
    with pytest.raises(RuntimeError, match="not trained; call fit"):
        Reranker().rerank(x[:1], x, [[0, 1]])
    with pytest.raises(ValueError, match="one group only"):
        Reranker().fit(x, np.zeros(80))
    with pytest.raises(ValueError, match="one group for each of the 80 items"):
        Reranker().fit(x, y[:3])
    with pytest.raises(ValueError, match="must treat candidates as a set"):
        Reranker(attention="primal").fit(x, y)
    with pytest.raises(ValueError, match="is not the folder of a model that primal trained"):
        Reranker.load(tmp_path)


def test_lists_with_known_relevance_teach_the_same_as_their_groups():
    rng = np.random.default_rng(0)
    groups = np.arange(40) // 5
    x = rng.standard_normal((8, 12))[groups] + 0.7 * rng.standard_normal((40, 12))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
    ids = np.argsort(-(x @ x.T) - 2 * np.eye(40), axis=1)[:, 1:]
    relevance = groups[ids] == groups[:, None]
    few = Reranker(max_epochs=1, options={"candidates": 39, "epoch_steps": 3})
    by_groups = clone(few).fit(x, groups)
    by_lists = clone(few).fit_lists(x, x, ids, relevance)
    for one, other in zip(by_groups.model_.parameters(), by_lists.model_.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # empty slots shorten lists, and lists that teach nothing are left out
    ids[0, 20:] = -1
    relevance[1] = False
    few.fit_lists(x, x, ids, relevance)
    with pytest.raises(ValueError, match="no order to learn"):
        Reranker().fit_lists(x, x, ids, np.zeros_like(relevance))
    with pytest.raises(ValueError, match="shape of ids"):
        Reranker().fit_lists(x, x, ids, relevance[:, :3])
    with pytest.raises(ValueError, match="0 and 1"):
        Reranker().fit_lists(x, x, ids, relevance + 0.5)


def test_scores_that_are_not_finite_are_refused():
    x = np.eye(4, dtype="float32")
    reranker = Reranker.pretrained()
    with torch.no_grad():
        next(iter(reranker.model_.parameters())).fill_(torch.nan)
    with pytest.raises(ValueError, match="no finite score"):
        reranker.rerank(x[:1], x, [[0, 1, 2]])
