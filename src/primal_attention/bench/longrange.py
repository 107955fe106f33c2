"""``primal bench longrange``: the efficiency table of Long Range Arena.

Time and peak memory of one training step (forward, loss with the KSVD term, backward, AdamW) of the
paper's two-layer model of width 64, on its five shapes, with every attention of the registry. The
measure is the *released* softmax, which forms the ``n × n`` weights and drops some of them; fused
softmax (SDPA) and an explicit one that drops no weights stand beside it.

Time is processor time of one thread, so that a busy machine does not distort it. Rounds are
interleaved; the table has medians; freed memory is kept for reuse, as on accelerators. Every step
is saved as it is done, and a second start continues.
"""

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from primal_attention.command import progress
from primal_attention.settings import at_least_one

if TYPE_CHECKING:
    from torch import Tensor

    from primal_attention.attention import Core
    from primal_attention.models import SequenceModel

__all__ = ["PUBLISHED", "Plan", "build", "contestants", "main", "measure", "summarize"]

MEASURE = "softmax-released"
"""What every ratio is taken against."""

_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")

PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # times and memories of Transformer over those of the method, in the order of _TASKS
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
"""Sequences, or pairs, per step: what two cores can bear instead of 32 or 256."""

_IDS = {"listops": 16, "text": 257, "retrieval": 257, "image": 256, "pathfinder": 256}
"""Distinct tokens of each task."""


@dataclass(frozen=True)
class Plan:
    """Time and peak memory of a training step on the shapes of Long Range Arena."""

    tasks: tuple[str, ...] = _TASKS
    """Tasks of Long Range Arena."""
    names: tuple[str, ...] = ()
    """Contestants; by default the softmaxes, both Primal.+, and the rest of the registry."""
    rounds: int = 7
    """Timed steps of each; one more is thrown away."""
    shrink: int = 1
    """Divide every length by this, for a quick look."""
    seed: int = 0
    """Seed of parameters and inputs."""
    out: Path = Path("outputs/longrange")
    """Folder of the results; what is there already is not measured again."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tasks) - set(_TASKS))
        if unknown:
            raise ValueError(f"Unknown tasks {unknown}; choose from {', '.join(_TASKS)}.")
        unknown = sorted(set(self.names) - set(contestants()))
        if unknown:
            raise ValueError(f"Unknown names {unknown}; choose from {', '.join(contestants())}.")
        at_least_one(self, "rounds", "shrink")


def contestants() -> tuple[str, ...]:
    """Return all names: the softmaxes, both Primal.+, and the rest of the registry.

    Example:
        >>> contestants()[:3]
        ('softmax-released', 'softmax-explicit', 'softmax')
    """
    from primal_attention.attention import list_attentions

    first = (MEASURE, "softmax-explicit", "softmax", "primal+", "primal+sdpa", "primal")
    # static weights mix no tokens unless causal
    others = (name for name in list_attentions() if name not in (*first, "primal-static"))
    return (*first, *others)


def build(name: str, task: str) -> "SequenceModel":
    """Return the paper's model with one attention, in training mode.

    ``softmax-released`` and, below the primal layer, ``primal+`` compute softmax as the released
    code does; ``primal+sdpa`` has the fused one.
    """
    from primal_attention.attention import SoftmaxAttention
    from primal_attention.tasks.longrange import build_model

    variants = {"primal+sdpa": "primal+", MEASURE: "softmax", "primal-dual": "dual"}
    model = build_model(task, variants.get(name, name))
    if name in (MEASURE, "primal+"):
        for block in model.blocks:
            if isinstance(block.attention, SoftmaxAttention):
                block.attention.core = _released_core(model.config.dropout)
    return model.train()


def _released_core(dropout: float) -> "Core":
    """Return softmax attention as the released code has it, operator by operator.

    It does less than ``softmax-explicit`` of the registry, which guards rows without keys: a gain
    over it is not owed to our guard.
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


