"""Sets of vectors with groups: splits, descriptors, searches, parts of experiments."""

import os
from pathlib import Path

import numpy as np
import pytest

from primal_attention.datasets.lists import (
    describe,
    load_pictures,
    make_curves,
    search_all,
    split_groups,
)
from primal_attention.support.command import UserError
from primal_attention.tasks.lists import (
    AlphaQE,
    DiffusionReranker,
    Reranker,
    mean_average_precision,
    recall_at,
)
from primal_attention.tasks.lists.parts import load_parts, picture_search_part, read_vectors
from primal_attention.tasks.lists.settings import VectorSettings

DATA = Path(os.environ.get("PRIMAL_DATA", "no data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs PRIMAL_DATA")


def test_groups_are_split_whole():
    groups = np.repeat(np.arange(9), 4)
    train = split_groups(groups, 3)
    assert not set(groups[train]) & set(groups[~train])
    assert len(set(groups[train])) == 4
    assert (split_groups(groups, 3) == train).all()
    assert any((split_groups(groups, seed) != train).any() for seed in range(5))


def test_descriptors_are_half_whitened_components_of_the_training_part():
    rng = np.random.default_rng(0)
    images = (rng.standard_normal((30, 6)) * [9, 4, 1, 1, 1, 1]).astype("f4")
    train = np.arange(30) < 20
    x = describe(images, train, 2)
    centred = images - images[train].mean(0)
    values, vectors = np.linalg.eigh(centred[train].T @ centred[train])
    z = centred @ vectors[:, ::-1][:, :2] / values[::-1][:2] ** 0.25  # sigma ** (1/2)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    np.testing.assert_allclose(np.abs(x), np.abs(z), atol=1e-5)
    # fewer columns of a wide descriptor, scaled again, are a narrow descriptor
    wide = describe(images, train, 5)[:, :2]
    np.testing.assert_allclose(wide / np.linalg.norm(wide, axis=1, keepdims=True), x, atol=1e-5)


def test_a_search_leaves_the_query_out():
    x, groups = make_curves(4, 6, seed=1)
    found = search_all(x, groups, 100)
    assert found.ids.shape == (24, 23)
    assert all(i not in row for i, row in enumerate(found.ids))
    cosines = np.take_along_axis(x @ x.T, found.ids, 1)
    assert (np.diff(cosines, axis=1) <= 1e-6).all()
    assert [len(row) for row in found.relevant] == [5] * 24
    assert recall_at(found.ids, found.relevant, 23) == 1


def test_context_finds_the_other_side_of_a_curve():
    x, groups = make_curves(12, 30, noise=0.05, seed=2)
    found = search_all(x, groups, 200)
    first = mean_average_precision(found.ids, found.relevant)
    ids = DiffusionReranker().rerank(found.xq, found.xb, found.ids).ids
    assert mean_average_precision(ids, found.relevant) > first + 0.1


def test_parts_share_no_group(tmp_path):
    x, groups = make_curves(20, 5)
    np.savez(tmp_path / "v.npz", x=2 * x, groups=np.char.add("g", groups.astype(str)))
    parts = load_parts(VectorSettings(train=tmp_path / "v.npz", test_share=0.25))
    sets = [set(part[0].groups.tolist()) for part in parts]
    assert [len(s) for s in sets] == [12, 3, 5]
    assert len(set.union(*sets)) == 20
    norms = np.linalg.norm(parts.train[0].x, axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-6)
    # with a test file all groups of the other one are for training
    np.savez(tmp_path / "t.npz", x=x[:10], groups=groups[:10])
    given = VectorSettings(train=tmp_path / "v.npz", test=tmp_path / "t.npz")
    assert [len(set(part[0].groups.tolist())) for part in load_parts(given)] == [16, 4, 2]


@pytest.mark.raw
def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "v.npz"
    x, groups = make_curves(3, 4)
    for arrays, words in (
        ({"x": x}, "no array .groups."),
        ({"x": x[0], "groups": groups}, "2 axes"),
        ({"x": x, "groups": groups[:2]}, "groups"),
        ({"x": np.full_like(x, np.nan), "groups": groups}, "not finite"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=words):
            read_vectors(path)
    np.savez(path, x=x, groups=groups)
    with pytest.raises(UserError, match="at least 2 in every part"):
        load_parts(VectorSettings(train=path))
    with pytest.raises(UserError, match="No such file"):
        read_vectors(tmp_path / "none.npz")
    with pytest.raises(UserError, match="which vectors"):
        load_parts(VectorSettings())
    with pytest.raises(UserError, match="Did you mean 'palm'"):
        load_pictures("plam")


@needs_data
def test_pictures_have_the_published_sizes():
    for name, shape, groups in (
        ("coil20", (1440, 32, 32), 20),
        ("palm", (2000, 16, 16), 100),
        ("emoji", (4773, 32, 32, 3), 1591),
    ):
        found = load_pictures(name, DATA)
        assert found.images.shape == shape
        assert len(np.unique(found.groups)) == groups
        assert 0 <= found.images.min() < found.images.max() <= 1


@needs_data
@pytest.mark.slow
def test_numbers_of_coil():
    """First search, expansion and list diffusion on one split; 80 queries of the specification."""
    found = search_all(*picture_search_part("coil20", 0, DATA), results=1000)
    first = mean_average_precision(found.ids, found.relevant)
    for method, low, high in ((AlphaQE(), 0.005, 0.04), (DiffusionReranker(), 0.05, 0.12)):
        ids = method.rerank(found.xq, found.xb, found.ids, candidates=150).ids
        assert low < mean_average_precision(ids, found.relevant) - first < high


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("affinity", "gain"), [("both", 0.03), ("inner", 0.01)])
def test_training_helps_objects_that_it_never_saw(affinity, gain):  # T19
    pictures = load_pictures("coil20", DATA)
    train = split_groups(pictures.groups, 0)
    x = describe(pictures.images, train)
    reranker = Reranker(max_epochs=4, options={"candidates": 150, "affinity": affinity})
    reranker.fit(x[train], pictures.groups[train])
    found = search_all(x[~train], pictures.groups[~train], 1000)
    ids = reranker.rerank(found.xq, found.xb, found.ids, candidates=150).ids
    first = mean_average_precision(found.ids, found.relevant)
    assert mean_average_precision(ids, found.relevant) > first + gain
