"""Scenes are drawn as they say, their captions are true, and their negatives are false."""

from collections import Counter

import numpy as np
import pytest
import torch

from primal_attention.datasets.scenes import (
    COLORS,
    SCENE_WORDS,
    SHAPES,
    Scene,
    SceneItem,
    draw_scenes,
    encode_captions,
    holds,
    sample_scenes,
)

STYLES = ("sides", "relations", "sizes")
KINDS = ("nouns", "attributes", "relation")
CIRCLE = SceneItem("red", "circle", "small", 5, 12)
SQUARE = SceneItem("blue", "square", "large", 19, 11)


@pytest.mark.parametrize("style", STYLES)
def test_captions_hold_and_negatives_do_not(style):
    found = sample_scenes(400, style, seed=3)
    for scene, caption, negative, kind in zip(
        found.scenes, found.captions, found.negatives, found.kinds, strict=True
    ):
        assert holds(scene, caption), (scene, caption)
        assert negative == scene.negative(kind)
        for one in KINDS:
            assert not holds(scene, scene.negative(one)), (scene, one)
    assert set(found.kinds) == set(KINDS)


@pytest.mark.parametrize("style", ["relations", "sizes"])
def test_a_bag_of_words_cannot_tell_exchanged_nouns_and_attributes(style):
    for scene in sample_scenes(50, style, seed=1).scenes:
        words = Counter(scene.caption.split())
        assert Counter(scene.negative("nouns").split()) == words
        assert Counter(scene.negative("attributes").split()) == words
        assert scene.negative("nouns") != scene.negative("attributes")


def test_what_captions_say():
    scene = Scene((CIRCLE, SQUARE), "sizes")
    assert scene.caption == "a small red circle left of a large blue square"
    assert scene.negative("nouns") == "a small red square left of a large blue circle"
    assert scene.negative("attributes") == "a large blue circle left of a small red square"
    assert scene.negative("relation") == "a small red circle right of a large blue square"
    above = Scene((CIRCLE._replace(x=12, y=4), SQUARE._replace(x=12, y=20)), "relations")
    assert above.caption == "a red circle above a blue square"
    sides = Scene((CIRCLE, SQUARE))
    assert [sides.caption, *map(sides.negative, KINDS)] == [
        "a red circle left", "a red square left", "a blue circle left", "a red circle right",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("caption", "is_true"),
    [
        ("a red circle left", True),
        ("a blue square right", True),
        ("a blue square left", False),
        ("a red square left", False),
        ("a circle left of a square", True),
        ("a blue square right of a red circle", True),
        ("a blue square left of a red circle", False),
        ("a small red circle left of a large square", True),
        ("a large red circle left of a square", False),
        ("a red circle left of a red circle", False),
        ("a red circle above a blue square", False),
    ],
)
def test_holds_reads_words(caption, is_true):
    assert holds(Scene((CIRCLE, SQUARE)), caption) is is_true


def test_holds_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match="no side"):
        holds(Scene((CIRCLE, SQUARE)), "a red circle")
    with pytest.raises(ValueError, match="unknown word 'purple'"):
        holds(Scene((CIRCLE, SQUARE)), "a purple circle left")


@pytest.mark.parametrize("style", ["sides", "relations"])
def test_the_side_can_be_read_off_the_pixels(style):
    """The centres of the colored pixels say the same as the captions; y points down."""
    found = sample_scenes(200, style, image_size=48, seed=5)
    for image, scene, caption in zip(found.images, found.scenes, found.captions, strict=True):
        centres = []
        for item in scene.items:
            rows, columns = np.nonzero((image == COLORS[item.color]).all(-1))
            centres.append(np.array([columns.mean(), rows.mean()]) + 0.5)
        # a triangle has more pixels below
        dx, dy = centres[0] - (24 if style == "sides" else centres[1])
        side = next(word for word in caption.split() if word in ("left", "right", "above", "below"))
        if abs(abs(dx) - abs(dy)) > 3:
            wide = abs(dx) > abs(dy)
            assert side == (
                ("right", "left")[int(dx < 0)] if wide else ("below", "above")[int(dy < 0)]
            )


def test_objects_never_touch_each_other_or_the_border():
    for style in STYLES:
        for image, scene in zip(*sample_scenes(150, style, seed=7)[::4], strict=True):
            alone = draw_scenes([Scene((scene.items[0], scene.items[0]))])[0]
            color = COLORS[scene.items[0].color]
            np.testing.assert_array_equal((image == color).all(-1), (alone == color).all(-1))
            border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
            assert (border == 30).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_their_areas(shape):
    item = SceneItem("red", shape, "large", 12, 12)
    image = draw_scenes([Scene((item, item))], 240)[0]
    area = (image == COLORS["red"]).all(-1).sum() / 100  # in squared units, half-width 4
    want = {
        "circle": np.pi * 16,
        "square": 3.6**2 * 4,
        "triangle": 8 * 8 / 2,
        "cross": 2 * 8 * 8 / 3 - (8 / 3) ** 2,
    }[shape]
    assert area == pytest.approx(want, rel=0.03)
    rows = np.nonzero((image == COLORS["red"]).all(-1))[0]
    widths = np.bincount(rows)
    if shape == "triangle":
        assert widths[81:].argmax() + 81 > 150  # the base is below


def test_draws_are_even_and_follow_the_seed():
    a, b = sample_scenes(2000, seed=11), sample_scenes(2000, seed=11)
    np.testing.assert_array_equal(a.images, b.images)
    assert a.captions == b.captions
    assert a.negatives == b.negatives
    assert sample_scenes(5, seed=12).captions != a.captions[:5]
    words = Counter(" ".join(a.captions).split())
    for word in (*COLORS, *SHAPES, "left", "right", "above", "below"):
        assert words[word] == pytest.approx(500, rel=0.2), word
    rng = np.random.default_rng(0)
    assert sample_scenes(9, seed=rng).captions != sample_scenes(9, seed=rng).captions


def test_side_scenes_are_unambiguous():
    for scene in sample_scenes(300, seed=2).scenes:
        first, second = (np.array(item[3:]) - 12 for item in scene.items)
        assert abs(abs(first[0]) - abs(first[1])) > 1
        axis = int(abs(first[1]) > abs(first[0]))
        assert first[axis] * second[axis] < 0  # opposite sides


def test_ids_and_pixels_are_what_the_model_takes():
    ids = encode_captions(["a red circle left", "a red circle left of a blue dog"])
    assert ids.shape == (2, 10)
    assert ids[0].tolist() == [1, 5, 11, 15, 7, 2, 0, 0, 0, 0]
    assert ids[1, 8:].tolist() == [4, 2]
    assert int(encode_captions([" ".join(SCENE_WORDS)]).max()) == 4 + len(SCENE_WORDS)
    found = sample_scenes(2, image_size=32)
    x = found.pixel_values
    assert x.shape == (2, 3, 32, 32)
    assert x.abs().max() <= 1
    want = torch.from_numpy(found.images[1, 3, 5]).float() / 127.5 - 1
    torch.testing.assert_close(x[1, :, 3, 5], want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "side"}, "style must be one of .* Did you mean"),
        ({"negatives": ("noun",)}, "negatives must be one of"),
        ({"negatives": ()}, "one kind of negatives"),
        ({"count": 0}, "count >= 1"),
        ({"image_size": 4}, "image_size >= 8"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample_scenes(**{"count": 2, **options})
    with pytest.raises(ValueError, match="kind must be one of"):
        Scene((CIRCLE, SQUARE)).negative("colors")
