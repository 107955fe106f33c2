"""The five tasks of Long Range Arena as the paper ran them: shapes, sizes and schedules.

Width 64, two pre-norm layers of two heads, perceptron 128, learned positions, a head with a hidden
layer of 128, dropout 0.1; AdamW without weight decay, rising linearly to 1e-4 and falling linearly
after (Chen et al. 2023, from the Nyströmformer code base). Differences:
the mean before the head runs over real tokens, the published one over padding too; AdamW has the
epsilon of torch, not 1e-6; single precision, not half.
"""

from dataclasses import dataclass
from typing import Any

from primal_attention.attention import attention_entry
from primal_attention.models import DualTowerClassifier, EncoderClassifier, EncoderConfig
from primal_attention.training import TrainingConfig

__all__ = ["LRA", "LongRangeTask", "model_config", "published_model", "training_config"]


@dataclass(frozen=True)
class LongRangeTask:
    """One task of Long Range Arena."""

    name: str
    length: int
    """Tokens of the longest sequence, rounded up to a power of two as the paper did."""
    vocab_size: int
    """Rows of the embedding; more than the ids that occur, as published."""
    num_classes: int
    batch_size: int
    warmup_steps: int
    steps: int
    evaluate_every: int
    """Steps between evaluations."""
    primal: tuple[int, float]
    """Rank and ``eta`` of PrimalFormer."""
    primal_plus: tuple[int, float]
    """Rank and ``eta`` of Primal.+."""
    is_padded: bool = True
    """Whether sequences differ in length."""
    is_pair: bool = False
    """Whether an item is two sequences that share one encoder."""


LRA = {
    task.name: task
    for task in (
        LongRangeTask("listops", 2048, 32, 10, 32, 1000, 5000, 50, (20, 0.1), (30, 0.05)),
        LongRangeTask("text", 4096, 512, 2, 32, 8000, 20000, 500, (20, 0.05), (30, 0.1)),
        LongRangeTask(
            "retrieval", 4096, 512, 2, 32, 800, 30000, 300, (30, 0.0), (20, 0.05), is_pair=True
        ),
        LongRangeTask(
            "image", 1024, 512, 10, 256, 175, 35000, 175, (30, 0.1), (30, 0.1), is_padded=False
        ),
        LongRangeTask(
            "pathfinder", 1024, 512, 2, 256, 312, 62400, 312, (30, 0.1), (20, 0.05), is_padded=False
        ),
    )
}
"""The tasks by name, in the order of the paper's tables."""


_ATTENTION = {"primal+": "primal", "dual": "primal-dual"}
_OPTIONS: dict[str, dict[str, Any]] = {
    # the published free table; our smooth basis has fewer parameters
    "primal": {"codes": "table"},
    "primal+": {"codes": "table"},
    "dual": {},
}


def model_config(task: str, variant: str, **changes: Any) -> EncoderConfig:
    """Return the paper's model for a task; ``changes`` are fields of :class:`EncoderConfig`.

    A variant is ``"primal"`` (PrimalFormer), ``"primal+"`` (softmax first, primal last), ``"dual"``
    (dual-tied PrimalFormer), or the name of any other attention, which takes its own defaults.

    Example:
        >>> model_config("text", "primal+").layer_attentions
        ('softmax', 'primal')
        >>> model_config("text", "skyformer").attention
        'skyformer'
    """
    found = _task(task)
    rank = _rank_and_eta(found, variant)[0]
    options: dict[str, Any] = {
        "num_classes": found.num_classes,
        "vocab_size": found.vocab_size,
        "dim": 64,
        "num_heads": 2,
        "num_layers": 2,
        "hidden_dim": 128,
        "head_dim": 128,
        "positions": "learned",
        "max_length": found.length,
        "dropout": 0.1,
        "attention": _ATTENTION.get(variant, variant),
        "attention_options": _OPTIONS[variant] | {"rank": rank} if variant in _OPTIONS else {},
        "primal_layers": "last:1" if variant == "primal+" else "all",
    }
    return EncoderConfig(**{**options, **changes})


def published_model(
    task: str, variant: str, **changes: Any
) -> EncoderClassifier | DualTowerClassifier:
    """Return the paper's model with new parameters: one tower, or two for pairs.

    Example:
        >>> sum(p.numel() for p in published_model("listops", "primal").parameters())
        236186
    """
    kind = DualTowerClassifier if _task(task).is_pair else EncoderClassifier
    return kind(model_config(task, variant, **changes))


def training_config(task: str, variant: str, **changes: Any) -> TrainingConfig:
    """Return the paper's schedule for a task; ``changes`` are fields of :class:`TrainingConfig`.

    Example:
        >>> config = training_config("image", "primal")
        >>> config.epochs * config.epoch_steps, config.eta
        (35000, 0.1)
    """
    found = _task(task)
    options: dict[str, Any] = {
        "epochs": found.steps // found.evaluate_every,
        "epoch_steps": found.evaluate_every,
        "batch_size": found.batch_size,
        "lr": 1e-4,
        "optimizer": "adamw",
        "schedule": "one-cycle",
        "warmup": found.warmup_steps / found.steps,
        "weight_decay": 0.0,
        "clip": None,
        "eta": _rank_and_eta(found, variant)[1],
        "monitor": "accuracy",
    }
    return TrainingConfig(**{**options, **changes})


def _task(name: str) -> LongRangeTask:
    if name not in LRA:
        raise ValueError(f"There is no task {name!r}; choose one of {', '.join(LRA)}.")
    return LRA[name]


def _rank_and_eta(task: LongRangeTask, variant: str) -> tuple[int, float]:
    """Return the published choice; layers that are not in the paper take PrimalFormer's."""
    attention_entry(_ATTENTION.get(variant, variant))
    return task.primal_plus if variant == "primal+" else task.primal
