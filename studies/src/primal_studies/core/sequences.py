"""Long Range Arena for the studies of single attentions: its data, and a short training."""

from pathlib import Path
from typing import Any

from torch import nn

from primal_attention.training import TrainingConfig, evaluate, fit
from primal_studies.longrange.accuracy import AccuracyOptions, Splits, load_splits

__all__ = ["Splits", "accuracy_on", "longrange_parts", "train_classifier"]


def longrange_parts(task: str, data: Path | None = None, **changes: Any) -> Splits:
    """Return the training, validation and test part of ListOps, Text or Image.

    Args:
        task: ``"listops"``, ``"text"`` or ``"image"``.
        data: Folder with ``text/imdb`` and ``vision/cifar-10``; by default the environment variable
            ``PRIMAL_DATA``. ListOps needs none.
        changes: Sizes: ``num_train``, ``num_valid``, ``num_test``, ``max_length`` and
            ``listops_lengths``.
    """
    return load_splits(task, AccuracyOptions(data=data, **changes))


def train_classifier(
    model: nn.Module, train: Any, folder: Path, *, steps: int, valid: Any = None, **changes: Any
) -> None:
    """Train for some steps of 8 sequences; a stopped training continues from its folder.

    Args:
        model: Trained in place; ends with the weights of its best validation, or its last ones.
        train: Training data.
        folder: Folder for checkpoints.
        steps: Steps.
        valid: Validation data.
        changes: Fields of :class:`~primal_attention.training.TrainingConfig`.
    """
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "weight_decay": 0.0}
    options |= changes
    config = TrainingConfig(epoch_steps=steps // options["epochs"], **options)
    fit(model, train, config=config, valid=valid, out=folder, resume=True)


def accuracy_on(model: nn.Module, test: Any) -> float:
    """Return the accuracy of a classifier on some data."""
    return round(float(evaluate(model, test)["accuracy"]), 4)
