"""A trained model in its folder: loaded with what it must know of its data."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from primal_attention.cli.problems import Reader
from primal_attention.command import UserError, user_errors
from primal_attention.models import DualTowerClassifier, EncoderClassifier, ModelFileError
from primal_attention.training import Evaluation, evaluate

__all__ = ["answers", "load_trained"]


def load_trained(folder: Path) -> tuple[EncoderClassifier | DualTowerClassifier, Reader]:
    """Return the model that ``primal train`` left in a folder, and its reader."""
    reader = Reader.load(folder)
    if not (folder / "model").is_dir():
        raise UserError(
            f"{folder} holds no finished model; finish it with primal train {folder.parent} "
            "--resume."
        )
    with user_errors("", ModelFileError, OSError):
        model = reader.model.from_pretrained(folder / "model")
    config, inputs = model.config, reader.inputs
    found = {name: getattr(config, name) for name in inputs}
    if found != inputs or config.num_classes != len(reader.classes):
        raise UserError(
            f"{folder}: model and reader.json do not belong together; the model has "
            f"{config.num_classes} classes and {found}, the reader {len(reader.classes)} and "
            f"{inputs}."
        )
    return model, reader


def answers(model: nn.Module, data: Dataset[Any], reader: Reader, batch_size: int) -> Evaluation:
    """Return what a model says to every sequence, and how good that is; it must be numbers."""
    found = evaluate(model, data, batch_size=batch_size, collate=reader.collate)
    silent = [] if found.logits is None else (~found.logits.isfinite().all(1)).nonzero().tolist()
    if silent:
        raise UserError(
            f"the model has no finite answer to sequence {silent[0][0]}, counted from 0; its "
            "weights are damaged, or the sequence is far from those of its training."
        )
    return found
