"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import primal_attention

MODULES = [
    info.name
    for info in pkgutil.walk_packages(primal_attention.__path__, "primal_attention.")
    if not info.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, extraglobs={"torch": torch}):
        torch.manual_seed(0)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        runner.run(test)
        assert runner.failures == 0, f"{test.name}, see above"
