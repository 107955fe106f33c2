"""Choice of nodes: words, special tokens, budgets, targets, dropped columns."""

import pytest
import torch

from primal_attention.analysis.causes.nodes import (
    choose_nodes,
    drop_list,
    groups_of_ids,
    word_groups,
)


def singles(n):
    return [(i,) for i in range(n)], [f"w{i}" for i in range(n)]


def rising(n):
    """Attention that grows with the position; the last half has more than 0.01 each."""
    return torch.arange(n, dtype=torch.float64) / sum(range(n))


def test_words_from_marks_of_tokenizers():
    assert word_groups(["<s>", "▁Un", "believ", "able", "!", "▁Yes", "</s>"]) == [
        (0,),
        (1, 2, 3),
        (4,),
        (5,),
        (6,),
    ]
    assert word_groups(["The", "Ġunbeliev", "able", "Ġone", "."]) == [(0,), (1, 2), (3,), (4,)]
    # a special token never joins, and a mark at the start of the text is no piece
    assert word_groups(["##a", "[SEP]", "##b"]) == [(0,), (1,), (2,)]
    assert word_groups(["x", "y"]) == [(0,), (1,)]
    assert groups_of_ids([None, 0, 0, 1, None, None]) == [(0,), (1, 2), (3,), (4,), (5,)]


def test_automatic_nodes_follow_attention_within_the_budget():
    groups, labels = singles(200)
    special = [i in (0, 199) for i in range(200)]
    seen = []

    def importance(target):
        seen.append(target)
        return rising(200)

    found = choose_nodes(groups, labels, special=special, importance=importance)
    # attention of 0.01 or more never occurs: 199 / 19900 is the largest, and it is special
    assert [m[0] for m in found.members] == list(range(167, 199))
    assert seen == [None]
    sharp = choose_nodes(
        groups, labels, special=special, target=0, importance=lambda t: 2 * rising(200)
    )
    # the target joins although it is special; tokens above 0.01 join up to 64
    assert sharp.target == 0
    assert len(sharp) == 65
    assert [m[0] for m in sharp.members] == [0, *range(135, 199)]


def test_short_sequences_need_no_attention():
    groups, labels = singles(5)

    def never(_):
        raise AssertionError

    special = [True, False, False, False, True]
    assert choose_nodes(groups, labels, special=special, importance=never).labels == (
        "w1",
        "w2",
        "w3",
    )
    assert len(choose_nodes(groups, labels, special=special, nodes="all", importance=never)) == 3


def test_targets_by_position_word_and_mean():
    groups, labels = [(0,), (1, 2), (3,), (4,)], ["a", "b", "c", "b"]

    def choose(**options):
        return choose_nodes(
            groups, labels, special=[False] * 5, importance=lambda t: rising(5), **options
        )

    assert choose(target=2).target == 1
    assert choose(target=-1).target == 3
    assert choose(target="c").target == 2
    assert choose(nodes=["c", 0]).labels == ("a", "c")
    assert choose().labels == ("a", "b", "c", "b_2")
    mean = choose(target="mean", nodes=[0, 1])
    assert mean.labels == ("a", "b", "mean")
    assert mean.target == 2
    torch.testing.assert_close(
        mean.matrix(),
        torch.tensor([[1, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0.2] * 5], dtype=torch.float64),
    )
    left = mean.without({0})
    assert (left.labels, left.target) == (("b", "mean"), 1)
    with pytest.raises(ValueError, match="several times"):
        choose(target="b")
    with pytest.raises(ValueError, match="no word"):
        choose(nodes=["x", "a"])
    with pytest.raises(ValueError, match="position"):
        choose(target=5)
    with pytest.raises(ValueError, match="at least two nodes"):
        choose(nodes=["a"])
    with pytest.raises(ValueError, match="at least 2"):
        choose(nodes=1)
    with pytest.raises(ValueError, match="'auto', 'all'"):
        choose(nodes="many")


def test_the_importance_of_a_target_is_asked_for_with_its_pieces():
    groups, labels = [(0, 1), *((i,) for i in range(2, 9))], [f"w{i}" for i in range(8)]
    seen = []

    def importance(target):
        seen.append(target.tolist())
        return rising(9)

    found = choose_nodes(
        groups, labels, special=[False] * 9, nodes=3, target=1, importance=importance
    )
    assert found.labels == ("w0", "w5", "w6", "w7")
    assert seen == [[0.5, 0.5, 0, 0, 0, 0, 0, 0, 0]]


def test_columns_to_drop():
    special = [True, False, False, True]
    assert drop_list("auto", 4, special, "first") == (0,)
    assert drop_list("auto", 4, special, None) == ()
    assert drop_list(None, 4, special, "first") == ()
    assert drop_list("special", 4, special, None) == (0, 3)
    assert drop_list([-1, 1, 1], 4, special, None) == (1, 3)
    with pytest.raises(ValueError, match="drop_columns must be"):
        drop_list("last", 4, special, None)
    with pytest.raises(ValueError, match="every token"):
        drop_list([0, 1], 2, special, None)
    with pytest.raises(ValueError, match="no position"):
        drop_list([4], 4, special, None)
