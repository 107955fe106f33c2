"""How far a graph can be trusted: margins of its decisions, entropies, and stability.

**Margin** (the default score of a head). Every pair has a deciding test. For a removed edge it is
the test that removed it, for a kept edge the weakest of its tests. The margin is
``μ = |log10(|ρ| / τ)|``, between 0 and 2: how far the partial correlation is from the threshold.

**Entropy difference** ``R = H_ind − H_dep`` of the p-values that say independent and dependent, in
ten bins each, normalised to 1. Compare it only between sequences with the same model, head, number
of nodes, ``α`` and ``m``. It does not separate structure from noise where matrices have no noise:
in an exact linear model all independent p-values are 1, so their entropy is zero.

**Stability**: in how many resamples of the feature columns an edge or a mark occurs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from primal_attention.analysis.causes.covariance import center_features, correlate
from primal_attention.analysis.causes.discovery import IndependenceTable
from primal_attention.analysis.causes.marks import ARROW, CIRCLE, TAIL
from primal_attention.analysis.causes.pag import PAG
from primal_attention.analysis.causes.primal import Matrix

__all__ = [
    "Confidence",
    "Consensus",
    "Stability",
    "bootstrap_stability",
    "confidence",
    "consensus",
    "decision_margins",
    "entropy_difference",
]

_BINS = 10
_LARGEST_MARGIN = 2.0


class Confidence(NamedTuple):
    """How clearly the tests of a graph decided."""

    margin: float
    """Mean margin of all pairs, 0 to 2."""
    low_margin: float
    """Margin that nine of ten pairs exceed; the score of a head."""
    entropy_difference: float | None
    """``R``, −1 to 1; ``None`` for a fixed threshold, which has no p-values."""


def decision_margins(tests: IndependenceTable) -> dict[tuple[int, int], float]:
    """Return the margin of the decision about each pair ``(i, j)``, ``i < j``.

    Args:
        tests: Tests of a search, such as ``discover(...).tests``.

    Example:
        >>> from primal_attention.analysis.causes import PartialCorrelationTest, discover
        >>> corr = np.array([[1, 0.5, 0.0], [0.5, 1, 0.2], [0.0, 0.2, 1]])
        >>> found = discover(PartialCorrelationTest(corr, tau=0.1), 3, max_cond=0)
        >>> {pair: round(float(m), 2) for pair, m in decision_margins(found.tests).items()}
        {(0, 1): 0.7, (0, 2): 2.0, (1, 2): 0.3}
    """
    rho, tau = np.abs(tests.rho), np.asarray(tests.tau)
    with np.errstate(divide="ignore", invalid="ignore"):
        margins = np.abs(np.log10(rho) - np.log10(tau))
    # a threshold of zero decides nothing: the test had no samples left
    margins = np.where(tau > 0, np.clip(margins, 0, _LARGEST_MARGIN), 0.0)
    independent = tests.independent
    found: dict[tuple[int, int], float] = {}
    removed: set[tuple[int, int]] = set()
    for i, j, margin, is_removed in zip(
        tests.i.tolist(), tests.j.tolist(), margins.tolist(), independent.tolist(), strict=True
    ):
        pair = min(i, j), max(i, j)
        if is_removed:
            removed.add(pair)
            found[pair] = margin
        elif pair not in removed:
            found[pair] = min(found.get(pair, _LARGEST_MARGIN), margin)
    return dict(sorted(found.items()))


def entropy_difference(p: Float[np.ndarray, " t"], alpha: float) -> float:
    """Return ``R = H_ind − H_dep`` of p-values, each entropy between 0 and 1.

    Args:
        p: P-values of all tests of a search.
        alpha: Level that separates dependent from independent.

    Example:
        >>> entropy_difference(np.linspace(0.01, 1, 1000), 0.01) > 0.99
        True
    """
    p = np.asarray(p, dtype=np.float64)
    return _entropy(p[p > alpha], alpha, 1.0) - _entropy(p[p <= alpha], 0.0, alpha)


def _entropy(p: Float[np.ndarray, " t"], low: float, high: float) -> float:
    counts, _ = np.histogram(p, bins=_BINS, range=(low, high))
    share = counts[counts > 0] / max(counts.sum(), 1)
    return max(float(-(share * np.log(share)).sum() / np.log(_BINS)), 0.0)


def confidence(tests: IndependenceTable) -> Confidence:
    """Return the confidence in the graph of a search.

    Args:
        tests: Tests of a search, such as ``discover(...).tests``.
    """
    margins = np.array(list(decision_margins(tests).values()))
    p = tests.p
    return Confidence(
        float(margins.mean()) if len(margins) else 0.0,
        float(np.quantile(margins, 0.1)) if len(margins) else 0.0,
        None if p is None or tests.alpha is None else entropy_difference(p, tests.alpha),
    )


class Stability(NamedTuple):
    """How often edges and marks occur when feature columns are drawn again."""

    edges: Float[np.ndarray, "k k"]
    """Share of resamples with an edge between two nodes."""
    marks: Float[np.ndarray, "k k"]
    """Share of resamples with the mark of the graph itself at ``j``; zero without an edge."""
    replicates: int


def bootstrap_stability(
    features: Matrix,
    learn: Callable[[Float[Tensor, "k k"]], PAG],
    pag: PAG | None = None,
    *,
    replicates: int = 50,
    ridge: float = 0.0,
    seed: int = 0,
) -> Stability:
    """Return in how many resamples of the feature columns edges and marks occur.

    Args:
        features: One row for each node and one column for each feature: outputs of a head.
        learn: Returns the graph of a correlation matrix.
        pag: The graph to judge; by default that of all columns.
        replicates: Number of resamples.
        ridge: Independent noise per node, as a share of its variance.
        seed: Seed of the resamples.

    Example:
        >>> from primal_attention.analysis.causes import learn_pag
        >>> x = np.random.default_rng(0).normal(size=(3, 200))
        >>> x[1] += x[0]
        >>> found = bootstrap_stability(x, lambda rho: learn_pag(rho, m=200), replicates=10)
        >>> float(found.edges[0, 1]), bool(found.edges[0, 2] < 0.5)
        (1.0, True)
    """
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}.")
    x = center_features(features)
    pag = learn(correlate(x, ridge=ridge).matrix) if pag is None else pag
    generator = torch.Generator().manual_seed(seed)
    edges, marks = np.zeros(pag.marks.shape), np.zeros(pag.marks.shape)
    for _ in range(replicates):
        columns = torch.randint(x.shape[1], (x.shape[1],), generator=generator)
        resampled = correlate(center_features(x[:, columns]), ridge=ridge)
        found = learn(resampled.matrix).marks
        edges += found > 0
        marks += (found == pag.marks) & (found > 0)
    return Stability(edges / replicates, marks / replicates, replicates)


class Consensus(NamedTuple):
    """Edges over all heads, weighted by the confidence of the heads."""

    frequency: Float[np.ndarray, "k k"]
    """Weighted share of heads with an edge between two nodes."""
    marks: Float[np.ndarray, "k k 3"]
    """Weighted share of heads with a circle, an arrowhead or a tail at ``j``."""
    weights: tuple[float, ...]
    """Weight of each head; they sum to 1."""

    def graph(self, threshold: float = 0.5, names: tuple[str, ...] | None = None) -> PAG:
        """Return the edges of at least this share of heads, each mark by majority.

        A tie of marks becomes a circle. The result summarises heads; it is not itself the outcome
        of a search, and no independence follows from it.
        """
        kept: Bool[np.ndarray, "k k"] = (self.frequency >= threshold) & (self.frequency > 0)
        best = self.marks.max(-1, keepdims=True)
        is_tie = (self.marks >= best - 1e-12).sum(-1) > 1
        marks = np.where(is_tie, CIRCLE, self.marks.argmax(-1) + CIRCLE)
        return PAG(np.where(kept, marks, 0).astype(np.int8), names)


def consensus(pags: Sequence[PAG], scores: Sequence[float]) -> Consensus:
    """Return how often edges and marks occur over heads, weighted by the scores of the heads.

    Args:
        pags: Graph of each head, over the same nodes.
        scores: Confidence of each head; if all are zero, heads count equally.
    """
    found = np.maximum(np.array(scores, dtype=np.float64), 0)
    weights = found / found.sum() if found.sum() > 0 else np.full(len(found), 1 / len(found))
    stack = np.stack([pag.marks for pag in pags])
    shares = [(weights[:, None, None] * (stack == mark)).sum(0) for mark in (CIRCLE, ARROW, TAIL)]
    every = np.stack(shares, -1)
    return Consensus(every.sum(-1), every, tuple(weights.tolist()))
