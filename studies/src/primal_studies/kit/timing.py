"""Time and memory of the training steps of layers, and the machine they were measured on."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from primal_attention.attention import ksvd_loss
from primal_attention.attention.terms import PublishesTerms
from primal_attention.support.output import hardware
from primal_attention.training.cost import peak_mb, take_turns
from primal_attention.training.memory import kept_for_backward

__all__ = ["layer_costs", "machine", "peak_mb", "take_turns"]

K = TypeVar("K")


def layer_costs(
    layers: Mapping[K, nn.Module],
    x: Tensor,
    repeats: int,
    *,
    seconds: float = math.inf,
    counts_memory: bool = True,
) -> dict[K, dict[str, Any]]:
    """Return time and memory of layers that take turns on the same tokens.

    ``forward_ms`` is the median time of a forward without gradients, ``step_ms`` that of a forward
    and backward with the regulariser, ``peak_mb`` the most that the tensors of such a step took at
    once, ``kept_mb`` what its forward kept for the backward.

    Args:
        layers: Layers by name.
        x: Tokens that require gradients.
        repeats: Turns.
        seconds: A layer whose steps have used this time takes no further turn.
        counts_memory: Whether to count memory; compiled programs cannot be counted.
    """

    def clear() -> None:
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
        x.grad = None

    runs: dict[tuple[K, str], Callable[[], None]] = {}
    for name, layer in layers.items():
        runs[name, "forward"] = partial(_infer, layer, x)
        runs[name, "step"] = partial(_step, layer, x)
    for run in runs.values():
        clear()
        run()
    times = take_turns(runs, repeats, seconds=seconds, before=clear)
    found = {}
    for name, layer in layers.items():
        costs: dict[str, Any] = {
            f"{part}_ms": round(median(times[name, part]) * 1e3, 3) for part in ("forward", "step")
        }
        if counts_memory:
            clear()
            costs["peak_mb"] = peak_mb(partial(_step, layer, x))
            kept = kept_for_backward(partial(layer, x), [x, *layer.parameters()])
            costs["kept_mb"] = round(kept / 2**20, 2)
        found[name] = costs | {"repeats": len(times[name, "step"])}
    return found


def _infer(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        layer.eval()(x)
    layer.train()


def _step(layer: nn.Module, x: Tensor) -> None:
    """Run the forward and backward of a training step."""
    outputs = layer(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    gradients = [torch.ones_like(y) for y in outputs]
    if any(isinstance(m, PublishesTerms) for m in layer.modules()):
        outputs.append(0.1 * ksvd_loss(layer))
        gradients.append(torch.ones(()))
    torch.autograd.backward(outputs, gradients)


def machine() -> str:
    """Return processor, threads and torch version in one line."""
    facts = hardware()
    threads = "one thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['cpu']}, {threads}, torch {facts['torch']}"
