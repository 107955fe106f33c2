"""A trained model in its folder: loaded with what it must know of its data."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from primal_attention.cli.mistakes import UserError, told_as_mistake
from primal_attention.cli.problems import Reader
from primal_attention.models import EncoderClassifier, ModelFileError

__all__ = ["load_trained", "probabilities"]


def load_trained(folder: Path) -> tuple[EncoderClassifier, Reader]:
    """Return the model that ``primal train`` left in a folder, and its reader."""
    reader = Reader.load(folder)
    if not (folder / "model").is_dir():
        raise UserError(
            f"{folder} holds no finished model; finish it with primal train {folder.parent} "
            "--resume."
        )
    with told_as_mistake("", ModelFileError, OSError):
        model = EncoderClassifier.from_pretrained(folder / "model")
    config, inputs = model.config, reader.inputs
    found = {name: getattr(config, name) for name in inputs}
    if found != inputs or config.num_classes != len(reader.classes):
        raise UserError(
            f"{folder}: model and reader.json do not belong together; the model has "
            f"{config.num_classes} classes and {found}, the reader {len(reader.classes)} and "
            f"{inputs}."
        )
    return model, reader


@torch.no_grad()
def probabilities(
    model: EncoderClassifier, data: Dataset[Any], reader: Reader, batch_size: int
) -> Float[Tensor, "items classes"]:
    """Return the probability of every class for every item, in the order of the data."""
    total = len(data)  # type: ignore[arg-type]
    found = []
    for start in range(0, total, batch_size):
        items = [data[i] for i in range(start, min(start + batch_size, total))]
        batch = {k: v for k, v in reader.collate(items).items() if k != "labels"}
        found.append(model(**batch).logits.float().softmax(-1))
    return torch.cat(found)
