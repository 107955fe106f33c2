"""The training loop.

    loss = objective(output, labels) + eta * ksvd_loss(model)

``fit`` is the whole interface. A :class:`~primal_attention.training.run.Run` takes the steps.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn
from torch.utils.data import Dataset

from primal_attention.support.randomness import deterministic_algorithms, isolated
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import pad_collate
from primal_attention.training.evaluation import Collate, Objective
from primal_attention.training.history import EpochRecord, History
from primal_attention.training.processes import one_writer
from primal_attention.training.run import Measure, Run
from primal_attention.training.scores import cross_entropy

__all__ = ["fit"]


def fit(
    model: nn.Module,
    train: Dataset[object],
    *,
    config: TrainingConfig | None = None,
    valid: Dataset[object] | None = None,
    objective: Objective = cross_entropy,
    measure: Measure | None = None,
    collate: Collate = pad_collate,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    on_epoch: Callable[[nn.Module, EpochRecord], None] | None = None,
    verbose: bool | None = None,
) -> History:
    """Train a model in place and return its history.

    The model ends in eval mode with the weights of the best epoch: the best on ``valid``, or the
    last one without it. The random state of the caller does not change.

    Args:
        model: Called with the keyword inputs of a batch; its output has ``logits``, or suits the
            objective. If it has a method ``keep_items``, that gets the training data first: some
            models read them when they predict. If a module has ``set_progress``, that gets the
            share of the training that is done before every step, for schedules of its own.
        train: Map-style data set whose items are dictionaries of tensors: keyword inputs of the
            model, and ``labels``. If it has an attribute ``group_by``, a number for each item such
            as its length, items with similar numbers share a batch, and less is padded.
        config: How to train.
        valid: Data that choose the epoch.
        objective: From output and labels to the mean loss of a batch; the KSVD term is added.
        measure: From a model and a data set to the scores that ``config.monitor`` may name; by
            default those of :func:`evaluate`: the objective, and the accuracy of classes.
        collate: From a list of items to a batch.
        out: Folder for checkpoints, logs and the final model; locked while the run writes there.
        resume: Continue the run in ``out``, if there is one. It ends with the same weights as a
            run without a break. If the last checkpoint is damaged, a warning says so and the run
            continues from the one before.
        evaluate: Called after every epoch in every process; its numbers go into the record and
            never choose the epoch.
        on_epoch: Called after every epoch in the main process.
        verbose: Whether to show progress: a bar, or lines where there is no terminal. By default a
            bar on a terminal, and nothing elsewhere.

    Raises:
        NonFiniteLossError: If the loss or the gradient is no longer finite.
        UserError: If another process writes into ``out``.
        CheckpointError: If the checkpoints in ``out`` are damaged or of another run, or one cannot
            be written.

    Example:
        >>> import torch
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> from primal_attention.training import Columns, TrainingConfig, fit
        >>> model = EncoderClassifier(EncoderConfig(num_classes=2, num_features=3, dim=16))
        >>> data = Columns(x=torch.randn(8, 5, 3), labels=torch.arange(8) % 2)
        >>> fit(model, data, config=TrainingConfig(epochs=2), valid=data).ended
        'epochs'
    """
    config = config or TrainingConfig()
    with isolated(), deterministic_algorithms(config.deterministic):
        run = Run(model, train, config, valid, objective, measure, collate, out, verbose)
        with one_writer(run.out):
            run.start(resume)
            try:
                return run.train(evaluate, on_epoch)
            finally:
                run.logs.close()
