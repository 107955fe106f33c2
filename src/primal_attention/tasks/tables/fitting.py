"""What follows the training of a model of tables: calibration, and the rows that it keeps."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from primal_attention.attention import PrimalAttention
from primal_attention.tasks.tables.data import TableRows
from primal_attention.tasks.tables.model import NPTModel, NPTOutput
from primal_attention.tasks.tables.scoring import deviation_factor, fit_temperature
from primal_attention.tasks.tables.task import TableTask
from primal_attention.tasks.trained import TrainedModel

__all__ = ["PREDICTED", "calibrate", "keep_rows", "read_outputs"]

PREDICTED = 1024
"""Rows that are predicted at once."""


def read_outputs(model: NPTModel, rows: TableRows, read: Callable[[NPTOutput], Tensor]) -> Tensor:
    """Return what ``read`` takes from the outputs of all rows; at once if they see each other."""
    size = len(rows) if model.config.context == "transductive" else PREDICTED
    pairs = zip(rows.values.split(size), rows.missing.split(size), strict=True)
    return torch.cat([read(model(v, m)) for v, m in pairs])


@torch.no_grad()
def calibrate(model: NPTModel, task: TableTask, valid: TableRows) -> None:
    """Set the temperature, or the factor of the deviations, from held-out rows."""
    model.temperature.fill_(1.0)
    logits = read_outputs(model, valid, lambda output: output.logits)
    if task.is_class:
        model.temperature.fill_(fit_temperature(logits, valid.labels))
    else:
        mean, log_std = logits.unbind(1)
        model.temperature.fill_(deviation_factor(mean, log_std.exp(), valid.labels))


def keep_rows(task: TableTask, model: NPTModel, rows: TableRows) -> TrainedModel:
    """Return the model with rows as its context, and the task that knows of it.

    A model whose row attentions are all primal uses every row and keeps none of them. Others keep
    at most ``task.max_context`` rows, a sample with the same share of every class.

    Args:
        task: Columns and target.
        model: Trained.
        rows: All rows that may be used in predictions.
    """
    config = model.config
    if not config.has_rows:
        model = model.with_context(rows.values[:0], rows.missing[:0])
    elif config.context == "train" and is_primal(model):
        model = model.with_context(rows.values, rows.missing).eval().condense()
    else:
        chosen = rows.sample(task.max_context)
        model = model.with_context(rows.values[chosen], rows.missing[chosen])
    return TrainedModel(replace(task, context_rows=model.config.context_rows), model.eval())


def is_primal(model: NPTModel) -> bool:
    """Return whether all row attentions are primal, so that the model needs no rows."""
    blocks = model._row_attentions()
    return bool(blocks) and all(isinstance(block, PrimalAttention) for block in blocks)
