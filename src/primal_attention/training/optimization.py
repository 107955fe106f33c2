"""Optimisers, parameter groups and the learning rate as a function of progress."""

import math
from typing import Any

import torch
from torch import nn

from primal_attention.training.config import TrainingConfig
from primal_attention.training.lamb import Lamb, Lookahead

__all__ = ["create_optimizer", "learning_rate", "parameter_groups"]

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
# one-cycle starts at 1/25 of the peak; momentum falls while the rate rises (Smith 2018)
_START, _END, _MOMENTUM = 1 / 25, 1 / 250_000, (0.95, 0.85)
# share of the training at the peak rate before flat-cosine falls (Kossen et al. 2021)
_FLAT = 0.7
# learning rate of slow parameters, relative to that of the others
_SLOW = 0.1


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: parameters that decay, and those that must not; then slow ones, if any.

    Not decayed are parameters of norms, biases, parameters with one axis, and those that a module
    names in ``undecayed``: position weights, landmarks and ``lam``, for which zero is not neutral.
    Parameters that a module names in ``slow``, such as frequencies, do not decay and learn at a
    tenth of the rate. Frozen parameters are in no group.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(3, 2), 0.1)
        >>> [(len(g["params"]), g["weight_decay"]) for g in groups]
        [(1, 0.1), (1, 0.0)]
    """
    decayed: dict[nn.Parameter, None] = {}
    spared: dict[nn.Parameter, None] = {}
    slow: dict[nn.Parameter, None] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                spare = (
                    parameter.ndim < 2
                    or name in getattr(module, "undecayed", ())
                    or name.endswith("bias")
                    or isinstance(module, _NORMS)
                )
                is_slow = name in getattr(module, "slow", ())
                (slow if is_slow else spared if spare else decayed)[parameter] = None
    decayed = {p: None for p in decayed if p not in slow}
    groups = [
        {"params": list(decayed), "weight_decay": weight_decay},
        {"params": [p for p in spared if p not in decayed and p not in slow], "weight_decay": 0.0},
    ]
    if slow:
        groups.append({"params": list(slow), "weight_decay": 0.0, "lr_scale": _SLOW})
    return groups


def create_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimiser of a configuration, over :func:`parameter_groups`.

    Example:
        >>> type(create_optimizer(torch.nn.Linear(2, 2), TrainingConfig(optimizer="radam")))
        <class 'torch.optim.radam.RAdam'>
    """
    groups = [g for g in parameter_groups(model, config.weight_decay) if g["params"]]
    if not groups:
        raise ValueError("The model has no parameter that requires a gradient: nothing to train.")
    for group in groups:
        group["lr"] = config.lr * group.get("lr_scale", 1.0)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr)
    if config.optimizer == "radam":
        return torch.optim.RAdam(groups, lr=config.lr, decoupled_weight_decay=True)
    if config.optimizer == "lamb-lookahead":
        return Lookahead(Lamb(groups, lr=config.lr))
    return torch.optim.Adam(groups, lr=config.lr)


def learning_rate(config: TrainingConfig, progress: float) -> float:
    """Return the learning rate when a fraction ``progress`` of the training is done.

    Example:
        >>> config = TrainingConfig(lr=1.0, warmup=0.1)
        >>> [round(learning_rate(config, t), 2) for t in (0.05, 0.1, 0.55, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
    """
    start, end = (_START, _END) if config.schedule == "one-cycle" else (0.0, 0.0)
    if progress < config.warmup:
        return config.lr * (start + (1 - start) * progress / config.warmup)
    done = _fall(config, progress)
    if config.schedule == "flat-cosine":
        done = max(0.0, (progress - _FLAT) / (1 - _FLAT))
    if config.schedule in ("cosine", "flat-cosine"):
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    if config.schedule in ("linear", "one-cycle"):
        return config.lr * (1 + (end - 1) * done)
    return config.lr


def _fall(config: TrainingConfig, progress: float) -> float:
    """Return the fraction of the time after the warm-up that is over."""
    return min(1.0, (progress - config.warmup) / max(1 - config.warmup, 1e-9))


def set_progress(
    optimizer: torch.optim.Optimizer, config: TrainingConfig, progress: float
) -> float:
    """Set the learning rate, and the momentum of one-cycle; return the learning rate."""
    lr = learning_rate(config, progress)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if config.schedule == "one-cycle":
            high, low = _MOMENTUM
            rising = progress < config.warmup
            share = progress / config.warmup if rising else 1 - _fall(config, progress)
            group["betas"] = (high + (low - high) * share, group["betas"][1])
    return lr
