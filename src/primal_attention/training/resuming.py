"""From which checkpoint a run continues, and whether it belongs to that run.

A run is known by its configuration, its data, its model and its optimiser.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.models import PretrainedModel
from primal_attention.support.command import UserError
from primal_attention.support.settings import build
from primal_attention.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    good_checkpoint,
    latest_checkpoint,
)
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import Fingerprint
from primal_attention.training.history import History

__all__ = ["FREE", "RunState", "Sums", "check_same_run", "find_checkpoint", "load_optimizer"]

FREE = frozenset({"workers", "save_steps", "tensorboard", "checkpointing"})
"""Settings that change no result; they may change when a run is resumed."""


@dataclass
class Sums:
    """Sums over the steps of the running epoch."""

    count: int = 0
    loss: float = 0.0
    ksvd: float = 0.0
    lr: float = 0.0


@dataclass(frozen=True)
class RunState:
    """Plain values of a checkpoint."""

    config: dict[str, object]
    """The configuration."""
    model: dict[str, object]
    """Settings of a model of this library; empty for others."""
    data: dict[str, object]
    """Fingerprints of the data sets by name."""
    history: History
    """The epochs so far."""
    seconds: float
    """Training time so far."""
    sums: Sums
    """Sums over the steps of the running epoch."""
    updates: int
    """Updates of the average of the weights."""

    @classmethod
    def of(cls, saved: Checkpoint) -> "RunState":
        """Return the values of a checkpoint; raise a :class:`UserError` if one is missing."""
        found = build(cls, saved.values, "state.json: values")
        count, best = len(found.history.records), found.history.best_epoch
        if count != saved.epoch or (best is None) != (count == 0) or not 0 <= (best or 0) <= count:
            raise UserError(
                f"state.json: the history has {count} epochs, the best of them is {best}; the "
                f"checkpoint has {saved.epoch}."
            )
        return found


def find_checkpoint(folder: Path, *, resume: bool) -> Path | None:
    """Return the checkpoint from which a run continues; without ``resume`` there must be none.

    Args:
        folder: The folder of the checkpoints, inside that of the run.
        resume: Whether to continue a run.

    Raises:
        UserError: If there is a run that is not to be continued.
    """
    if resume:
        return good_checkpoint(folder)
    found = latest_checkpoint(folder)
    if found is not None:
        raise UserError(
            f"{folder.parent} already holds a run ({found.name}); continue it with resume=True, or "
            "choose another folder."
        )
    return None


def settings_of(model: nn.Module) -> dict[str, object]:
    """Return the configuration of a model of this library as JSON values; empty for others."""
    if not isinstance(model, PretrainedModel):
        return {}
    # through JSON, as in a checkpoint: tuples become lists
    found: dict[str, Any] = json.loads(json.dumps(asdict(model.config), default=str))
    return found


def check_same_run(
    saved: Checkpoint,
    state: RunState,
    path: Path,
    *,
    config: TrainingConfig,
    model: nn.Module,
    data: Mapping[str, Fingerprint],
    processes: int,
) -> None:
    """Raise if a checkpoint belongs to another model, configuration or data set."""
    pairs = [(state.config, asdict(config)), (state.model, settings_of(model))]
    changed = [
        f"{k} was {was.get(k)!r} and is {v!r}"
        for was, now in pairs
        for k, v in now.items()
        if k not in FREE and was.get(k) != v
    ]
    for name, now in data.items():
        words = now.changes(_fingerprint(state.data.get(name), name))
        changed += [f"the {name} data {words}"] * bool(words)
    if len(saved.random) != processes:
        changed.append(f"it ran on {len(saved.random)} processes and now on {processes}")
    shapes = _shapes(model.state_dict())
    for weights in (saved.model, saved.best, saved.average):
        if weights is not None and shapes != _shapes(weights):
            changed.append("the model has other weights")
            break
    if changed:
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(changed)}. Resume with what it was "
            "started with, or choose another folder."
        )
    if (config.ema is None) != (saved.average is None):
        raise UserError("state.safetensors: the average of the weights is missing.")
    if (saved.epoch == 0) != (saved.best is None):
        raise UserError("state.json: best must be true after the first epoch.")


def _fingerprint(value: object, name: str) -> Fingerprint:
    """Return the fingerprint that a list ``[count, numbers]`` holds."""
    items, numbers = value if isinstance(value, list) and len(value) == 2 else (0, None)
    if not isinstance(numbers, list) or not _are_numbers([items, *numbers]):
        raise UserError(f"state.json: values.data.{name} must be a count and a list of numbers.")
    return Fingerprint(items, tuple(numbers))


def _are_numbers(values: Sequence[object]) -> bool:
    return all(isinstance(v, int | float) for v in values)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore an optimiser; raise a :class:`UserError` if the state is of another one."""
    # torch compares the numbers of groups and parameters only
    fresh = optimizer.state_dict()["param_groups"]
    kinds, saved_kinds = ([_kinds(g) for g in groups] for groups in (fresh, saved["param_groups"]))
    if kinds != saved_kinds:
        raise UserError("state.json: param_groups are not those of the optimiser.")
    optimizer.load_state_dict(dict(saved))
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # counters have no axis
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise UserError(
                    f"state.safetensors: {name} of a parameter of shape {tuple(parameter.shape)} "
                    f"has the shape {tuple(value.shape)}."
                )


def _kinds(group: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of a group, and the types of its settings."""
    return {k: v if k == "params" else _kind(v) for k, v in group.items()}


def _kind(value: object) -> object:
    # a rate of 1.0 may come back from JSON as 1
    if isinstance(value, tuple):
        return [_kind(v) for v in value]
    return "number" if type(value) in (int, float) else type(value)
