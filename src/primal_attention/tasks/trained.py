"""Trained models: a model with the task that reads its data, saved and loaded as one folder.

trained = primal_attention.load("outputs/my/primal")
trained.predict("new.ts")                # or arrays
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primal_attention.support.command import UserError, user_errors
from primal_attention.support.files import SealedFolder, UnsealedWarning, finish_save, save_sealed
from primal_attention.tasks.task import FILE, Task, open_folder, read_task, task_content

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from primal_attention.models import PretrainedModel
    from primal_attention.training.data import Item
    from primal_attention.training.scores import Answers

__all__ = [
    "TrainedModel",
    "check_finite",
    "check_lengths",
    "load",
    "load_trained",
    "read_trained",
    "save_trained",
]


class TrainedModel(NamedTuple):
    """A trained model and the task that reads its data."""

    task: Task
    model: "PretrainedModel"

    def predict(self, data: Any, *, batch_size: int = 64) -> np.ndarray:
        """Return the prediction for every item: names of classes, or numbers.

        Args:
            data: A file of the kind the model was trained on, or the same in memory: arrays
                ``[cases, channels, time]`` for series, a list of texts for texts. Labels are not
                needed, and not read.
            batch_size: Items to run at once.
        """
        rows = self.records(data, batch_size=batch_size)
        return np.array([self.task.prediction(row) for row in rows])

    def records(
        self, data: Any, *, part: str = "test", batch_size: int = 64
    ) -> list[dict[str, object]]:
        """Return a row for every item, as ``primal predict`` writes: with all probabilities.

        Args:
            data: As in :meth:`predict`.
            part: Which part of a file that holds several.
            batch_size: Items to run at once.
        """
        if isinstance(data, str | Path):
            items, where = self.task.read(Path(data), labelled=False, part=part), str(data)
        else:
            with user_errors("data"):
                items, where = self.task.from_arrays(data), "data"
        check_lengths(items, self.model, where)
        answers = self.task.measure(self.model, items, batch_size=batch_size).answers
        with user_errors(where, UserError):
            check_finite(answers)
        return self.task.records(answers)


def save_trained(
    folder: Path, task: Task, model: "PretrainedModel", also: Mapping[str, str] | None = None
) -> None:
    """Write a model and its task to a folder that :func:`load_trained` reads, whole or not at all.

    Args:
        folder: Made if it is not there.
        task: What reads the data of the model.
        model: The model.
        also: Contents of other files that belong to them, by name.

    Raises:
        UserError: If another process writes into the folder.
    """
    save_sealed(folder, {FILE: task_content(task), **(also or {}), "model": model.to_files()})


def load_trained(folder: str | Path) -> TrainedModel:
    """Return the model in a folder that ``primal train`` or an estimator wrote, with its reader.

    Args:
        folder: Folder of a model, such as ``outputs/my/primal``; or of a run with one model.

    Raises:
        UserError: If the folder holds no finished model, a file in it was changed or damaged, or
            model and task do not match.
    """
    folder = Path(folder)
    finish_save(folder)
    inside = [path.parent for path in folder.glob(f"*/{FILE}")]
    if len(inside) == 1 and not (folder / FILE).exists():
        folder = inside[0]
    return read_trained(open_folder(folder))


def read_trained(folder: SealedFolder) -> TrainedModel:
    """Return task and model in a folder that :func:`load_trained` found."""
    from primal_attention.models import PretrainedModel

    task = read_task(folder)
    path = folder.path
    if not (path / "model").is_dir():
        raise UserError(
            f"{path} holds no finished model; finish it with primal train {path.parent} --resume."
        )
    with warnings.catch_warnings():
        if folder.sums is None:  # of which the folder itself has warned
            warnings.simplefilter("ignore", UnsealedWarning)
        model = PretrainedModel.from_pretrained(folder.part("model").path)
    found = {name: getattr(model.config, name, None) for name in task.sizes}
    if found != dict(task.sizes):
        raise UserError(
            f"{path}: model and task.json do not belong together; the model has {found}, the "
            f"task {dict(task.sizes)}."
        )
    return TrainedModel(task, model)


load = load_trained
"""The name of :func:`load_trained` in ``primal_attention``."""


def check_lengths(data: "Dataset[Item]", model: "PretrainedModel", where: str) -> None:
    """Raise if a sequence has more tokens than the learned positions of a model.

    Args:
        data: What the model would read; sets without ``lengths`` pass.
        model: Its configuration may have ``max_length``.
        where: The name of the data.
    """
    most, lengths = getattr(model.config, "max_length", None), getattr(data, "lengths", None)
    if most is None or lengths is None or not len(lengths) or max(lengths) <= most:
        return
    raise UserError(
        f"{where}: the longest sequence has {max(lengths)} tokens, but the learned positions of "
        f"the model end at max_length={most}; cut the sequences, or train with a larger "
        "model.max_length or other positions."
    )


def check_finite(answers: "Answers") -> None:
    """Raise if a model has no finite answer to an item."""
    for tensor in answers.values():
        broken = (~tensor.reshape(len(tensor), -1).isfinite().all(1)).nonzero().tolist()
        if broken:
            raise UserError(
                f"the model has no finite answer to item {broken[0][0]}, counted from 0; its "
                "weights are damaged, or the item is far from those of its training."
            )
