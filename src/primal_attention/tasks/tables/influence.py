"""What a prediction leans on: influences of single rows, a corrupted context, attention maps."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.tables.columns import ValidTable
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.model import NPTModel
from primal_attention.tasks.tables.task import TableTask

__all__ = ["RowInfluence", "corrupt", "corrupt_rows", "row_attention_maps", "row_influence"]


class RowInfluence(NamedTuple):
    """The context rows with the largest influence on a prediction."""

    rows: NDArray[np.int64]
    """Numbers of the rows in the context, the largest influence first."""
    influence: NDArray[np.float64]
    """First-order change of the prediction if a row counted fully instead of not at all."""
    features: ValidTable
    """The rows in their own units: a frame, or an array."""
    target: np.ndarray
    """Their targets."""


def row_influence(model: NPTModel, task: TableTask, rows: TableRows, k: int) -> list[RowInfluence]:
    """Return the ``k`` most influential context rows of every row.

    Every context row gets a gate of one in each row attention. The influence is the derivative of
    the prediction with respect to the gates, summed over layers: one forward and one backward pass
    for a row.

    Args:
        model: In eval mode, with rows as its context.
        task: Columns and target.
        rows: Rows to explain.
        k: How many context rows to return.
    """
    count = len(model.context_values)
    with torch.no_grad():
        memories = model.stream(model.context_values, model.context_missing, keeps_rows=True)
    found = []
    for values, missing in zip(rows.values.split(1), rows.missing.split(1), strict=True):
        hidden = missing.clone()
        hidden[:, model.config.num_features :] = True
        with torch.enable_grad():
            gates = [torch.ones(count, requires_grad=True) for _ in memories]
            x = model.embedding(values, hidden)
            logits = model.predict_from(x, memories=memories, gates=gates).logits
            value = logits.softmax(1).max() if task.is_class else logits[0, 0]
            slopes = torch.autograd.grad(value, gates)
        scale = 1.0 if task.target is None or task.is_class else task.target.scale
        total = scale * torch.stack(slopes).sum(0).double()
        index = total.abs().topk(min(k, count)).indices
        found.append(_describe(model, task, index, total[index]))
    return found


def _describe(model: NPTModel, task: TableTask, index: Tensor, influence: Tensor) -> RowInfluence:
    f = model.config.num_features
    values = model.context_values[index].double().numpy()
    missing = model.context_missing[index].numpy()
    features = task.encoder.decode(values[:, :f], missing[:, :f])
    target = np.zeros(0)
    if task.target is not None:
        target = task.target.decode(np.where(missing[:, f], np.nan, values[:, f]))
    return RowInfluence(index.numpy(), influence.numpy(), features, target)


def corrupt_rows(values: Tensor, missing: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return a table whose columns are shuffled, each by itself; their values stay the same."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(values.shape, generator=generator).argsort(0)
    return values.gather(0, order), missing.gather(0, order)


def corrupt(model: NPTModel, seed: int) -> NPTModel:
    """Return a model whose context rows are shuffled in every column.

    Args:
        model: With rows as its context.
        seed: Seed of the shuffles.
    """
    if not model.config.context_rows:
        return model
    shuffled = corrupt_rows(model.context_values, model.context_missing, seed)
    return model.with_context(*shuffled).eval()


@torch.no_grad()
def row_attention_maps(model: NPTModel, rows: TableRows) -> dict[str, NDArray[np.float64]]:
    """Return the weights of every head between rows and context rows, by layer."""
    from primal_attention.attention import MultiHeadAttention
    from primal_attention.hosts import layer_inputs

    maps = {}
    for name, inputs in layer_inputs(model, rows.values, rows.missing).items():
        layer = model.get_submodule(name)
        if name.startswith("row_blocks") and isinstance(layer, MultiHeadAttention):
            maps[name] = inputs.matrices(layer)[0].double().numpy()
    return maps