def measure(
    plan: Plan, path: Path, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Measure what is missing in ``path`` and return all its rows.

    Args:
        plan: What to measure.
        path: CSV file with one row a step; created, or continued.
        progress: Told before every round.
    """
    import torch

    from primal_attention.tasks.longrange import LRA

    rows = _read(path)
    done = {(r["task"], r["name"], r["round"]) for r in rows}
    names = plan.names or contestants()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for task in plan.tasks:
            length = LRA[task].length // plan.shrink
            inputs = _inputs(task, length, plan.seed)
            models: dict[str, tuple[Any, Any]] = {}
            for turn in range(plan.rounds + 1):
                for name in names:
                    if (task, name, turn) in done:
                        continue
                    progress(f"{task}, round {turn} of {plan.rounds}: {name}")
                    if name not in models:
                        torch.manual_seed(plan.seed)
                        models[name] = _prepare(name, task)
                    row = {"task": task, "name": name, "round": turn, "n": length}
                    row["batch"] = _BATCH[task]
                    # the first round warms up, and is the one whose memory is counted
                    run = _count if turn == 0 else _clock
                    row.update(run(*models[name], inputs))
                    writer.writerow({key: row.get(key, "") for key in _FIELDS})
                    file.flush()
                    rows.append(row)
    found = [r for r in rows if r["task"] in plan.tasks and r["name"] in names]
    places = {name: place for place, name in enumerate((*plan.tasks, *names))}
    # a continued file has its rows in the order of the runs
    return sorted(found, key=lambda r: (places[r["task"]], places[r["name"]], r["round"]))


_FIELDS = ("task", "name", "round", "n", "batch", "cpu_seconds", "peak_mb")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        for key in ("round", "n", "batch"):
            row[key] = int(row[key])
        for key in ("cpu_seconds", "peak_mb"):
            row[key] = float(row[key]) if row[key] else ""
    return rows


def _inputs(task: str, length: int, seed: int) -> "dict[str, Tensor]":
    """Return random tokens of the task's shape; the padded tasks have sequences of all lengths."""
    import torch

    from primal_attention.tasks.longrange import LRA

    found, generator = LRA[task], torch.Generator().manual_seed(seed)
    count = _BATCH[task]
    batch = {"labels": torch.randint(found.num_classes, (count,), generator=generator)}
    # as many real tokens as one in four, and up to all
    lengths = torch.linspace(length // 4, length, 2 * count + 1)[1:].long()
    for side, name in enumerate(("x", "other")[: 1 + found.is_pair]):
        batch[name] = torch.randint(1, _IDS[task], (count, length), generator=generator)
        if found.is_padded:
            keep = torch.arange(length) < lengths[side::2, None]
            batch["key_mask" if name == "x" else "other_mask"] = keep
    return batch


def _prepare(name: str, task: str) -> tuple[Any, Any]:
    import torch

    model = build(name, task)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


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


def _clock(model: Any, optimizer: Any, batch: "Mapping[str, Tensor]") -> dict[str, float]:
    start = time.thread_time()
    _step(model, optimizer, batch)
    return {"cpu_seconds": round(time.thread_time() - start, 5)}


def _count(model: Any, optimizer: Any, batch: "Mapping[str, Tensor]") -> dict[str, float]:
    """Return the peak of a step, parameters and the state of the optimiser included."""
    from primal_attention.analysis.memory import PeakMemory

    _step(model, optimizer, batch)
    optimizer.zero_grad(set_to_none=True)
    own = list(model.parameters())
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    standing = sum(t.numel() * t.element_size() for t in (*own, *state))
    with PeakMemory() as memory:
        _step(model, optimizer, batch)
    return {"peak_mb": round((standing + memory.peak) / 2**20, 2)}


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one record per task and contestant: medians, gains over both softmaxes, published.

    Example:
        >>> steps = [("softmax-released", 3.0), ("softmax", 1.5), ("primal", 1.0)]
        >>> rows = [{"task": "text", "name": a, "n": 9, "batch": 2, "cpu_seconds": s,
        ...          "peak_mb": s} for a, s in steps]
        >>> [(r["name"], r["time_gain"], r["published_time"]) for r in summarize(rows)][-1]
        ('primal', 3.0, 7.4)
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["name"]), []).append(row)
    seconds = {key: _median(found, "cpu_seconds") for key, found in groups.items()}
    peak = {key: _median(found, "peak_mb") for key, found in groups.items()}

    def gain(values: Mapping[Any, float | None], task: str, name: str, over: str) -> float | None:
        ours, theirs = values.get((task, name)), values.get((task, over))
        return round(theirs / ours, 2) if ours and theirs else None

    records = []
    for (task, name), found in groups.items():
        published = PUBLISHED.get(name)
        place = _TASKS.index(task)
        records.append(
            {
                "task": task,
                "name": name,
                "n": found[0]["n"],
                "batch": found[0]["batch"],
                "cpu_seconds": seconds[task, name],
                "time_gain": gain(seconds, task, name, MEASURE),
                "published_time": published[0][place] if published else None,
                "time_gain_explicit": gain(seconds, task, name, "softmax-explicit"),
                "time_gain_sdpa": gain(seconds, task, name, "softmax"),
                "peak_mb": peak[task, name],
                "memory_gain": gain(peak, task, name, MEASURE),
                "published_memory": published[1][place] if published else None,
                "memory_gain_explicit": gain(peak, task, name, "softmax-explicit"),
                "memory_gain_sdpa": gain(peak, task, name, "softmax"),
            }
        )
    return records


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) not in ("", None)]
    return median(values) if values else None


