"""Run a model over a data set: answers to every item, and named scores."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from primal_attention.training.config import Precision
from primal_attention.training.data import map_tensors, pad_collate, split_labels
from primal_attention.training.scores import (
    Answer,
    Answers,
    Score,
    Scores,
    class_answers,
    class_scores,
    cross_entropy,
)

__all__ = ["Collate", "Evaluation", "Objective", "evaluate"]

Objective = Callable[[Any, Any], Tensor]
"""From the output of a model and the labels to a loss: a mean over the sequences of the batch."""
Collate = Callable[[Sequence[Any]], Mapping[str, Any]]
"""From a list of items to a batch: keyword inputs of the model, and ``labels``."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on a data set, and its answers to every item.

    Example:
        >>> Evaluation({"accuracy": Score(0.9)})["accuracy"]
        0.9
    """

    scores: Scores
    """Named scores; ``loss`` is the objective without the KSVD term."""
    answers: Answers = field(default_factory=dict)
    """Answers in the order of the data, on the CPU."""

    def __getitem__(self, name: str) -> float:
        return self.scores[name].value


_Measured = tuple[int, int, float, dict[str, Tensor]]
"""Number of a batch, its size, its loss and its answers."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset[object],
    *,
    batch_size: int = 64,
    objective: Objective = cross_entropy,
    answer: Answer = class_answers,
    score: Callable[[Answers], Scores] = class_scores,
    collate: Collate = pad_collate,
    precision: Precision = "fp32",
) -> Evaluation:
    """Return the named scores of a model on a data set, and its answers.

    With several processes each takes its share of the batches, and all return the whole.

    Args:
        model: Called with the keyword inputs of each batch, in eval mode and without gradients.
        data: Map-style data set whose items are dictionaries of tensors.
        batch_size: Sequences to run at once.
        objective: From output and labels to the mean loss of a batch.
        answer: From output and labels to what is kept of every item.
        score: From all answers to named scores; ``loss`` is added.
        collate: From a list of items to a batch.
        precision: Type of the matrix products.

    Example:
        >>> from primal_attention.training import Columns
        >>> data = Columns(input=torch.eye(3), labels=torch.arange(3))
        >>> evaluate(torch.nn.Identity(), data)["accuracy"]
        1.0
    """
    total = num_items(data)
    if total == 0:
        raise ValueError("There is nothing to evaluate: the data set is empty.")
    rank, world_size = _processes()
    starts = list(enumerate(range(0, total, batch_size)))[rank::world_size]
    batches = [list(range(a, min(a + batch_size, total))) for _, a in starts]
    # an own generator, so that the random state of the caller does not change
    loader = DataLoader(
        data, batch_sampler=batches, collate_fn=collate, generator=torch.Generator()
    )
    device = device_of(model)
    measured: list[_Measured] = []
    with eval_mode(model), autocast(device, precision):
        for (number, _), indices, batch in zip(starts, batches, loader, strict=True):
            inputs, labels = split_labels(to_device(batch, device))
            output = model(**inputs)
            found = {name: t.detach().cpu() for name, t in answer(output, labels).items()}
            loss = float(objective(output, labels))
            measured.append((number, len(indices), loss, found))
    # in the order of the data, whichever process ran a batch
    _, sizes, losses, found_in = zip(*sorted(_gather(measured), key=lambda m: m[0]), strict=True)
    loss = sum(map(operator.mul, losses, sizes)) / sum(sizes)
    answers = {name: torch.cat([found[name] for found in found_in]) for name in found_in[0]}
    return Evaluation({"loss": Score(loss, larger_is_better=False), **score(answers)}, answers)


def _gather(measured: list[_Measured]) -> list[_Measured]:
    _, world_size = _processes()
    if world_size == 1:
        return measured
    found: list[list[_Measured]] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(found, measured)
    return [m for part in found for m in part]


def _processes() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def num_items(data: Dataset[object]) -> int:
    """Return the number of items of a map-style data set."""
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"Data must be map-style, with __len__ and __getitem__, got {type(data).__name__}; "
            "read a stream into a list of dictionaries, or use Columns."
        )
    return len(data)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Mapping[str, object], device: torch.device) -> dict[str, Any]:
    """Return the batch with its tensors on a device."""
    moved: dict[str, Any] = map_tensors(lambda t: t.to(device, non_blocking=True), batch)
    return moved


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return the context in which matrix products run in the given precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and every module back into the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
