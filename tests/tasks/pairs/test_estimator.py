"""The estimator, its tokenizer, and what becomes of unusual input."""

import json
import re

import numpy as np
import pytest
import torch
from sklearn.base import clone

import primal_attention as pa
from primal_attention.support.files import UnsealedWarning, write_sealed
from primal_attention.tasks.pairs import (
    ImageError,
    ImageTextMatcher,
    PairFitOptions,
    TextTokenizer,
    UnknownWordsNotice,
    VisualParser,
)
from primal_attention.tasks.pairs.pairs import PairData, to_pixel_values
from primal_attention.tasks.pairs.scoring import (
    fit_probability,
    make_search,
    mismatches,
    score_all,
    score_pairs,
    search_pairs,
)
from primal_attention.tasks.pairs.searching import find_images, pair_scores, similarity_weight

COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 230), "white": (255,) * 3}
CORNERS = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}


def patches(repeats: int = 3, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """A colored quarter on black, with noise: 16 texts."""
    rng = np.random.default_rng(seed)
    images, texts = [], []
    for color, rgb in COLORS.items():
        for corner, (y, x) in CORNERS.items():
            for _ in range(repeats):
                image = rng.integers(0, 25, (16, 16, 3))
                image[8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = rgb
                images.append(image.astype(np.uint8))
                texts.append(f"a {color} square {corner}")
    return np.stack(images), texts


@pytest.fixture(scope="module")
def fitted() -> ImageTextMatcher:
    torch.set_num_threads(1)
    images, texts = patches(8)
    matcher = ImageTextMatcher(
        dim=32,
        max_epochs=2,
        batch_size=32,
        learning_rate=3e-3,
        options=PairFitOptions(image_size=16, max_words=8),
        random_state=0,
    )
    return _short(matcher, 180).fit(images, texts)


def _short(matcher, steps, monkeypatch=pytest.MonkeyPatch()):  # noqa: B008
    from primal_attention.tasks.pairs import estimator

    training = {**estimator.TRAINING["training"], "min_steps": steps}
    monkeypatch.setattr(estimator, "TRAINING", {"training": training})
    return matcher


def test_it_finds_and_judges_what_it_has_learned(fitted):
    images, texts = patches(1, seed=9)
    scores = fitted.evaluate(images, texts)
    assert fitted.score(images, texts) == scores["R@1"] >= 0.8
    assert scores["R@5 of texts"] >= 0.9
    assert scores["matching"] >= 0.8
    hits = fitted.index(images).search("a blue square top right", k=3)
    assert texts[hits[0].index] == "a blue square top right"
    assert hits[0].image is not None
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
    # the probability of a search is that of the pair
    pair = fitted.predict_proba([images[hits[0].index]], ["a blue square top right"])
    assert pair.shape == (1,)
    assert pair[0] == pytest.approx(hits[0].probability, abs=1e-4)
    wrong = fitted.predict_proba(images, texts[8:] + texts[:8])
    assert fitted.predict_proba(images, texts).mean() > wrong.mean() + 0.4
    assert fitted.predict(images, texts).mean() > 0.7


def test_candidates_are_ordered_by_logit_plus_weighted_cosine(fitted):
    images, texts = patches(1, seed=5)
    data = fitted.task_.pairs(images, texts)
    model, search = fitted.model_, make_search(fitted.model_, data)
    assert similarity_weight(model) == pytest.approx(float(model.log_scale.detach().exp()))
    found = find_images(search, data.ids[:2], data.keep[:2], len(images))
    pixels = to_pixel_values(data.pixels)
    for q in range(2):
        ids, keep = (x[q : q + 1].expand(len(pixels), -1) for x in (data.ids, data.keep))
        with torch.no_grad():
            output = model(pixels, ids, keep)
        cosine = (output.image_features * output.text_features).sum(1)
        want = output.logits + float(model.log_scale.detach().exp()) * cosine
        torch.testing.assert_close(found.scores[q], want[found.ids[q]], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pair_scores(model, pixels, ids, keep), want)
        assert found.ids[q].tolist() == want.argsort(descending=True).tolist()


def test_a_reranker_and_the_matching_count_the_same(fitted):
    from primal_attention.tasks.lists import AlphaQE, Reranked

    class Backwards:
        """Prefers what comes last, and keeps what it was asked."""

        def rerank(self, xq, xb, ids):
            self.query, self.items = xq, xb
            return Reranked(ids[:, ::-1], np.arange(ids.shape[1], 0, -1.0)[None])

    images, _ = patches(1, seed=7)
    fitted.index(images)
    text, method = "a red square top left", Backwards()
    plain = fitted.search(text, k=16)
    found = fitted.search(text, k=16, reranker=method)
    old = np.array([h.score for h in plain])
    new = np.arange(16.0)  # the place in the list is its own score
    want = [(x - x.mean()) / x.std() for x in (old, new)]
    want = dict(zip([h.index for h in plain], (want[0] + want[1]) / 2, strict=True))
    for hit in found:
        assert hit.score == pytest.approx(want[hit.index], abs=1e-5)
    assert [h.index for h in found] == sorted(want, key=lambda i: -want[i])
    by_index = {h.index: h.probability for h in plain}
    assert all(h.probability == pytest.approx(by_index[h.index]) for h in found)
    # the query is the mean of the three best matches, by their share
    share = np.exp(old[:3] - old[0])
    mean = (share / share.sum()) @ method.items[[h.index for h in plain[:3]]]
    np.testing.assert_allclose(method.query[0], mean / np.linalg.norm(mean), atol=1e-5)
    assert len({h.index for h in fitted.search(text, k=9, reranker=AlphaQE())}) == 9


def test_saved_and_loaded_it_answers_the_same(fitted, tmp_path):
    images, texts = patches(1, seed=3)
    fitted.save(tmp_path / "m")
    again = ImageTextMatcher.load(tmp_path / "m")
    assert again.get_params() == fitted.get_params()
    np.testing.assert_array_equal(
        again.predict_proba(images, texts), fitted.predict_proba(images, texts)
    )
    loaded = pa.load(tmp_path / "m").predict((images, texts))
    np.testing.assert_allclose(loaded, fitted.predict_proba(images, texts), atol=1e-6)
    assert not [p for p in (tmp_path / "m").rglob("*") if p.suffix in (".pkl", ".pt", ".bin")]
    with pytest.raises(RuntimeError, match=r"call index\(images\) first"):
        again.search("a red square")
    write_sealed(tmp_path / "m", {"estimator.json": '{"parameters": {"evil": 1}}'})
    with pytest.raises(ValueError, match="damaged"):
        ImageTextMatcher.load(tmp_path / "m")


def test_unusual_input_has_a_clear_error(fitted):
    image = np.zeros((4, 4))
    for images, texts, words in (
        ([image], ["one"], "fewer than two different texts"),
        ([image, image], ["same", "Same"], "fewer than two different texts"),
        ([], [], "There are no pairs"),
        ([image], ["a", "b"], "same number, got 1 and 2"),
        ([image, image], ["a", "  "], r"texts\[1\] is empty"),
        ([image, image], ["a", None], r"texts\[1\] must be a text, got NoneType"),
        ([image, image], "ab", "list of texts"),
        ("folder", ["a"], "list of images"),
        ([image, "no.png"], ["a", "b"], r"images\[1\]: There is no file no.png"),
    ):
        with pytest.raises(ValueError, match=words):
            ImageTextMatcher().fit(images, texts, time_limit=1)
    fitted.index([image])
    assert len(fitted.search("a red square", k=5)) == 1
    with pytest.raises(ValueError, match="text is empty"):
        fitted.search(" ")
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, got 0"):
        fitted.search("a red square", k=0)
    with pytest.warns(UnknownWordsNotice, match="'zebra'.* reads it as unknown"):
        fitted.search("a zebra")
    with pytest.raises(ImageError):
        fitted.index(["no.png"])


def test_it_is_an_estimator_of_scikit_learn():
    options = PairFitOptions(tokenizer=TextTokenizer.learn(["a b"]))
    matcher = ImageTextMatcher(dim=32, options=options, random_state=3)
    copy = clone(matcher)
    assert copy.get_params() == matcher.get_params()
    assert copy is not matcher
    assert copy.set_params(dim=16).dim == 16


def test_the_same_seed_gives_the_same_model_and_two_pairs_are_enough():
    images, texts = patches(1)
    given = {"dim": 16, "max_epochs": 1, "options": {"image_size": 16}, "random_state": 1}
    first, second = (
        _short(ImageTextMatcher(**given), 4).fit(images[[0, 5]], [texts[0], texts[5]])
        for _ in range(2)
    )
    for a, b in zip(first.model_.parameters(), second.model_.parameters(), strict=True):
        assert torch.equal(a, b)
    assert np.isfinite(first.predict_proba(images, texts)).all()


def test_relevance_counts_shared_texts_and_repeated_images():
    one, other = np.zeros((8, 8)), np.ones((8, 8))
    texts = ["dark", "black", "light", "dark"]
    data = PairData([one, one, other, other], texts, TextTokenizer.learn(texts), (8, 8), 8)
    assert len(data.pixels) == 2
    assert data.texts == ["black", "dark", "light"]
    relevant = data.is_relevant(np.arange(3)[:, None], np.arange(2)[None])
    assert relevant.tolist() == [[True, False], [True, True], [False, True]]
    model = VisualParser.from_config("tiny", vocab_size=8, image_size=8, max_words=8)
    drawn, hard, loss = mismatches(make_search(model, data), data)
    assert drawn.tolist() == hard.tolist() == [2, 2, 0, 0]  # the only wrong text of each image
    assert loss > 0
    found = search_pairs(make_search(model, data), data)
    assert set(found.image_rank.tolist()) <= {1, 2}
    assert found.image_rank[0] == 1  # "dark" is right for both images
    assert score_all(model, data, np.array([0, -1, 1, 1])).isnan().tolist() == [
        False, True, False, False,
    ]  # fmt: skip


def test_scores_follow_from_ranks():
    answers = {
        "image_rank": torch.tensor([1, 3, 0, -1]),
        "text_rank": torch.tensor([1, 1, 6, -1]),
        "logits": torch.tensor([1.0, -1.0, 2.0, 3.0]),
        "random": torch.tensor([-1.0, -1.0, 2.0, torch.nan]),
        "hard": torch.tensor([-1.0, 1.0, 2.0, torch.nan]),
    }
    scores = {name: s.value for name, s in score_pairs(answers).items()}
    assert scores == pytest.approx(
        {
            "R@1": 1 / 3,
            "R@5": 2 / 3,
            "R@1 of texts": 2 / 3,
            "R@5 of texts": 2 / 3,
            "matching": 5 / 7,
            "hard mismatches": 1 / 3,
        }
    )


def test_probabilities_are_those_of_a_logistic_model():
    rng = np.random.default_rng(0)
    good, bad = rng.normal(3, 1, 20000), rng.normal(1, 1, 20000)
    slope, offset = fit_probability(torch.tensor(good), torch.tensor(bad))
    # two normal distributions of variance one: log-odds 2 x - 4
    assert slope == pytest.approx(2, abs=0.06)
    assert offset == pytest.approx(-4, abs=0.12)
    assert fit_probability(torch.tensor(bad), torch.tensor(good)) == (0.0, 0.0)
    apart = fit_probability(torch.tensor([9.0, 8.0]), torch.tensor([1.0, float("nan")]))
    assert np.isfinite(apart).all()


def test_a_learned_tokenizer_keeps_frequent_words(tmp_path):
    texts = ["Red CIRCLE, left", "red square", "blue circle"]
    tokenizer = TextTokenizer.learn(texts)
    assert tokenizer.words == (",", "blue", "circle", "left", "red", "square")
    assert TextTokenizer.learn(texts, max_size=7).words == ("circle", "red")
    assert tokenizer.encode(["RED unseen ⅷ"], 16) == [[1, 9, 4, 4, 2]]
    assert tokenizer.encode(["red " * 50], 6) == [[1, 9, 9, 9, 9, 2]]
    assert tokenizer.unknown("a red zebra") == ["a", "zebra"]
    ids, keep = tokenizer.batch(["red", "red square"], 8)
    assert ids.tolist() == [[1, 9, 2, 0], [1, 9, 10, 2]]
    assert keep.sum(1).tolist() == [3, 4]
    tokenizer.save(tmp_path / "t.json")
    assert TextTokenizer.load(tmp_path / "t.json") == tokenizer
    whole = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(whole.replace('"red"', '"rad"'))
    with pytest.raises(ValueError, match="was changed or damaged"):
        TextTokenizer.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(re.sub(r'"checksum": "\w+",', "", whole))
    with pytest.warns(UnsealedWarning, match="no checksum"):
        assert TextTokenizer.load(tmp_path / "t.json") == tokenizer


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{}", "null", "[" * 100_000, '{"format": 2}', "words", '{"special": [0, 1]}'],
)
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    good = {"format": 1, **vars(TextTokenizer.learn(["a b"]))}
    if content.startswith('{"special'):
        content = json.dumps({**good, **json.loads(content)})
    elif content == "words":
        content = json.dumps({**good, "words": ["a"]})
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match="no tokenizer of this library"):
        TextTokenizer.load(tmp_path / "t.json")


def test_other_tokenizers_are_taken_and_saved(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "red": 2, "circle": 3, "[MASK]": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = TextTokenizer.wrap(inner)
    # [CLS] and [SEP] are missing and come behind the words
    assert wrapped.special == (1, 5, 6, 4, 0)
    assert wrapped.vocab_size == 7
    assert wrapped.encode(["red zebra circle"], 16) == [[5, 2, 0, 3, 6]]
    assert wrapped.unknown("red zebra") == ["[UNK]"]
    wrapped.save(tmp_path / "t.json")
    again = TextTokenizer.load(tmp_path / "t.json")
    assert again.encode(["circle red"], 3) == [[5, 3, 6]]
    images, texts = patches(1)
    options = {"image_size": 16, "tokenizer": inner}
    matcher = ImageTextMatcher(dim=16, max_epochs=1, options=options, random_state=0)
    _short(matcher, 2).fit(images, texts).save(tmp_path / "m")
    loaded = ImageTextMatcher.load(tmp_path / "m")
    assert loaded.model_.config.mask_token_id == 4
    assert np.isfinite(loaded.predict_proba(images[:2], texts[:2])).all()
    with pytest.raises(TypeError, match="got int"):
        TextTokenizer.wrap(3)
