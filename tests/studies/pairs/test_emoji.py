"""Emoji: the split keeps styles and concepts apart, and the rivals compute what they say."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.datasets.public import find_set
from primal_attention.support.command import UserError
from primal_attention.tasks.pairs.model import VisualParser
from primal_studies.pairs import emoji_models
from primal_studies.pairs.emoji_data import (
    STYLES,
    Emoji,
    EmojiSplit,
    crop_to_content,
    emoji_words,
    load_emoji,
    split_emoji,
)
from primal_studies.pairs.emoji_models import EmojiPairs, recalls

DATA = Path(os.environ.get("PRIMAL_DATA", "no data"))


def coded(n: int = 8) -> Emoji:
    """Return emoji whose pixels say style and concept."""
    images = np.zeros((3, n, 32, 32, 3), np.uint8)
    images += (80 * np.arange(3)[:, None] + np.arange(n))[..., None, None, None].astype(np.uint8)
    names = [f"{('red', 'blue')[i % 2]} thing{i // 2} " for i in range(n)]
    return Emoji(images, [name.strip() for name in names], [[f"tag{i}"] for i in range(n)])


def test_a_file_becomes_concepts(tmp_path, write_emoji):
    write_emoji(tmp_path, ["Red Apple", "Cat", "red apple", "Cat-Face"],
                ["fruit, red, sweet fruit", "", "other", "cat face, cat, pet"])  # fmt: skip
    emoji = load_emoji(tmp_path)
    assert emoji.names == ["red apple", "cat", "cat face"]
    assert emoji.tags == [["fruit", "sweet"], [], ["pet"]]
    assert emoji.images.shape == (3, 3, 32, 32, 3)
    assert emoji.images[:, :, 0, 0, 0].tolist() == [[0, 1, 3], [4, 5, 7], [8, 9, 11]]
    assert emoji.texts(0) == ["red apple", "fruit sweet"]
    assert emoji_words("It's  10 O’Clock_now!") == "it s 10 o clock now"


def test_drawings_fill_the_frame():
    images = np.full((4, 32, 32, 3), 255, np.uint8)
    images[0, 10:18, 3:19] = (255, 0, 0)  # twice as wide as high
    images[1, 4, 30] = 0
    images[2] = np.arange(32)[:, None, None] * 7  # fills it already
    found = crop_to_content(images)
    is_red = (found[0] == (255, 0, 0)).all(-1)
    assert is_red[9:23, 1:31].all()
    assert not is_red[:7].any()
    assert not is_red[25:].any()
    assert found[1].max() < 255  # one pixel becomes a blot, black in the middle
    assert found[1, 15:17, 15:17].max() < 20
    np.testing.assert_array_equal(found[1], found[1, ::-1, ::-1])
    np.testing.assert_array_equal(found[2], images[2])
    np.testing.assert_array_equal(found[3], images[3])


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"emoji32\.npz is missing.*openmoji"):
        load_emoji(tmp_path)
    path = tmp_path / "multimodal/emoji/emoji32.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK no archive")
    with pytest.raises(UserError, match=r"damaged \.npz archive"):
        load_emoji(tmp_path)


def test_held_out_names_have_no_word_of_their_own():
    names = ["red cat", "blue cat", "red dog", "blue dog", "green cow", "cow"]
    emoji = Emoji(np.zeros((3, 6, 2, 2, 3), np.uint8), names, [[]] * 6)
    for seed in range(20):
        split = split_emoji(emoji, unseen=2, seed=seed)
        assert sorted([*split.seen, *split.unseen]) == list(range(6))
        assert len(split.unseen) == 2
        known = {word for i in split.seen for word in names[i].split()}
        assert all(set(names[i].split()) <= known for i in split.unseen)
    assert {tuple(split_emoji(emoji, unseen=2, seed=s).unseen) for s in range(20)} != {(0, 1)}
    with pytest.raises(ValueError, match=r"Only [23] concepts .* unseen=5"):
        split_emoji(emoji, unseen=5)
    with pytest.raises(ValueError, match="between 1 and 5"):
        split_emoji(emoji, unseen=6)


@pytest.mark.skipif(not DATA.exists(), reason="needs PRIMAL_DATA")
def test_the_public_set():
    emoji = load_emoji()
    assert len(emoji) == 1591
    assert len(set(emoji.names)) == 1591
    split = split_emoji(emoji)
    assert (len(split.seen), len(split.unseen)) == (1391, 200)


def test_training_shows_neither_the_third_style_nor_unseen_concepts(monkeypatch):
    monkeypatch.setattr(emoji_models, "_vary", lambda images, _: images)
    emoji = coded()
    split = EmojiSplit(np.array([0, 1, 2, 5, 6]), np.array([3, 4, 7]))
    pairs = EmojiPairs(emoji, split)
    seen = set()
    for images, ids in pairs.batches(80, 0):
        codes = ((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
        assert len({code % 80 for code in codes}) == 5  # every concept once
        for code, row in zip(codes, ids, strict=True):
            style, concept = divmod(code, 80)
            texts = [pairs.ids([text])[0] for text in emoji.texts(concept)]
            which = [t.tolist() == row[: len(t)].tolist() for t in texts]
            assert any(which)
            seen.add((style, concept, which.index(True)))
    assert seen == {(s, c, t) for s in (0, 1) for c in split.seen.tolist() for t in (0, 1)}
    images, names = pairs.test(split.unseen)
    codes = ((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert codes == [163, 164, 167]
    assert names == ["blue thing1", "red thing2", "blue thing3"]
    assert "tag3" not in pairs.words


def test_variation_moves_by_at_most_two_pixels():
    image = torch.full((40, 3, 32, 32), -1.0)
    image[:, :, 16, 16] = 1.0
    found = emoji_models._vary(image, np.random.default_rng(0))
    place = (found[:, 0] / found[:, 0].abs().amax((1, 2), keepdim=True)).flatten(1).argmax(1)
    y, x = place // 32 - 16, place % 32 - 16
    assert set(y.tolist()) == set(x.tolist()) == {-2, -1, 0, 1, 2}
    gains = found.amax((2, 3))
    assert 0.6 <= gains.min() < 0.7
    assert 1.3 < gains.max() <= 1.4


def test_recalls_of_known_ranks():
    to_text = torch.tensor([[3.0, 1, 2, 0, 0, 0], [5, 4, 0, 0, 0, 0]] + [[9.0] * 5 + [0]] * 4)
    to_text[5] = torch.tensor([1.0, 2, 3, 4, 5, 0])
    found = recalls(to_text, torch.eye(6))
    # ranks 0, 1, then ties with four others: 4, 4, 4, and 5
    assert found["image to text R@1"] == pytest.approx(1 / 6)
    assert found["image to text R@5"] == pytest.approx(5 / 6)
    assert found["text to image R@1"] == 1.0
    column = torch.zeros(6, 6)
    column[0] = 1  # image 0 is best for every text
    found = recalls(torch.eye(6), column)
    assert found["text to image R@1"] == pytest.approx(1 / 6)


def test_ridge_is_that_of_the_normal_equations():
    rng = np.random.default_rng(0)
    images, y = torch.from_numpy(rng.normal(size=(30, 3, 2, 2))).float(), rng.normal(size=(30, 4))
    x = emoji_models._flat(images)
    z = (x - x.mean(0)) @ np.linalg.svd(x - x.mean(0))[2].T
    z /= z.std(0)
    gram = z.T @ z + 7.0 * np.eye(12)
    want = z @ np.linalg.solve(gram, z.T @ (y - y.mean(0))) + y.mean(0)
    np.testing.assert_allclose(emoji_models._ridge(x, y, 7.0)(images), want, atol=1e-9)


def test_a_bag_of_words_names_what_it_saw():
    rng = np.random.default_rng(1)
    images = np.repeat(rng.integers(0, 255, (1, 8, 8, 8, 3), np.uint8), 3, 0)
    emoji = Emoji(images, coded().names, [[]] * 8)
    pairs = EmojiPairs(emoji, EmojiSplit(np.arange(6), np.array([6, 7])))
    found = emoji_models.bag_of_words(pairs)
    scores = found.scores(*pairs.test(np.arange(6)))[""]
    assert recalls(*scores)["image to text R@1"] == 1.0
    assert float(scores[0].abs().max()) <= 1 + 1e-9  # cosines


@torch.no_grad()
def test_candidates_of_the_first_stage_are_read(monkeypatch):
    model = VisualParser.from_config("tiny", vocab_size=20).eval()
    images, ids = torch.randn(6, 3, 32, 32), torch.randint(5, 20, (7, 4))
    ids[:, 0] = 1
    visual = model.parse(images).features
    first = torch.randn(6, 7)
    logits = torch.stack([model.match(visual[i].expand(7, -1, -1), ids) for i in range(6)])
    found = emoji_models._read_best(model, first, visual, ids)
    torch.testing.assert_close(found, first + logits, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(emoji_models, "_READ", 3)
    for is_text, scores, want in (
        (False, first, first + logits),
        (True, first.T, (first + logits).T),
    ):
        found = emoji_models._read_best(model, scores, visual, ids, is_text=is_text)
        best = scores.topk(3, 1).indices
        torch.testing.assert_close(
            found.gather(1, best), want.gather(1, best), atol=1e-4, rtol=1e-4
        )
        order = found.argsort(1, descending=True)
        assert all(set(a[:3].tolist()) == set(b.tolist()) for a, b in zip(order, best, strict=True))


def test_the_dual_encoder_reads_the_last_word():
    pytest.importorskip("open_clip")
    emoji = coded()
    pairs = EmojiPairs(emoji, EmojiSplit(np.arange(6), np.array([6, 7])))
    found = emoji_models.dual_encoder(pairs, steps=2, seed=0)
    images, _ = pairs.test(np.arange(2))
    to_text, to_image = found.scores(images, ["red thing1", "red thing2"])[""]
    assert to_text.shape == (2, 2)
    assert not torch.allclose(to_text[:, 0], to_text[:, 1])
    torch.testing.assert_close(to_text, to_image)
    assert to_text.abs().max() <= 1 + 1e-5


def test_lists_of_a_search_become_scores_in_the_same_order():
    scores = emoji_models._of_lists(torch.tensor([[2, 0], [1, 3]]), 4)
    assert scores.tolist() == [[-1, -2, 0, -2], [-2, 0, -2, -1]]


def test_training_leaves_the_global_seed_alone():
    pairs = EmojiPairs(coded(), EmojiSplit(np.arange(6), np.array([6, 7])))
    before = torch.random.get_rng_state()
    runs = [emoji_models.visual_parser(pairs, steps=1, seed=s) for s in (0, 0, 1)]
    assert torch.equal(before, torch.random.get_rng_state())
    scores = [run.scores(*pairs.test(np.arange(6)))["both stages"][0] for run in runs]
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.allclose(scores[0], scores[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"color": np.zeros((2, 4, 4, 3))}, "'color' must hold bytes"),
        ({"black": np.zeros((2, 4, 4), np.uint8)}, "'black' must hold bytes"),
        ({"text": np.array([1, 2])}, "'text' must hold words"),
        ({"text": np.array(["a"])}, "differ in number or size"),
        ({"black": np.zeros((2, 8, 8, 3), np.uint8)}, "differ in number or size"),
    ],
)
def test_a_damaged_file_of_emoji_is_one_sentence(tmp_path, change, words):
    good = {style: np.zeros((2, 4, 4, 3), np.uint8) for style in STYLES}
    good |= {"text": np.array(["cat", "dog"]), "tags": np.array(["pet", ""])}
    found = find_set("emoji")
    path = tmp_path / found.folder / next(iter(found.files))
    path.parent.mkdir(parents=True)
    np.savez(path, **good)
    assert len(load_emoji(tmp_path)) == 2
    np.savez(path, **{**good, **change})
    with pytest.raises(UserError, match=path.name) as caught:
        load_emoji(tmp_path)
    assert words in str(caught.value)
