"""Rows of the family's table: what to measure, and one measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.analysis.memory import PeakMemory, kept_for_backward
from primal_attention.attention import (
    Attention,
    PrimalAttention,
    attention_entry,
    create_attention,
    ksvd_loss,
    list_attentions,
)
from primal_attention.bench.allocator import return_memory
from primal_attention.bench.exact import output_error, tokens
from primal_attention.bench.family import Plan
from primal_attention.bench.family_table import MIDDLE, Row, read_caption, read_rows
from primal_attention.bench.layer_rows import ProjectionFloor
from primal_attention.command import progress
from primal_attention.output import hardware, to_csv, write_atomically

__all__ = ["BUDGETS", "measure", "plan_rows", "run"]

BUDGETS: dict[str, tuple[str, tuple[int, ...]]] = {
    "favor": ("num_features", (32, 128, 512)),
    "kernelized": ("num_features", (16, 32, 128)),
    "kernelized-log": ("num_features", (8, 32)),
    "linformer": ("num_projections", (32, 128, 512)),
    "nystromformer": ("num_landmarks", (16, 64, 256)),
    "schoenbat": ("num_features", (128, 256, 512)),
    "skyformer": ("num_landmarks", (32, 128, 512)),
    "skyformer-learned": ("num_landmarks", (32, 128, 512)),
}
"""The option that buys accuracy for time, and how much of it the plot shows."""
EXPLICIT_LIMIT = 4096
"""Tokens up to which a layer that forms its matrix is run."""


class _Contestant(NamedTuple):
    name: str
    option: str
    layer: nn.Module


def plan_rows(plan: Plan) -> dict[int, list[tuple[str, str]]]:
    """Return the pairs of name and option to measure at each length."""
    names = list(plan.names) or ["floor", *list_attentions()]
    table: dict[int, list[tuple[str, str]]] = {}
    for n in sorted(plan.lengths):
        table[n] = [(name, "") for name in names if n <= EXPLICIT_LIMIT or "explicit" not in name]
        if n == MIDDLE:
            for name in names:
                option, sizes = BUDGETS.get(name, ("", ()))
                table[n] += [(name, f"{option}={size}") for size in sizes]
    return table


def _build(name: str, option: str, plan: Plan) -> nn.Module:
    torch.manual_seed(plan.seed)
    if name == "floor":
        return ProjectionFloor(plan.dim)
    key, _, value = option.partition("=")
    return create_attention(name, plan.dim, plan.num_heads, **({key: int(value)} if key else {}))


def _run(layer: nn.Module, x: Tensor) -> Any:
    # static weights mix tokens in causal order only
    is_static = isinstance(layer, PrimalAttention) and layer.weights == "static"
    return layer(x, is_causal=True) if is_static else layer(x)


def _step(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    outputs = _run(layer, x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seeds = [torch.ones_like(y) for y in outputs]
    if isinstance(layer, Attention) and layer.capabilities.aux_loss:
        outputs.append(0.1 * ksvd_loss(layer))
        seeds.append(torch.ones(()))
    torch.autograd.backward(outputs, seeds)


def _infer(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        _run(layer.eval(), x)
    layer.train()


def _milliseconds(
    run: Callable[[nn.Module, Tensor], None],
    layer: nn.Module,
    x: Tensor,
    clock: Callable[[], float],
) -> float:
    start = clock()
    run(layer, x)
    return (clock() - start) * 1e3


def measure(
    wanted: Sequence[tuple[str, str]],
    n: int,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Return one row for each pair of name and option at one length, timed in turns.

    Example:
        >>> row = measure([("favor", "num_features=8")], 20, Plan(dim=16, num_heads=2, repeats=1))
        >>> row[0].n, row[0].error > 0
        (20, True)
    """
    contestants = [_Contestant(a, b, _build(a, b, plan)) for a, b in wanted]
    x = tokens(n, plan.dim, plan.seed).requires_grad_()
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for name, option, layer in contestants:
        _infer(layer, x)
        _step(layer, x)
        times[name, option] = [], []
    for turn in range(plan.repeats):
        for name, option, layer in contestants:
            forward, step = times[name, option]
            if not turn or sum(step) < 1e3 * plan.limit / 20:
                forward.append(_milliseconds(_infer, layer, x, clock))
                step.append(_milliseconds(_step, layer, x, clock))
    rows = []
    for name, option, layer in contestants:
        forward, step = times[name, option]
        peak, kept = _memory(layer, x)
        error, average = output_error(layer, x.detach())
        rows.append(
            Row(
                name=name,
                option=option,
                n=n,
                forward_ms=round(median(forward), 3),
                step_ms=round(median(step), 3),
                peak_mb=round(peak / 2**20, 2),
                kept_mb=round(kept / 2**20, 2),
                error=float(f"{error:.3g}"),
                average=float(f"{average:.3g}"),
                repeats=len(step),
            )
        )
    return rows


def _memory(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with PeakMemory() as memory:
        _step(layer, x)
    return memory.peak, kept_for_backward(lambda: _run(layer, x), [x, *layer.parameters()])


def _expected(rows: Iterable[Row], name: str, n: int) -> float:
    """Return how many seconds a step should take, from the last length measured."""
    shorter = [row for row in rows if (row.name, row.option) == (name, "") and row.n < n]
    if not shorter:
        return 0.0
    last = max(shorter, key=lambda row: row.n)
    power = 2 if name != "floor" and "²" in attention_entry(name).cost else 1.2
    return last.step_ms / 1e3 * (n / last.n) ** power


def run(plan: Plan, path: Path, *, clock: Callable[[], float]) -> list[Row]:
    """Measure what a saved table lacks, and save after every length; stop when time is up.

    Rows that were measured elsewhere or otherwise are not mixed with new ones.
    """
    facts = {**hardware(), "width": plan.dim, "heads": plan.num_heads, "batch": 1}
    caption = ", ".join(f"{key}: {value}" for key, value in facts.items())
    start, same = time.perf_counter(), path.exists() and caption == read_caption(path)
    rows = read_rows(path) if same else []
    for n, wanted in plan_rows(plan).items():
        found = {(row.name, row.option) for row in rows if row.n == n}
        missing = [
            pair
            for pair in wanted
            if pair not in found and _expected(rows, pair[0], n) < plan.limit
        ]
        if not missing:
            continue
        needed = sum(_expected(rows, name, n) for name, _ in missing) * 4
        if time.perf_counter() - start + needed > 60 * plan.minutes:
            progress(f"no time left for {n} tokens; call again")
            break
        progress(f"{n} tokens, {len(missing)} layers")
        return_memory()  # what shorter lengths left in pieces is of no use to longer ones
        rows += measure(missing, n, plan, clock=clock)
        write_atomically(path, to_csv([asdict(row) for row in rows], caption))
    return rows
