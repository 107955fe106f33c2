"""``primal bench instability``: how far outputs move when parameters move.

Chen et al. 2021 (arXiv 2111.00035) call ``‖Δf‖² / ‖ΔW‖²`` the instability of a model: the change of
its outputs by one step of training over the change of its parameters, here of the logits of the
step's own batch, without dropout. The table has its mean over the first 20 steps, as a multiple of
that of softmax attention: below one is steadier.

The two-layer model of width 64 of Long Range Arena on its data, with the published optimiser and
schedule, with smaller batches. Embeddings start small, as published, or of unit variance
(``--std 1``). All models of a seed see the same sequences, and start from the same parameters where
they have the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from primal_attention.support.output import markdown_table, page
from primal_attention.support.settings import at_least_one, one_of
from primal_attention.tasks.study import Cell, Row, Study
from primal_studies.kit.tables import Files

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from primal_attention.models import EncoderClassifier

__all__ = [
    "BASE",
    "MODELS",
    "PUBLISHED",
    "InstabilityOptions",
    "InstabilityStudy",
    "build_classifier",
    "instability",
    "ratios",
]

BASE = "softmax"
"""Ratios are to this."""

PUBLISHED = {
    "gaussian-published": {"listops": 0.77, "text": 0.83, "image": 0.62},
    "skyformer-published": {"listops": 0.79, "text": 0.81, "image": 0.65},
    "nystromformer-published": {"listops": 1.01, "text": 1.03, "image": 1.02},
}
"""Ratios of the paper. Its kernel layers do not divide by the sums of rows, and its Nyströmformer
has no convolution of the values."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: ("softmax", {}),
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
"""A name of the registry, and options."""

_WARMUP = {"listops": 1000, "text": 80, "image": 175}
_STEPS = 50_000
_BATCH = {"listops": 4, "text": 4, "image": 8}
"""Sequences per step; published: 32, 32 and 256."""


@dataclass(frozen=True)
class InstabilityOptions:
    """How far outputs move when parameters move, as a multiple of softmax attention."""

    tasks: tuple[str, ...] = tuple(_BATCH)
    """Tasks of Long Range Arena: listops, text, image."""
    names: tuple[str, ...] = tuple(MODELS)
    """Models; softmax always takes part."""
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

    def __post_init__(self) -> None:
        one_of(self, "tasks", _BATCH)
        one_of(self, "names", MODELS)
        at_least_one(self, "steps", "seeds", "shrink")
        if not self.std > 0:
            raise ValueError(f"std must be positive, got {self.std}; the published one is 0.02.")


class InstabilityStudy(Study[InstabilityOptions]):
    """One cell a task."""

    name = "instability"
    Options = InstabilityOptions

    def cells(self, options: InstabilityOptions) -> Sequence[Cell]:
        """Return the cells in the order of the tasks."""
        common = {key: getattr(options, key) for key in ("std", "steps", "seeds", "shrink")}
        names = list(dict.fromkeys((BASE, *options.names)))
        return [{"task": task, "names": names, **common} for task in options.tasks]

    def run(self, cell: Cell, options: InstabilityOptions, scratch: Path) -> Sequence[Row]:
        """Return the instability of every model, and its ratio to softmax, seed by seed."""
        batches = _batches(cell, options.data)
        tokens = round(mean(float(batch["x"].shape[1]) for batch in batches))
        found: dict[str, list[float]] = {name: [] for name in cell["names"]}
        for seed in range(cell["seeds"]):
            mine = batches[seed * cell["steps"] :][: cell["steps"]]
            for name, values in found.items():
                values.append(_mean_instability(name, cell, seed, mine))
        return [{"tokens": tokens, **row} for row in ratios(found)]

    def tables(self, rows: Sequence[Row], options: InstabilityOptions) -> Mapping[str, str | bytes]:
        """Return one table for each standard deviation of the embedding."""
        files: Files = {}
        for std in dict.fromkeys(row["std"] for row in rows):
            mine = [row for row in rows if row["std"] == std]
            steps, seeds = mine[0]["steps"], mine[0]["seeds"]
            over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
            caption = (
                f"Instability over the first {steps} steps as a multiple of that of softmax "
                f"attention, {over} (published); batch×mean length in the head. Embeddings start "
                f"with standard deviation {std:g}."
            )
            files[f"std{std:g}.md"] = page(caption, _table(mine))
            files[f"std{std:g}.png"] = _picture(mine)
        return files


