"""The search for small sets: order, connection, budget, and sets inside sets."""

from itertools import combinations

import pytest
import torch

from primal_attention.analysis.causes.recommend import RecommenderSubject
from primal_attention.analysis.causes.search import (
    Evaluations,
    Influence,
    legal_subsets,
    ordered_subsets,
    radius_sets,
    search_levels,
    shrink,
)
from primal_attention.analysis.causes.subjects import Outcome
from primal_attention.models import EncoderClassifier, EncoderConfig


class Switch:
    """A decision that changes as soon as all tokens of one of the triggers are gone."""

    def __init__(self, *triggers, n=6, weights=None):
        self.tokens, self.target, self.candidates = list("abcdefghijkl"[:n]), 0, list(range(1, n))
        self.decision, self.score, self.batches = "yes", 0.9, []
        self.triggers = [frozenset(t) for t in triggers]
        self.weights = weights or {}

    def evaluate(self, sets):
        self.batches.append(len(sets))
        found = []
        for positions in sets:
            changed = any(t <= set(positions) for t in self.triggers)
            score = self.score - sum(self.weights.get(i, 0.01) for i in positions)
            found.append(Outcome(changed, "no" if changed else "yes", score, 2 if changed else 1))
        return found

    def captured(self):
        raise NotImplementedError


def star(positions, attention=None):
    every = dict.fromkeys(positions, 1)
    return Influence(every, dict.fromkeys(positions, (frozenset(),)), attention or {})


def test_subsets_come_in_the_order_of_their_sums():
    generator = torch.Generator().manual_seed(0)
    distance = torch.randint(1, 4, (7,), generator=generator).tolist()
    weight = torch.rand(7, generator=generator).tolist()
    keys = {i: (distance[i], -weight[i]) for i in range(7)}
    for size in range(1, 5):
        found = list(ordered_subsets(keys, size))
        assert sorted(found) == list(combinations(range(7), size))
        sums = [(sum(keys[i][0] for i in s), round(sum(keys[i][1] for i in s), 12)) for s in found]
        assert sums == sorted(sums)
    assert list(ordered_subsets(keys, 8)) == []


def test_sets_are_connected_to_the_explained_token():
    # 1 and 2 are neighbours; 3 is reached through 1, or through 2
    inside = {
        1: (frozenset(),),
        2: (frozenset(),),
        3: (frozenset({1}), frozenset({2})),
    }
    influence = Influence({1: 1, 2: 1, 3: 2}, inside, {1: 0.1, 2: 0.3, 3: 0.9})
    assert list(legal_subsets(influence, [1, 2, 3], 1)) == [(2,), (1,)]
    assert list(legal_subsets(influence, [1, 2, 3], 2)) == [(1, 2), (2, 3), (1, 3)]
    assert list(legal_subsets(influence, [1, 3], 2)) == [(1, 3)]
    assert radius_sets(influence, [1, 2, 3]) == [(1, 2), (1, 2, 3)]


def test_every_set_runs_once_and_the_budget_holds():
    subject = Switch((1, 2))
    evaluations = Evaluations(subject, max_evals=5, batch_size=2)
    assert evaluations.run([(2, 1), (1, 2), (3,)])[0].changed
    assert evaluations.used == 2
    found = evaluations.run([(1,), (2,), (4,), (5,), (1, 3)])
    assert [o is None for o in found] == [False, False, False, True, True]
    assert evaluations.spent
    assert subject.batches == [2, 2, 1]
    assert evaluations.run([(1, 2)])[0].changed  # known sets cost nothing
    # words run with all of their pieces
    whole = Evaluations(Switch((1, 2)), max_evals=5, words={1: (1, 2)})
    assert whole.run([(1,)])[0].changed
    assert whole.found[(1,)].changed


