"""``primal bench instability``: how far outputs move when parameters move.

Chen et al. 2021 (arXiv 2111.00035) call ``‖Δf‖² / ‖ΔW‖²`` the instability of a model: the change of
its outputs by one step of training over the change of its parameters, here of the logits of the
step's own batch, without dropout. The table has its mean over the first 20 steps, as a multiple of
softmax attention's: below one is steadier.

The two-layer model of width 64 of Long Range Arena on its data, with the published optimiser and
schedule, at batches one core can bear. Embeddings start small, as published, or of unit variance
(``--std 1``). All models of a seed see the same sequences, and start from the same parameters where
they have the same. Every run is saved as it ends, and a second start continues.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from primal_attention.command import progress, user_errors
from primal_attention.settings import at_least_one

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from primal_attention.models import EncoderClassifier

__all__ = ["PUBLISHED", "Plan", "build", "instability", "main", "measure", "summarize"]

MEASURE = "softmax"
"""What every ratio is taken against."""

PUBLISHED = {
    "gaussian-published": {"listops": 0.77, "text": 0.83, "image": 0.62},
    "skyformer-published": {"listops": 0.79, "text": 0.81, "image": 0.65},
    "nystromformer-published": {"listops": 1.01, "text": 1.03, "image": 1.02},
}
"""Ratios of the paper. Its kernel layers do not divide by the sums of rows, and its Nyströmformer
has no convolution of the values."""

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    MEASURE: ("softmax", {}),
    "gaussian": ("gaussian", {}),
    "gaussian-published": ("gaussian", {"normalize": False}),
    "skyformer": ("skyformer", {"num_landmarks": 128}),
    "skyformer-published": (
        "skyformer",
        {"num_landmarks": 128, "normalize": False, "ridge": 0.1, "inverse": "published"},
    ),
    "nystromformer": ("nystromformer", {"num_landmarks": 128}),
    "nystromformer-published": ("nystromformer", {"num_landmarks": 128, "kernel_size": None}),
    "primal": ("primal", {}),
    "primal-dual": ("primal-dual", {}),
}
"""Contestants: a name of the registry, and options."""

_WARMUP = {"listops": 1000, "text": 80, "image": 175}
_STEPS = 50_000
_BATCH = {"listops": 4, "text": 4, "image": 8}
"""Sequences per step: what one core can bear instead of 32, 32 and 256."""


@dataclass(frozen=True)
class Plan:
    """How far outputs move when parameters move, as a multiple of softmax attention's."""

    tasks: tuple[str, ...] = tuple(_BATCH)
    """Tasks of Long Range Arena: listops, text, image."""
    names: tuple[str, ...] = tuple(OPTIONS)
    """Contestants; softmax always takes part."""
    steps: int = 20
    """Steps of training."""
    seeds: int = 3
    """Seeds of parameters, dropout and the choice of sequences."""
    std: float = 0.02
    """Standard deviation of the embedding at first: the published one; torch's is 1."""
    shrink: int = 1
    """Divide every length by this, for a quick look; pictures keep theirs."""
    data: Path | None = None
    """Folder with text/imdb and vision/cifar-10; by default that of PRIMAL_DATA."""
    out: Path = Path("outputs/instability")
    """Folder of the results; what is there already is not run again."""

    def __post_init__(self) -> None:
        for field, known in (("tasks", _BATCH), ("names", OPTIONS)):
            unknown = sorted(set(getattr(self, field)) - set(known))
            if unknown:
                raise ValueError(f"Unknown {field} {unknown}; choose from {', '.join(known)}.")
        at_least_one(self, "steps", "seeds", "shrink")
        if not self.std > 0:
            raise ValueError(f"std must be positive, got {self.std}; the published one is 0.02.")