def ratios(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the mean instability of each model, its mean ratio to softmax, and its spread.

    Example:
        >>> [row["ratio"] for row in ratios({"softmax": [2.0, 4.0], "primal": [1.0, 3.0]})]
        [1.0, 0.625]
    """
    rows = []
    for name, values in found.items():
        shares = [a / b for a, b in zip(values, found[BASE], strict=True)]
        rows.append(
            {
                "name": name,
                "instability": float(f"{mean(values):.4g}"),
                "ratio": round(mean(shares), 3),
                "spread": round(stdev(shares), 3) if len(shares) > 1 else 0.0,
            }
        )
    return rows


def _picture(rows: Sequence[Row]) -> bytes:
    from primal_attention.report import plot_dots, to_png

    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row["name"], {})[row["task"]] = row["ratio"]
    is_wide = max(row["ratio"] for row in rows) > 10
    return to_png(plot_dots(values, xlabel="instability, softmax = 1", log=is_wide))


def _table(rows: Sequence[Row]) -> str:
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    at = {(r["task"], r["name"]): r for r in reversed(rows)}
    head = ["attention", *(f"{t} ({_BATCH[t]}×{at[t, BASE]['tokens']:,})" for t in tasks)]
    cells = []
    for name in dict.fromkeys(r["name"] for r in rows):
        line = [name]
        for task in tasks:
            row, beside = at.get((task, name)), PUBLISHED.get(name, {}).get(task)
            text = "—" if row is None else f"{row['ratio']:.2f}"
            if row is not None and row["seeds"] > 1:
                text += f" ± {row['spread']:.2f}"
            line.append(text + (f" ({beside:.2f})" if beside is not None else ""))
        cells.append(line)
    return markdown_table(head, cells)


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


def build_classifier(name: str, task: str, seed: int, *, std: float = 0.02) -> "EncoderClassifier":
    """Return the model of a task with one attention; models of a seed share their common weights.

    Args:
        name: One of ``MODELS``.
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
        attention, options = MODELS[name]
        changes = {"attention": attention, "attention_options": options}
        return EncoderClassifier(model_config(task, "softmax", **changes))

    model, shared = make(name), make(BASE).state_dict()
    shared["embed.weight"] *= std
    own = model.state_dict()
    model.load_state_dict(
        {k: shared[k] if k in shared and shared[k].shape == v.shape else v for k, v in own.items()}
    )
    return model


def _batches(cell: Cell, data: Path | None) -> "list[dict[str, Tensor]]":
    """Return ``steps`` batches a seed, sequences padded to the longest of their batch."""
    from primal_attention.training import pad_collate
    from primal_studies.core.sequences import longrange_parts

    size, count, shrink = _BATCH[cell["task"]], cell["steps"] * cell["seeds"], cell["shrink"]
    found = longrange_parts(
        cell["task"],
        data,
        num_train=size * count,
        num_valid=1,
        num_test=1,
        max_length=4000 // shrink,
        listops_lengths=(500 // shrink, 2000 // shrink),
    ).train
    return [pad_collate([found[size * step + i] for i in range(size)]) for step in range(count)]


def _mean_instability(
    name: str, cell: Cell, seed: int, batches: "Sequence[Mapping[str, Tensor]]"
) -> float:
    import torch

    from primal_attention.tasks.longrange import training_config

    task = cell["task"]
    model = build_classifier(name, task, seed, std=cell["std"])
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
    return mean(instability(model, batches, optimizer, eta=eta, after_step=schedule.step))
