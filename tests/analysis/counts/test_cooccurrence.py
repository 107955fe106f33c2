"""Counts: by hand, streaming, transforms and files."""

import io
import zipfile

import numpy as np
import pytest
from scipy import sparse

from primal_attention.analysis.counts import (
    Cooccurrence,
    context_probability,
    split_words,
    transform_counts,
)

TEN = list("abcabdacba")


def naive_forward(documents, n, window, weight):
    """Count pairs one by one."""
    counts = np.zeros((n, n))
    for ids in documents:
        for i, first in enumerate(ids):
            for distance in range(1, window + 1):
                if i + distance < len(ids) and first >= 0 and ids[i + distance] >= 0:
                    counts[first, ids[i + distance]] += weight(distance)
    return counts


def random_documents(seed=0, n=12, count=9):
    rng = np.random.default_rng(seed)
    return [rng.integers(-1, n, size=rng.integers(0, 40)) for _ in range(count)]


# T7
def test_ten_tokens_counted_by_hand():
    found = Cooccurrence("abcd", window=2).fit([TEN]).forward.toarray()
    # rows: the words after a, b, c, d; columns: a, b, c, d
    expected = [[0, 2.5, 1.5, 0.5], [2, 0, 1, 1], [1.5, 1.5, 0, 0], [1, 0, 0.5, 0]]
    np.testing.assert_array_equal(found, expected)


# T7
@pytest.mark.parametrize("window", [1, 3, 25])
def test_counts_equal_the_double_loop(window):
    documents = random_documents()
    for weighting, weight in (("inverse", lambda d: 1 / d), ("flat", lambda d: 1)):
        found = Cooccurrence(12, window=window, weighting=weighting).fit(documents)
        expected = naive_forward(documents, 12, window, weight)
        np.testing.assert_allclose(found.forward.toarray(), expected, rtol=1e-14, atol=0)


def test_glove_takes_unknown_words_out_and_the_others_keep_their_place():
    documents = [[0, -1, 1], [2, 99, 1]]
    kept = Cooccurrence(3, window=2).fit(documents).forward.toarray()
    assert kept[0, 1] == kept[2, 1] == 0.5
    glove = Cooccurrence(3, window=2, weighting="harmonic-glove").fit(documents).forward.toarray()
    assert glove[0, 1] == glove[2, 1] == 1.0


# T6
@pytest.mark.parametrize("boundary", ["document", "stream"])
def test_parts_of_a_corpus_give_the_same_bits_as_the_whole(boundary):
    documents = random_documents(count=30)
    whole = Cooccurrence(12, boundary=boundary).fit(documents)
    parts = Cooccurrence(12, boundary=boundary)
    for first in range(0, 30, 7):
        parts.update(documents[first : first + 7])
    np.testing.assert_array_equal(parts.forward.toarray(), whole.forward.toarray())
    np.testing.assert_array_equal(parts.unigram, whole.unigram)
    joined = [np.concatenate(documents)] if boundary == "stream" else documents
    expected = naive_forward(joined, 12, 5, lambda d: 1 / d)
    np.testing.assert_allclose(whole.forward.toarray(), expected, rtol=1e-14)
    assert whole.fit(documents).num_documents == 30


# T6
def test_symmetric_is_forward_plus_its_transpose():
    found = Cooccurrence(12).fit(random_documents())
    forward = found.forward.toarray()
    np.testing.assert_array_equal(found.symmetric.toarray(), forward + forward.T)
    rows, columns, total = found.totals
    np.testing.assert_allclose(rows, forward.sum(1))
    np.testing.assert_allclose(columns, forward.sum(0))
    assert total == pytest.approx(forward.sum())
    known = np.concatenate(random_documents())
    np.testing.assert_array_equal(found.unigram, np.bincount(known[known >= 0], minlength=12))


