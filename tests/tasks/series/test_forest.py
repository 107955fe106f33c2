"""Trees as arrays answer as scikit-learn's do."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

from primal_attention.tasks.series.blend.forest import Forest


def grown(kind, y, trees=20, **options):
    """A forest, and cases that lie on its thresholds and just beside them."""
    rng = np.random.default_rng(0)
    # few different values: many cases are equal, and thresholds are close
    x = (rng.integers(0, 9, size=(len(y), 4)) / 7).astype(np.float32)
    forest = kind(trees, random_state=0, **options).fit(x, y)
    edges = np.concatenate([e.tree_.threshold[e.tree_.feature >= 0] for e in forest.estimators_])
    on = edges.astype(np.float32)
    around = np.concatenate([on, np.nextafter(on, np.float32(9)), np.nextafter(on, -on - 1), x[0]])
    return forest, np.concatenate([x, rng.choice(around, size=(600, 4))]).astype(np.float32)


def test_probabilities_are_those_of_scikit_learn():
    y = np.arange(50) % 3
    forest, x = grown(ExtraTreesClassifier, y, criterion="entropy")
    np.testing.assert_allclose(
        Forest.from_sklearn(forest, 3)(x), forest.predict_proba(x), rtol=0, atol=1e-6
    )


def test_a_class_without_a_case_has_no_probability():
    forest, x = grown(ExtraTreesClassifier, np.array([0, 2, 3] * 10))
    found = Forest.from_sklearn(forest, 5)(x)
    np.testing.assert_allclose(found[:, [0, 2, 3]], forest.predict_proba(x), rtol=0, atol=1e-6)
    assert not found[:, [1, 4]].any()


def test_numbers_are_those_of_scikit_learn():
    y = np.random.default_rng(1).normal(size=40)
    forest, x = grown(ExtraTreesRegressor, y)
    found = Forest.from_sklearn(forest)(x)
    np.testing.assert_allclose(found[:, 0], forest.predict(x), rtol=0, atol=1e-6)


def test_a_tree_of_one_leaf_and_no_case_at_all():
    forest, x = grown(ExtraTreesRegressor, np.full(8, 2.5), trees=3)
    trees = Forest.from_sklearn(forest)
    assert trees.sizes.nodes == trees.sizes.leaves == 3
    np.testing.assert_array_equal(trees(x[:2]), [[2.5], [2.5]])
    assert trees(x[:0]).shape == (0, 1)


def inner(forest):
    return int((forest.feature >= 0).nonzero()[0])


DAMAGES = {
    "a node that is its own child": lambda f: f.left.__setitem__(inner(f), inner(f)),
    "a child before its parent": lambda f: f.right.__setitem__(int(f.root[1]), 0),
    "a child beyond the nodes": lambda f: f.right.__setitem__(inner(f), f.sizes.nodes),
    "a negative child": lambda f: f.left.__setitem__(inner(f), -2),
    "a feature beyond the cases": lambda f: f.feature.__setitem__(inner(f), 4),
    "a root beyond the nodes": lambda f: f.root.__setitem__(0, 2**31 - 1),
    "a negative root": lambda f: f.root.__setitem__(0, -1),
    "a leaf beyond the answers": lambda f: f.left.__setitem__(f.feature < 0, f.sizes.leaves),
    "no trees in the arrays": lambda f: f.left.zero_(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_arrays_are_refused(damage):
    forest, x = grown(ExtraTreesClassifier, np.arange(30) % 2)
    trees = Forest.from_sklearn(forest, 2)
    trees(x)
    with torch.no_grad():
        damage(trees)
    with pytest.raises(ValueError, match="trees of the model do not belong to cases of 4 features"):
        trees(x)
