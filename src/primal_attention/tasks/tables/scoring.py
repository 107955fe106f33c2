"""Scores and calibration of predicted targets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from primal_attention.training.scores import Answers, Score

__all__ = ["NORMAL_90", "coverage", "deviation_factor", "fit_temperature"]

NORMAL_90 = 1.6448536269514722
"""Half width of the central 90 % of a standard normal distribution."""


def coverage(answers: Answers) -> Score:
    """Return the share of the targets inside their 90 % intervals, with its standard error."""
    inside = (answers["values"] - answers["labels"]).abs() <= NORMAL_90 * answers["std"]
    share, count = float(inside.double().mean()), max(len(inside), 1)
    return Score(share, (share * (1 - share) / count) ** 0.5, is_share=True)


def fit_temperature(
    logits: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
    *,
    lo: float = 0.2,
    hi: float = 5.0,
) -> float:
    """Return the temperature by which held-out logits have the least cross-entropy.

    The loss is convex in the inverse temperature, so a search by thirds finds the best one. With
    few rows the answer is drawn towards 1 by one pseudo-row at each end.

    Args:
        logits: Of held-out rows, not divided by a temperature.
        labels: Their classes.
        lo: Smallest temperature.
        hi: Largest temperature.

    Example:
        >>> sure = torch.tensor([[4.0, 0.0]] * 4)
        >>> fit_temperature(sure, torch.tensor([0, 0, 1, 0])) > 1
        True
    """
    logits, low, high = logits.double(), 1 / hi, 1 / lo

    def loss(inverse: float) -> float:
        pull = torch.tensor(inverse).log().square()
        return float(cross_entropy(inverse * logits, labels, reduction="sum") + pull)

    for _ in range(40):
        third = (high - low) / 3
        if loss(low + third) < loss(high - third):
            high -= third
        else:
            low += third
    return 2 / (low + high)


def deviation_factor(
    mean: Float[Tensor, " n"], std: Float[Tensor, " n"], labels: Float[Tensor, " n"]
) -> float:
    """Return the factor by which predicted deviations fit held-out errors best.

    The root mean square of standardised errors is the maximum-likelihood factor. One pseudo-row
    with an error of one deviation keeps it finite.
    """
    squares = ((mean - labels) / std).double().square()
    return float(((squares.sum() + 1) / (len(squares) + 1)).sqrt().clamp(0.1, 10))
