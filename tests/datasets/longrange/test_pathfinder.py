"""Pathfinder: the label can be read from the pixels, and from nothing simpler."""

import math

import numpy as np
import pytest

from primal_attention.datasets.longrange.pathfinder import (
    PathfinderConfig,
    dots_are_joined,
    generate_pathfinder,
)


@pytest.fixture(scope="module")
def pictures():
    return generate_pathfinder(40)


def regions(lit):
    """Number the groups of touching pixels by spreading the smallest number until it rests."""
    numbers = np.where(lit, np.arange(1, lit.size + 1).reshape(lit.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        n = len(lit)
        around = np.stack([padded[i : i + n, j : j + n] for i in range(3) for j in range(3)])
        spread = np.where(lit, around.max(0), 0)
        if np.array_equal(spread, numbers):
            return numbers
        numbers = spread


def centres(picture):
    dots = regions(picture > 180)
    return [np.argwhere(dots == k).mean(0) for k in np.unique(dots[dots > 0])]


def test_pictures_have_the_size_and_values_of_the_task(pictures):
    assert set(pictures.lengths) == {1024}
    assert pictures.tokens.dtype == np.uint8
    assert pictures.tokens.max() == 255


def test_labels_agree_with_an_independent_look_at_the_pixels(pictures):
    for i, label in enumerate(pictures.labels):
        picture = pictures.row(i).reshape(32, 32)
        parts = regions(picture >= 0.3 * 180)
        ends = centres(picture)
        assert len(ends) == 2
        first, second = (parts[tuple(np.round(end).astype(int))] for end in ends)
        assert (first == second) == bool(label)


def test_both_classes_occur_and_have_distractors(pictures):
    assert 0.25 < pictures.labels.mean() < 0.75
    parts = [len(np.unique(regions(pictures.row(i).reshape(32, 32) >= 54))) - 1 for i in range(40)]
    assert np.mean(parts) > 3


@pytest.mark.slow
def test_neither_the_distance_of_the_dots_nor_the_ink_tells_the_class():
    data = generate_pathfinder(400)
    distance = np.array([math.dist(*centres(data.row(i).reshape(32, 32))) for i in range(400)])
    ink = data.tokens.reshape(400, -1).sum(1)
    for value in (distance, ink):
        above = value > np.median(value)
        assert abs((above == data.labels).mean() - 0.5) < 0.09


def test_pictures_do_not_change_between_versions(pictures):
    assert pictures.labels[:12].tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1]
    assert pictures.tokens.mean() == pytest.approx(18.25, abs=0.05)


@pytest.mark.slow
def test_pictures_do_not_depend_on_the_number_of_processes_nor_of_pictures(pictures):
    two = generate_pathfinder(4, workers=2)
    np.testing.assert_array_equal(two.tokens, pictures.tokens[: 4 * 1024])
    np.testing.assert_array_equal(two.labels, pictures.labels[:4])


def test_splits_differ(pictures):
    assert not np.array_equal(generate_pathfinder(1, split="test").tokens, pictures.row(0))


def test_a_picture_without_two_dots_has_no_answer():
    assert dots_are_joined(np.zeros((16, 16), np.uint8)) is None


def test_a_gap_separates():
    picture = np.zeros((16, 16), np.uint8)
    picture[2, 2:14] = 180
    picture[2, [2, 13]] = 255
    picture[2, 7:9] = 0
    assert dots_are_joined(picture) is False


@pytest.mark.parametrize("options", [{"size": 8}, {"path_dashes": 1}, {"margin": 1.0}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match=r"A picture needs|margin must be"):
        PathfinderConfig(**options)