def instability(
    model: "nn.Module",
    batches: "Iterable[Mapping[str, Tensor]]",
    optimizer: "Optimizer",
    *,
    eta: float = 0.0,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train for one step a batch; return ``‖Δf‖² / ‖ΔW‖²`` of each.

    Args:
        model: Takes the batch as keywords and returns an object with ``logits``.
        batches: Inputs with ``labels``.
        optimizer: Of the model's parameters.
        eta: Weight of the layers' regularisers.
        after_step: Called after every step, such as the ``step`` of a schedule.

    Example:
        >>> import torch
        >>> from primal_attention.models import EncoderClassifier, EncoderConfig
        >>> model = EncoderClassifier(EncoderConfig(num_classes=3, vocab_size=9, dim=16))
        >>> batch = {"x": torch.randint(9, (2, 5)), "labels": torch.tensor([0, 2])}
        >>> len(instability(model, [batch] * 4, torch.optim.SGD(model.parameters(), 0.1)))
        4
    """
    import torch
    from torch.nn.functional import cross_entropy

    from primal_attention.attention import ksvd_loss

    found = []
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            was = model.eval()(**inputs).logits.double()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model.train()(**inputs).logits, batch["labels"])
        if eta:
            loss = loss + eta * ksvd_loss(model)
        loss.backward()
        optimizer.step()
        after_step()
        with torch.no_grad():
            moved = (model.eval()(**inputs).logits.double() - was).square().sum()
        pairs = zip(model.parameters(), before, strict=True)
        way = sum((p.detach() - old).double().square().sum() for p, old in pairs)
        found.append(float(moved / way))
    return found


def build(name: str, task: str, seed: int, *, std: float = 0.02) -> "EncoderClassifier":
    """Return the model of a task with one attention; equal parts of a seed's models are equal.

    Args:
        name: A contestant.
        task: A task of Long Range Arena.
        seed: Seed of the parameters.
        std: Standard deviation of the embedding.
    """
    import torch

    from primal_attention.models import EncoderClassifier
    from primal_attention.tasks.longrange import model_config

    def make(name: str) -> EncoderClassifier:
        torch.manual_seed(seed)
        if name in ("primal", "primal-dual"):
            return EncoderClassifier(model_config(task, "dual" if "dual" in name else "primal"))
        attention, options = OPTIONS[name]
        changes = {"attention": attention, "attention_options": options}
        return EncoderClassifier(model_config(task, "softmax", **changes))

    model, shared = make(name), make(MEASURE).state_dict()
    shared["embed.weight"] *= std
    own = model.state_dict()
    model.load_state_dict(
        {k: shared[k] if k in shared and shared[k].shape == v.shape else v for k, v in own.items()}
    )
    return model


def measure(
    plan: Plan,
    path: Path,
    *,
    data: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return one row per task, seed and contestant; what ``path`` holds is not done again.

    Args:
        plan: What to measure.
        path: Where every run is written as it ends.
        data: Folder with ``text/imdb`` and ``vision/cifar-10``; by default the environment variable
            ``PRIMAL_DATA``. ListOps needs none.
        progress: Told before every run.
    """
    names = tuple(dict.fromkeys((MEASURE, *plan.names)))
    common = {"std": plan.std, "steps": plan.steps, "shrink": plan.shrink}
    rows, found = _read(path), []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for task in plan.tasks:
            batches: list[Any] = []
            for seed in range(plan.seeds):
                for name in names:
                    key = {"task": task, "seed": seed, "name": name, **common}
                    row = next((r for r in rows if key.items() <= r.items()), None)
                    if row is None:
                        progress(f"{task}, seed {seed}: {name}")
                        batches = batches or _batches(task, plan, data)
                        mine = batches[seed * plan.steps :][: plan.steps]
                        row = {**key, **_run(name, task, seed, plan.std, mine)}
                        writer.writerow(row)
                        file.flush()
                    found.append(row)
    return found


_FIELDS = ("task", "seed", "name", "std", "steps", "shrink", "tokens", "instability")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        for key in ("seed", "steps", "shrink", "tokens"):
            row[key] = int(row[key])
        for key in ("std", "instability"):
            row[key] = float(row[key])
    return rows


def _batches(task: str, plan: Plan, data: Path | None) -> "list[dict[str, Tensor]]":
    """Return ``steps`` batches a seed, sequences padded to the longest of their batch."""
    from primal_attention.tasks.longrange.compare import Comparison, load_splits
    from primal_attention.training import pad_collate

    size, count = _BATCH[task], plan.steps * plan.seeds
    wanted = Comparison(
        num_train=size * count,
        num_valid=1,
        num_test=1,
        max_length=4000 // plan.shrink,
        listops_lengths=(500 // plan.shrink, 2000 // plan.shrink),
    )
    found = load_splits(task, wanted, data).train
    return [pad_collate([found[size * step + i] for i in range(size)]) for step in range(count)]


def _run(
    name: str, task: str, seed: int, std: float, batches: "Sequence[Mapping[str, Tensor]]"
) -> dict[str, Any]:
    """Return the mean instability of one model, and the mean length of a batch."""
    import torch

    from primal_attention.tasks.longrange import training_config

    model = build(name, task, seed, std=std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)
    # the published clipping is left out: the optimiser divides by the size of gradients anyway
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        1e-4,
        total_steps=_STEPS,
        pct_start=_WARMUP[task] / _STEPS,
        anneal_strategy="linear",
        cycle_momentum=False,
    )
    eta = 0.0
    if name in ("primal", "primal-dual"):
        eta = training_config(task, "dual" if "dual" in name else "primal").eta
    torch.manual_seed(seed)
    scores = instability(model, batches, optimizer, eta=eta, after_step=schedule.step)
    tokens = round(mean(float(batch["x"].shape[1]) for batch in batches))
    return {"tokens": tokens, "instability": mean(scores)}


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one record per task and contestant: the ratio to softmax, its spread, the paper's.

    Ratios are taken seed by seed.

    Example:
        >>> common = {"task": "text", "seed": 0, "std": 0.02, "tokens": 9}
        >>> rows = [{**common, "name": "softmax", "instability": 2.0},
        ...         {**common, "name": "skyformer-published", "instability": 3.0}]
        >>> [(r["ratio"], r["published"]) for r in summarize(rows)]
        [(1.0, None), (1.5, 0.81)]
    """
    level = {(r["task"], r["seed"]): r["instability"] for r in rows if r["name"] == MEASURE}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["name"]), []).append(row)
    records = []
    for (task, name), found in groups.items():
        ratios = [row["instability"] / level[task, row["seed"]] for row in found]
        records.append(
            {
                "task": task,
                "name": name,
                "std": found[0]["std"],
                "seeds": len(found),
                "tokens": round(mean(row["tokens"] for row in found)),
                "instability": float(f"{mean(row['instability'] for row in found):.4g}"),
                "ratio": round(mean(ratios), 3),
                "spread": round(stdev(ratios), 3) if len(ratios) > 1 else 0.0,
                "published": PUBLISHED.get(name, {}).get(task),
            }
        )
    return records


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    from primal_attention.output import markdown_table

    tasks = list(dict.fromkeys(r["task"] for r in records))
    at = {(r["task"], r["name"]): r for r in records}
    head = ["attention", *(f"{t} ({_BATCH[t]}×{at[t, MEASURE]['tokens']:,})" for t in tasks)]
    cells = []
    for name in dict.fromkeys(r["name"] for r in records):
        line = []
        for task in tasks:
            record = at[task, name]
            beside = record["published"]
            text = f"{record['ratio']:.2f}"
            if record["seeds"] > 1:
                text += f" ± {record['spread']:.2f}"
            line.append(text + (f" ({beside:.2f})" if beside is not None else ""))
        cells.append([name, *line])
    return markdown_table(head, cells)


def main(plan: Plan) -> None:
    """Measure, print the table, and save it with every run."""
    import torch

    from primal_attention.output import hardware, to_csv, write_atomically

    torch.set_num_threads(1)
    runs = plan.out / "instability_runs.csv"
    with user_errors(""):
        rows = measure(plan, runs, data=plan.data, progress=progress)
    records = summarize(rows)
    facts = ", ".join(f"{key}: {value}" for key, value in hardware().items())
    seeds = f"mean and standard deviation over {plan.seeds} seeds" if plan.seeds > 1 else "one seed"
    caption = (
        f"Instability over the first {plan.steps} steps as a multiple of softmax attention's, "
        f"{seeds} (published); batch×mean length in the head. Embeddings start with standard "
        f"deviation {plan.std:g}. {facts}."
    )
    report = f"{caption}\n\n{_table(records)}\n"
    print(report)
    stem = "instability" if plan.std == Plan.std else f"instability_std{plan.std:g}"
    write_atomically(plan.out / f"{stem}.md", report)
    write_atomically(plan.out / f"{stem}.csv", to_csv(records, facts))
    print(f"Saved {stem}.md, {stem}.csv and instability_runs.csv in {plan.out}.")
