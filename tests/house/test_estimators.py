"""One vocabulary for all estimators: few arguments, the same words, a time limit on every fit."""

import importlib
import inspect
import pkgutil

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("aeon")
from sklearn.base import BaseEstimator

NETWORK = {
    *("attention", "dim", "num_heads", "num_layers", "max_epochs", "batch_size", "learning_rate"),
    *("options", "random_state", "verbose"),
}
"""Arguments of every estimator that trains a network."""
OTHER_WORDS = {"depth", "steps", "epochs", "seed", "lr", "d_embed", "heads", "n_threads", "layers"}


def estimators() -> list[type]:
    """Return every estimator of the product that a user can fit."""
    found = {}
    for package in ("tasks", "ksvd", "analysis"):
        module = importlib.import_module(f"primal_attention.{package}")
        for info in pkgutil.walk_packages(module.__path__, f"primal_attention.{package}."):
            parts = vars(importlib.import_module(info.name))
            for kind in parts.values():
                is_ours = inspect.isclass(kind) and kind.__module__ == info.name
                if is_ours and issubclass(kind, BaseEstimator) and kind.__name__[0] != "_":
                    found[kind.__name__] = kind
    return [kind for kind in found.values() if hasattr(kind, "fit")]


def test_estimators_have_ten_arguments_at_most_of_one_vocabulary():
    kinds = estimators()
    assert len(kinds) >= 12
    for kind in kinds:
        arguments = set(inspect.signature(kind).parameters)
        assert len(arguments) <= 10, kind
        assert not arguments & OTHER_WORDS, kind
        if "max_epochs" in arguments and "attention" in arguments:
            assert arguments == NETWORK, kind


def test_every_fit_that_takes_time_has_a_limit():
    for kind in estimators():
        takes_time = {"max_epochs", "n_components"} & set(inspect.signature(kind).parameters)
        if takes_time:
            assert "time_limit" in inspect.signature(kind.fit).parameters, kind
