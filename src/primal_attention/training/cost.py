"""Time and memory of functions that take turns in one process, and of a training.

A busy machine slows all of them down alike, so ratios within one run are reliable.
"""

import math
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from primal_attention.attention import ksvd_loss
from primal_attention.support.randomness import isolated
from primal_attention.training.config import TrainingConfig
from primal_attention.training.data import split_labels
from primal_attention.training.evaluation import Objective
from primal_attention.training.memory import PeakMemory
from primal_attention.training.optimization import create_optimizer

__all__ = ["Cost", "FitCost", "compare_costs", "fit_cost", "peak_mb", "take_turns"]

K = TypeVar("K")


def take_turns(
    runs: Mapping[K, Callable[[], object]],
    repeats: int,
    *,
    seconds: float = math.inf,
    before: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Return the seconds of each call of some functions, which are called in turns.

    With one thread this is the processor time of that thread, which a busy machine does not
    distort; with more threads it is wall time.

    Args:
        runs: Functions by name; call each once before, to warm up.
        repeats: Turns.
        seconds: A function that has used this time takes no further turn.
        before: Called before each function; its time does not count.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if sum(times[name]) < seconds:
                before()
                start = clock()
                run()
                times[name].append(clock() - start)
    return times


def peak_mb(run: Callable[[], object]) -> float:
    """Return the most MiB that tensors of one call took at once."""
    with PeakMemory() as memory:
        run()
    return round(memory.peak / 2**20, 2)


class Cost(NamedTuple):
    """Cost of one call."""

    milliseconds: float
    """Median time in one thread."""
    megabytes: float
    """Peak memory of the tensors that the call creates, in MiB."""


@torch.no_grad()
def compare_costs(runs: Mapping[str, Callable[[], object]]) -> dict[str, Cost]:
    """Return time and memory of functions without gradients, in one thread, median of three turns.

    Example:
        >>> x = torch.ones(500, 500)
        >>> compare_costs({"add": lambda: x + 1})["add"].megabytes
        0.95
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peaks = {name: peak_mb(run) for name, run in runs.items()}  # also warms up
        times = take_turns(runs, 3)
    finally:
        torch.set_num_threads(threads)
    return {name: Cost(1e3 * median(times[name]), peaks[name]) for name in runs}


class FitCost(NamedTuple):
    """What a training will cost, measured on single steps."""

    seconds: float
    """Processor seconds of all steps; the evaluations between them come on top."""
    bytes: int
    """Most bytes of tensors alive in a step, model and optimiser included."""
    parameters: int
    """Weights of the model."""

    def __str__(self) -> str:
        return (
            f"about {self.seconds:.0f} s of one core, {self.bytes / 1e6:.0f} MB, "
            f"{self.parameters:,} weights"
        )


def fit_cost(
    build: Callable[[], nn.Module],
    batch: Mapping[str, object],
    *,
    objective: Objective,
    config: TrainingConfig,
    steps: int,
) -> FitCost:
    """Return what a training will cost, from three steps on one batch.

    The random state of the caller does not change.

    Args:
        build: Returns a fresh model in training mode.
        batch: Keyword inputs of the model, and ``labels``.
        objective: From output and labels to the loss.
        config: How to train.
        steps: Steps of the whole training.

    Example:
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> from primal_attention.training import TrainingConfig, cross_entropy
        >>> config = EncoderConfig(num_classes=2, num_features=3, dim=16)
        >>> batch = {"x": torch.randn(8, 5, 3), "labels": torch.arange(8) % 2}
        >>> options = {"objective": cross_entropy, "config": TrainingConfig(), "steps": 100}
        >>> fit_cost(lambda: EncoderClassifier(config), batch, **options).bytes > 10_000
        True
    """
    inputs, labels = split_labels(batch)

    def step() -> None:
        output = model(**inputs)
        loss = objective(output, labels)
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + config.eta * ksvd_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with isolated():
        # counting takes time itself, so the first step is not timed
        with PeakMemory() as memory:
            model = build()
            optimizer = create_optimizer(model, config)
            step()
        times = []
        for _ in range(2):
            started = time.process_time()
            step()
            times.append(time.process_time() - started)
    count = sum(p.numel() for p in model.parameters())
    return FitCost(steps * min(times), int(memory.peak), count)
