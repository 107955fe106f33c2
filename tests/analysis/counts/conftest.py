import numpy as np
import pytest

from primal_attention.analysis.counts import Cooccurrence


@pytest.fixture
def example():
    """The counts of the published example, in the order of its vocabulary."""
    words = ["river", "bank", "loan", "money", "flooded", "shore", "rely"]
    pairs = {
        "river-bank": 4,
        "river-flooded": 5,
        "river-shore": 6,
        "bank-loan": 6,
        "bank-money": 5,
        "bank-flooded": 3,
        "bank-shore": 5,
        "bank-rely": 4,
        "loan-money": 7,
        "loan-rely": 2,
        "flooded-shore": 4,
    }
    counts = np.zeros((7, 7))
    for pair, value in pairs.items():
        i, j = (words.index(word) for word in pair.split("-"))
        counts[i, j] = counts[j, i] = value
    return Cooccurrence.from_counts(counts, words, directional=False)


@pytest.fixture
def positive():
    """Counts that are all positive and not symmetric, of thirty words."""
    return Cooccurrence.from_counts(np.random.default_rng(0).integers(1, 300, (30, 30)))


@pytest.fixture
def sparse_counts():
    """Counts of a text of fifty words with the frequencies of real text; many pairs are unseen."""
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, 51)
    return Cooccurrence(50, window=3).fit([rng.choice(50, 800, p=p / p.sum())])
