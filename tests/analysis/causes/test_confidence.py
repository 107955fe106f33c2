"""Margins, entropies, stability and consensus of graphs."""

import numpy as np
import pytest
import torch

from primal_attention.analysis.causes import (
    ARROW,
    CIRCLE,
    PAG,
    TAIL,
    PartialCorrelationTest,
    discover,
    learn_pag,
)
from primal_attention.analysis.causes.confidence import (
    bootstrap_stability,
    confidence,
    consensus,
    decision_margins,
    entropy_difference,
)
from primal_attention.analysis.causes.covariance import correlate
from primal_attention.analysis.causes.discovery import IndependenceTable


def table(rows, alpha=None):
    """Tests ``(i, j, rho, tau)`` without conditioning sets."""
    i, j, rho, tau = (np.array(column) for column in zip(*rows, strict=True))
    return IndependenceTable(
        i.astype(np.int16), j.astype(np.int16), np.zeros((len(i), 0), np.int16), rho, tau, alpha
    )


def test_margins_take_the_weakest_kept_and_the_deciding_removed_test():
    found = decision_margins(
        table(
            [
                (0, 1, 0.9, 0.1),
                (0, 1, -0.2, 0.1),
                (0, 1, 0.5, 0.1),
                (2, 0, 0.9, 0.1),
                (2, 0, 0.001, 0.1),
                (1, 2, 1e-9, 0.1),
                (1, 3, 0.0, 0.1),
                (2, 3, 0.3, 0.0),
            ]
        )
    )
    assert found == pytest.approx({(0, 1): np.log10(2), (0, 2): 2, (1, 2): 2, (1, 3): 2, (2, 3): 0})
    assert list(found) == sorted(found)
    weak = decision_margins(table([(0, 1, 0.11, 0.1), (0, 2, 0.05, 0.1)]))
    assert weak[0, 1] == pytest.approx(np.log10(1.1))
    assert weak[0, 2] == pytest.approx(np.log10(2))


def test_confidence_of_margins():
    rows = [(0, j, 0.1 * 10 ** (j / 10), 0.1) for j in range(1, 12)]
    found = confidence(table(rows))
    assert found.margin == pytest.approx(0.6)
    assert found.low_margin == pytest.approx(0.2)
    assert found.entropy_difference is None


def test_entropy_difference_of_known_p_values():
    alpha = 0.1
    spread, point = np.linspace(0.1001, 1, 5000), np.full(10, 0.05)
    assert entropy_difference(np.concatenate([spread, point]), alpha) == pytest.approx(1, abs=1e-3)
    assert entropy_difference(np.concatenate([np.ones(9), np.linspace(0, 0.1, 4000)]), alpha) == (
        pytest.approx(-1, abs=1e-3)
    )
    assert entropy_difference(np.array([]), alpha) == 0
    # two of ten bins, equally full
    assert entropy_difference(np.array([0.15, 0.95]), alpha) == pytest.approx(np.log10(2))


def test_margins_separate_structure_from_noise_and_entropies_do_not():
    # the order of section 2.10: exact model, 5 % and 20 % noise, random softmax
    generator = np.random.default_rng(0)

    def model(noise):
        effects = np.tril(generator.uniform(0.3, 0.8, (10, 10)), -1)
        effects *= generator.random((10, 10)) < 2 / 9
        mixing = np.linalg.inv(np.eye(10) - effects) * generator.uniform(0.5, 1.5, 10)
        mixing /= mixing.sum(1, keepdims=True)
        random = generator.dirichlet(np.ones(10), 10)
        return (1 - noise) * mixing + noise * random

    def softmax():
        logits = torch.from_numpy(generator.normal(size=(10, 10)))
        return logits.softmax(-1).numpy()

    def mean(draw):
        found = []
        for _ in range(8):
            test = PartialCorrelationTest(correlate(draw()).matrix.numpy(), 768, 0.01)
            found.append(confidence(discover(test, 10).tests))
        return np.mean(np.array(found), 0)

    exact, five, twenty = (mean(lambda x=x: model(x)) for x in (0.0, 0.05, 0.2))
    random = mean(softmax)
    assert exact[0] > 1.2 > five[0] > twenty[0]
    assert exact[1] > five[1] > random[1]
    # the noise-free model has the smallest entropy difference
    assert exact[2] < 0.5 < min(five[2], random[2])


def test_stability_of_clear_and_of_missing_edges():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 256))
    x[2] += x[0] + x[1]
    x[3] += x[2]
    x[1] += 5  # the mean over features does not matter

    def learn(rho):
        return learn_pag(rho.numpy(), m=256)

    pag = learn(correlate(x - x.mean(1, keepdims=True)).matrix)
    assert pag.edges() == ["0 o→ 2", "1 o→ 2", "2 → 3"]
    found = bootstrap_stability(x, learn, replicates=20)
    again = bootstrap_stability(x, learn, pag, replicates=20)
    assert np.array_equal(found.edges, again.edges)
    assert np.array_equal(found.edges, found.edges.T)
    assert min(found.edges[0, 2], found.edges[1, 2]) > 0.8
    assert found.edges[2, 3] == 1
    assert found.edges[0, 3] < 0.4
    assert found.marks[0, 2] > 0.5
    assert not found.marks[~pag.adjacency()].any()
    assert (found.marks <= found.edges).all()
    with pytest.raises(ValueError, match="replicates"):
        bootstrap_stability(x, learn, replicates=0)


def test_consensus_weights_heads_by_confidence():
    one = PAG([[0, ARROW, 0], [TAIL, 0, 0], [0, 0, 0]])
    two = PAG([[0, ARROW, CIRCLE], [CIRCLE, 0, 0], [CIRCLE, 0, 0]])
    found = consensus([one, two], [0.3, 0.1])
    assert found.weights == pytest.approx((0.75, 0.25))
    assert found.frequency[0, 1] == found.frequency[1, 0] == pytest.approx(1)
    assert found.frequency[0, 2] == pytest.approx(0.25)
    assert found.marks[1, 0].tolist() == pytest.approx([0.25, 0, 0.75])
    assert found.graph(0.5).edges() == ["0 → 1"]
    assert found.graph(0.2).edges() == ["0 → 1", "0 o-o 2"]
    # equal weights without confidence; a tie of marks is unknown
    equal = consensus([one, two], [0, 0])
    assert equal.weights == (0.5, 0.5)
    assert equal.graph(0.9).edges() == ["0 o→ 1"]
    assert equal.graph(0.0).adjacency()[1, 2] == 0
