"""Damaged files are told in one sentence, or read with a result of the usual kind.

A failure prints the numbers of the damages. ``FUZZ=7,19 pytest tests/robustness -k "checkpoint"``
repeats two of them; the damaged files stay in the temporary folder of the test. ``FUZZ_SEED=1``
draws others.
"""

import os

import pytest

from . import data_cases, model_cases
from .cases import CASES, make
from .harness import problems

__all__ = ["data_cases", "model_cases"]  # they fill CASES
SEED = int(os.environ.get("FUZZ_SEED", "0"))
FEW, MANY = range(5), range(200)


def fuzz(name, tmp_path, numbers):
    given = os.environ.get("FUZZ")
    numbers = [int(n) for n in given.split(",")] if given else numbers
    files, kept = tmp_path / "files", tmp_path / "kept"
    files.mkdir()
    kept.mkdir()
    found = list(problems(make(name, files), numbers, SEED, kept))
    lines = "\n".join(found)
    told = f"seed {SEED}, {len(found)} of {len(numbers)} damages; files in {kept}"
    assert not found, f"{told}\n{lines}"


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_told_or_harmless(name, tmp_path):
    fuzz(name, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_200_damages_of_a_format_are_told_or_harmless(name, tmp_path):
    fuzz(name, tmp_path, MANY)