def _tables(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return headed markdown tables: gains in time and memory, over explicit and fused softmax."""
    from primal_attention.output import markdown_table

    tasks = list(dict.fromkeys(r["task"] for r in records))
    names = list(dict.fromkeys(r["name"] for r in records))
    at = {(r["task"], r["name"]): r for r in records}
    shapes = [at[task, names[0]] for task in tasks]
    head = ["attention", *(f"{r['task']} ({r['batch']}×{r['n']:,})" for r in shapes)]
    parts = []
    faster, less = "Times faster than", "Times less memory than"
    for title, key, published, unit in (
        (f"{faster} the released softmax (published)", "time_gain", "published_time", ""),
        (f"{less} the released softmax (published)", "memory_gain", "published_memory", ""),
        (f"{faster} fused softmax (SDPA)", "time_gain_sdpa", "", ""),
        (f"{less} fused softmax (SDPA)", "memory_gain_sdpa", "", ""),
        (f"{faster} explicit softmax that drops no weights", "time_gain_explicit", "", ""),
        (f"{less} explicit softmax that drops no weights", "memory_gain_explicit", "", ""),
        ("Processor seconds a step", "cpu_seconds", "", "s"),
        ("Peak of a step, MiB", "peak_mb", "", "MiB"),
    ):
        cells = [
            [name, *(_cell(at.get((task, name)), key, published, unit) for task in tasks)]
            for name in names
        ]
        parts += [f"{title}:", markdown_table(head, cells)]
    return parts


def _cell(record: Mapping[str, Any] | None, key: str, published: str, unit: str) -> str:
    value = record and record[key]
    if record is None or value is None:
        return "—"
    if unit:
        return f"{value:.3f}" if unit == "s" else f"{value:,.0f}"
    beside = record[published] if published else None
    return f"{value:.1f}" + (f" ({beside:.1f})" if beside is not None else "")


def main(plan: Plan) -> None:
    """Measure, print the tables, and save them with every step."""
    import torch

    from primal_attention.output import hardware, to_csv, write_atomically

    torch.set_num_threads(1)
    rows = measure(plan, plan.out / "longrange_steps.csv", progress)
    records = summarize(rows)
    facts = ", ".join(f"{key}: {value}" for key, value in {**hardware(), "seed": plan.seed}.items())
    caption = (
        f"One training step of the two-layer model of width 64, batch×length in the head (the "
        f"paper's batches are 32 and 256); a batch of retrieval is pairs. Processor time of one "
        f"thread, median of {plan.rounds} interleaved steps after one to warm up; memory is the "
        f"peak of all tensors, parameters and optimiser state included. {facts}."
    )
    report = "\n\n".join([caption, *_tables(records)]) + "\n"
    print(report)
    write_atomically(plan.out / "longrange.md", report)
    write_atomically(plan.out / "longrange.csv", to_csv(records, facts))
    print(f"Saved longrange.md, longrange.csv and longrange_steps.csv in {plan.out}.")
