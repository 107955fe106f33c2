"""Training from the command line, and the model of the package."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone

from primal_attention.cli.main import main
from primal_attention.datasets.lists import make_curves, search_all
from primal_attention.support.command import UserError
from primal_attention.tasks import load_trained
from primal_attention.tasks.lists import Reranker, context, mean_average_precision
from primal_attention.tasks.lists.metrics import average_precision, list_precision


def test_list_precision_is_average_precision():
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((6, 9)), rng.integers(-1, 2, (6, 9))
    labels[5] = 0
    found = list_precision(torch.tensor(scores), torch.tensor(labels))
    for value, s, y in zip(found.tolist(), scores, labels, strict=True):
        order = np.argsort(-s[y >= 0])
        ranks = np.flatnonzero(y[y >= 0][order] == 1)
        want = average_precision(ranks, len(ranks)) if len(ranks) else 0.0
        assert value == pytest.approx(want, abs=1e-6)


def test_a_file_of_vectors_is_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, groups = make_curves(12, 8)
    np.savez("mine.npz", x=x, groups=groups)
    quick = ["--training.epochs", "1", "--training.epoch-steps", "3", "--data.candidates", "20"]
    assert main(["train", "mine.npz", *quick, "--model.dim", "16"]) == 0
    told = capsys.readouterr().out
    assert "96 vectors of width 24 with groups (task lists)" in told
    assert "first search" in told
    folder = Path("outputs/mine/primal-dual")
    page = (folder.parent / "report.html").read_text("utf-8")
    assert "Every list" in page
    # the folder of the run is a re-ranker with the scores of the trained model
    reranker = Reranker.load(folder)
    assert (reranker.dim, reranker.attention) == (16, "primal-dual")
    search = search_all(x, groups, 20)
    got = reranker.rerank(search.xq, search.xb, search.ids)
    trained = load_trained(folder)
    rows = trained.task.records(trained.task.measure(trained.model, trained.task.read(
        Path("mine.npz"), labelled=True)).answers)  # fmt: skip
    own = [
        average_precision(np.flatnonzero(np.isin(row, good)), int(np.isin(row, good).sum()))
        for row, good in zip(got.ids, search.relevant, strict=True)
    ]
    np.testing.assert_allclose([row["AP"] for row in rows], own, atol=1e-5)
    assert main(["rerank", "--gallery", "x.npy", "--method", str(folder)]) == 2
    with pytest.raises(UserError, match="use primal rerank"):
        trained.task.read(Path("mine.npz"), labelled=False)


def test_the_model_of_the_package():
    reranker = Reranker.pretrained()
    folder = Path(context.__file__).parent / "pretrained"
    assert sum(p.stat().st_size for p in folder.rglob("*")) < 1_000_000
    options = reranker.options
    assert (options.affinity, options.input, reranker.attention) == (
        "both", "means", "primal-dual",
    )  # fmt: skip
    x, groups = make_curves(16, 30, 33, 0.1, seed=41)
    search = search_all(x, groups, 150)
    found = reranker.rerank(search.xq[::4], search.xb, search.ids[::4]).ids
    relevant = search.relevant[::4]
    first = mean_average_precision(search.ids[::4], relevant)
    assert mean_average_precision(found, relevant) > first + 0.05
    assert clone(reranker).get_params() == reranker.get_params()  # T20


def test_similarities_are_enough():
    reranker = Reranker.pretrained()
    x, groups = make_curves(5, 12, seed=3)
    search = search_all(x, groups, 40)
    want = reranker.rerank(search.xq[:3], search.xb, search.ids[:3])
    tokens = np.concatenate([x[:3, None], x[search.ids[:3]]], 1)
    cosines = tokens @ tokens.transpose(0, 2, 1)
    got = reranker.rerank_affinity(cosines)
    np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)
    # equal scores may change places
    places = np.take_along_axis(search.ids[:3], got.ids, 1)
    assert (places == want.ids).mean() > 0.9
    # empty slots
    padded = np.pad(cosines, ((0, 0), (0, 2), (0, 2)), constant_values=np.nan)
    keep = np.arange(43) < 41
    short = reranker.rerank_affinity(padded, np.tile(keep, (3, 1)))
    np.testing.assert_allclose(short.scores[:, :40], got.scores, atol=1e-5)
    assert (short.ids[:, 40:] == -1).all()
    # cosines with the anchors are enough for one kernel
    options = {"affinity": "inner", "candidates": 20, "anchors": 8, "epoch_steps": 1}
    inner = Reranker(dim=16, max_epochs=1, options=options)
    inner.fit(x, groups)
    few = inner.rerank_affinity(cosines[:, :, :8])
    np.testing.assert_allclose(few.scores, inner.rerank_affinity(cosines).scores, atol=1e-6)


@pytest.mark.raw
def test_wrong_similarities_are_refused():
    reranker = Reranker.pretrained()
    for a, keep, words in (
        (np.eye(3), None, "shape"),
        (np.ones((1, 4, 2)), None, "all pairs"),
        (np.full((1, 3, 3), 7.0), None, "no cosine"),
        (np.ones((1, 3, 3)), np.ones((1, 2)), "keep must have the shape"),
        (np.ones((1, 3, 3)), np.array([[1, 0, 1]]), "at the end of a list only"),
    ):
        with pytest.raises(ValueError, match=words):
            reranker.rerank_affinity(a, keep)
