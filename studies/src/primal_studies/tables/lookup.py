"""Duplicate lookup: a task that only attention from each row to its twin solves.

Half of a table's rows show their targets; the other half, their twins, hide them. Features are
normal and say nothing about the target, so a model must find the twin and copy. Every table is
new, so nothing can be learned by heart (Kossen et al. 2021, section 4.3).
"""

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from primal_attention.support.command import did_you_mean
from primal_attention.tasks.tables.model import NPTConfig, NPTModel
from primal_attention.tasks.tables.settings import NPTOptions
from primal_studies.tables.methods import ROW_ATTENTIONS

__all__ = [
    "FEATURES",
    "VARIANTS",
    "Lookup",
    "LookupTables",
    "LookupVariant",
    "build_lookup",
    "lookup_error",
    "nearest_targets",
    "predict_lookup",
    "sample_lookup",
    "train_lookup",
]

LookupVariant = Literal["original", "random-features", "add-one", "both", "any-column"]

VARIANTS: dict[str, str] = {
    "original": "features of twins are equal; the target is to be copied",
    "random-features": "three further features are noise, different in both twins",
    "add-one": "visible targets are larger by one",
    "both": "random features and add one",
    "any-column": "each table hides another column of the twins",
}
"""Forms of the task, and what is special about each."""

FEATURES = 4
"""Features that twins share."""
_NOISE = 3
"""Features of noise in two of the variants."""
_TARGETS = 512
"""Most targets of a training step; tables of many rows come fewer at a time."""


class LookupTables(NamedTuple):
    """Tables of duplicate lookup: rows with visible targets, then their twins in the same order."""

    values: Float[Tensor, "b rows d"]
    """All cells, those of the twins with their true targets."""
    hidden: Bool[Tensor, "b rows d"]
    """``True`` where a model must not see a value: the asked cells of the twins."""
    column: Int[Tensor, " b"]
    """The asked column of each table."""
    truth: Float[Tensor, "b n"]
    """Values to predict, of variance one."""


def _check_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(
            f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}."
            f"{did_you_mean(str(variant), VARIANTS)}"
        )


def _columns(variant: str) -> int:
    return FEATURES + 1 + (_NOISE if variant in ("random-features", "both") else 0)


def sample_lookup(
    tables: int,
    rows: int,
    variant: LookupVariant = "original",
    *,
    generator: torch.Generator | None = None,
) -> LookupTables:
    """Return tables of ``rows`` rows with visible targets and as many twins.

    Args:
        tables: Number of tables.
        rows: Rows with a visible target, in each table.
        variant: One of :data:`VARIANTS`.
        generator: Source of the draws; by default torch's own.

    Example:
        >>> tables = sample_lookup(2, 3)
        >>> tables.values.shape, tables.hidden[0].sum(0).tolist()
        (torch.Size([2, 6, 5]), [0, 0, 0, 0, 3])
        >>> bool((tables.values[:, :3] == tables.values[:, 3:]).all())
        True
    """
    _check_variant(variant)
    d = _columns(variant)
    seen = torch.randn(tables, rows, d, generator=generator)
    twins = seen.clone()
    if d > FEATURES + 1:
        shape = (tables, rows, _NOISE)
        for half in (seen, twins):
            half[..., FEATURES:-1] = 1 + torch.randn(shape, generator=generator)
    column = torch.full((tables,), d - 1)
    if variant == "any-column":
        column = torch.randint(d, (tables,), generator=generator)
    if variant in ("add-one", "both"):
        seen[..., -1] += 1
    asked = torch.arange(d) == column[:, None, None]  # [b 1 d]
    hidden = torch.cat([torch.zeros_like(seen).bool(), asked.expand_as(twins)], 1)
    truth = twins.gather(2, column[:, None, None].expand(-1, rows, 1))[..., 0]
    return LookupTables(torch.cat([seen, twins], 1), hidden, column, truth)


def nearest_targets(tables: LookupTables) -> Float[Tensor, "b n"]:
    """Return the visible value of the nearest row by all features: the answer of 1-NN.

    Example:
        >>> tables = sample_lookup(2, 9)
        >>> bool((nearest_targets(tables) == tables.truth).all())
        True
    """
    n = tables.truth.shape[1]
    seen, twins = tables.values[:, :n], tables.values[:, n:]
    shown = (~tables.hidden[:, n:]).to(seen.dtype)  # the asked column has no distance
    place = torch.cdist(twins * shown, seen * shown).argmin(-1)
    column = tables.column[:, None, None].expand(-1, n, 1)
    return seen.gather(2, column)[..., 0].gather(1, place)


def build_lookup(row_attention: str = "softmax", variant: LookupVariant = "original") -> NPTModel:
    """Return an untrained model for the task: cells of width 16, four heads, two layers.

    Row attention has the published width, that of all cells together.

    Args:
        row_attention: One of :data:`~primal_studies.tables.methods.ROW_ATTENTIONS`.
        variant: One of :data:`VARIANTS`; some have more columns.

    Example:
        >>> build_lookup("none").config.has_rows
        False
    """
    _check_variant(variant)
    if row_attention not in ROW_ATTENTIONS:
        raise ValueError(
            f"row_attention must be one of {', '.join(ROW_ATTENTIONS)}, got {row_attention!r}."
            f"{did_you_mean(str(row_attention), ROW_ATTENTIONS)}"
        )
    options = NPTOptions(
        dim=16, row_dim=None, numbers="linear", dropout=0.0, **ROW_ATTENTIONS[row_attention]
    )
    return NPTModel(NPTConfig(categories=(0,) * _columns(variant), **options.complete())).eval()


