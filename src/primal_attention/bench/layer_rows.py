"""Time and memory of attention layers: the contestants, one measurement, and the whole plan.

Every contestant is a layer ``[b n c] → [b n c]``. Repeats are interleaved, so that a slow moment of
the machine hits all of them; ratios are taken within one run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from primal_attention.analysis.memory import PeakMemory, kept_for_backward
from primal_attention.attention import (
    Attention,
    PrimalAttention,
    State,
    create_attention,
    ksvd_loss,
)
from primal_attention.attention.terms import PublishesTerms
from primal_attention.bench.layers import Plan
from primal_attention.functional import (
    ksvd_objective,
    parameter_trace,
    reduce_objective,
    sample_rows,
)
from primal_attention.output import markdown_table

__all__ = [
    "Measurement",
    "ProjectionFloor",
    "TextbookPrimal",
    "build",
    "decoding_rows",
    "run_sweep",
    "summarize",
]


class ProjectionFloor(nn.Module):
    """The query, key and output projections alone: no attention can be cheaper than this."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Float[Tensor, "b n c"]) -> tuple[Tensor, Tensor]:
        """Return what the projections return; both carry gradient."""
        return self.out_proj(self.q_proj(x)), self.k_proj(x)


class TextbookPrimal(PublishesTerms):
    """Primal-Attention as the formulas read: normalise, project, concatenate, map, merge, project.

    It borrows the parameters of a :class:`PrimalAttention` and computes the same function.
    """

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Return the layer's output and publish its term."""
        layer = self.layer
        q, k = (layer._split(p(x)).contiguous() for p in (layer.q_proj, layer.k_proj))
        tied = layer._tie_rows(sample_rows(x, layer.num_samples))
        e = normalize(q, dim=-1, eps=layer.conventions.eps) @ tied.w_e
        r = normalize(k, dim=-1, eps=layer.conventions.eps) @ tied.w_r
        heads = layer.concat(torch.cat([e, r], dim=-1))
        moment_e, moment_r = e.square().mean(2), r.square().mean(2)
        trace = parameter_trace(layer.w_e, layer.w_r)
        objective = ksvd_objective(moment_e, moment_r, layer.ell, trace)
        self.publish({"": reduce_objective(objective)})
        return layer.out_proj(heads.transpose(1, 2).flatten(2))


@dataclass
class Measurement:
    """One row of the result."""

    name: str
    heads: int
    head_dim: int
    n: int
    mode: str
    """``eager`` or ``compiled``."""
    forward_ms: float
    """Median time of one forward without gradients."""
    step_ms: float
    """Median time of one forward and backward, the KSVD term included."""
    peak_mb: float
    """Most that tensors took at once in such a step; zero where a step takes too long to repeat."""
    kept_mb: float
    """What the forward kept for backward; zero likewise."""
    repeats: int


def build(name: str, heads: int, head_dim: int, rank: int) -> nn.Module:
    """Return a contestant by name, in training mode."""
    dim = heads * head_dim
    if name == "floor":
        return ProjectionFloor(dim)
    if name == "primal-textbook":
        return TextbookPrimal(PrimalAttention(dim, heads, rank=rank))
    return _attention(name, heads, head_dim, rank)


def _attention(name: str, heads: int, head_dim: int, rank: int) -> Attention:
    options = {"rank": rank} if name.startswith("primal") else {}
    return create_attention(name, heads * head_dim, heads, **options)


