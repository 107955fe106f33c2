"""Settings of a training run: one dataclass for Python, YAML and the command line."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from primal_attention.support.settings import check_limits

__all__ = ["TrainingConfig"]

Optimizer = Literal["adamw", "radam", "adam", "lamb-lookahead"]
Schedule = Literal["cosine", "linear", "one-cycle", "flat-cosine", "constant"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a training run, besides the model and the data.

    Example:
        >>> TrainingConfig(epochs=100, lr=3e-4, patience=10).schedule
        'cosine'
    """

    epochs: int = 30
    """Epochs to train; the model is evaluated after each."""
    epoch_steps: int | None = None
    """Optimiser steps per epoch; by default one pass over the data."""
    min_steps: int | None = None
    """Fewest steps of the training: with little data an epoch takes several passes."""
    batch_size: int = 32
    """Sequences per optimiser step, over all processes and accumulated parts together."""
    accumulate: int = 1
    """Parts in which a process runs its share of a batch, to save memory; changes no result."""
    lr: float = 1e-3
    """Peak learning rate."""
    optimizer: Optimizer = "adamw"
    """Optimiser: adamw, radam, adam, or LAMB inside Lookahead (lamb-lookahead)."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: to zero, flat for 70 % first (flat-cosine), or constant."""
    warmup: float = 0.1
    """Fraction of the training in which the learning rate rises linearly."""
    weight_decay: float = 0.01
    """Weight decay of matrices, decoupled from the gradient except in adam."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None does not clip."""
    eta: float = 0.1
    """Weight of the KSVD term of primal layers."""
    precision: Precision = "fp32"
    """Type of the matrix products: fp32 or bf16 (autocast)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    ema: float | None = None
    """Decay of an average of the weights that is evaluated and kept instead of them, e.g. 0.999."""
    monitor: str = "loss"
    """Score on the validation data that chooses the best epoch; ties go to the lower loss."""
    patience: int | None = None
    """Epochs without a better one after which to stop; None trains to the end."""
    max_seconds: float | None = None
    """Seconds of training (processor time on a CPU) that end it; the schedule shortens to fit."""
    save_steps: int | None = None
    """Also save a checkpoint every so many steps; by default after every epoch only."""
    seed: int = 0
    """Seed of the order of the batches and of everything random in the model."""
    deterministic: bool = False
    """Use deterministic algorithms only, also where they are slower."""
    workers: int = 0
    """Processes that load data; with 0 the training process does."""
    tensorboard: bool = False
    """Also write TensorBoard events."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}."
                )
        counts = ("epochs", "epoch_steps", "min_steps", "batch_size", "accumulate", "patience")
        for name in (*counts, "save_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("lr", "clip", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}.")
        for name in ("weight_decay", "eta", "workers"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative: {getattr(self, name)}.")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a fraction from 0 to 1, got {self.warmup}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, got {self.ema}; 0.999 is usual.")
        check_limits(self)

    def steps_of_epoch(self, items: int) -> int:
        """Return the steps of an epoch for a number of training items.

        Example:
            >>> TrainingConfig(epochs=10, batch_size=32, min_steps=200).steps_of_epoch(100)
            20
        """
        one_pass, fewest = -(-items // self.batch_size), -(-(self.min_steps or 0) // self.epochs)
        return self.epoch_steps or max(one_pass, fewest)


_CHOICES = {"optimizer": Optimizer, "schedule": Schedule, "precision": Precision}
