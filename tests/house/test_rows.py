"""Values that share a row all run, and a failure names those that fail."""

import inspect
import itertools

import pytest
import torch
from tests.house.rows import cover, each


def test_every_combination_of_values_runs_with_the_other_arguments():
    seen = []

    @each("a", [1, 2])
    @each("b, c", [(3, 4), (5, 6)])
    def one(given, a, b, c):
        seen.append((given, a, b, c))

    assert list(inspect.signature(one).parameters) == ["given"]
    one(given=0)
    assert seen == [(0, 1, 3, 4), (0, 1, 5, 6), (0, 2, 3, 4), (0, 2, 5, 6)]


def test_a_failure_names_all_values_that_fail():
    @each("a", range(4))
    def one(a):
        assert a % 2 == 0

    with pytest.raises(AssertionError) as caught:
        one()
    assert caught.value.__notes__ == ["fails with a=1; a=3"]


def test_values_can_depend_on_an_argument_and_start_from_one_seed():
    seen = []

    @each("item", lambda row: [row + 1, row + 2], of="row")
    def one(item):
        seen.append((item, torch.rand(()).item()))

    assert list(inspect.signature(one).parameters) == ["row"]
    one(row=1)
    (first, draw), (second, other) = seen
    assert (first, second) == (2, 3)
    assert draw == other


def test_names_that_the_test_does_not_take_are_refused():
    with pytest.raises(AssertionError, match="one does not take b"):

        @each("b", [1])
        def one(a):
            """Take another argument."""


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_cover_has_every_combination_of_so_many_values(strength):
    axes = [range(5), "ab", [False, True], range(3)]
    rows = cover(strength, *axes)
    for chosen in itertools.combinations(range(4), strength):
        every = set(itertools.product(*(axes[i] for i in chosen)))
        assert {tuple(row[i] for i in chosen) for row in rows} == every
    assert len(rows) <= {1: 5, 2: 16, 3: 35}[strength]
    assert rows == cover(strength, *axes)