def test_all_heads_finish_the_level_of_the_first_hit():
    subject = Switch((1, 2), (3, 4), (1, 3, 5))
    evaluations = Evaluations(subject, max_evals=100, batch_size=3)
    heads = {7: star([1, 2, 5]), 8: star([3, 4]), 9: star([5])}
    levels = (
        [(h, legal_subsets(found, subject.candidates, size)) for h, found in heads.items()]
        for size in (1, 2, 3)
    )
    found = search_levels(evaluations, levels)
    assert found.hits == {7: [(1, 2)], 8: [(3, 4)]}
    assert found.size == 2
    assert found.complete
    # five single tokens, then (1, 2) is the first pair of head 7; no set runs twice
    assert found.calls == 6
    assert evaluations.used == 5 + 3 + 1
    small = search_levels(
        Evaluations(subject, max_evals=4),
        ([(7, legal_subsets(star([1, 2, 3, 4, 5]), subject.candidates, k))] for k in (1, 2)),
    )
    assert small.size is None
    assert not small.complete


def test_a_part_of_a_connected_set_may_suffice():
    evaluations = Evaluations(Switch((2,), (1, 3)), max_evals=1)
    assert shrink(evaluations, (1, 2)) == [(2,)]
    assert shrink(evaluations, (1, 3)) == [(1, 3)]


def recommender(mask=True, seed=0):
    torch.manual_seed(seed)
    # item 0 is padding, 20 is the mask
    config = EncoderConfig(num_classes=20, vocab_size=21, dim=16, num_heads=2, num_layers=2)
    model = EncoderClassifier(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(3)
    return model


def test_a_recommender_reads_the_history_with_the_recommended_item_at_its_end():
    model, items = recommender(), [3, 7, 5, 7, 11]
    subject = RecommenderSubject(model, items, mask_id=20, pad_id=0, names={3: "Alien"})
    with torch.no_grad():
        scores = model(torch.tensor([[*items, 20]])).logits[0].double()
    scores[[0, 3, 5, 7, 11]] = -torch.inf
    assert subject.choice == int(scores.argmax())
    assert subject.tokens == ["Alien", "7", "5", "7", "11", subject.decision]
    assert subject.target == 5
    assert subject.abduct().tolist() == [[*items, subject.choice]]
    (found,) = subject.evaluate([(0, 3)])
    with torch.no_grad():
        masked = model(torch.tensor([[20, 7, 5, 20, 11, 20]])).logits[0].double()
    masked[[0, 3, 5, 7, 11]] = -torch.inf
    new = int(masked.argmax())
    assert found.label == str(new)
    assert found.changed == (new != subject.choice)
    assert found.score == pytest.approx(float(masked.softmax(-1)[subject.choice]), abs=1e-6)
    # the rank of the new item in the original list
    assert found.rank == 1 + int((scores > scores[new]).sum())


@pytest.mark.parametrize("removal", ["drop", "attend", "zero", "resample"])
def test_a_recommender_without_a_mask_item(removal):
    model, items = recommender(), [3, 7, 5, 9, 11]
    subject = RecommenderSubject(model, items, removal=removal, exclude_seen=False)
    assert subject.abduct().tolist() == [[*items, subject.choice]]
    (found,) = subject.evaluate([(1, 4)])
    history, options = torch.tensor([items]), {}
    if removal == "drop":
        history = torch.tensor([[3, 5, 9]])
    elif removal == "attend":
        options["key_mask"] = torch.tensor([[True, False, True, True, False]])
    elif removal == "zero":
        with torch.no_grad():
            subject.embedding.weight[[7, 11]] = 0.0
    else:
        history = history.repeat(5, 1)
        history[:, [1, 4]] = subject.remover.replacements[:, [1, 4]]
    with torch.no_grad():
        expected = model(history, **options).logits.double().softmax(-1)[:, subject.choice].mean()
    assert found.score == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.raw
def test_mistakes_of_recommendations_are_named():
    with pytest.raises(ValueError, match="items is empty"):
        RecommenderSubject(recommender(), [])
    with pytest.raises(ValueError, match="needs mask_id"):
        RecommenderSubject(recommender(), [1, 2], removal="mask")
    with pytest.raises(ValueError, match="at least 1"):
        Evaluations(Switch((1,)), max_evals=0)