def predict_lookup(model: NPTModel, tables: LookupTables) -> Float[Tensor, "b n"]:
    """Return the predicted values of the twins; all tables are computed at once.

    Twins attend to the rows with visible targets, as in :class:`NPTModel`.

    Args:
        model: A model of these columns; its own context is not read.
        tables: The tables.

    Example:
        >>> predict_lookup(build_lookup(), sample_lookup(2, 3)).shape
        torch.Size([2, 3])
    """
    b, n = tables.truth.shape
    # [b rows d e]: tables keep an axis of their own, so that no row sees another table
    x = _by_table(model.embedding, b, tables.values.flatten(0, 1), tables.hidden.flatten(0, 1))
    for i, cell in enumerate(model.cell_blocks):
        if model.config.has_rows:
            block = model.row_blocks[i].block
            tokens = x.flatten(2)
            seen, asked = tokens[:, :n], tokens[:, n:]
            memory = block.remember([seen])  # type: ignore[union-attr,operator]
            x = torch.cat([block(seen), block(asked, memory)], 1).view_as(x)  # type: ignore[operator]
        x = _by_table(cell, b, x.flatten(0, 1))
    twins = model.norm(x)[:, n:]
    chosen = twins[torch.arange(b), :, tables.column]  # [b n e]
    first = torch.tensor(model.heads.starts)[tables.column]
    weight, bias = model.heads.weight[first], model.heads.bias[first]
    return torch.einsum("bne,be->bn", chosen, weight) + bias[:, None]


def _by_table(function: torch.nn.Module, tables: int, *inputs: Tensor) -> Tensor:
    """Return what a function of rows gives for the rows of all tables, table by table."""
    found: Tensor = function(*inputs)
    return found.unflatten(0, (tables, -1))


class Lookup(NamedTuple):
    """A model trained on duplicate lookup, and how well it copies."""

    model: NPTModel
    """In eval mode; each of its answers needs a context."""
    rmse: float
    """Root mean squared error on new tables, in standard deviations of the target."""
    losses: tuple[float, ...]
    """Mean squared error of every training step."""
    seconds: float
    """Processor seconds of the training."""


def train_lookup(
    row_attention: str = "softmax",
    rows: int = 12,
    *,
    variant: LookupVariant = "original",
    steps: int = 1600,
    tables: int | None = None,
    lr: float = 3e-3,
    seed: int = 0,
) -> Lookup:
    """Train a small model on new tables of duplicate lookup in every step.

    Adam with a cosine schedule, gradients clipped at 1.

    Args:
        row_attention: ``"softmax"``, ``"primal"``, ``"hybrid"`` or ``"none"``.
        rows: Rows with a visible target in each table; there are as many twins.
        variant: One of :data:`VARIANTS`.
        steps: Training steps.
        tables: Tables of a step; by default 8, or fewer if they have more than 64 rows.
        lr: Peak learning rate.
        seed: Seed of parameters and tables.

    Example:
        >>> found = train_lookup("none", rows=4, steps=3)
        >>> len(found.losses), found.rmse > 0.5
        (3, True)
    """
    for name, value in (("rows", rows), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    count = max(1, min(8, _TARGETS // rows)) if tables is None else tables
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_lookup(row_attention, variant)
    generator = torch.Generator().manual_seed(seed)
    started = time.process_time()
    losses = _optimize(
        model, lambda: sample_lookup(count, rows, variant, generator=generator), steps, lr
    )
    seconds = time.process_time() - started
    with torch.no_grad():
        rmse = lookup_error(
            lambda new: predict_lookup(model, new), rows=rows, variant=variant, seed=seed
        )
    return Lookup(model, rmse, losses, seconds)


def lookup_error(
    predict: Callable[[LookupTables], Tensor],
    *,
    rows: int = 12,
    variant: LookupVariant = "original",
    seed: int = 0,
) -> float:
    """Return the RMSE of predictions on tables that no training saw, in deviations of the target.

    Args:
        predict: From tables to the values of the twins.
        rows: Rows with a visible target in each table.
        variant: One of :data:`VARIANTS`.
        seed: Seed of the tables.

    Example:
        >>> lookup_error(nearest_targets, variant="add-one")
        1.0
    """
    generator = torch.Generator().manual_seed(2**32 + seed)
    tables = sample_lookup(max(4, 2048 // rows), rows, variant, generator=generator)
    return round(float((predict(tables) - tables.truth).square().mean().sqrt()), 6)


def _optimize(
    model: NPTModel, draw: Callable[[], LookupTables], steps: int, lr: float
) -> tuple[float, ...]:
    """Train a model on new tables, and return the loss of every step."""
    # eval mode: there is no dropout, and the regulariser of primal layers is left out
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, 20 * (s + 1) / steps) * (1 + math.cos(math.pi * s / steps)) / 2
    )
    losses = []
    for _ in range(steps):
        tables = draw()
        loss = (predict_lookup(model, tables) - tables.truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return tuple(losses)
