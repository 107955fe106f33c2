"""Scores of ranked lists against closed forms, scikit-learn and the revisited ground truth."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from primal_attention.tasks.lists import (
    average_precision,
    evaluate_revisited,
    mean_average_precision,
    precision_at,
    recall_at,
)


def test_both_forms_of_average_precision():  # T18
    assert average_precision([0, 2], 2, kind="trapezoid") == pytest.approx(0.791667, abs=1e-6)
    assert average_precision([0, 2], 2) == pytest.approx(0.833333, abs=1e-6)
    # positives that were not found count as misses
    assert average_precision([0], 4) == 0.25
    assert np.isnan(average_precision([], 0))


def test_the_rectangle_is_that_of_scikit_learn():
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(0)
    for _ in range(20):
        relevant = rng.random(30) < 0.3
        relevant[0] = True
        scores = -np.arange(30)
        ranks = np.flatnonzero(relevant)
        assert average_precision(ranks, len(ranks)) == pytest.approx(
            average_precision_score(relevant, scores)
        )


def test_metrics_are_those_of_trec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(50)[:20] for _ in range(6)])
    relevant = [rng.choice(50, 5 + i, replace=False) for i in range(6)]
    truth = {str(q): {str(i): 1 for i in row} for q, row in enumerate(relevant)}
    run = {
        str(q): {str(i): float(-rank) for rank, i in enumerate(row)} for q, row in enumerate(ids)
    }
    found = pytrec_eval.RelevanceEvaluator(truth, {"map", "recall_10"}).evaluate(run)
    want = np.mean([row["map"] for row in found.values()])
    assert mean_average_precision(ids, relevant) == pytest.approx(want)
    want = np.mean([row["recall_10"] for row in found.values()])
    assert recall_at(ids, relevant, 10) == pytest.approx(want)


def test_recall_and_precision():
    ids, relevant = [[5, 1, 2, -1], [7, 8, 9, 6]], [[5, 2, 30], [6]]
    assert recall_at(ids, relevant, 2) == pytest.approx((1 / 3 + 0) / 2)
    assert recall_at(ids, relevant, 4) == pytest.approx((2 / 3 + 1) / 2)
    # the first list ends at its last positive, rank 2
    assert precision_at(ids, relevant, 4) == pytest.approx((2 / 3 + 1 / 4) / 2)
    # a query without a relevant item is skipped
    assert mean_average_precision([[1], [2]], [[1], []]) == 1.0


def test_junk_never_counts():  # T17
    truth = [{"easy": [3, 4], "hard": [1], "junk": [0, 9]}]
    clean = evaluate_revisited([[3, 4, 1, 2]], truth)
    junk_first = evaluate_revisited([[0, 9, 3, 4, 1, 2]], truth)
    assert clean == junk_first
    assert all(scores.map == 100 for scores in clean.values())
    # hard images are ignored in the easy setting, easy ones in the hard setting
    swapped = evaluate_revisited([[1, 3, 4, 2]], truth)
    assert swapped["easy"].map == swapped["hard"].map == 100
    nothing = evaluate_revisited([[2, 1]], [{"easy": [], "hard": [1], "junk": []}])
    assert nothing["easy"].queries == 0
    assert nothing["hard"].queries == 1


@pytest.mark.parametrize(
    ("name", "want"), [("roxford5k", (0.96, 1.64, 0.78)), ("rparis6k", (1.74, 4.11, 2.55))]
)
def test_random_and_perfect_rankings_of_the_real_ground_truth(name, want):  # T17
    folder = os.environ.get("PRIMAL_DATA")
    path = Path(folder or ".") / "retrieval" / "revisitop" / f"gnd_{name}.json.gz"
    if not folder or not path.is_file():
        pytest.skip("PRIMAL_DATA has no revisited ground truth")
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    truth, count = content["gnd"], len(content["imlist"])
    rng = np.random.default_rng(0)
    maps = []
    for _ in range(3):
        ids = np.stack([rng.permutation(count) for _ in truth])
        maps.append([scores.map for scores in evaluate_revisited(ids, truth).values()])
    np.testing.assert_allclose(np.mean(maps, 0), want, atol=0.25)
    perfect = []
    for row in truth:
        good = row["easy"] + row["hard"]
        perfect.append(good + [i for i in range(count) if i not in set(good)])
    scores = evaluate_revisited(np.array(perfect), truth)
    assert [round(s.map, 6) for s in scores.values()] == [100.0, 100.0, 100.0]


@pytest.mark.raw
def test_wrong_lists_are_refused():
    with pytest.raises(ValueError, match="an item twice"):
        mean_average_precision([[1, 1]], [[1]])
    with pytest.raises(ValueError, match="one row for each of the 2 queries"):
        recall_at([[1]], [[1], [2]], 1)
    with pytest.raises(ValueError, match="only 1 positives exist"):
        average_precision([0, 1], 1)
