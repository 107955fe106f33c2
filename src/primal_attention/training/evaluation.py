"""How good a model is on some data: loss, accuracy, and what it said."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from primal_attention.training.config import Precision
from primal_attention.training.data import IGNORED, _pad, pad_collate, split_labels

__all__ = ["Collate", "Evaluation", "Objective", "cross_entropy", "evaluate"]

Objective = Callable[[Any, Any], Tensor]
"""From the model's output and the labels to a loss: a mean over the sequences of the batch."""
Collate = Callable[[Sequence[Any]], Mapping[str, Any]]
"""From a list of items to a batch: keyword inputs of the model, and ``labels``."""


def cross_entropy(output: Any, labels: Int[Tensor, "b *n"]) -> Float[Tensor, ""]:
    """Return the mean over sequences of the cross-entropy, each the mean over its labelled tokens.

    Args:
        output: What the model returned: logits ``[b *n classes]``, or an object that has them.
        labels: Classes; ``-100`` where none is asked for.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    logits = logits_of(output)
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


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output, which may be the logits themselves."""
    return cast(Tensor, getattr(output, "logits", output))


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found."""

    loss: float
    """The objective, without the KSVD term."""
    accuracy: float
    """Fraction of labels that the largest logit hits; ``nan`` if labels are no classes."""
    logits: Tensor | None
    """All logits in the order of the data, on the CPU; ``None`` if they were not kept."""
    labels: Tensor | None
    """All labels in the order of the data, on the CPU; ``None`` if they were not kept."""


class _Measured(NamedTuple):
    """One batch of an evaluation."""

    number: int
    size: int
    loss: float
    hits: int
    labelled: int
    logits: Tensor | None
    labels: Tensor | None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Dataset[Any],
    *,
    batch_size: int = 64,
    objective: Objective = cross_entropy,
    collate: Collate = pad_collate,
    precision: Precision = "fp32",
    keep_outputs: bool = True,
) -> Evaluation:
    """Return loss, accuracy, logits and labels of a model on a data set.

    With several processes each takes its share of the batches, and all return the whole.

    Args:
        model: Called with the keyword inputs of each batch, in eval mode and without gradients.
        data: Map-style data set whose items are dictionaries of tensors.
        batch_size: Sequences to run at once.
        objective: From output and labels to the mean loss of a batch.
        collate: From a list of items to a batch.
        precision: Type of the matrix products.
        keep_outputs: Whether to return logits and labels; without them memory stays constant.

    Example:
        >>> from primal_attention.training import Columns
        >>> data = Columns(input=torch.eye(3), labels=torch.arange(3))
        >>> evaluate(torch.nn.Identity(), data).accuracy
        1.0
    """
    total = num_items(data)
    if total == 0:
        raise ValueError("There is nothing to evaluate: the data set is empty.")
    rank, world_size = _processes()
    starts = list(enumerate(range(0, total, batch_size)))[rank::world_size]
    batches = [list(range(a, min(a + batch_size, total))) for _, a in starts]
    # a generator of its own: the stream of the caller is left alone
    loader = DataLoader(
        data, batch_sampler=batches, collate_fn=collate, generator=torch.Generator()
    )
    device = device_of(model)
    measured = []
    with eval_mode(model), autocast(device, precision):
        for (number, _), indices, batch in zip(starts, batches, loader, strict=True):
            inputs, labels = split_labels(to_device(batch, device))
            output = model(**inputs)
            measured.append(_measure(number, len(indices), output, labels, objective, keep_outputs))
    return _join(_gather(measured))


def _measure(
    number: int, size: int, output: Any, labels: Tensor, objective: Objective, keep: bool
) -> _Measured:
    logits = logits_of(output)
    hits = labelled = 0
    if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        asked = labels != IGNORED
        hits = int(((logits.argmax(-1) == labels) & asked).sum())
        labelled = int(asked.sum())
    kept = (logits.float().cpu(), labels.cpu()) if keep else (None, None)
    return _Measured(number, size, float(objective(output, labels)), hits, labelled, *kept)


def _join(measured: list[_Measured]) -> Evaluation:
    measured = sorted(measured, key=lambda m: m.number)
    labelled = sum(m.labelled for m in measured)
    logits = [m.logits for m in measured if m.logits is not None]
    labels = [m.labels for m in measured if m.labels is not None]
    return Evaluation(
        sum(m.loss * m.size for m in measured) / sum(m.size for m in measured),
        sum(m.hits for m in measured) / labelled if labelled else float("nan"),
        _concatenate(logits, 0.0) if logits else None,
        _concatenate(labels, IGNORED) if labels else None,
    )


def _concatenate(batches: list[Tensor], fill: float) -> Tensor:
    if len({b.shape[1:] for b in batches}) == 1:
        return torch.cat(batches)
    return _pad([row for batch in batches for row in batch], fill)


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


def num_items(data: Dataset[Any]) -> int:
    """Return the number of items of a map-style data set."""
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"Data must be map-style, with __len__ and __getitem__, got {type(data).__name__}; "
            "read a stream into a list of dictionaries, or use Columns."
        )
    return len(data)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's parameters live; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch with its tensors on a device."""
    return {
        k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()
    }


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
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