def test_vocabulary_is_learned_by_frequency_and_then_by_name():
    texts = ["b a a c", "c b d"]
    assert Cooccurrence().fit(texts).words == ("a", "b", "c", "d")
    assert Cooccurrence(top_k=2).fit(texts[::-1]).words == ("a", "b")
    assert Cooccurrence(min_count=2).fit(texts).words == ("a", "b", "c")
    found = Cooccurrence.from_corpus(["B-b a"], str.split)
    assert found.words == ("B-b", "a")
    np.testing.assert_array_equal(found.encode(["a", "x"]), [1, -1])
    assert split_words("It's 2 o’clock_now") == ["it's", "2", "o’clock", "now"]


# T6: the measures of sparse counts equal the formula on a dense matrix
def test_measures_equal_their_formulas():
    counts = Cooccurrence(12, window=2).fit(random_documents())
    c = counts.forward.toarray()
    with np.errstate(divide="ignore"):
        pmi = np.log(c * c.sum() / (c.sum(1)[:, None] * c.sum(0)))
        alpha = c.sum(0) ** 0.75 / (c.sum(0) ** 0.75).sum()
        smoothed = np.log(c / c.sum(1)[:, None] / alpha)
        log = np.log(c)
    for kind, expected, options in (
        ("counts", c, {}),
        ("probability", c / c.sum(), {}),
        ("log1p", np.log1p(c), {}),
        ("pmi", np.maximum(pmi, -10), {}),
        ("pmi", np.maximum(pmi - np.log(3), -0.5), {"shift": 3, "pmi_min": -0.5}),
        ("ppmi", np.maximum(pmi, 0), {}),
        ("ppmi", np.maximum(smoothed - 0.1, 0), {"shift": np.exp(0.1), "context_smoothing": 0.75}),
        ("pmi", np.maximum(smoothed, -10), {"context_smoothing": 0.75}),
        ("log", log, {}),
        ("log", np.log(c + 0.1), {"epsilon": 0.1}),
    ):
        found = counts.transform(kind, **options)
        assert sparse.issparse(found) == (kind not in ("pmi", "log"))
        assert abs(expected).max() > 0
        found = found.toarray() if sparse.issparse(found) else found
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_smoothing_adds_to_every_pair():
    counts = Cooccurrence(12, smoothing=0.5).fit(random_documents())
    c = counts.forward.toarray() + 0.5
    expected = np.log(c * c.sum() / (c.sum(1)[:, None] * c.sum(0)))
    np.testing.assert_allclose(counts.transform("pmi"), expected, atol=1e-12)
    np.testing.assert_allclose(counts.transform("ppmi"), np.maximum(expected, 0), atol=1e-12)
    np.testing.assert_allclose(counts.totals.columns, c.sum(0))
    symmetric = counts.transform("counts", directional=False)
    np.testing.assert_allclose(symmetric, counts.symmetric.toarray() + 0.5)


def test_a_word_without_counts_has_no_probability_and_no_association():
    counts = np.array([[0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert context_probability(counts.sum(0), 0.75)[2] == 0
    assert transform_counts(counts, "ppmi").toarray()[2].sum() == 0
    assert (transform_counts(counts, "pmi", pmi_min=-7)[2] == -7).all()
    assert transform_counts(np.zeros((2, 2)), "probability").nnz == 0


def test_a_saved_file_gives_the_same_object(tmp_path):
    counts = Cooccurrence(
        ["é", "b\n", "c"], window=3, weighting="flat", boundary="stream", smoothing=0.25
    ).update([[0, 1, 2, 1]])
    counts.save(tmp_path / "counts.npz")
    found = Cooccurrence.load(tmp_path / "counts.npz")
    assert repr(found) == repr(counts)
    assert (found.words, found.smoothing, found.num_documents) == (counts.words, 0.25, 1)
    # the end of the stream is part of the file
    for each in (found, counts):
        each.update([[2, 0]])
    np.testing.assert_array_equal(found.forward.toarray(), counts.forward.toarray())
    np.testing.assert_array_equal(found.unigram, counts.unigram)


def _rewrite(path, **arrays):
    with np.load(path) as file:
        content = {**file, **arrays}
    np.savez(path, **{name: array for name, array in content.items() if array is not None})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"indices": np.array([0, 7, 1])}, "not a readable file of counts"),
        ({"data": np.array([1.0, np.nan, 1.0])}, "not finite"),
        ({"data": np.array([1.0, -1.0, 1.0])}, "negative"),
        ({"data": np.array(["a", "b", "c"])}, "must hold finite numbers"),
        ({"unigram": np.array([1, 2])}, "unigram"),
        ({"words": None}, "no array .words."),
        ({"about": np.frombuffer(b"{}", np.uint8)}, "format"),
        ({"about": np.frombuffer(b"\xff", np.uint8)}, "not UTF-8"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, arrays, message):
    path = tmp_path / "counts.npz"
    Cooccurrence(3, window=2).fit([[0, 1, 2]]).save(path)
    _rewrite(path, **arrays)
    with pytest.raises(ValueError, match=message):
        Cooccurrence.load(path)


def test_a_file_larger_than_the_limit_is_not_unpacked(tmp_path):
    path = tmp_path / "counts.npz"
    Cooccurrence(3).fit([[0, 1, 2]]).save(path)
    with pytest.raises(ValueError, match=r"at most .* 100 bytes"):
        Cooccurrence.load(path, max_bytes=100)
    # a header may promise more than the file has
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members["data.npy"] = header.getvalue() + b"1"
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    with pytest.raises(ValueError, match="promises"):
        Cooccurrence.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"not an \.npz archive"):
        Cooccurrence.load(path)


