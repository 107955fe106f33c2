"""Named scores: what is measured on a data set, how sure it is, and which direction is better.

A task measures ``{"accuracy": Score(0.91, 0.02), "loss": Score(0.3, …)}``. The training loop does
not depend on the names; ``TrainingConfig.monitor`` picks one of them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "IGNORED",
    "Answers",
    "Score",
    "Scores",
    "class_answers",
    "class_scores",
    "cross_entropy",
    "squared_error",
    "value_answers",
    "value_scores",
]

IGNORED = -100
"""The label of a token that counts neither in the loss nor in the accuracy."""

Answers = Mapping[str, Tensor]
"""What a model answers to every item, by name; the first axis of each tensor runs over items."""


@dataclass(frozen=True)
class Score:
    """One measured number.

    Example:
        >>> str(Score(0.912, 0.021)), str(Score(0.912, 0.021, is_share=True))
        ('0.912 ± 0.021', '91.2 ± 2.1 %')
    """

    value: float
    error: float | None = None
    """Standard error over the items; ``None`` if it is not known."""
    larger_is_better: bool = True
    is_share: bool = False
    """Whether to show it in per cent."""

    def __str__(self) -> str:
        factor, digits, unit = (100, 1, " %") if self.is_share else (1, 3, "")
        parts = [p for p in (self.value, self.error) if p is not None]
        return " ± ".join(f"{factor * part:.{digits}f}" for part in parts) + unit

    def is_better_than(self, value: float) -> bool:
        """Return whether this beats an earlier value; a NaN never does, and any number beats it."""
        if math.isnan(self.value) or math.isnan(value):
            return math.isnan(value) and not math.isnan(self.value)
        return self.value > value if self.larger_is_better else self.value < value


Scores = Mapping[str, Score]
Answer = Callable[[Any, Any], Answers]
"""From the output of a model and the labels of a batch to answers."""


def cross_entropy(output: object, labels: Int[Tensor, "b *n"]) -> Float[Tensor, ""]:
    """Return the mean over sequences of the cross-entropy, each the mean over its labelled tokens.

    Args:
        output: Logits ``[b *n classes]``, or an object that has them.
        labels: Classes; ``-100`` where there is none.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    logits = _logits(output)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape {tuple(logits.shape[:-1])} of the logits without classes, "
            f"got {tuple(labels.shape)}; write an objective(output, labels) for other tasks."
        )
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    losses = torch.nn.functional.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).reshape(len(labels), -1)
    counted = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    return (losses.sum(1) / counted.clamp_min(1)).mean()


def class_answers(output: object, labels: Tensor) -> Answers:
    """Return logits and labels of sequences, or hits and counts of labelled tokens.

    Empty if the labels are not classes of the logits.
    """
    logits = _logits(output)
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return {}
    if labels.dim() == 1:
        return {"logits": logits.float(), "labels": labels}
    # all logits of all tokens would not fit in memory
    asked = labels != IGNORED
    hits = ((logits.argmax(-1) == labels) & asked).flatten(1).sum(1)
    return {"hits": hits, "labelled": asked.flatten(1).sum(1)}


def class_scores(answers: Answers) -> dict[str, Score]:
    """Return the accuracy with its binomial standard error, which is never zero.

    Example:
        >>> class_scores({"logits": torch.eye(2), "labels": torch.tensor([0, 0])})["accuracy"].value
        0.5
    """
    if not answers:
        return {}
    if "logits" in answers:
        asked = answers["labels"] != IGNORED
        hits = int(((answers["logits"].argmax(-1) == answers["labels"]) & asked).sum())
        count = int(asked.sum())
    else:
        hits, count = int(answers["hits"].sum()), int(answers["labelled"].sum())
    if not count:
        return {}
    share = hits / count
    # all right or all wrong is not certainty: one more case of each kind
    sure = share if 0 < hits < count else (hits + 1) / (count + 2)
    error = (sure * (1 - sure) / count) ** 0.5
    return {"accuracy": Score(share, error, is_share=True)}


def squared_error(output: object, labels: Float[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the mean squared error of one number a sequence."""
    values = _logits(output)
    return (values.reshape(labels.shape) - labels).square().mean()


def value_answers(output: object, labels: Float[Tensor, " b"]) -> Answers:
    """Return predicted and true numbers."""
    return {"values": _logits(output).reshape(labels.shape).float(), "labels": labels}


def value_scores(answers: Answers) -> dict[str, Score]:
    """Return root mean squared error, mean absolute error and R² of predicted numbers.

    Example:
        >>> found = value_scores({"values": torch.tensor([1.0, 2.0]), "labels": torch.arange(2.0)})
        >>> found["RMSE"].value, found["R2"].value
        (1.0, -3.0)
    """
    values, labels = answers["values"].double(), answers["labels"].double()
    residual = values - labels
    squares, count = residual.square(), max(len(labels), 1)
    rmse = float(squares.mean().sqrt())
    # delta method: the error of a root is that of the mean over twice the root
    spread = float(squares.std(correction=0)) / count**0.5
    mae = residual.abs()
    total = float((labels - labels.mean()).square().sum())
    scores = {
        "RMSE": Score(rmse, spread / (2 * rmse) if rmse else 0.0, larger_is_better=False),
        "MAE": Score(
            float(mae.mean()), float(mae.std(correction=0)) / count**0.5, larger_is_better=False
        ),
    }
    if total:
        scores["R2"] = Score(1 - float(squares.sum()) / total)
    return scores


def _logits(output: object) -> Tensor:
    """Return the logits of a model's output, which may be the logits themselves."""
    return cast(Tensor, getattr(output, "logits", output))
