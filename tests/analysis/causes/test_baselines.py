"""Every baseline reports the size of its first flipping set and what it cost."""

import pytest
import torch
from tests.analysis.causes.test_search import Switch, star

from primal_attention.analysis.causes.baselines import METHODS, compare_methods, graph_order
from primal_attention.analysis.causes.search import Evaluations, Influence

# attention of two heads to the tokens a to f; token 0 is the explained one
ATTENTION = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.25, 0.15], [0.0, 0.4, 0.35, 0.1, 0.1, 0.05]])


def run(subject, **options):
    evaluations = Evaluations(subject, max_evals=options.pop("max_evals", 100), batch_size=4)
    options = {"influences": {0: star([1, 2]), 1: star([5])}, **options}
    found = compare_methods(evaluations, subject.candidates, ATTENTION, **options)
    return {result.method: result for result in found}


def test_orders_remove_a_growing_number_of_tokens():
    subject = Switch((1, 2), weights={1: 0.2, 2: 0.15})
    found = run(subject, importances={"gradient × input": [0, 0, 0, 0, 1, 1]})
    assert list(found) == list(METHODS)
    # head 1 has tokens 1 and 2 first; head 0 needs all five
    best = found["attention, best head"]
    assert (best.size, best.positions, best.head) == (2, (1, 2), 1)
    # five sets of head 0, two of head 1
    assert best.calls == 5 + 2
    # the mean of heads orders 2 (.275), 1 (.25), 3 (.2), 4, 5
    assert found["attention, mean of heads"].positions == (1, 2)
    assert found["attention, mean of heads"].calls == 2
    assert found["gradient × input"].size == 4
    assert found["gradient × input"].positions == (1, 2, 4, 5)
    assert found["attention rollout"].note == "not available for this model"
    # the graph of head 0 has 1 and 2 next to the target
    graph = found["graph order, best head"]
    assert (graph.size, graph.head, graph.calls) == (2, 0, 2 + 1)


def test_searches_by_score_and_by_all_sets():
    found = run(Switch((1, 2), weights={1: 0.2, 2: 0.15}))
    # five single tokens; the prefix (1,) is one of them
    assert (found["leave-one-out"].size, found["leave-one-out"].calls) == (2, 6)
    # five single tokens, then four pairs with 1
    assert (found["greedy"].size, found["greedy"].calls) == (2, 9)
    assert (found["exhaustive"].size, found["exhaustive"].calls) == (2, 6)
    # (1, 2) has the largest sum of attention of all pairs
    assert (found["subsets by attention"].size, found["subsets by attention"].calls) == (2, 6)


def test_exhaustive_is_never_larger_than_another():
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        triggers = [torch.randperm(5, generator=generator)[:3].add(1).tolist() for _ in range(3)]
        found = run(Switch(*triggers))
        sizes = {name: r.size for name, r in found.items() if r.size is not None}
        assert sizes["exhaustive"] == 3 == min(sizes.values())
        # a shuffled order ends at the latest with all tokens
        assert sizes["random"] <= 5


def test_one_token_that_flips_is_found_whatever_its_score():
    found = run(Switch((4,), weights={4: 0.0, 1: 0.5}))
    assert found["leave-one-out"].positions == (4,)
    assert found["greedy"].positions == (4,)
    assert found["exhaustive"].calls == 4


def test_a_budget_ends_every_method_alone():
    subject = Switch((1, 2, 3, 4, 5))
    found = run(subject, max_evals=4)
    assert all(result.calls <= 4 for result in found.values())
    assert all(result.size is None for result in found.values())
    # results of one method do not use up the budget of the next
    found = run(Switch((3, 4)), max_evals=6)
    assert found["attention, best head"].size == 2


def test_words_count_as_one_and_have_the_attention_of_their_pieces():
    subject = Switch((4, 5))
    evaluations = Evaluations(subject, max_evals=50, words={4: (4, 5)})
    found = compare_methods(evaluations, [1, 2, 3, 4], ATTENTION)
    sizes = {r.method: r.size for r in found}
    assert sizes["exhaustive"] == 1
    # head 0 gives .25 + .15 to the word, more than to any other
    assert sizes["attention, best head"] == 1
    assert "graph order, best head" not in [r.method for r in found if r.size]


def test_tokens_outside_the_graph_come_last():
    influence = Influence({2: 2, 3: 1}, {}, {})
    assert graph_order(influence, [1, 2, 3, 4], {1: 0.1, 2: 0.2, 3: 0.0, 4: 0.3}) == [3, 2, 4, 1]
    order = run(Switch((9,)), seed=3)["random"]
    assert order.size is None
    assert order.calls == 5


@pytest.mark.parametrize("batch", [1, 64])
def test_calls_do_not_depend_on_the_size_of_batches(batch):
    subject = Switch((2, 3))
    evaluations = Evaluations(subject, max_evals=100, batch_size=batch)
    found = compare_methods(evaluations, subject.candidates, ATTENTION)
    calls = {r.method: r.calls for r in found}
    assert calls["exhaustive"] == 5 + 5
    assert calls["attention, mean of heads"] == 3