def test_restricted_counts_are_those_of_the_words():
    counts = Cooccurrence(list("abcd"), window=2, smoothing=0.5).fit([TEN])
    found = counts.restrict(["c", "x", "a", "c"])
    assert (found.words, found.smoothing, found.window) == (("c", "a"), 0.5, 2)
    np.testing.assert_array_equal(
        found.forward.toarray(), counts.forward.toarray()[np.ix_([2, 0], [2, 0])]
    )
    np.testing.assert_array_equal(found.unigram, [2, 4])
    with pytest.raises(ValueError, match="no word is in the vocabulary"):
        counts.restrict(["x"])


def test_given_counts_are_kept():
    forward = np.array([[0.0, 3.0], [1.0, 0.5]])
    found = Cooccurrence.from_counts(sparse.csr_array(forward), ["x", "y"])
    np.testing.assert_array_equal(found.counts.toarray(), forward)
    symmetric = Cooccurrence.from_counts(forward + forward.T, directional=False)
    np.testing.assert_array_equal(symmetric.counts.toarray(), forward + forward.T)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cooccurrence(window=0), "window must be at least 1"),
        (lambda: Cooccurrence(weighting="linear"), "weighting must be one of"),
        (lambda: Cooccurrence(smoothing=-1), "smoothing must be"),
        (lambda: Cooccurrence(3, top_k=2), "one or the other"),
        (lambda: Cooccurrence(["a", "a"]), "'a' twice"),
        (lambda: Cooccurrence([]), "empty"),
        (lambda: Cooccurrence().fit([[1, 2]]), "no vocabulary"),
        (lambda: Cooccurrence(min_count=9).fit(["a"]), "lower min_count"),
        (lambda: Cooccurrence.from_counts([[0, -1], [0, 0]]), "not negative"),
        (lambda: Cooccurrence.from_counts([[0, 1], [0, 0]], directional=False), "not symmetric"),
        (lambda: Cooccurrence.from_counts([[0, 1], [0, 0]], ["a"]), "2 rows"),
        (lambda: Cooccurrence(3).transform("tfidf"), "transform must be one of"),
        (lambda: Cooccurrence(3).transform("pmi", shift=0), "shift must be"),
        (lambda: Cooccurrence(30_000).transform("pmi"), "at most 20000 words"),
    ],
)
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_kinds_are_named():
    with pytest.raises(TypeError, match="list of texts"):
        Cooccurrence().fit("one text")
    with pytest.raises(TypeError, match="shape"):
        Cooccurrence(3).fit([[0.5, 1.0]])
    with pytest.raises(TypeError, match="tokenize"):
        Cooccurrence.from_corpus(["a"], 3)
    with pytest.raises(RuntimeError, match="call fit"):
        len(Cooccurrence())