def _step(layer: nn.Module, x: Tensor) -> None:
    """Run one training step's forward and backward; no gradients may be there before."""
    outputs = layer(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seeds = [torch.ones_like(y) for y in outputs]
    if any(isinstance(m, PublishesTerms) for m in layer.modules()):
        outputs.append(0.1 * ksvd_loss(layer))
        seeds.append(torch.ones(()))
    torch.autograd.backward(outputs, seeds)


def run_sweep(
    plan: Plan, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Measurement]:
    """Measure every contestant at every shape and length; yields rows as they are done."""
    for heads, head_dim in plan.shapes:
        torch.manual_seed(plan.seed)
        layers = {name: build(name, heads, head_dim, plan.rank) for name in plan.names}
        if plan.compiled:
            # layers share their forward; past the default of 8 variants the rest would run eagerly
            torch._dynamo.config.recompile_limit = 16 * len(layers)
            for layer in layers.values():
                layer.compile(dynamic=True)
        last: dict[str, tuple[int, float]] = {}
        for n in sorted(plan.lengths):
            progress(f"{heads} heads of {head_dim}, {n} tokens")
            x = torch.randn(plan.batch, n, heads * head_dim, requires_grad=True)
            present = {k: v for k, v in layers.items() if _expected(last, k, n, 2) < plan.budget}
            brief = {k for k in present if _expected(last, k, n, 1) < plan.budget / 10}
            if plan.compiled:
                # whoever is not run once beforehand would be timed while it compiles
                present = {k: v for k, v in present.items() if k in brief}
            for name, times in _times(plan, present, brief, x).items():
                last[name] = (n, median(times.step))
                measures_memory = name in brief and not plan.compiled
                peak, kept = _memory(layers[name], x) if measures_memory else (0, 0)
                yield Measurement(
                    name=name,
                    heads=heads,
                    head_dim=head_dim,
                    n=n,
                    mode="compiled" if plan.compiled else "eager",
                    forward_ms=round(median(times.forward) * 1e3, 3),
                    step_ms=round(median(times.step) * 1e3, 3),
                    peak_mb=round(peak / 2**20, 2),
                    kept_mb=round(kept / 2**20, 2),
                    repeats=len(times.step),
                )


class _Times(NamedTuple):
    forward: list[float]
    step: list[float]


def _expected(last: dict[str, tuple[int, float]], name: str, n: int, power: int) -> float:
    """Return how long a step should take if it grows with that power of the length."""
    length, seconds = last.get(name, (n, 0.0))
    return seconds * (n / length) ** power


def _times(
    plan: Plan, layers: dict[str, nn.Module], brief: set[str], x: Tensor
) -> dict[str, _Times]:
    """Return interleaved timings; one that has used up its share sits out the next rounds."""
    times = {name: _Times([], []) for name in layers}
    for name in brief:
        _step(layers[name], x)
        _infer(layers[name], x)
    for _ in range(plan.repeats):
        for name, layer in layers.items():
            forward, step = times[name]
            if sum(step) < plan.budget / 10 or (name in brief and len(step) < 3):
                forward.append(_seconds(_infer, layer, x))
                step.append(_seconds(_step, layer, x))
    return times


def _infer(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        layer.eval()(x)
    layer.train()


def _clear(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None


def _seconds(run: Callable[[nn.Module, Tensor], None], layer: nn.Module, x: Tensor) -> float:
    _clear(layer, x)
    start = time.perf_counter()
    run(layer, x)
    return time.perf_counter() - start


def _memory(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the peak of one step and what its forward keeps, in bytes beyond x and parameters."""
    _clear(layer, x)
    with PeakMemory() as memory:
        _step(layer, x)
    kept = kept_for_backward(lambda: layer(x), [x, *layer.parameters()])
    return memory.peak, kept


def summarize(rows: Sequence[Measurement]) -> list[str]:
    """Return headed markdown tables: times as multiples of the projection floor, and memory."""
    parts = []
    for heads, head_dim in dict.fromkeys((r.heads, r.head_dim) for r in rows):
        table = {(r.name, r.n): r for r in rows if (r.heads, r.head_dim) == (heads, head_dim)}
        names = list(dict.fromkeys(name for name, _ in table))
        for title, field in (
            ("forward and backward with the KSVD term", "step_ms"),
            ("forward alone", "forward_ms"),
            ("MiB kept for backward", "kept_mb"),
            ("MiB at the peak of a step", "peak_mb"),
        ):
            is_time = field.endswith("ms")
            values = {key: getattr(row, field) for key, row in table.items()}
            if not any(values.values()):
                continue
            unit = ", ms and multiples of the floor" if is_time else ""
            cells = []
            for n in dict.fromkeys(n for _, n in table):
                floor = values.get(("floor", n))
                cells.append(
                    [f"{n:,}", *(_cell(values.get((k, n)), is_time, floor) for k in names)]
                )
            parts.append(f"{heads} heads of {head_dim}: {title}{unit}")
            parts.append(markdown_table(["tokens", *names], cells))
    return parts


def _cell(value: float | None, is_time: bool, floor: float | None) -> str:
    if not value:
        return "—"
    if not is_time or not floor:
        return f"{value:,.1f}"
    return f"{value:,.1f} ({value / floor:.2f})"


def decoding_rows(
    positions: Sequence[int], shape: tuple[int, int], rank: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return time and state size of one decoding step after prefixes of the given lengths.

    The positions take turns, so that a busy moment of the machine meets them all.
    """
    heads, head_dim = shape
    rows = []
    for name in names:
        torch.manual_seed(0)
        layer = _attention(name, heads, head_dim, rank).eval()
        token = torch.randn(1, 1, heads * head_dim)
        with torch.no_grad():
            states = [_decoded(layer, position) for position in positions]
            times: list[list[float]] = [[] for _ in positions]
            for _ in range(200):
                for state, taken in zip(states, times, strict=True):
                    begin = time.perf_counter()
                    layer.step(token, state)
                    taken.append(time.perf_counter() - begin)
        for position, state, taken in zip(positions, states, times, strict=True):
            row = {"name": name, "position": position, "step_us": round(median(taken) * 1e6, 1)}
            rows.append({**row, "state_numbers": state.numel})
    return rows


def _decoded(layer: Attention, position: int) -> State:
    """Return the state after that many tokens."""
    state = layer.init_state(1)
    for start in range(0, position, 4096):
        prompt = torch.randn(1, min(4096, position - start), layer.dim)
        _, state = layer.step(prompt, state)
    return state
