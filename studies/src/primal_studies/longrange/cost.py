"""``primal bench longrange-cost``: the efficiency table of Long Range Arena.

Time and peak memory of one training step (forward, loss with the KSVD term, backward, AdamW) of the
paper's two-layer model of width 64, on its five shapes, with every attention of the registry. Gains
are over the *released* softmax, which forms the ``n × n`` weights and drops some of them. Fused
softmax (SDPA) and an explicit one that drops no weights stand beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import dots_picture, pivot

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.attention import Core
    from primal_attention.models import SequenceModel

__all__ = ["BASE", "PUBLISHED", "CostOptions", "CostStudy", "build_model", "gains", "rivals"]

BASE = "softmax-released"
"""Gains are over this."""

_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")

PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # times and memories of the Transformer over those of the method, in the order of _TASKS
    "primal": ((3.4, 7.4, 7.2, 2.3, 2.3), (7.9, 15.5, 6.3, 4.2, 3.9)),
    "primal+": ((1.7, 1.9, 2.4, 1.6, 1.5), (1.1, 1.0, 1.0, 1.1, 1.1)),
    "nystromformer": ((2.8, 5.7, 5.7, 1.9, 1.8), (6.2, 12.6, 5.7, 3.0, 3.0)),
    "linformer": ((3.1, 6.0, 5.9, 2.1, 2.0), (3.2, 6.2, 3.0, 1.7, 1.7)),
    "favor": ((2.3, 4.4, 4.2, 1.6, 1.5), (3.3, 6.4, 3.0, 1.8, 1.8)),
    # hours and gigabytes of the Skyformer paper, one V100
    "skyformer": ((1.7, 4.2, 4.5, 1.2, 1.3), (3.1, 6.5, 3.4, 1.4, 1.4)),
    "gaussian": ((1.1, 1.1, 1.1, 1.0, 1.1), (0.9, 1.8, 1.0, 1.8, 0.9)),
}
"""Published gains over the Transformer: time, then memory."""

_BATCH = {"listops": 4, "text": 2, "retrieval": 1, "image": 16, "pathfinder": 16}
"""Sequences, or pairs, per step; published: 32 or 256."""

_IDS = {"listops": 16, "text": 257, "retrieval": 257, "image": 256, "pathfinder": 256}
"""Distinct tokens of each task."""


@dataclass(frozen=True)
class CostOptions:
    """Time and peak memory of a training step on the shapes of Long Range Arena."""

    tasks: tuple[str, ...] = _TASKS
    """Tasks of Long Range Arena."""
    names: tuple[str, ...] = ()
    """Models; by default the softmaxes, both Primal.+, and the rest of the registry."""
    repeats: int = 7
    """Timed steps of each model."""
    shrink: int = 1
    """Divide every length by this, for a quick look."""
    seed: int = 0
    """Seed of parameters and inputs."""

    def __post_init__(self) -> None:
        at_least_one(self, "repeats", "shrink")


class CostStudy(Study[CostOptions]):
    """One cell a task."""

    name = "longrange-cost"
    Options = CostOptions

    def cells(self, options: CostOptions) -> Sequence[Cell]:
        """Return the cells in the order of the tasks."""
        from primal_attention.tasks.longrange import LRA

        one_of(options, "tasks", _TASKS)
        one_of(options, "names", rivals())
        return [
            {
                "task": task,
                "n": LRA[task].length // options.shrink,
                "batch": _BATCH[task],
                "names": list(options.names or rivals()),
                "seed": options.seed,
            }
            for task in options.tasks
        ]

    def run(self, cell: Cell, options: CostOptions, scratch: Path) -> Sequence[Row]:
        """Measure all models on one shape; the first steps count memory and warm up."""
        import torch

        from primal_studies.kit.timing import machine, take_turns

        inputs = _inputs(cell)
        steps, peaks = {}, {}
        for name in cell["names"]:
            torch.manual_seed(cell["seed"])
            model = build_model(name, cell["task"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
            steps[name] = partial(_step, model, optimizer, inputs)
            peaks[name] = _peak_mb(model, optimizer, steps[name])
        times = take_turns(steps, options.repeats)
        return [
            {
                "name": name,
                "cpu_seconds": round(median(taken), 5),
                "peak_mb": peaks[name],
                "machine": machine(),
            }
            for name, taken in times.items()
        ]

    def tables(self, rows: Sequence[Row], options: CostOptions) -> Mapping[str, str | bytes]:
        """Return gains in time and memory over three softmaxes, and what they are made of."""
        caption = (
            "One training step of the two-layer model of width 64, batch×length in the head (the "
            "paper's batches are 32 and 256); a batch of retrieval is pairs. Processor time of one "
            "thread, median of interleaved steps after one to warm up; memory is the peak of all "
            "tensors, parameters and optimiser state included. "
            f"{rows[0]['machine']}, seed {rows[0]['seed']}."
        )
        return {"table.md": page(caption, *_tables(rows)), "picture.png": _picture(rows)}


def rivals() -> tuple[str, ...]:
    """Return all names: the softmaxes, both Primal.+, and the rest of the registry.

    Example:
        >>> rivals()[:3]
        ('softmax-released', 'softmax-explicit', 'softmax')
    """
    from primal_attention.attention import list_attentions

    first = (BASE, "softmax-explicit", "softmax", "primal+", "primal+sdpa", "primal")
    # static weights mix no tokens unless causal
    others = (name for name in list_attentions() if name not in (*first, "primal-static"))
    return (*first, *others)


def build_model(name: str, task: str) -> "SequenceModel":
    """Return the paper's model with one attention, in training mode.

    ``softmax-released`` and, below the primal layer, ``primal+`` compute softmax as the released
    code does; ``primal+sdpa`` has the fused one.
    """
    from primal_attention.attention import SoftmaxAttention
    from primal_attention.tasks.longrange import published_model

    variants = {"primal+sdpa": "primal+", BASE: "softmax", "primal-dual": "dual"}
    model = published_model(task, variants.get(name, name))
    if name in (BASE, "primal+"):
        for block in model.blocks:
            if isinstance(block.attention, SoftmaxAttention):
                block.attention.core = _released_core(model.config.dropout)
    return model.train()


def _released_core(dropout: float) -> "Core":
    """Return softmax attention as the released code has it, operator by operator.

    It does less than ``softmax-explicit`` of the registry, which guards rows without keys, so that
    no gain over it comes from our guard.
    """
    import torch
    from torch.nn.functional import dropout as drop

    from primal_attention.attention.softmax import SoftmaxCore

    class ReleasedSoftmaxCore(SoftmaxCore):
        """``dropout(softmax(q kᵀ / √d)) v``."""

        def forward(
            self,
            q: "Tensor",
            k: "Tensor",
            v: "Tensor",
            *,
            key_mask: "Tensor | None" = None,
            is_causal: bool = False,
        ) -> "Tensor":
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if key_mask is not None:
                scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
            return drop(scores.softmax(-1), dropout, self.training) @ v

    return ReleasedSoftmaxCore()


def _inputs(cell: Cell) -> "dict[str, Tensor]":
    """Return random tokens of the task's shape; the padded tasks have sequences of all lengths."""
    import torch

    from primal_attention.tasks.longrange import LRA

    task, length, count = cell["task"], cell["n"], cell["batch"]
    found, generator = LRA[task], torch.Generator().manual_seed(cell["seed"])
    batch = {"labels": torch.randint(found.num_classes, (count,), generator=generator)}
    # between a quarter of the tokens and all of them are real
    lengths = torch.linspace(length // 4, length, 2 * count + 1)[1:].long()
    for side, name in enumerate(("x", "other")[: 1 + found.is_pair]):
        batch[name] = torch.randint(1, _IDS[task], (count, length), generator=generator)
        if found.is_padded:
            keep = torch.arange(length) < lengths[side::2, None]
            batch["key_mask" if name == "x" else "other_mask"] = keep
    return batch


def _step(model: Any, optimizer: Any, batch: "Mapping[str, Tensor]") -> None:
    from torch.nn.functional import cross_entropy

    from primal_attention.attention import ksvd_loss

    optimizer.zero_grad(set_to_none=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs)
    loss = cross_entropy(output.logits, batch["labels"])
    if output.aux_loss is not None:
        loss = loss + 0.1 * ksvd_loss(model)
    loss.backward()
    optimizer.step()


def _peak_mb(model: Any, optimizer: Any, step: Any) -> float:
    """Return the peak of a step, parameters and the state of the optimiser included."""
    from primal_studies.kit.timing import peak_mb

    step()
    optimizer.zero_grad(set_to_none=True)
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    standing = sum(t.numel() * t.element_size() for t in (*model.parameters(), *state))
    return round(standing / 2**20 + peak_mb(step), 2)


_OVER = {
    BASE: "the released softmax (published)",
    "softmax": "fused softmax (SDPA)",
    "softmax-explicit": "explicit softmax that drops no weights",
}
_LESS = {"cpu_seconds": "Times faster than", "peak_mb": "Times less memory than"}


def gains(rows: Sequence[Row], field: str, over: str) -> dict[tuple[str, str], float]:
    """Return how many times less than another model each model needs, by task and name.

    Example:
        >>> rows = [{"task": "text", "name": a, "peak_mb": b} for a, b in (("x", 6.0), ("y", 2.0))]
        >>> gains(rows, "peak_mb", over="x")
        {('text', 'x'): 1.0, ('text', 'y'): 3.0}
    """
    at = {(r["task"], r["name"]): r[field] for r in rows}
    return {
        (task, name): round(at[task, over] / value, 2)
        for (task, name), value in at.items()
        if (task, over) in at
    }


def _picture(rows: Sequence[Row]) -> bytes:
    points = gains(rows, "cpu_seconds", "softmax").items()
    return dots_picture(
        ((name, task, gain) for (task, name), gain in points),
        "times as fast as fused softmax",
        is_log=True,
    )


def _tables(rows: Sequence[Row]) -> list[str]:
    rows = list({(r["task"], r["name"]): r for r in reversed(rows)}.values())[::-1]
    rows = [{**r, "shape": f"{r['task']} ({r['batch']}×{r['n']:,})"} for r in rows]

    def table(cell: Callable[[Row], object] | str) -> str:
        shapes = dict.fromkeys(row["shape"] for row in rows)
        return pivot(rows, {"attention": "name"}, "shape", cell, title="{}", values=shapes)

    parts = []
    for over, words in _OVER.items():
        for field, less in _LESS.items():
            parts += [f"{less} {words}:", table(_gain(rows, field, over))]
    parts += ["Processor seconds a step:", table("{cpu_seconds:.3f}")]
    return [*parts, "Peak of a step, MiB:", table("{peak_mb:,.0f}")]


def _gain(rows: Sequence[Row], field: str, over: str) -> Callable[[Row], str]:
    """Return a cell: a gain, and in brackets the published one."""
    values = gains(rows, field, over)

    def cell(row: Row) -> str:
        value = values.get((row["task"], row["name"]))
        text = "—" if value is None else f"{value:.1f}"
        if over != BASE or row["name"] not in PUBLISHED:
            return text
        published = PUBLISHED[row["name"]][int(field == "peak_mb")]
        return f"{text} ({published[_TASKS.index(row['task'])]:.1f})"

    return cell
